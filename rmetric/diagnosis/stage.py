"""The stage in which a job stood at an entry: by its traceback, its log, or its kind of fault."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rmetric.diagnosis.evidence.row import Scene
from rmetric.diagnosis.faults import Fault
from rmetric.diagnosis.job import Match, Occurrence
from rmetric.diagnosis.ordering import stage_at, stage_now
from rmetric.diagnosis.patterns.stages import awaited
from rmetric.diagnosis.report.frames import probable_stage_of, stage_of

#: Stages that a job leaves with its first step.
_BEFORE_TRAINING = ("launch", "initialise", "load data", "compile")


def stage_of_failure(scene: Scene, faults: Sequence[Fault], place: Occurrence | None) -> str:
    """The stage at the failure; a checkpoint that fails is written or read, whatever was logged.

    Args:
        scene: the job.
        faults: the likeliest first.
        place: the entry that shows the failure.
    """
    stage = _logged_stage(scene, faults, place)
    lead = faults[0] if faults else None
    if lead is None or stage != "train":
        return stage
    named = place is not None and awaited(place.text) == "checkpoint"
    named |= any(one.has("checkpoint") for one in faults)
    fails = lead.has("checkpoint") or (lead.has("write fails") and named)
    return "checkpoint" if fails else stage


def _logged_stage(scene: Scene, faults: Sequence[Fault], place: Occurrence | None) -> str:
    """Stage from the own traceback, else the log, else other tracebacks, else the fault."""
    lead, job = (faults[0] if faults else None), scene.job
    if lead is not None and lead.has("before start"):
        return "launch"
    matches = [match for one in faults for match in one.matches]
    texts = _texts_of(place, matches)
    # A GPU's fault is raised by whatever uses it next.
    broken = lead is not None and lead.signature.actor == "hardware" and job.trained
    stage = _first(map(stage_of, texts))
    stage = "" if stage == "load data" and broken else stage
    if not stage and place is not None:
        stage = stage_at(job, place, scene.ordering)
    if not stage and not broken:
        stage = _first(stage_of(match.first.text) for match in matches)
    stage = stage or last_stage(scene)
    if stage in _BEFORE_TRAINING and not job.trained and _in_training(scene, matches):
        return "train"  # without a line of a step, which few ranks write
    usual = lead.signature.usual_stage if lead is not None else ""
    return stage or _first(map(probable_stage_of, texts)) or usual


def _texts_of(place: Occurrence | None, matches: Sequence[Match]) -> list[str]:
    """The entry's text, and those of the matches of its stream."""
    if place is None:
        return []
    own = (match for match in matches if match.stream == place.stream)
    return [place.text, *(one.text for match in own for one in (match.first, match.last))]


def _first(stages: Iterable[str]) -> str:
    return next(filter(None, stages), "")


def _in_training(scene: Scene, matches: Sequence[Match]) -> bool:
    """Return True if the traceback of a rank's failure passes through the training loop."""
    events = {event for match in matches for event in match.events}
    entries = (one for stream in scene.job.streams.values() for one in stream.tail)
    return any(stage_of(one.text) == "train" for one in entries if one.event in events)


def last_stage(scene: Scene) -> str:
    """The last stage of the job as a whole."""
    job = scene.job
    last = [one.last for one in job.streams.values() if one.last is not None]
    if not job.stages:
        return max(last, key=scene.ordering.key).stage if last else ""
    stage = job.stages[-1][0]
    saving = [one for one in last if one.stage == stage == "checkpoint"]
    return "train" if saving and all(stage_now(job, one) == "train" for one in saving) else stage
