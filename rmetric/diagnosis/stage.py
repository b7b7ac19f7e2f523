"""The stage in which a job stood at an entry: by its traceback, its log, or its kind of fault."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

from rmetric.diagnosis.clock import Ordering
from rmetric.diagnosis.evidence.row import Scene
from rmetric.diagnosis.facts.job import Job, JobStream, Match, Occurrence
from rmetric.diagnosis.faults import Fault
from rmetric.diagnosis.library.stages import awaited, next_stage, stage_of

#: Stages in which launchers and streams without stages remain, and those with few stage lines.
_LAUNCHING = ("", "launch")
_STARTING = (*_LAUNCHING, "initialise", "load data", "compile")
#: Least share of the most step lines of a stream whose own stages are valid.
_MIN_STEP_SHARE = 0.5


def stage_of_failure(scene: Scene, faults: Sequence[Fault], place: Occurrence | None) -> str:
    """The stage at the failure; a checkpoint that fails is written or read, whatever was logged."""
    stage = _logged_stage(scene, faults, place)
    lead = faults[0] if faults else None
    if lead is None or stage != "train":
        return stage
    named = place is not None and awaited(place.text) == "checkpoint"
    named |= any(one.has("checkpoint") for one in faults)
    fails = lead.has("checkpoint") or (lead.has("write fails") and named)
    return "checkpoint" if fails else stage


def _logged_stage(scene: Scene, faults: Sequence[Fault], place: Occurrence | None) -> str:
    """Stage by the own traceback, else by the log, other tracebacks, the kind of fault."""
    lead = faults[0] if faults else None
    if lead is not None and lead.has("before start"):
        return "launch"
    matches = [match for one in faults for match in one.matches]
    texts = _texts_of(place, matches) if place is not None else []
    stage = _first(map(stage_of, texts))
    stage = stage or ("" if place is None else stage_at(scene.job, place, scene.ordering))
    stage = stage or _first(stage_of(match.first.text) for match in matches) or last_stage(scene)
    return stage or (lead.signature.usual_stage if lead is not None else "")


def _texts_of(place: Occurrence, matches: Sequence[Match]) -> list[str]:
    """The entry's text, and those of the matches of its stream."""
    own = (match for match in matches if match.stream == place.stream)
    return [place.text, *(one.text for match in own for one in (match.first, match.last))]


def _first(stages: Iterable[str]) -> str:
    return next(filter(None, stages), "")


def last_stage(scene: Scene) -> str:
    """The last stage of the job as a whole."""
    job = scene.job
    last = [one.last for one in job.streams.values() if one.last is not None]
    if not job.stages:
        return max(last, key=scene.ordering.key).stage if last else ""
    return job.stages[-1][0]


def stage_at(job: Job, place: Occurrence, ordering: Ordering) -> str:
    """Stage of the entry's stream, or of the streams that log steps; "" where none is known.

    Launchers, ranks that leave step lines to rank 0, and files of errors beside a rank's output
    stay in a stage of their first lines.
    """
    stepping = [one for one in job.stepping if one.steps >= _MIN_STEP_SHARE * job.most_steps]
    own = [one for one in stepping if one.name == place.stream]
    stage = place.stage
    if stage in (_LAUNCHING if own else _STARTING):
        working = (one.stage for one in _working(own or stepping, place, ordering))
        stage = reduce(next_stage, working, stage)
    if stage in _LAUNCHING:
        before = [name for name, at in job.stages if not ordering.after(at, place)]
        return next((one for one in reversed(before) if one not in _LAUNCHING), stage)
    return stage


def _working(
    streams: Sequence[JobStream], place: Occurrence, ordering: Ordering
) -> list[Occurrence]:
    """The kept entries of streams at work up to a place, in order."""
    latest = ordering.at_latest(place) or place
    kept = [entry for one in streams for entry in (*one.tail, one.last_step_at)]
    found = [
        entry
        for entry in kept
        if entry is not None
        and entry.stage not in _LAUNCHING
        and not ordering.after(entry, place if entry.file == place.file else latest)
    ]
    # Of another file, an entry without a time may as well have come later.
    placed = [one for one in found if one.time is not None or one.file == place.file]
    return sorted(placed or found, key=ordering.key)
