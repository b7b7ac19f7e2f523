"""Render one HTML incident page: diagnosis, metric alarms and GPU telemetry.

The three sources have different clocks: text logs have times and steps, a training log has steps
and at most seconds since its start, GPU readings have times. The page shows a common axis where
one exists and states what cannot be aligned.
"""

from __future__ import annotations

from pathlib import Path

from rmetric._util.version import __version__
from rmetric.diagnosis.report import layout, render
from rmetric.diagnosis.report.gpus import in_words, read_gpus, rows
from rmetric.diagnosis.report.metric import read_metric
from rmetric.diagnosis.report.timeline import timelines
from rmetric.diagnosis.result import Diagnosis
from rmetric.reporting.page import monitor_events
from rmetric.reporting.page.render import MOST_ALARMS, listed, render_incident
from rmetric.reporting.page.sentences import summarise

__all__ = ["incident_page"]

#: Rows of the table of GPUs.
MOST_NEWS = 200


def incident_page(
    diagnosis: Diagnosis, *, metrics: Path | None = None, telemetry: Path | None = None
) -> str:
    """The page, as HTML that needs nothing beside itself; the same input gives the same bytes.

    Args:
        diagnosis: as `diagnose` returns it.
        metrics: a training log, any that `rmetric.readers.read_log` reads.
        telemetry: what `rmetric telemetry --jsonl` recorded.

    Raises:
        LogError, OSError: a file cannot be read.
    """
    metric = None if metrics is None else read_metric(metrics, diagnosis)
    gpus = None if telemetry is None else read_gpus(telemetry)
    times, remarks = timelines(diagnosis, metric, gpus)
    shown, more = listed([] if metric is None else metric.trace.began, MOST_ALARMS)
    news, more_news = listed([] if gpus is None else rows(gpus, diagnosis), MOST_NEWS)
    return render_incident(
        None if metric is None else metric.charts,
        diagnosis=diagnosis,
        title=render.headline(diagnosis), what=render.what(diagnosis),
        where=render.where(diagnosis),
        when=render.when(diagnosis),
        sureness=render.sureness(diagnosis),
        acts=render.WHO_ACTS.get(diagnosis.actor or "", diagnosis.actor or ""),
        text=render.verdict(diagnosis),
        said=layout.excerpt, plain=layout.plain, place=render.place,
        # Without its file, which has a column of its own.
        speakers=lambda one: [layout.plain(who) for who in one.who if who != one.file],
        moment=lambda time: "" if time is None else render.clock(time),
        timelines=times, remarks=remarks,
        metric=metric,
        saying=None if metric is None else summarise(metric.scored.run, metric.trace),
        shown=shown, more=more,
        **({"decisions": []} if metric is None else monitor_events(metric.scored.run)),
        gpus=gpus, gpu_words=None if gpus is None else in_words(gpus, diagnosis),
        news=news, more_news=more_news,
        version=__version__,
    )  # fmt: skip
