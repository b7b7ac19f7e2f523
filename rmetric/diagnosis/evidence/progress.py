"""Signs of progress in logs: steps and their times, heartbeats, and what a line says of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter

from rmetric.diagnosis.evidence.row import Scene
from rmetric.diagnosis.facts.job import JobStream, Occurrence

#: An entry with its time in seconds.
Timed = tuple[float, Occurrence]
#: What watches a log and sees nothing new in it.
_NO_PROGRESS = re.compile(
    r"(?i)\bunchanged for \d"
    r"|\bno (?:new )?(?:progress|steps?|lines?|output)\b.{0,20}\b(?:for|since)\b"
)
#: So many different entries may recur during a hang: heartbeats, monitors.
MAX_HEARTBEATS = 2
#: Least number of entries after the last step of logs that state no end.
MIN_HEARTBEATS = 3
#: Stages in which nothing may be logged for long.
QUIET_STAGES = {"load data", "compile", "evaluate", "checkpoint", "tear-down"}


def last_step_time(scene: Scene, stepping: Sequence[JobStream], end: float) -> float | None:
    """When the last step was logged at the latest; None without steps.

    A line that states no time may be as late as the next one that does, or as the end.
    """
    timed = {
        one.name: one for one in stepping if one.last_step_at and one.last_step_at.time is not None
    }
    top = max((one.last_step or 0 for one in timed.values()), default=-1)
    times = [
        _last_step_of(scene, one, end)
        for one in stepping
        if one.name in timed or (one.last_step or 0) > top  # another entry of it is no progress
    ]
    return max((time for time in times if time is not None), default=None)


def _last_step_of(scene: Scene, stream: JobStream, end: float) -> float | None:
    if stream.last_step_at is None:
        return None
    at = scene.ordering.at_latest(stream.last_step_at)
    return end if at is None else scene.ordering.dated(at)


def timed_entries(scene: Scene, counts: Callable[[Occurrence], bool]) -> list[Timed]:
    """The last entries of all streams with their times, in time; those that count."""
    found = [
        (time, entry)
        for one in scene.job.streams.values()
        for entry in one.tail
        if counts(entry) and (time := scene.ordering.dated(entry)) is not None
    ]
    return sorted(found, key=itemgetter(0))


def are_heartbeats(later: Sequence[Timed], stepping: Sequence[JobStream]) -> bool:
    """True if what follows the last step is little that recurs, and no evaluation or checkpoint."""
    names = {one.name for one in stepping}
    stages = {entry.stage for _, entry in later if entry.stream in names}
    few = len({entry.event for _, entry in later}) <= MAX_HEARTBEATS
    return few and not stages & QUIET_STAGES


def heartbeats(later: Sequence[Timed]) -> set[int]:
    """Events that recur after the last step, to the end; none if there are many."""
    times = Counter((entry.stream, entry.event) for _, entry in later)
    beats = {event for (_, event), count in times.items() if count >= MIN_HEARTBEATS}
    quiet = max((time for time, entry in later if entry.event not in beats), default=0.0)
    since = sum(time > quiet for time, entry in later if entry.event in beats)
    return beats if since >= MIN_HEARTBEATS and len(beats) <= MAX_HEARTBEATS else set()


def says_no_progress(text: str) -> bool:
    """True for the words of what watches a log and sees nothing new in it."""
    return _NO_PROGRESS.search(text) is not None
