"""With which settings of the metric a log is replayed."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from rmetric.metric import MODES, PRESETS, Components, RMetricConfig
from rmetric.records import Run

AS_LOGGED = "as logged"
DEFAULT_PRESET = "simulation"


class Settings(NamedTuple):
    """Settings of the metric, where they come from, and which ablation they are."""

    config: RMetricConfig
    name: str
    mode: str


def settings_of(run: Run, preset: str | None = None) -> Settings:
    """The settings of `preset`; without one those that the log states, or the default's.

    The ablation (`metric.MODES`) is the log's in either case.
    """
    stated = run.config.get("METRIC_MODE")
    mode = stated if stated in MODES else "FULL_METRIC"
    own = None if preset else _stated(run)
    if own is not None:
        return Settings(own, AS_LOGGED, mode)
    name = preset or DEFAULT_PRESET
    return Settings(PRESETS[name]().with_mode(mode), name, mode)


def following(settings: Settings, loss: str) -> Settings:
    """The same with ΔL taken from another loss."""
    return settings._replace(config=replace(settings.config, loss=loss))


def _stated(run: Run) -> RMetricConfig | None:
    settings = run.config.get("metric_settings")
    if not isinstance(settings, dict):
        return None
    weights = settings.get("weights")
    try:
        # A named tuple is a list in JSON, an object where somebody wrote it by hand.
        named = Components(**weights) if isinstance(weights, dict) else weights
        return RMetricConfig(**(settings | {"weights": named}))
    except (TypeError, ValueError):
        run.notes.append("the log's metric_settings are not understood and were not used")
        return None
