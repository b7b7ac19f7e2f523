"""Evidence of the calibrated detector by its remedy, and the level of the loss. No torch here."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from math import isfinite
from statistics import fmean

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
#: Losses of a level, and those that it needs at least.
_LEVEL, _LEAST = 10, 3
#: Losses kept: an alarm is raised up to so many steps after its onset.
_KEPT = 60
#: A level within so many standard errors of another one, or such a share of it, is no other level.
_ERRORS, _SHARE = 4.0, 0.01


def evidence_of(detector: CalibratedDetector, step: int) -> Evidence | None:
    """Evidence of an alarmed detector, updated with the record of `step`; None without an alarm."""
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


class LossLevel:
    """Whether the loss is back at the level that it had before an incident.

    The level is the mean of ten losses. It is back where it is at most four standard errors of the
    difference of two such means, or 1 %, above the one before. The deviation of one loss is that of
    the steps from loss to loss before, over √2, so a loss that falls has no larger one.

    >>> level = LossLevel()
    >>> for step, loss in enumerate([2.0, 2.1, 2.0, 2.1, 4.0, 4.1, 4.0], start=1):
    ...     level.update(step, loss)
    >>> level.mark(onset=5)
    >>> level.is_back
    False
    """

    def __init__(self) -> None:
        self._losses: deque[tuple[int, float]] = deque(maxlen=_KEPT)
        self._limit: float | None = None

    def update(self, step: int, loss: float | None) -> None:
        if loss is not None and isfinite(loss):
            self._losses.append((step, loss))

    def mark(self, onset: int) -> None:
        """An incident begins; the level before it is that of the steps before `onset`."""
        before = [loss for step, loss in self._losses if step < onset][-_LEVEL:]
        if self._limit is not None or len(before) < _LEAST:
            return
        variance = fmean((b - a) ** 2 for a, b in pairwise(before)) / 2
        level, error = fmean(before), (2 * variance / len(before)) ** 0.5
        self._limit = level + max(_ERRORS * error, _SHARE * abs(level))

    def forget(self) -> None:
        self._limit = None

    @property
    def is_back(self) -> bool | None:
        """Whether the level is at most that of before; None where too few losses are known."""
        if self._limit is None or len(self._losses) < _LEAST:
            return None
        return fmean(loss for _, loss in list(self._losses)[-_LEVEL:]) <= self._limit

    def state(self) -> list[tuple[int, float]]:
        return list(self._losses)

    def go_back(self, state: list[tuple[int, float]]) -> None:
        """Return to the losses of a snapshot; the level before the incident stays known."""
        self._losses = deque(state, maxlen=_KEPT)
