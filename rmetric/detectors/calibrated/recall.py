"""Effect of a calibration on failing runs, and the calibration runs that cause it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from rmetric.detectors.calibrated.calibration import FLOORS, MARGIN, Shown, by_budget, rounded
from rmetric.detectors.calibrated.calibration import thresholds_from as make_thresholds
from rmetric.detectors.calibrated.failing_runs import (
    CIRCUMSTANCES,
    SIGNALS,
    detected,
    failing_runs,
)
from rmetric.detectors.calibrated.thresholds import Thresholds, default_thresholds

#: Share of the detected failing runs that a calibration may lose.
MOST_LOST = 0.1
#: Runs that are left out in turn to find those that a loss comes from.
_MOST_LEFT_OUT = 10


class Recall(NamedTuple):
    """Ids of the shipped failing runs that are detected.

    Attributes:
        signals: fields of `Record` that the detector may read, in the order of `SIGNALS`.
        before: with the shipped thresholds.
        after: with others.
    """

    signals: tuple[str, ...]
    before: frozenset[str]
    after: frozenset[str]

    @property
    def lost(self) -> frozenset[str]:
        return self.before - self.after

    @property
    def loses_recall(self) -> bool:
        """True if more than a tenth of the detected runs is lost."""
        return len(self.lost) > MOST_LOST * len(self.before)

    @property
    def lost_by_fault(self) -> dict[str, int]:
        """Number of lost runs by fault."""
        faults = sorted(run.fault for run in failing_runs() if run.id in self.lost)
        return {fault: faults.count(fault) for fault in dict.fromkeys(faults)}

    def to_json(self) -> dict[str, Any]:
        """As the threshold file holds it."""
        return {
            "signals": list(self.signals),
            "runs": len(failing_runs()),
            "detected_before": len(self.before),
            "detected_after": len(self.after),
            "no_longer_detected": sorted(self.lost),
        }


def recall(thresholds: Thresholds, logged: Collection[str]) -> Recall:
    """Failing runs that `thresholds` detect beside the shipped ones.

    The detector reads only what the calibration runs log: a run that the probe loss shows is
    no evidence for thresholds that will judge a training loss.

    Args:
        thresholds: the new ones.
        logged: fields of `Record` that the calibration runs log.
    """
    signals = tuple(name for name in SIGNALS if name in logged)
    shipped = default_thresholds()
    before = detected(shipped, signals)
    same = (thresholds.alone, thresholds.together) == (shipped.alone, shipped.together)
    after = before if same else detected(thresholds, signals)
    return Recall(tuple(s for s in signals if s not in CIRCUMSTANCES), before, after)


def logged_by(runs: Sequence[Shown]) -> frozenset[str]:
    """Fields of `Record` that one of the runs logs."""
    return frozenset().union(*(run.signals for run in runs))


def raised_by(runs: Sequence[Shown], budget: float) -> dict[str, dict[str, Any]]:
    """Each threshold that was raised: by which run, to what, and what it is without that run.

    Args:
        runs: what all runs showed.
        budget: as `calibrate` takes it.

    Returns:
        Statistic -> "run", "least", "raised_to" and "without_it". Under "pairs" they are factors.
    """
    _, kept = by_budget(runs, budget)
    found: dict[str, dict[str, Any]] = {}
    limits: list[tuple[str, float]] = [*FLOORS.alone.items(), ("pairs", 1.0)]
    for name, least in limits:
        values = [(run.pair if name == "pairs" else run.most.get(name, 0.0), run) for run in kept]
        values.sort(key=lambda pair: (-pair[0], pair[1].run_id))
        strengths = [_raised(name, least, value) for value, _ in values]
        if strengths[0] > least:
            found[name] = {
                "run": values[0][1].run_id,
                "least": least,
                "raised_to": strengths[0],
                "without_it": strengths[1] if len(strengths) > 1 else least,
            }
    return found


def _raised(name: str, least: float, most: float) -> float:
    if name == "pairs" and most <= 1:
        return least
    return max(least, rounded(MARGIN * most))


def runs_that_reduce_recall(
    runs: Sequence[Shown], budget: float, signals: Collection[str]
) -> tuple[list[str], Recall] | None:
    """The fewest runs, by score, without which no more than a tenth is lost.

    Returns:
        Their ids and the recall without them; None where ten are not enough, or all.
    """
    _, kept = by_budget(runs, budget)
    for number in range(1, min(_MOST_LEFT_OUT, len(kept) - 1) + 1):
        if kept[number - 1].score <= 1:
            return None
        found = recall(make_thresholds(kept[number:], 0.0), signals)
        if not found.loses_recall:
            return sorted(run.run_id for run in kept[:number]), found
    return None
