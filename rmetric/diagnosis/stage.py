"""The stage in which a job stood at an entry: by its traceback, its log, or its kind of fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce

from rmetric.diagnosis.evidence.scene import Scene
from rmetric.diagnosis.facts.job import JobStream, Occurrence
from rmetric.diagnosis.faults import Fault
from rmetric.diagnosis.library.stages import awaited, next_stage, stage_of

#: Stages in which launchers and streams without stages remain, and those with few stage lines.
_LAUNCHING = ("", "launch")
_STARTING = (*_LAUNCHING, "initialise", "load data", "compile")
#: Least share of the most step lines of a stream whose own stages are valid.
_MIN_STEP_SHARE = 0.5


def stage_of_failure(scene: Scene, faults: Sequence[Fault], place: Occurrence | None) -> str:
    """The stage at the failure; a checkpoint that fails is written or read, whatever was logged."""
    stage = next(filter(None, _stages(scene, faults, place)), "")
    if not faults or stage != "train":
        return stage
    named = place is not None and awaited(place.text) == "checkpoint"
    named |= any(fault.has("checkpoint") for fault in faults)
    fails = faults[0].has("checkpoint") or (faults[0].has("write fails") and named)
    return "checkpoint" if fails else stage


def _stages(scene: Scene, faults: Sequence[Fault], place: Occurrence | None) -> Iterator[str]:
    """By the own tracebacks, by the log, by other tracebacks, by the kind of fault."""
    if faults and faults[0].has("before start"):
        yield "launch"
    matches = [match for fault in faults for match in fault.matches]
    if place is not None:
        yield stage_of(place.text)
        for match in matches:
            if match.stream == place.stream:
                yield stage_of(match.first.text)
                yield stage_of(match.last.text)
        yield _stage_at(scene, place)
    yield from (stage_of(match.first.text) for match in matches)
    yield from (stage for stage, _ in scene.job.stages[-1:])
    yield from (fault.signature.usual_stage for fault in faults[:1])


def _stage_at(scene: Scene, place: Occurrence) -> str:
    """Stage of the entry's stream, or of the streams that log steps.

    Launchers, ranks that leave step lines to rank 0, and files of errors beside a rank's output
    stay in a stage of their first lines.
    """
    job, ordering, stage = scene.job, scene.ordering, place.stage
    active = [stream for stream in job.stepping if stream.steps >= _MIN_STEP_SHARE * job.most_steps]
    own = [stream for stream in active if stream.name == place.stream]
    if stage in (_LAUNCHING if own else _STARTING):
        working = _working(scene, own or active, place)
        stage = reduce(next_stage, (entry.stage for entry in working), stage)
    if stage in _LAUNCHING:
        before = [name for name, at in job.stages if not ordering.after(at, place)]
        return next((name for name in reversed(before) if name not in _LAUNCHING), stage)
    return stage


def _working(scene: Scene, streams: Sequence[JobStream], place: Occurrence) -> list[Occurrence]:
    """The kept entries of streams at work up to a place, in order."""
    ordering = scene.ordering
    latest = ordering.at_latest(place) or place
    working = [
        entry
        for stream in streams
        for entry in (*stream.tail, stream.last_step_at)
        if entry is not None
        and entry.stage not in _LAUNCHING
        and not ordering.after(entry, place if entry.file == place.file else latest)
    ]
    # An entry of another file without a time may as well have come later.
    placed = [entry for entry in working if entry.time is not None or entry.file == place.file]
    return sorted(placed or working, key=ordering.key)
