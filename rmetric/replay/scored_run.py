"""What the R-Metric makes of a run that is over."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from rmetric.metric import Components, RMetric, RMetricConfig
from rmetric.records import Run
from rmetric.replay.settings import Settings, following, settings_of

_SOURCES = {
    "workers": "the variance between the workers' gradient norms",
    "logged": "taken as the log states it",
    "trailing": "the variance of the one logged gradient norm over its last {window} values, "
    "which is change over time and not disagreement between workers",
}


class Score(NamedTuple):
    """The metric after one record; see `RMetric`."""

    step: int
    raw: Components
    normalised: Components
    score: float
    alarm: bool


@dataclass(kw_only=True)
class ScoredRun:
    """A run with the metric at each of its records.

    Attributes:
        settings: of the metric, where they come from, and which ablation they are.
        scores: one for each record.
        variance_source: what σ² was computed from; None where it is undefined.
        notes: what was chosen or is undefined, beside the run's own notes.
    """

    run: Run
    settings: Settings
    scores: list[Score]
    variance_source: str | None
    notes: list[str] = field(default_factory=list)

    @property
    def config(self) -> RMetricConfig:
        return self.settings.config

    @property
    def alert_steps(self) -> list[int]:
        """The steps at which the metric began to alert, each time that it did."""
        before = [False, *(score.alarm for score in self.scores)]
        return [s.step for s, was in zip(self.scores, before, strict=False) if s.alarm and not was]


def score_run(run: Run, preset: str | None = None) -> ScoredRun:
    """Stream `run` through the metric; see `settings_of` for what `preset` does."""
    notes: list[str] = []
    settings = settings_of(run, preset)
    settings = following(settings, _loss_of(run, settings.config.loss, notes))
    metric = RMetric(settings.config)
    scores, sources = [], set()
    for record in run.records:
        metric.update(record)
        sources.add(metric.variance_source)
        scores.append(Score(record.step, metric.raw, metric.normalised, metric.score, metric.alarm))
    scored = ScoredRun(
        run=run,
        settings=settings,
        scores=scores,
        variance_source=" and ".join(sorted(s for s in sources if s)) or None,
    )
    scored.notes = notes + _notes_on_signals(scored) + _notes_on_threshold(scored)
    return scored


def _loss_of(run: Run, preferred: str, notes: list[str]) -> str:
    """Which loss ΔL follows; it needs a second value to be defined at all."""
    evaluations = sum(record.validation_loss is not None for record in run.records)
    trained = any(record.training_loss is not None for record in run.records)
    stated = any(record.loss_drift is not None for record in run.records)
    if evaluations >= 2 or stated or not trained or preferred == "training_loss":
        return preferred
    found = "one evaluation only" if evaluations else "no evaluation loss"
    notes.append(f"{found} in the log: ΔL follows the training loss, at every record that has one")
    return "training_loss"


def _notes_on_signals(scored: ScoredRun) -> list[str]:
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
    reach = 0.0
    for symbol, (name, reason) in missing.items():
        if all(getattr(score.raw, name) != getattr(score.raw, name) for score in scored.scores):
            notes.append(f"{symbol} is undefined, it adds nothing to R: {reason}")
        else:
            reach += getattr(scored.config.weights, name)
    if reach <= scored.config.threshold:
        notes.append(f"R can reach {reach:g} here and never passes {scored.config.threshold:g}")
    return notes


def _notes_on_threshold(scored: ScoredRun) -> list[str]:
    stated = scored.run.config.get("alert_thresholds")
    own = stated.get("r_metric") if isinstance(stated, dict) else None
    if own is None or own == scored.config.threshold:
        return []
    return [f"the log's own threshold is {own}; {scored.config.threshold:g} was used"]


def alarm_spans(scores: list[Score]) -> list[tuple[int, int]]:
    """From where to where the metric alerts; an alert holds until the next record."""
    alarms = [False, *(score.alarm for score in scores), False]
    edges = [i for i, (before, now) in enumerate(pairwise(alarms)) if before != now]
    steps = [score.step for score in scores]
    steps.append(steps[-1])
    return [(steps[a], steps[b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
