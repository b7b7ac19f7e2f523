"""Signs of progress in logs: steps and their times, heartbeats, and what a line says of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from rmetric.diagnosis.evidence.row import Scene
from rmetric.diagnosis.facts.job import JobStream, Occurrence
from rmetric.diagnosis.reading.timestamps import parse

#: An entry with its time in seconds.
Timed = tuple[float, Occurrence]
#: But those of the time that passes: "waited 60s".
_COUNTS = re.compile(r"(?<!\d)\d+(?!\d| ?(?:ms|s|secs?|seconds?|m|mins?|minutes?|h|hours?)\b)")
#: The value of such a key: `"no_progress_s": 600`.
_DURATION = re.compile(
    r"(?i)\b\w*(?:_s|_ms|_secs?|_seconds|_mins?|_minutes|elapsed|waited|idle|stalled)\"?\s?[:=]\s?[\d.]+"
)
#: What is counted during an evaluation or another work without steps.
_WORK = re.compile(r"(?i)eval|valid|\btest|batch|sample|shard|export|upload|download|generat")
#: What watches a log and sees nothing new in it.
_NO_PROGRESS = re.compile(
    r"(?i)\bunchanged for \d"
    r"|\bno (?:new )?(?:progress|steps?|lines?|output)\b.{0,20}\b(?:for|since)\b"
)
#: So many different entries may recur during a hang: heartbeats, monitors.
MAX_HEARTBEATS = 2
#: Least number of entries after the last step of logs that state no end.
MIN_HEARTBEATS = 3
#: Least number of step lines without times from which their rate is derived, and by how much
#: slower the last ones may be.
MIN_STEPS, RATE_MARGIN = 20, 2.0
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
    time = end if at is None else scene.ordering.dated(at)
    rate = rate_of(scene, stream)
    return time if time is None or rate is None else min(time, rate.last)


class Rate(NamedTuple):
    """Steps without times, by the entries between them that state one.

    Attributes:
        last: when the last one was logged at the latest.
        pause: seconds between two lines of steps, on average.
    """

    last: float
    pause: float


def rate_of(scene: Scene, stream: JobStream) -> Rate | None:
    """Derived from checkpoints, evaluations and warnings; None where the steps state times."""
    last, end = stream.last_step_at, stream.last_step
    if last is None or end is None or last.time is not None or stream.steps < MIN_STEPS:
        return None
    events = (entry for event in scene.job.events for entry in (event.first, event.last))
    entries = [
        (one.step, one)
        for one in (*stream.head, *stream.tail, *events)
        if one.stream == stream.name and one.step is not None
    ]
    timed = {
        (step, time)
        for step, one in entries
        if step < end and one.time is not None and (time := scene.ordering.dated(one)) is not None
    }
    (step, begin), (to_step, time) = min(timed, default=(0, 0.0)), max(timed, default=(0, 0.0))
    if to_step == step or time <= begin:
        return None
    each = (time - begin) / (to_step - step)
    steps_a_line = (end - min(step for step, _ in entries)) / (stream.steps - 1)
    return Rate(time + RATE_MARGIN * (end - to_step) * each, steps_a_line * each)


def timed_entries(
    scene: Scene, counts: Callable[[Occurrence], bool] = lambda _: True
) -> list[Timed]:
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
    texts: dict[int, list[str]] = {}
    for _, entry in later:
        texts.setdefault(entry.event, []).append(entry.text)
    recurring = len(texts) <= MAX_HEARTBEATS and not any(map(_counts_work, texts.values()))
    return recurring and not stages & QUIET_STAGES


def heartbeats(later: Sequence[Timed], *, of_all: bool = True) -> set[int]:
    """Events that recur after the last step without counting anything; none if there are many.

    An evaluation counts its batches, which is progress.
    """
    texts: dict[tuple[str, int], list[str]] = {}
    for _, entry in later:
        texts.setdefault((entry.stream, entry.event), []).append(entry.text)
    beats = {event for (_, event), each in texts.items() if len(each) >= MIN_HEARTBEATS}
    counting = any(_counts_work(each) for (_, event), each in texts.items() if event in beats)
    quiet = max((time for time, entry in later if entry.event not in beats), default=0.0)
    since = sum(time > quiet for time, entry in later if entry.event in beats)
    at_the_end = since >= MIN_HEARTBEATS or not of_all
    return beats if at_the_end and not counting and len(beats) <= MAX_HEARTBEATS else set()


def _counts_work(texts: Sequence[str]) -> bool:
    """True if a number rises from entry to entry, and they are not of the time that passes."""
    if len(texts) < MIN_HEARTBEATS or not _WORK.search(texts[-1]):
        return False
    rests = (text[(parse(text) or (0.0, 0))[1] :] for text in texts)
    found = [_COUNTS.findall(_DURATION.sub("", rest)) for rest in rests]
    numbers = (list(map(int, each)) for each in zip(*found, strict=False))
    return any(all(one < other for one, other in pairwise(each)) for each in numbers)


def says_no_progress(text: str) -> bool:
    """True for the words of what watches a log and sees nothing new in it."""
    return _NO_PROGRESS.search(text) is not None
