"""The metric as a log states it: its settings, its threshold, and R to compare with ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple

from rmetric._util.strict_json import number, shown
from rmetric.metric import MODES, PRESETS, WINDOWS_AT_LEAST, Components, RMetric, RMetricConfig
from rmetric.records import Run

AS_LOGGED = "as logged"
DEFAULT_PRESET = "simulation"
#: A window's memory is set aside before the first record, so a log must not ask for any amount.
LONGEST_WINDOW = 10**7
#: Difference of two values of R that a log's writer may have rounded away.
_ROUNDING = 1e-9
#: What the authors' logs call the weights of λ, σ² and ΔL, and what else they may be called.
_WEIGHT_NAMES = (("w1_lambda", "lambda"), ("w2_sigma_sq", "sigma_sq"), ("w3_delta_l", "delta_l"))


class Settings(NamedTuple):
    """Settings of the metric, where they come from, and which ablation they are."""

    config: RMetricConfig
    name: str
    mode: str


def settings_of(run: Run, preset: str | None = None) -> Settings:
    """The settings of `preset`; without one those that the log states, or the default's.

    The authors' logs state weights (``r_metric_weights``) and the threshold alone: the rest is
    then the simulation's, with ΔL as the authors' code computes it.
    The ablation (`metric.MODES`) is the log's in either case.
    """
    stated = run.config.get("METRIC_MODE")
    mode = stated if isinstance(stated, str) and stated in MODES else "FULL_METRIC"
    if stated not in (None, mode):
        _note(run, f"the log's METRIC_MODE is {shown(stated)}, not known: {mode} was used")
    if not preset and (own := _stated(run)) is not None:
        return Settings(own, AS_LOGGED, mode)
    if not preset and (theirs := _stated_weights(run)) is not None:
        return Settings(theirs.with_mode(mode), AS_LOGGED, mode)
    name = preset or DEFAULT_PRESET
    return Settings(PRESETS[name]().with_mode(mode), name, mode)


def comparison(run: Run) -> str:
    """Compare the recomputed R with the logged one; returns a sentence."""
    settings = settings_of(run)
    metric = RMetric(settings.config)
    has_signals, stated, differing = False, 0, []
    for record in run.records:
        score, logged = metric.update(record).score, record.stated_score
        has_signals = has_signals or any(source is not None for source in metric.sources)
        stated += logged is not None
        if logged is not None and not is_same_r(score, logged):
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


def is_same_r(score: float, logged: float) -> bool:
    """True for equal R, or as close as the log's writer may have rounded."""
    return score == logged or abs(score - logged) <= _ROUNDING


def _stated(run: Run) -> RMetricConfig | None:
    settings = run.config.get("metric_settings")
    if not isinstance(settings, dict):
        return None
    weights = settings.get("weights")
    try:
        # A named tuple is a list in JSON, an object where somebody wrote it by hand.
        named = Components(**weights) if isinstance(weights, dict) else weights
        return _bounded(run, RMetricConfig(**(settings | {"weights": named})))
    except (TypeError, ValueError, OverflowError):
        _note(run, "the log's metric_settings are not understood and were not used")
        return None


def _stated_weights(run: Run) -> RMetricConfig | None:
    stated = run.config.get("r_metric_weights")
    if stated is None:
        return None
    try:
        weights = Components(*(_weight(stated, names) for names in _WEIGHT_NAMES))
        config = RMetricConfig.simulation(weights=weights, variant="authors_average")
    except (TypeError, ValueError, OverflowError) as error:
        _note(run, f"the log's r_metric_weights are not understood and were not used: {error}")
        return None
    threshold = stated_threshold(run.config)
    return config if threshold is None else replace(config, threshold=threshold)


def stated_threshold(config: dict[str, Any]) -> float | None:
    """``alert_thresholds.r_metric`` of a log's config; None where it holds no finite number."""
    thresholds = config.get("alert_thresholds")
    own = thresholds.get("r_metric") if isinstance(thresholds, dict) else None
    if isinstance(own, bool) or not isinstance(own, (int, float)):
        return None
    try:
        return float(own) if isfinite(own) else None
    except OverflowError:
        return None


def _weight(stated: Any, names: Sequence[str]) -> float:
    if not isinstance(stated, Mapping):
        raise ValueError(f"found {shown(stated)}; a JSON object is accepted")
    found = [stated[name] for name in names if name in stated]
    if not found:
        raise ValueError(f"found {shown(dict(stated))}; {names[0]} is missing")
    return number(found[0])


def _bounded(run: Run, config: RMetricConfig) -> RMetricConfig:
    windows = {name: getattr(config, name) for name in WINDOWS_AT_LEAST}
    beyond: dict[str, Any] = {n: LONGEST_WINDOW for n, w in windows.items() if w > LONGEST_WINDOW}
    for name in beyond:
        _note(run, f"the log's {name} is {shown(windows[name])}: {LONGEST_WINDOW} was used")
    return replace(config, **beyond)


def _note(run: Run, note: str) -> None:
    # A reader that compares scores reads the settings too, before the replay does.
    if note not in run.notes:
        run.notes.append(note)
