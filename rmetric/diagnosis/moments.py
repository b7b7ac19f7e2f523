"""Which of two entries came first: by order in a log that both share, else by corrected clocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from rmetric.diagnosis.job import Job, Occurrence

#: Seconds by which clocks of different files may differ after correction and still be called one
#: moment; entries of one file are ordered exactly.
SAME_MOMENT = 2.0


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Orders entries of a job.

    Attributes:
        job: that they are of.
        offsets: file -> seconds that its clock is ahead of the others.
    """

    job: Job
    offsets: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, one: Occurrence) -> float | None:
        """Corrected time; None where the entry states none."""
        return None if one.time is None else one.time - self.offsets.get(one.file, 0.0)

    def later_by(self, one: Occurrence, other: Occurrence) -> float | None:
        """Seconds by which `one` comes after `other`, negative before; None where unknown.

        Within one file without times it is the sign of the order only.
        """
        if one.file == other.file:
            if one.time is not None and other.time is not None and one.time != other.time:
                return one.time - other.time
            return float((one.order > other.order) - (one.order < other.order)) * 1e-6
        mine, others = self.seconds(one), self.seconds(other)
        if mine is not None and others is not None:
            return mine - others
        if one.step is not None and other.step is not None and one.step != other.step:
            return float(one.step - other.step)
        return None

    def after(self, one: Occurrence, other: Occurrence) -> bool:
        """Surely after: in one file by order, else by more than `SAME_MOMENT`."""
        later = self.later_by(one, other)
        if later is None:
            return False
        return later > (0.0 if one.file == other.file else SAME_MOMENT)

    def key(self, one: Occurrence) -> tuple[float, int]:
        """Sorts entries, the first first; those without a time after those with one."""
        if len(self.job.files) == 1:
            return (0.0, one.order)
        seconds = self.seconds(one)
        if seconds is None:
            seconds = inf
        return (seconds, one.order)
