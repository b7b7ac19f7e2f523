"""What may have ended a job: the known faults, inferred causes, or nothing.

Each hypothesis has the features by which the model ranks it (model.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log, log1p

from rmetric.diagnosis.evidence.ranks import MAX_COMMON_SHARE
from rmetric.diagnosis.evidence.row import Row, Scene, grouped, strongest
from rmetric.diagnosis.faults import Fault
from rmetric.diagnosis.inferred import HUNG
from rmetric.diagnosis.reading.steps import planned_steps
from rmetric.diagnosis.result import Suspect

HEALTHY = "healthy"
#: Share of the planned steps below which a log stops early.
MIN_PLANNED_STEP_SHARE = 0.95
#: Confidences of signatures are kept so far from 0 and 1.
MARGIN = 0.02


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One thing that may have ended the job.

    Attributes:
        id: of a signature or of an inferred cause; `HEALTHY` for no failure.
        group: the role of the signature, "inferred" or "healthy".
        features: name -> value.
        fault: the known fault; None else.
        rows: evidence for an inferred cause, that of the likeliest suspect first.
    """

    id: str
    group: str
    features: Mapping[str, float]
    fault: Fault | None = None
    rows: tuple[Row, ...] = ()


def hypotheses(
    scene: Scene, every: Sequence[Fault], rows: Sequence[Row], ranked: Sequence[Suspect]
) -> list[Hypothesis]:
    """All hypotheses about a job."""
    suspected = {one.name: one.score for one in ranked}
    by_cause = grouped(rows, "hypothesis")
    beside = {
        "hang": float(HUNG in by_cause),
        "planned end": float(scene.job.succeeded is not None and not scene.alone),
    }
    found = [_known(scene, fault, beside) for fault in every]
    for cause, its in by_cause.items():
        its.sort(key=lambda one: -suspected.get(one.target, 0.0))
        features = {cause: 1.0} | _in_context("inferred", beside) | strongest(its)
        found.append(Hypothesis(id=cause, group="inferred", features=features, rows=tuple(its)))
    features = _of_no_failure(scene) | _in_context(HEALTHY, beside)
    return [*found, Hypothesis(id=HEALTHY, group=HEALTHY, features=features)]


def _in_context(group: str, beside: Mapping[str, float]) -> dict[str, float]:
    return {f"{group} beside {name}": value for name, value in beside.items() if value}


def _known(scene: Scene, fault: Fault, beside: Mapping[str, float]) -> Hypothesis:
    sure = min(max(fault.confidence, MARGIN), 1.0 - MARGIN)
    few = MAX_COMMON_SHARE * max(1, len(scene.job.active_streams))
    features = {
        fault.role: 1.0,
        "confidence": log(sure / (1.0 - sure)),
        "survived": float(fault.survived),
        "survivable": float(fault.signature.survivable),
        "consequence": float(bool(fault.follows)),
        "of few": float(len(fault.matches) <= few),
        "explains": float(any(one.follows == fault.signature.id for one in scene.faults)),
    }
    features = {name: value for name, value in features.items() if value}
    features |= _in_context(fault.role, beside)
    return Hypothesis(id=fault.signature.id, group=fault.role, features=features, fault=fault)


def _of_no_failure(scene: Scene) -> dict[str, float]:
    return {
        HEALTHY: 1.0,
        "trained": float(scene.job.trained),
        "stops early": float(bool(early_stop(scene))),
        "faults": log1p(len(scene.faults)),
    }


def early_stop(scene: Scene) -> str:
    """Describe where the log stops, if that is before the planned number of steps."""
    if scene.job.cut_off:
        return ", but the log is cut off before its end"
    last = scene.job.furthest
    if last is None or last.last_step_at is None:
        return ""
    step = last.last_step or 0
    planned = planned_steps(last.last_step_at.text, step)
    if planned is None or step >= MIN_PLANNED_STEP_SHARE * planned:
        return ""
    return f", but the log stops at step {step:,} of {planned:,}"
