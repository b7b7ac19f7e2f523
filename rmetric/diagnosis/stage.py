"""Training stage that was active when a log entry was written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rmetric.diagnosis.job import Job, Occurrence, Stream
from rmetric.diagnosis.ordering import Ordering
from rmetric.diagnosis.reading.text import TRACEBACK

#: Where a launcher is all the time, and who tells no stage; with where ranks stay that tell few.
_LAUNCHING = ("", "launch")
_STARTING = (*_LAUNCHING, "initialise", "load data", "compile")
#: Share of the most step lines from which on a stream tells its stages itself.
_TELLS = 0.5


def stage_at(job: Job, place: Occurrence, ordering: Ordering) -> str:
    """Stage of the entry's stream, or of the streams that log steps; "" where none is known.

    Launchers, ranks that leave the telling to rank 0, and files of errors beside a rank's output
    stay in a stage for which they had words. A traceback behind the words of a tear-down that
    was not planned was raised before them: it passed through a `finally`.
    """
    most = max((one.steps for one in job.streams.values()), default=0)
    tellers = [one for one in job.streams.values() if most and one.steps >= _TELLS * most]
    own = [one for one in tellers if one.name == place.stream]
    stage = place.stage
    if stage in (_LAUNCHING if own else _STARTING):
        working = [one for one in _working(own or tellers) if not ordering.after(one, place)]
        stage = max(working, key=ordering.key).stage if working else stage
    before = [stage for stage, at in job.stages if not ordering.after(at, place)]
    left_early = stage == "tear-down" and job.succeeded is None and TRACEBACK in place.text
    if left_early or stage in _LAUNCHING:
        passed = ("tear-down", *_LAUNCHING) if left_early else _LAUNCHING
        return next((one for one in reversed(before) if one not in passed), stage)
    return stage


def _working(streams: Iterable[Stream]) -> Iterator[Occurrence]:
    for one in streams:
        kept = [*one.tail] if one.last_step_at is None else [*one.tail, one.last_step_at]
        yield from (entry for entry in kept if entry.stage not in _LAUNCHING)
