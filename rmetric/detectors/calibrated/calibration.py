"""Thresholds from healthy runs: floors that have a meaning, raised where healthy runs need it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import ceil, floor, inf, isfinite, nan
from statistics import median
from typing import Any, NamedTuple

from rmetric._util import __version__
from rmetric.detectors.calibrated.alarm_lifecycle import UNDER_WAY, YOUNG
from rmetric.detectors.calibrated.detector import CalibratedDetector
from rmetric.detectors.calibrated.thresholds import Thresholds, sources
from rmetric.detectors.calibrated.training_loss import LEAST_RISE
from rmetric.detectors.contract import FollowedLoss
from rmetric.records import Record, Run

#: Fields of `Record` that the detector reads and that the shipped runs hold where measured.
SIGNALS = (
    "training_loss",
    "validation_loss",
    "probe_loss",
    "gradient_norm",
    "learning_rate",
    "update_norm",
    "parameter_norm",
    "non_finite_gradients",
    "worker_gradient_norms",
    "worker_gradient_cosines",
)
#: What is needed at least, in each statistic's own unit, however quiet the healthy runs are.
FLOORS = Thresholds(
    alone={
        "not_finite": 1.0,
        "loss_jump": 4.0,  # spreads, and 10 %
        "loss_drift": 1.0,  # 0.75 spreads or more, and 6 %
        "loss_climb": 1.0,  # a third above the lowest level (70 % at the start)
        "update_size": 1.0,  # e = 2.7 times too large
        "worker_norm": 4.6,  # a hundred times the others'
        "opposed_worker": 0.33,  # cosine of -0.33
    },
    together={
        "loss_jump": 1.0,
        "loss_drift": 0.9,
        "loss_climb": 0.5,
        "probe_rise": 3.5,  # 7 % above the lowest; alone it may be overfitting
        "validation_rise": 7.0,  # usual changes from one evaluation to the next
        "update_size": 0.4,  # 1.5 times too large
        "gradient_norm": 1.6,  # spreads
        "worker_norm": 0.55,  # 1.7 times the others'
        "opposed_worker": 0.27,
        "hardware_events": 3.0,  # a chance of 1 in 1000
        "rate_beyond": 0.4,  # 1.5 times its former peak
    },
    full_scale={
        "hardware_events": 3.75,
        "gradient_variance": 1.6,
        "loss_jump": 5.0,
        "loss_climb": 1.25,
    },
)
#: How far above the most that healthy runs show a raised threshold lies.
MARGIN = 1.1
#: An alarm by R on its loss alone needs 0.57 / 0.70 of the full scale.
_FULL_SCALE = 1.25
#: The end of a run: a tenth of its losses, at least 5 and at most 40.
_SHARE, _MIN_LOSSES, _MOST = 10, 5, 40


class Shown(NamedTuple):
    """The most that a healthy run showed."""

    run_id: str
    most: dict[str, float]  # by statistic
    pair: float  # of the second largest source
    score: float
    judged: bool  # whether there was ever enough to judge by
    failure: str  # evidence that the run failed, see `HealthyLabelCheck`
    signals: frozenset[str]  # fields of `Record` that it logs


class NotHealthy(ValueError):
    """Runs that cannot be calibrated on, with the reason."""


def calibrate(runs: Iterable[Run], budget: float = 0.02) -> Thresholds:
    """Thresholds under which at most a share `budget` of these runs alarms.

    The floors hold until healthy runs go beyond them. `floor(budget n)` of the n
    runs, those with the highest scores under the floors, may alarm; for the rest
    a threshold alone is at least `MARGIN` times the most that they show, and no pair
    of sources reaches its two. The order of the runs does not matter. Those that are too short
    to be judged do not count. Every other counts as healthy here: without benign changes among
    them, benign changes alarm.

    Raises NotHealthy where there is no run, or one beyond the budget with values that are
    not finite; ValueError for a budget that is not a share.
    """
    return thresholds_from([watch(run) for run in runs], budget)


def thresholds_from(runs: Sequence[Shown], budget: float) -> Thresholds:
    """The same, from what the runs showed under the floors."""
    given_up, kept = by_budget(runs, budget)
    shown = [*given_up, *kept]
    broken = [s.run_id for s in kept if s.most.get("not_finite")]
    if broken:
        raise NotHealthy(f"{broken[0]}: holds values that are not finite, so it is not healthy")
    names = [name for source in sources() for name in source.NAMES]
    most = {name: max(s.most.get(name, 0.0) for s in kept) for name in names}
    alone = {n: max(x, rounded(MARGIN * most.get(n, 0.0))) for n, x in FLOORS.alone.items()}
    # Pairs are raised as a whole: which of the two was at fault is not known.
    pair = max(s.pair for s in kept)
    factor = MARGIN * pair if pair > 1 else 1.0
    together = {n: rounded(x * factor) for n, x in FLOORS.together.items()}
    full = {n: max(x, rounded(_FULL_SCALE * most.get(n, 0))) for n, x in FLOORS.full_scale.items()}
    provenance: dict[str, Any] = {
        "runs": len(shown),
        "budget": budget,
        "margin": MARGIN,
        "alarmed_by_the_floors": sum(s.score > 1 for s in shown),
        "given_up": [s.run_id for s in given_up if s.score > 1],
        "most_in_the_others": {name: round(value, 3) for name, value in most.items()},
        "rmetric": __version__,
    }
    if too_short := sorted(s.run_id for s in runs if not s.judged):
        provenance["too_short"] = too_short
    return Thresholds(alone=alone, together=together, full_scale=full, provenance=provenance)


def by_budget(runs: Sequence[Shown], budget: float) -> tuple[list[Shown], list[Shown]]:
    """The runs that may alarm, and those that thresholds are made of; the highest scores first.

    Runs that are too short to be judged are in neither list. Raises as `calibrate` does.
    """
    if not 0 <= budget < 1:
        raise ValueError(f"budget is {budget}: a share from 0 to less than 1 is accepted")
    shown = sorted((s for s in runs if s.judged), key=lambda s: (-s.score, s.run_id))
    if not shown:
        raise NotHealthy("no healthy run to calibrate on")
    num_given_up = floor(budget * len(shown) + 1e-9)  # 0.29 of 100 is 29
    return shown[:num_given_up], shown[num_given_up:]


def watch(run: Run) -> Shown:
    """The most that a run shows, beside the floors."""
    detector, label_check = CalibratedDetector(FLOORS), HealthyLabelCheck()
    most: dict[str, float] = {}
    signals: set[str] = set()
    pair = score = 0.0
    for record in run.records:
        detector.update(record)
        label_check.update(record, detector)
        signals |= {name for name in SIGNALS if getattr(record, name) is not None}
        for name, value in detector.statistics.items():
            if value > most.get(name, 0.0):
                most[name] = value
        pair = max(pair, detector.pair)
        score = max(score, detector.score) if detector.score == detector.score else score
    judged = bool(most) or not detector.statistics.keys() <= {"not_finite"}
    return Shown(run.id, most, pair, score, judged, label_check.failure, frozenset(signals))


def rounded(x: float) -> float:
    """Up, to two digits after the point: a threshold file is read by people."""
    return inf if x == inf else ceil(x * 100 - 1e-9) / 100


class HealthyLabelCheck:
    """The judgement of a whole run, from the detector's own alarms under the floors.

    A run failed if one of these holds:

    1. a value was not finite, as `NotFinite` counts it;
    2. an alarm older than ten records had the verdict ``failure under way``;
    3. the log ends in an alarm;
    4. the loss never came back: at the end (median of the last tenth) it is 10 % above
       what was usual before the first alarm. An announced change begins this anew.

    A spike that recovered does not count, nor does a run that never alarmed.
    """

    def __init__(self) -> None:
        self._followed = FollowedLoss()
        self._last: deque[float] = deque(maxlen=_MOST)
        self._num_losses = 0
        self._age = 0
        self._before = nan
        self._alarmed_at = 0
        self._not_finite = self._under_way = self._first = self._open = ""

    def update(self, record: Record, detector: CalibratedDetector) -> None:
        """Take a record that the detector has judged."""
        loss = self._followed.of(record)
        if record.planned_events:
            self._before, self._first = nan, ""
            self._last.clear()
            self._num_losses = 0
        if loss is not None and isfinite(loss):
            self._last.append(loss)
            self._num_losses += 1
        if not detector.alarm:
            self._age, self._open = 0, ""
            return
        self._age += 1
        words = detector.measured.partition(": ")[2]
        self._open = words
        if not self._first:
            self._first, self._alarmed_at = words, record.step
            self._before = detector.usual_loss
        if "not_finite" in detector.leading:
            self._not_finite = self._not_finite or words
        elif self._age > YOUNG and detector.verdict == UNDER_WAY and not self._under_way:
            self._under_way = f"{UNDER_WAY} at step {record.step}: {words}"

    @property
    def failure(self) -> str:
        """The evidence, in words; empty for a run that may be healthy."""
        if self._not_finite:
            return self._not_finite
        num_last = max(_MIN_LOSSES, self._num_losses // _SHARE)
        end = median(list(self._last)[-num_last:] or [nan])
        least = LEAST_RISE * abs(self._before)
        back = not end - self._before >= least  # nan: there is nothing to compare
        level = f"the loss is {end:.4g} at the end, {self._before:.4g} was usual before"
        if self._under_way:
            return self._under_way if back else f"{self._under_way}; {level}"
        if self._open:
            return f"the log ends in an alarm: {self._open}"
        if not back:
            return f"{level} the alarm at step {self._alarmed_at}: {self._first}"
        return ""
