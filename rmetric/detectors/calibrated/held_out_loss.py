"""Statistics of losses on fixed data: validation loss and probe loss."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from math import inf, isfinite, log, nan, sqrt
from pathlib import Path

from rmetric._util.strict_json import parse_line
from rmetric.detectors.calibrated.source import EvidenceSource, bounded
from rmetric.detectors.contract import roll_back
from rmetric.records import Record

PRIOR = Path(__file__).with_name("evaluation_prior.json")
#: Newest rises of a run that are taken for its noise.
_RISES = 8
_FAST_SMOOTHING = 0.3
_PER_CENT = 0.02
_WARM_UP, _PROBE_WARM_UP = 5, 15


@lru_cache(maxsize=1)
def evaluation_prior() -> tuple[float, float]:
    """Scale and degrees of freedom of log changes between evaluations in healthy runs."""
    prior = parse_line(PRIOR.read_bytes())
    return prior["scale"], prior["degrees_of_freedom"]


class ValidationLoss(EvidenceSource):
    """Rise of the validation loss above its best, against what healthy runs and this one show.

        validation_rise  r = log(evaluation / lowest before), in usual changes s
                         s² = (f s0² + sum of n r²) / (f + n)

    s is the scale of the Student-t that predicts the next change, with f + n degrees of freedom:
    f and s0 are of many healthy runs (`python -m studies.fault_lab.evaluation_prior`), and the
    run's own rises r > 0 update them, the eight newest without that of the evaluation before.
    Falls do not: they show how fast it learns. Evaluations of 0 or less have no logarithm and are
    left out.
    """

    NAMES = ("validation_rise",)
    LABEL = "validation loss"

    def __init__(self) -> None:
        super().__init__()
        self._rises: deque[float] = deque(maxlen=_RISES)
        self._last = self._best = nan
        self._newest = 0.0  # rise
        self._anew = True

    def update(self, record: Record) -> None:
        loss = record.validation_loss
        if loss is None or not 0 < loss < inf:
            return
        self._last = loss
        if not self._anew:
            scale, freedom = evaluation_prior()
            rise = log(loss) - log(self._best)
            squares = freedom * scale**2 + sum(r * r for r in self._rises)
            usual = sqrt(squares / (freedom + len(self._rises)))
            self.statistics["validation_rise"] = rise / usual
            self.note("validation_rise", record.step, rise / usual, 1.0)
            if self._newest > 0:
                self._rises.append(self._newest)
            self._newest = rise
        self._best = loss if self._anew else min(self._best, loss)
        self._anew = False

    def restart(self) -> None:
        self.forget_best()
        self._rises.clear()
        self._newest = 0.0

    def forget_best(self) -> None:
        """Begin anew with the next evaluation; the noise is known."""
        super().restart()
        self._anew = True

    def words(self, name: str) -> str:
        return f"validation loss {self._last:.4g}, lowest {self._best:.4g}"

    def advice(self, name: str, since: int) -> str:
        return f"stop where the training loss still falls (overfitting), else {roll_back(since)}"


class ProbeLoss(EvidenceSource):
    """Rise of the loss on a small batch that stays the same: what the weights have lost.

        probe_rise  EWMA (0.3) of the probe loss above the lowest that it was after the fifth,
                    in units of 2 % of that, at least 0.001; from the sixteenth on

    No noise of the data is in it, so it separates harder data from damaged weights.
    """

    NAMES = ("probe_rise",)
    LABEL = "probe loss"

    def __init__(self) -> None:
        super().__init__()
        self._level = nan
        self._lowest = inf
        self._count = 0

    def update(self, record: Record) -> None:
        loss = record.probe_loss
        if loss is None or not isfinite(loss):
            return
        loss = bounded(loss)
        self._count += 1
        first = self._level != self._level
        self._level = loss if first else self._level + _FAST_SMOOTHING * (loss - self._level)
        if self._count > _PROBE_WARM_UP:
            unit = _PER_CENT * max(abs(self._lowest), 0.05)
            self.statistics["probe_rise"] = (self._level - self._lowest) / unit
            self.note("probe_rise", record.step, (loss - self._lowest) / unit, 1.0)
        if self._count > _WARM_UP:
            self._lowest = min(self._lowest, self._level)

    def restart(self) -> None:
        super().restart()
        self._level = nan
        self._lowest = inf
        self._count = 0

    def words(self, name: str) -> str:
        return f"probe loss {self._level:.4g} (smoothed), lowest {self._lowest:.4g}"

    def advice(self, name: str, since: int) -> str:
        return roll_back(since)
