"""The calibrated detector: evidence that is beyond what healthy runs show."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import inf, nan
from typing import NamedTuple, TypeVar

from rmetric.detectors.calibrated.alarm_lifecycle import (
    RECOVERING,
    TOO_EARLY,
    UNDER_WAY,
    AlarmLifecycle,
)
from rmetric.detectors.calibrated.gradients import Gradients
from rmetric.detectors.calibrated.held_out_loss import ValidationLoss
from rmetric.detectors.calibrated.rate_change import RateChange
from rmetric.detectors.calibrated.source import EvidenceSource, clipped
from rmetric.detectors.calibrated.thresholds import Thresholds, default_thresholds, sources
from rmetric.detectors.calibrated.training_loss import TrainingLoss
from rmetric.detectors.contract import roll_back
from rmetric.metric import Components
from rmetric.records import Record

#: Scores are cut here, so that they can be drawn and averaged.
CEILING = 100.0
#: Score of an alarm that is kept open because the loss has not come back.
KEPT_OPEN = 1.01
#: Steps that evidence must last which does not alarm at once.
LASTING = 5
#: Two sources of these alarm at once: statistic -> share of its joint threshold that is enough.
SUFFICES = {
    **dict.fromkeys(("loss_jump", "loss_climb", "validation_rise"), 1.0),
    **dict.fromkeys(("update_size", "gradient_norm", "rate_beyond"), 1.0),
    "loss_drift": 0.6,  # smoothed over some ten records
}
#: What counts in no other pair: the probe loss is evidence of the same as it.
ONLY_SO = frozenset({"validation_rise", "rate_beyond"})


Source = TypeVar("Source", bound=EvidenceSource)
#: Strength of a source's statistic, with the source's place and the statistic's name.
_Strength = tuple[float, tuple[int, str]]


class _Config(NamedTuple):
    thresholds: Thresholds
    limits: list[list[tuple[str, float, float]]]  # by source: statistic, solo, joint threshold


class CalibratedDetector:
    """Alarms on evidence beyond that of healthy runs, and names the evidence.

    Each source (training loss, validation loss, probe loss, updates, gradients, hardware,
    non-finite values, learning rate) gives statistics relative to the run's own rolling
    baseline. A statistic s has two thresholds, floors that are raised where healthy
    and benign runs exceed them: a solo threshold a, which alarms by itself, and a
    joint threshold b, which alarms together with another source. With u the largest
    s / b of each source,

        score = max(largest s / a, second largest u),    alarm where score > 1

    so an alarm is either one piece of evidence that is beyond all that was seen
    in healthy runs, or two of different kinds that are each unusual. Both must last for five
    steps: the least of their records counts. Values that are not finite
    and the training loss, whose statistics contain this, count at once, and so do two sources
    of those that suffice together (`SUFFICES`). What is not logged adds nothing;
    with only a loss it works on that.

    An alarm of the losses stays open, with a score of 1.01, until the loss is back or its new level
    has become usual: one collapse is one alarm.

    A change that the user announced (`planned_events`) resets every baseline:
    values before a change of rate, batch or data do not predict those after it.

    Its weaknesses: it needs some ten records before it can judge a level; what
    fails within a step shows nothing before; and a level that lasts for some thirty
    records becomes usual, so an alarm marks the begin of a failure and not its end.

    Args:
        thresholds: those of `rmetric calibrate`; by default the shipped ones.

    Attributes:
        score: 1 is the threshold; nan until there is anything to judge by.
        alarm: whether the score is above 1.
        reason: the verdict; each piece of evidence with its usual value and since when; a jump of
            the learning rate where one that nobody announced came before; and a suggested action.
        verdict: ``healthy``; ``spike or failure, too early to tell`` in the first ten records of
            an alarm that rests on the losses, unless they are far beyond the spikes that come
            back; then ``recovering spike`` or ``failure under way``.
        ended: why the last alarm ended, in words, from the record on at which it did; empty
            before that and while there is an alarm.
        evidence: statistic -> its strength, 1 being enough for an alarm: alone, or, where
            it never alarms alone, beside another source.
        statistics: what the sources give, in their own units.
        pair: strength of the second largest source, 1 being enough beside the largest; the least
            of the last records.
        contributions: λ, σ² and ΔL from 0 to 1 as the calibrated R-Metric weighs them, where
            1 is a quarter more than the limit or than healthy runs show; see `CalibratedRMetric`.

    >>> detector = CalibratedDetector()
    >>> for step in range(60):
    ...     _ = detector.update(Record(step=step, training_loss=2.0 + 0.01 * (step % 3)))
    >>> for step in range(60, 63):
    ...     _ = detector.update(Record(step=step, training_loss=4.0))
    >>> detector.alarm, detector.verdict
    (True, 'spike or failure, too early to tell')
    """

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self._sources = sources()
        thresholds = thresholds or default_thresholds()
        solo, joint = thresholds.alone, thresholds.together
        limits = [
            [(name, solo.get(name, inf), joint.get(name, inf)) for name in source.NAMES]
            for source in self._sources
        ]
        self.config = _Config(thresholds, limits)
        self.score = nan
        self.pair = 0.0
        self._lasting: deque[tuple[float, float]] = deque(maxlen=LASTING)
        self._needed = LASTING
        self.alarm = False
        self.step = 0
        self.ended = ""
        self._since: dict[str, int] = {}
        self._course = AlarmLifecycle()
        self._rate = RateChange()
        self._because_of_rate = ""
        self._rate_advice = ""
        self._leading: list[tuple[int, str]] = []

    def update(self, record: Record) -> CalibratedDetector:
        """Take the next record."""
        again = record.step == self.step
        if not again:
            self._needed = max(1, LASTING // max(1, record.step - self.step))
        self.step = record.step
        self._rate.update(record)
        if record.planned_events:
            for source in self._sources:
                source.restart()
        elif self._rate.restarted:  # gradients follow the rate; what the training loss does counts
            self._source(Gradients).restart()
            self._source(ValidationLoss).forget_best()  # which a restart gives up for a while
        for source in self._sources:
            source.update(record)
        was, led, since = self.alarm, self._leading, dict(self._since)
        self._judge(again=again)
        if was and not self.alarm and not record.planned_events:
            names = {name for _, name in led}
            if self._course.unfinished(names, self._source(TrainingLoss)):
                self.score, self.alarm, self._leading = KEPT_OPEN, True, led
                for name in names & since.keys():
                    self._since[name] = since[name]
        if self.alarm:
            if not was:
                self.ended = ""
                self._because_of_rate = self._rate.words()
                self._rate_advice = self._rate.advice()
            self._course.follow({name for _, name in self._leading}, self._source(TrainingLoss))
        elif was:
            labels = {self._sources[index].LABEL: None for index, _ in led}
            why = self._course.end({name for _, name in led}, labels, self._source(TrainingLoss))
            self.ended = "a change was announced" if record.planned_events else why
        return self

    def _judge(self, *, again: bool) -> None:
        strongest, strongest_by = 0.0, (0, "")
        others, others_by = 0.0, (0, "")
        pairs: list[_Strength] = []
        at_once: list[_Strength] = []
        known = False
        for index, source in enumerate(self._sources):
            best: _Strength = 0.0, (0, "")
            soonest: _Strength = 0.0, (0, "")
            for name, solo, joint in self.config.limits[index]:
                value = source.statistics.get(name)
                if value is None:
                    self._since.pop(name, None)
                    continue
                known = True
                solo_strength, joint_strength = _strength(value, solo), _strength(value, joint)
                if source.AT_ONCE:
                    if solo_strength > strongest:
                        strongest, strongest_by = solo_strength, (index, name)
                elif solo_strength > others:
                    others, others_by = solo_strength, (index, name)
                if joint_strength > best[0] and name not in ONLY_SO:
                    best = joint_strength, (index, name)
                if share := SUFFICES.get(name):
                    soonest = max(soonest, (joint_strength / share, (index, name)))
                if max(solo_strength, joint_strength) > 1:
                    self._since.setdefault(name, source.begun.get(name, self.step))
                else:
                    self._since.pop(name, None)
            at_once.append(soonest)
            pairs.append(best)
        second, pair_by = _second(pairs)
        if again and self._lasting:  # one step may have several records
            self._lasting.pop()
        self._lasting.append((others, second))
        last = list(self._lasting)[-self._needed :]
        lasts = len(last) == self._needed
        others, self.pair = map(min, zip(*last, strict=True)) if lasts else (0.0, 0.0)
        soon, soon_by = _second(at_once)
        if soon > self.pair:
            self.pair, pair_by = soon, soon_by
        if others > strongest:
            strongest, strongest_by = others, others_by
        self.score = min(max(strongest, self.pair), CEILING) if known else nan
        self.alarm = self.score > 1
        self._leading = [strongest_by] if strongest >= self.pair else pair_by

    def _source(self, kind: type[Source]) -> Source:
        return next(source for source in self._sources if isinstance(source, kind))

    @property
    def usual_loss(self) -> float:
        """Level that the newest loss is compared with, nats; nan or inf while undefined."""
        return self._source(TrainingLoss).before

    @property
    def early_rise(self) -> float:
        """Share by which the last three losses are above all before; 0 once there is a baseline."""
        return self._source(TrainingLoss).early_rise

    @property
    def since(self) -> int | None:
        """First step of the evidence for the alarm; None without one."""
        if not self.alarm:
            return None
        return min(self._since_of(index, name) for index, name in self._leading)

    def _since_of(self, index: int, name: str) -> int:
        """First step of the evidence; of what suffices only beside another, of its stretch."""
        return self._since.get(name, self._sources[index].begun.get(name, self.step))

    @property
    def leading(self) -> tuple[str, ...]:
        """Statistics that the present alarm rests on, one or two; empty without an alarm."""
        return tuple(name for _, name in self._leading) if self.alarm else ()

    @property
    def unusual(self) -> frozenset[str]:
        """Statistics above one of their thresholds."""
        return frozenset(self._since)

    @property
    def level(self) -> str:
        """``alarm``, which is to act on; ``watch``, which is to look closer; else ``quiet``.

        A watch holds while any statistic is above a threshold, in healthy runs some hundred
        records apart.
        """
        return "alarm" if self.alarm else "watch" if self._since else "quiet"

    @property
    def odd_worker(self) -> int | None:
        """The worker that differs most from the others, where these are logged; else None."""
        return self._source(Gradients).odd_worker(self.config.thresholds.together)

    @property
    def verdict(self) -> str:
        return self._course.verdict

    @property
    def evidence(self) -> dict[str, float]:
        found = {}
        for source, limits in zip(self._sources, self.config.limits, strict=True):
            for name, solo, joint in limits:
                value = source.statistics.get(name)
                if value is not None:
                    found[name] = min(_strength(value, solo if solo < inf else joint), CEILING)
        return found

    @property
    def statistics(self) -> dict[str, float]:
        return {n: x for source in self._sources for n, x in source.statistics.items()}

    @property
    def contributions(self) -> Components:
        found = self.statistics
        scale = self.config.thresholds.full_scale
        loss = max(_share(found, scale, "loss_jump"), _share(found, scale, "loss_climb"))
        return Components(
            failure_rate=_share(found, scale, "hardware_events"),
            gradient_variance=_share(found, scale, "gradient_variance"),
            loss_drift=1.0 if found.get("not_finite") else loss,
        )

    @property
    def reason(self) -> str:
        since = self.since
        return "" if since is None else f"{self.measured}: {self._advice(since)}"

    @property
    def measured(self) -> str:
        """The reason without the advice; empty without an alarm."""
        if self.since is None:
            return ""
        parts = [
            f"{self._sources[index].words(name)}, since step {self._since_of(index, name)}"
            for index, name in self._leading
        ]
        rate = f"; {self._because_of_rate}" if self._because_of_rate else ""
        lost = f"the loss is lost, {self._course.lost:.3g} times its usual level; "
        lost = lost if self._course.lost and self.verdict == UNDER_WAY else ""
        return f"{self.verdict}: {lost}{'; and '.join(parts)}{rate}"

    def _advice(self, since: int) -> str:
        if self.verdict == RECOVERING:
            return f"keep the checkpoints from before step {since} until the loss is back"
        if self._rate_advice:
            return f"{self._rate_advice} and {roll_back(since)}"
        if self.verdict == TOO_EARLY:
            return f"keep the checkpoints from before step {since} and wait for ten records"
        index, name = self._leading[0]
        return self._sources[index].advice(name, since)


def _strength(value: float, limit: float) -> float:
    if value == inf:
        return CEILING if limit < inf else 0.0
    return value / limit


def _second(found: list[_Strength]) -> tuple[float, list[tuple[int, str]]]:
    (_, by), (strength, other) = sorted(found, key=lambda pair: -pair[0])[:2]
    return strength, [by, other]


def _share(found: Mapping[str, float], scale: Mapping[str, float], name: str) -> float:
    return clipped(found.get(name, 0.0) / scale.get(name, inf), 0.0, 1.0)
