"""Event statistics of successful jobs: the cross-job pattern (L4, section 4.2).

Learnt once (`rmetric logs learn`), stored as JSON, and subtracted when such a job fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from rmetric._util.durable import write_atomically
from rmetric._util.errors import LogError
from rmetric._util.strict_json import refused
from rmetric.diagnosis.facts.job import Event, Job
from rmetric.diagnosis.templates import OTHERS, Events

#: An event that this share of the pool's jobs have is ordinary ("frequently" in L4).
FREQUENT = 0.5

Share = Annotated[float, Meta(gt=0.0, le=1.0)]


class PoolEvent(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event of the pool.

    Attributes:
        template: with <*> and named masks for what varies.
        signature: the one that matched it, by id; "" without.
        jobs: share of the jobs that have it, above 0 to 1.
        mean: mean number of entries in a job.
    """

    template: str
    signature: str = ""
    jobs: Share
    mean: float


class Pool(Struct, frozen=True, kw_only=True, rename={"name": "job"}, dict=True):
    """Event statistics of jobs of similar settings, as their file holds them.

    Attributes:
        name: the owner's name for such a job.
        jobs, succeeded: number of jobs, and of those whose logs state their planned end.
        stages: stage -> share of the jobs that entered it.
        events: the most frequent first.
    """

    format: Annotated[int, Meta(ge=1, le=1)] = 1
    name: str
    jobs: Annotated[int, Meta(ge=1)]
    succeeded: int
    stages: dict[str, Share]
    events: tuple[PoolEvent, ...]

    @cached_property
    def _index(self) -> tuple[Events, dict[int, PoolEvent]]:
        known = Events(max_events=len(self.events) + 1)
        by_number: dict[int, PoolEvent] = {}
        for event in self.events:
            by_number.setdefault(known.number(event.template, event.signature), event)
        return known, by_number

    def find(self, template: str, signature: str = "") -> PoolEvent | None:
        """The event of the pool with these words; None where there is none."""
        known, by_number = self._index
        number = known.like(template, signature)
        return None if number is None else by_number[number]

    def save(self, path: Path) -> None:
        """Raises OSError where it cannot be written."""
        write_atomically(path, [msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"])

    @classmethod
    def load(cls, path: Path | str) -> Pool:
        """Raises LogError that names the file, the field, what was found and what is accepted."""
        content: object = None
        try:
            content = msgspec.json.decode(Path(path).read_bytes())
            return msgspec.convert(content, cls)
        except OSError as error:
            why = f"cannot be read ({error.strerror})"
        except ValueError as error:
            refusal = isinstance(error, msgspec.ValidationError)
            why = f"no pool of rmetric logs learn: {refused(content, error) if refusal else error}"
        raise LogError(Path(path), None, why)


def learn(name: str, jobs: Sequence[Job]) -> Pool:
    """The pool of jobs that succeeded. Raises ValueError for no jobs or an empty name."""
    if not jobs or not name.strip():
        raise ValueError("a pool needs a name and at least one job")
    events, total, having = Events(), Counter[int](), Counter[int]()
    class_of: dict[int, str] = {}
    for job in jobs:
        found = set[int]()
        for event, signature in _with_signatures(job):
            if event.template != OTHERS:
                at = events.number(event.template, signature)
                class_of[at] = signature
                total[at] += event.count
                found.add(at)
        having.update(found)
    usual = [
        PoolEvent(
            template=events.template(at),
            signature=signature,
            jobs=round(having[at] / len(jobs), 6),
            mean=round(total[at] / len(jobs), 6),
        )
        for at, signature in class_of.items()
    ]
    usual.sort(key=lambda item: (-item.jobs, -item.mean, item.template, item.signature))
    stages = Counter(stage for job in jobs for stage in {stage for stage, _ in job.stages})
    return Pool(
        name=name,
        jobs=len(jobs),
        succeeded=sum(job.succeeded is not None for job in jobs),
        stages={stage: stages[stage] / len(jobs) for stage in sorted(stages)},
        events=tuple(usual),
    )


def ordinary(job: Job, pool: Pool) -> set[int]:
    """The job's events that are frequent in the pool: at least `FREQUENT` of its jobs have them."""
    usual = ((event, pool.find(event.template, id)) for event, id in _with_signatures(job))
    return {event.number for event, known in usual if known is not None and known.jobs >= FREQUENT}


def _with_signatures(job: Job) -> Iterator[tuple[Event, str]]:
    """The job's events, each with the signature that matched it, "" without one."""
    matched = {event: match.signature for match in job.matches.values() for event in match.events}
    return ((event, matched.get(event.number, "")) for event in job.events)


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
