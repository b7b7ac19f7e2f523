"""R as a log states it, and its comparison with the recomputed R."""

from __future__ import annotations

from dataclasses import dataclass

from rmetric.metric import RMetric, RMetricConfig
from rmetric.readers.settings import settings_of, stated_threshold
from rmetric.records import Run

_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Stated:
    """R as a log states it, and the alarms that follow from it.

    Attributes:
        scores: R at each record; None where the log states none there.
        threshold: R above it is an alarm.
        threshold_is_stated: whether the log states the threshold; else it is the paper's.
        alarms: whether R is above it, at each record. A record that states no R goes on as
            the one before it.
    """

    scores: list[float | None]
    threshold: float
    threshold_is_stated: bool
    alarms: list[bool]

    @property
    def highest(self) -> float | None:
        """The highest R that is a number; None where no record states one."""
        known = [score for score in self.scores if score is not None and score == score]
        return max(known, default=None)

    @property
    def threshold_words(self) -> str:
        """The threshold and who states it."""
        if self.threshold_is_stated:
            return f"{self.threshold:g}, the threshold that the log states"
        return f"{self.threshold:g}, the paper's threshold, as the log states none"


def stated_by(run: Run) -> Stated | None:
    """R as the log of `run` states it; None if it states none."""
    scores = [record.stated_score for record in run.records]
    if all(score is None for score in scores):
        return None
    own = stated_threshold(run.config)
    threshold = RMetricConfig().threshold if own is None else own
    alarms, alarm = [], False
    for score in scores:
        alarm = alarm if score is None else score > threshold
        alarms.append(alarm)
    return Stated(
        scores=scores, threshold=threshold, threshold_is_stated=own is not None, alarms=alarms
    )


def comparison(run: Run) -> str:
    """Compare the recomputed R with the logged one; returns a sentence."""
    settings = settings_of(run)
    metric = RMetric(settings.config)
    has_signals = False
    stated, differing = 0, []
    for record in run.records:
        score, logged = metric.update(record).score, record.stated_score
        has_signals = has_signals or any(source is not None for source in metric.sources)
        if logged is not None:
            stated += 1
            if not (score == logged or abs(score - logged) <= _TOLERANCE):
                differing.append((record.step, score, logged))
    if not has_signals:
        return "R cannot be recomputed: the log holds nothing of what it is made of"
    if not differing:
        return f"R recomputed equals the logged r_metric at all {stated} records that state it"
    step, score, logged = differing[0]
    return (
        f"R recomputed (settings: {settings.name}) differs from the logged r_metric at "
        f"{len(differing)} of {stated} records, first at step {step}: {score:.4f}, "
        f"logged {logged:.4f}"
    )
