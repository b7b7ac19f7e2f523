"""With which settings of the metric a log is replayed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from rmetric.metric import MODES, PRESETS, WINDOWS_AT_LEAST, Components, RMetricConfig
from rmetric.records import Run
from rmetric.strict_json import shown

AS_LOGGED = "as logged"
DEFAULT_PRESET = "simulation"
#: A window's memory is set aside before the first record, so a log must not ask for any amount.
LONGEST_WINDOW = 10**7


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
    mode = stated if isinstance(stated, str) and stated in MODES else "FULL_METRIC"
    if stated not in (None, mode):
        _note(run, f"the log's METRIC_MODE is {shown(stated)}, not known: {mode} was used")
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
        return _bounded(run, RMetricConfig(**(settings | {"weights": named})))
    except (TypeError, ValueError, OverflowError):
        _note(run, "the log's metric_settings are not understood and were not used")
        return None


def _bounded(run: Run, config: RMetricConfig) -> RMetricConfig:
    windows = {name: getattr(config, name) for name in WINDOWS_AT_LEAST}
    beyond: dict[str, Any] = {n: LONGEST_WINDOW for n, w in windows.items() if w > LONGEST_WINDOW}
    for name in beyond:
        _note(run, f"the log's {name} is {shown(windows[name])}: {LONGEST_WINDOW} was used")
    return replace(config, **beyond)


def _note(run: Run, note: str) -> None:
    # A reader that compares scores asks for the settings too, before the replay does.
    if note not in run.notes:
        run.notes.append(note)
