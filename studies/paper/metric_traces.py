"""R of a run by its log's own settings: computed from what it logged, or as it states it."""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose, isnan, nan

import numpy as np

from rmetric.evaluation.study import StatedScore
from rmetric.evaluation.traces import Trace
from rmetric.metric import Components, RMetric, RMetricConfig
from rmetric.metric_settings import settings_of, stated_threshold
from rmetric.records import Run


def metric_trace(
    name: str, run: Run, stated: Sequence[StatedScore] = (), config: RMetricConfig | None = None
) -> Trace:
    """R at every record of a run.

    It is computed by the settings that the log states. Where the log lacks a signal that
    has a weight and states R, the stated R is taken; where it lacks all of them and states
    nothing, R is nan.

    Args:
        name: of the detector, for the trace.
        run: the run.
        stated: one for each record; empty where nothing is to be taken as stated.
        config: settings in place of the log's own.
    """
    own = settings_of(run).config
    scores, missing = computed(run, config or own)
    threshold = (config or own).threshold
    if any(missing) and config is None and any(s.score is not None for s in stated):
        scores = np.array([nan if s.score is None else s.score for s in stated], dtype=float)
        own_threshold = stated_threshold(run.config)
        threshold = threshold if own_threshold is None else own_threshold
    elif all(missing):
        scores = np.full(len(run.records), nan)
    return Trace(
        detector=name,
        run_id=run.id,
        steps=np.array([record.step for record in run.records], dtype=np.int64),
        scores=scores,
        alarms=scores > threshold,
    )


def computed(run: Run, config: RMetricConfig) -> tuple[np.ndarray, Components]:
    """R after each record, shape (T,), and which signals with a weight the run never logged.

    A signal without a weight counts as missing only where all others are.
    """
    metric, scores = RMetric(config), []
    logged = [False] * 3
    for record in run.records:
        scores.append(metric.update(record).score)
        sources = zip(logged, metric.sources, strict=True)
        logged = [was or source is not None for was, source in sources]
    weighted = [weight > 0 for weight in config.weights]
    nothing = not any(was and counts for was, counts in zip(logged, weighted, strict=True))
    missing = (
        nothing or (counts and not was) for was, counts in zip(logged, weighted, strict=True)
    )
    return np.array(scores, dtype=float), Components(*missing)


def _same(stated: float, ours: float) -> bool:
    return isclose(stated, ours, abs_tol=1e-9) or (isnan(stated) and isnan(ours))


def disagreements(
    runs: Sequence[Run], stated: Sequence[list[StatedScore]], traces: Sequence[Trace]
) -> list[str]:
    """Logs whose own R, or alarm, is not what the metric gives for their records."""
    found = []
    for run, own, trace in zip(runs, stated, traces, strict=True):
        for step, theirs, ours, alarm in zip(
            trace.steps, own, trace.scores, trace.alarms, strict=True
        ):
            if theirs.score is not None and not _same(theirs.score, ours):
                difference = f"r_metric is {theirs.score:.6g}, recomputed {ours:.6g}"
            elif theirs.alarm is not None and theirs.alarm != alarm:
                difference = f"the alert is {theirs.alarm}, recomputed {bool(alarm)}"
            else:
                continue
            found.append(f"{run.source or run.id}, step {step}: {difference}")
            break
    return found
