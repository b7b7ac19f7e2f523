"""Evidence of the calibrated detector and of the step rules, by the remedy that it calls for."""

from __future__ import annotations

from rmetric.detectors.calibrated import CalibratedDetector
from rmetric.rescue.policy import Evidence

_OF_WORKERS = ("worker_norm", "opposed_worker")
_OF_TRAINING_LOSS = frozenset({"loss_jump", "loss_drift", "loss_climb"})
#: Before there is a baseline, by the runs of others: in their first 14 records none of 239 healthy
#: runs of the laboratory has three losses in a row above all before, and 2 of 101 public ones have
#: by this share.
_EARLY_RISE, _IN_A_ROW = 0.3, 3
#: Below this probe_rise, in units of 2 %, the probe loss does not speak against the weights.
_USUAL = 3.25


def evidence_of(detector: CalibratedDetector, step: int) -> Evidence | None:
    """Evidence of an alarmed detector after `step`; None without an alarm.

    Args:
        detector: after its update with the record of the step.
        step: of the record.
    """
    since = detector.since
    if since is None and detector.early_rise > _EARLY_RISE:
        words = f"{_IN_A_ROW} losses in a row are {detector.early_rise:.0%} above all before them"
        return Evidence(step=step, since=max(1, step - _IN_A_ROW + 1), words=words)
    if since is None:
        return None
    kind, worker = kind_of(detector)
    return Evidence(
        step=step, since=min(since, step), kind=kind, words=detector.measured, worker=worker
    )


def kind_of(detector: CalibratedDetector) -> tuple[str, int | None]:
    """Kind of the evidence for the present alarm, the most specific first, and the worker."""
    unusual = detector.unusual
    if "not_finite" in unusual:
        return "not_finite", None
    if not unusual.isdisjoint(_OF_WORKERS):
        return "worker", detector.odd_worker
    if not unusual.isdisjoint(("update_size", "rate_beyond")):
        return "settings", None
    if unusual <= _OF_TRAINING_LOSS and detector.statistics.get("probe_rise", 0.0) < _USUAL:
        return "data", None
    return "unknown", None
