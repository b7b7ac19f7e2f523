"""Statistics of the training loss: jumps and climbs against its rolling baseline."""

from __future__ import annotations

from collections import deque
from math import inf, isfinite, nan

from rmetric.detectors.calibrated.source import (
    LARGEST,
    Deviation,
    EvidenceSource,
    ExcursionLimit,
    LaggedPast,
    Resolution,
    bounded,
    clipped,
)
from rmetric.detectors.contract import FollowedLoss, roll_back
from rmetric.records import Record

#: Share of the usual loss: a smaller rise is never a jump, however quiet the run.
LEAST_RISE = 0.1
#: A jump by `LEAST_RISE` alone counts as so many spreads.
_SPREADS_PER_RISE = 4.0
#: Of a run logged at every step a single batch may be bad; where a value stands for many
#: steps, two are enough, and one, if it is more than twice as far out.
_EVERY_STEP, _SPARSE = 3, 2
_SINGLE = 0.45
#: Newest values that are not part of the baseline, and values that it needs: the second pair
#: where the log skips steps, which has fewer values before and in a rise.
_LAG, _MIN_BASELINE = 5, 8
_SPARSE_LAG, _SPARSE_MIN = 2, 5
#: Before there is a baseline: so many times the highest loss before, of which two are known.
_TREBLE, _MIN_FIRST_LOSSES = 3.0, 2
_SMOOTHING = 0.1
_MOST_SPREADS = 3.0
#: Drift that counts as 1: spreads, and share of the usual loss.
_DRIFT, _DRIFT_SHARE = 0.75, 0.06
#: Records that count as the start of a run, and those after which a level is a level.
_START, _CLIMB_WARM_UP = 40, 20
#: A level is a median of so many records; a climb is a share of the lowest and a number of
#: usual steps from record to record.
_LEVEL_RECORDS = 5
_START_RATIO, _START_STEPS = 0.7, 4.0
_CLIMB_RATIO, _CLIMB_STEPS = 0.33, 9.0
#: One loss is itself unusual: spreads, and share of a climb that is too far.
_UNUSUAL_SPREADS, _UNUSUAL_CLIMB = 1.0, 0.5


class TrainingLoss(EvidenceSource):
    """Jumps, drifts and climbs of the training loss (or of the only loss that is logged).

    With z the spreads and r the rise above what is usual, u, record by record:

        loss_jump   least j = min(z, 4 r / (10 % of |u|)) of the last three records; where the log
                    skips steps, of the last two, or 0.45 of the last, the larger; before there is
                    a baseline, 2 (m / h - 1), at least 0, with m the least of the three and h the
                    highest before
        loss_drift  the smaller of two EWMA (0.1): of z, cut to ±3, over its limit, which begins
                    at 0.75 (`ExcursionLimit`), and of r over 6 % of |u|
        loss_climb  median of the last five losses above the lowest such median: the smaller of
                    its share of a third of that and of nine usual steps from record to record;
                    70 % and four steps will do as well in the first 40 records, and nothing else
                    in the first 20

    A usual step is the noise that the median step implies, at least 2 % of the loss. A spread
    is at least 1 % of the usual loss. Both are at least the resolution of the log. All three are
    free of scale: c times the losses, c > 0, gives the same.

    Attributes:
        early_rise: before there is a baseline, m / h - 1 as above; 0 afterwards.
    """

    NAMES = ("loss_jump", "loss_drift", "loss_climb")
    LABEL = "training loss"
    AT_ONCE = True

    def __init__(self) -> None:
        super().__init__()
        self._followed = FollowedLoss()
        self._resolution = Resolution(lag=_LAG)
        self._past = LaggedPast(window=40, lag=_LAG, least=_MIN_BASELINE)
        self._deviation = Deviation(self._past, relative=0.01)
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=_EVERY_STEP)
        self._judged = _EVERY_STEP
        self._first: list[float] = []
        self.early_rise = 0.0
        self._smoothed_spreads = self._smoothed_rise = 0.0
        self._drift_limit = ExcursionLimit(_DRIFT)
        self._steps = LaggedPast(window=40, lag=0, least=8)
        self._last: deque[float] = deque(maxlen=_LEVEL_RECORDS)
        self._level = nan
        self._lowest = inf
        self._count = 0
        self._step: int | None = None
        self._steps_of: deque[int] = deque(maxlen=_EVERY_STEP)

    def update(self, record: Record) -> None:
        loss = self._followed.of(record)
        if loss is None or not isfinite(loss):
            return
        stride = 1 if self._step is None else record.step - self._step
        self._step = record.step
        loss = bounded(loss)
        past = self._past
        past.lag, past.least = (_SPARSE_LAG, _SPARSE_MIN) if stride > 1 else (_LAG, _MIN_BASELINE)
        self._count += 1
        self._steps_of.append(record.step)
        self._resolution.update(loss)
        self._judge_level(loss, stride)
        self._judge_climb(loss)

    def _judge_level(self, loss: float, stride: int) -> None:
        deviation = self._deviation
        deviation.absolute = self._resolution.step
        deviation.update(loss)
        rise, z = deviation.rise, deviation.z
        if rise != rise:
            self._judge_start(loss)
            return
        self._first.clear()
        self.early_rise = 0.0
        scale = abs(deviation.usual)
        least = LEAST_RISE * scale
        jump = bounded(min(z, _SPREADS_PER_RISE * rise / least) if least > 0 else z)
        self._recent.append((jump, rise, z))
        needed = _EVERY_STEP if stride <= 1 else _SPARSE
        last = list(self._recent)[-needed:]
        lasting = min(jump for jump, _, _ in last) if len(last) == needed else 0.0
        self._judged = needed
        if stride > 1 and _SINGLE * jump > lasting:
            lasting, self._judged = _SINGLE * jump, 1
        self.statistics["loss_jump"] = lasting
        self.begun["loss_jump"] = self._steps_of[-min(self._judged, len(self._steps_of))]
        self._judge_drift(z, rise, scale)

    def _judge_start(self, loss: float) -> None:
        first = self._first
        first.append(loss)
        before, last = first[:-_EVERY_STEP], first[-_EVERY_STEP:]
        if len(before) >= _MIN_FIRST_LOSSES and max(before) > 0:
            self.early_rise = min(last) / max(before) - 1
            jump = _SPREADS_PER_RISE * self.early_rise / (_TREBLE - 1)
            self.statistics["loss_jump"] = bounded(max(jump, 0.0))
            self.begun["loss_jump"] = self._steps_of[0]

    def _judge_drift(self, z: float, rise: float, scale: float) -> None:
        z = clipped(z, -_MOST_SPREADS, _MOST_SPREADS)
        self._smoothed_spreads += _SMOOTHING * (z - self._smoothed_spreads)
        self._smoothed_rise += _SMOOTHING * (rise - self._smoothed_rise)
        drift = self._smoothed_spreads / self._drift_limit.update(self._smoothed_spreads)
        least = _DRIFT_SHARE * scale
        if least > 0:
            drift = min(drift, self._smoothed_rise / least)
        self.statistics["loss_drift"] = bounded(drift)
        self.note("loss_drift", self._steps_of[-1], z, _UNUSUAL_SPREADS)

    def _judge_climb(self, loss: float) -> None:
        if self._last:
            self._steps.remember(abs(loss - self._last[-1]))
        self._last.append(loss)
        if len(self._last) < _LEVEL_RECORDS:
            return
        self._level = level = sorted(self._last)[_LEVEL_RECORDS // 2]
        climb = 0.0
        if self._steps.ready and level > self._lowest:
            climb = self._climb_to(level, loss)
        self.statistics["loss_climb"] = climb
        if self._steps.ready:
            newest = self._climb_to(loss, loss)
            self.note("loss_climb", self._steps_of[-1], newest, _UNUSUAL_CLIMB, _UNUSUAL_CLIMB / 2)
        self._lowest = min(self._lowest, level)

    def _climb_to(self, level: float, loss: float) -> float:
        """Height of a level above the lowest, in units of the largest usual height."""
        climb = 0.0
        above = level - self._lowest
        step = max(self._steps.widened, 0.02 * abs(loss), self._resolution.step)
        if not above > 0 or not step > 0:
            return climb
        ratio = above / abs(self._lowest) if self._lowest else LARGEST
        steps = above / step
        if self._count <= _START:
            climb = min(ratio / _START_RATIO, steps / _START_STEPS)
        if self._count > _CLIMB_WARM_UP:
            climb = max(climb, min(ratio / _CLIMB_RATIO, steps / _CLIMB_STEPS))
        return climb

    @property
    def before(self) -> float:
        """The usual level; the lowest one while that is undefined."""
        usual = self._deviation.usual
        return usual if usual == usual else self._lowest

    @property
    def latest(self) -> tuple[float, float]:
        """The newest loss and the median of the last three; nan where there are fewer."""
        if len(self._last) < 3:
            return nan, nan
        return self._last[-1], sorted(list(self._last)[-3:])[1]

    def restart(self) -> None:
        super().restart()
        self._deviation.forget()
        self._steps.forget()
        self._recent.clear()
        self._steps_of.clear()
        self._last.clear()
        self._lowest = inf
        self._count = 0
        self._level = nan
        self._first.clear()
        self._smoothed_spreads = self._smoothed_rise = 0.0
        self._drift_limit.forget()

    def words(self, name: str) -> str:
        what = f"{self._followed.name} {self._followed.loss:.4g}"
        if name == "loss_climb":
            level = f"the median of the last {_LEVEL_RECORDS} is {self._level:.4g}"
            return f"{what}, lowest {self._lowest:.4g} ({level})"
        if self._first:
            highest = max(self._first[:-_EVERY_STEP])
            return f"{what}, one of {_EVERY_STEP} in a row; the highest before was {highest:.4g}"
        what += f", usual {self._deviation.usual:.4g}"
        if name == "loss_drift":
            drift = f"{self._smoothed_spreads:.2f} times the usual spread"
            return f"{what} ({drift} above it, smoothed)"
        _, rise, spreads = map(min, zip(*list(self._recent)[-self._judged :], strict=True))
        above = f"{rise:.3g} above it, {spreads:.3g} times the usual spread"
        if self._judged == 1:
            return f"{what} ({above})"
        return f"{what} (the last {self._judged} records at least {above})"

    def advice(self, name: str, since: int) -> str:
        return f"{roll_back(since)} and leave out the data after it"
