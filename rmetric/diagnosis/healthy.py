"""What is usual in healthy jobs of similar settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rmetric.diagnosis.facts.job import Job
from rmetric.diagnosis.pool import Pool, learn, ordinary


@dataclass(frozen=True, kw_only=True)
class HealthyReference:
    """Reference data from healthy jobs of similar settings.

    Attributes:
        siblings: the jobs, where their logs were given.
        pool: their event statistics.
        ordinary: events of the job at hand that are frequent there.
    """

    siblings: tuple[Job, ...] = ()
    pool: Pool | None = None
    ordinary: frozenset[int] = frozenset()

    @classmethod
    def of(cls, job: Job, siblings: Sequence[Job], pool: Pool | None) -> HealthyReference:
        if pool is None and siblings:
            pool = learn("siblings", siblings)
        usual = frozenset(ordinary(job, pool)) if pool else frozenset()
        return cls(siblings=tuple(siblings), pool=pool, ordinary=usual)

    def lacks_its_end(self, job: Job) -> bool:
        """True if successful jobs of these settings state their end, and this one does not."""
        pool = self.pool
        return job.succeeded is None and pool is not None and pool.succeeded >= pool.jobs
