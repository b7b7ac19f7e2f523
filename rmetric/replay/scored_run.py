"""R of a finished run: computed from its records, and as its log states it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isnan, nan
from typing import NamedTuple

from rmetric.metric import Components, RMetric, RMetricConfig
from rmetric.metric_settings import Settings, is_same_r, settings_of, stated_threshold
from rmetric.records import Run
from rmetric.replay.restarts import Restart

_SOURCES = {
    "workers": "the variance between the workers' gradient norms",
    "logged": "taken as the log states it",
    "logged_normalised": "taken as the log states it, normalised by whoever wrote the log",
    "trailing": "the variance of the one logged gradient norm over its last {window} values, "
    "which is change over time and not disagreement between workers",
}


class Score(NamedTuple):
    """The metric after one record; see `RMetric`.

    The score is nan at every record of a run that logs nothing of what R is made of.
    """

    step: int
    raw: Components
    normalised: Components
    score: float
    alarm: bool


@dataclass(frozen=True, kw_only=True)
class StatedMetric:
    """R as a log states it, and the alarms that follow from it.

    Attributes:
        scores: R at each record; None where the log states none there.
        threshold: R above it is an alarm; the log's own, or else the paper's.
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


@dataclass(kw_only=True)
class ScoredRun:
    """A run with the metric at each of its records.

    Attributes:
        settings: of the metric, where they come from, and which ablation they are.
        scores: one for each record.
        variance_source: what σ² was computed from; None where it is undefined.
        stated: None where the log states no R.
        notes: what was chosen or is undefined, beside the run's own notes.
        restarts: in the log, or after another log of the run.
    """

    run: Run
    settings: Settings
    scores: list[Score]
    variance_source: str | None
    stated: StatedMetric | None = None
    notes: list[str] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)

    @property
    def config(self) -> RMetricConfig:
        return self.settings.config

    @property
    def is_defined(self) -> bool:
        """True if the log holds any of the signals of R."""
        return not all(isnan(score.score) for score in self.scores)

    @property
    def stated_differs(self) -> bool:
        """True if the log states an R that differs from the computed one."""
        stated = self.stated.scores if self.stated else []
        return any(
            score is not None and not is_same_r(ours.score, score)
            for score, ours in zip(stated, self.scores, strict=False)
        )


def stated_by(run: Run) -> StatedMetric | None:
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
    return StatedMetric(
        scores=scores, threshold=threshold, threshold_is_stated=own is not None, alarms=alarms
    )


def score_run(run: Run, preset: str | None = None) -> ScoredRun:
    """Stream `run` through the metric; see `settings_of` for what `preset` does."""
    notes: list[str] = []
    settings = settings_of(run, preset)
    loss = _loss_of(run, settings.config.loss, notes)
    settings = settings._replace(config=replace(settings.config, loss=loss))
    metric = RMetric(settings.config)
    scores, sources = [], set()
    for record in run.records:
        metric.update(record)
        sources.add(metric.variance_source)
        scores.append(Score(record.step, metric.raw, metric.normalised, metric.score, metric.alarm))
    seen = _seen(run, scores)
    reach = sum(
        weight for name, weight in settings.config.weights._asdict().items() if name in seen
    )
    if not reach:
        scores = [score._replace(score=nan) for score in scores]
    scored = ScoredRun(
        run=run,
        settings=settings,
        scores=scores,
        variance_source=" and ".join(sorted(s for s in sources if s)) or None,
        stated=stated_by(run),
    )
    scored.notes = notes + _notes_on_signals(scored, seen, reach) + _notes_on_threshold(scored)
    return scored


def _loss_of(run: Run, preferred: str, notes: list[str]) -> str:
    """The loss that ΔL is taken of; ΔL is defined from its second value on."""
    evaluations = sum(record.validation_loss is not None for record in run.records)
    trained = any(record.training_loss is not None for record in run.records)
    stated = any(
        record.loss_drift is not None or record.loss_drift_normalised is not None
        for record in run.records
    )
    if evaluations >= 2 or stated or not trained or preferred == "training_loss":
        return preferred
    found = "one evaluation only" if evaluations else "no evaluation loss"
    notes.append(f"{found} in the log: ΔL follows the training loss, at every record that has one")
    return "training_loss"


def _notes_on_signals(scored: ScoredRun, seen: set[str], reach: float) -> list[str]:
    notes = []
    if scored.variance_source is not None:
        window = scored.config.norm_window
        for source in scored.variance_source.split(" and "):
            notes.append(f"σ² is {_SOURCES[source].format(window=window)}")
    missing = {
        "λ": ("failure_rate", "no hardware events with their times in the log"),
        "σ²": ("gradient_variance", "no gradient norms, or one alone, in the log"),
        "ΔL": ("loss_drift", "fewer than two losses in the log"),
    }
    for symbol, (name, reason) in missing.items():
        if name not in seen:
            notes.append(f"{symbol} is undefined, it adds nothing to R: {reason}")
        elif all(isnan(getattr(score.raw, name)) for score in scored.scores):
            notes.append(f"{symbol} is taken normalised, as the log states it: its value is not")
    if not reach:
        notes.append("R is undefined: nothing that it is made of was logged")
    elif reach <= scored.config.threshold:
        notes.append(f"R can reach {reach:g} here and never passes {scored.config.threshold:g}")
    return notes


def _seen(run: Run, scores: Sequence[Score]) -> set[str]:
    """The signals that had a value anywhere, or of which the log states n."""
    return {
        name
        for name in Components._fields
        if any(not isnan(getattr(score.raw, name)) for score in scores)
        or any(getattr(record, f"{name}_normalised") is not None for record in run.records)
    }


def _notes_on_threshold(scored: ScoredRun) -> list[str]:
    notes = []
    own = stated_threshold(scored.run.config)
    if own is not None and own != scored.config.threshold:
        notes.append(f"the log's own threshold is {own}; {scored.config.threshold:g} was used")
    if scored.stated is not None:
        notes.append(
            f"R as the log states it counts as an alarm above {scored.stated.threshold_words}"
        )
    return notes
