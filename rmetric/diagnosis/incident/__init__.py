"""One incident, one page: the diagnosis from the logs, beside the metric's alarms and the GPUs.

The three know nothing of each other: logs have times and steps, a training log steps and at best
seconds since its start, GPUs times. What can stand on one axis does; what cannot is said.
"""

from __future__ import annotations

from pathlib import Path

from rmetric._util.version import __version__
from rmetric.diagnosis import cutting, words
from rmetric.diagnosis.incident.gpus import in_words, read_gpus, rows
from rmetric.diagnosis.incident.metric import read_metric
from rmetric.diagnosis.incident.times import timelines
from rmetric.diagnosis.result import Diagnosis, Evidence
from rmetric.reporting.page.render import MOST_ALARMS, listed, render_incident
from rmetric.reporting.page.words import say

__all__ = ["incident_page"]

#: Rows of the table of GPUs.
MOST_NEWS = 200


def incident_page(
    diagnosis: Diagnosis, *, metrics: Path | None = None, telemetry: Path | None = None
) -> str:
    """The page, as HTML that needs nothing beside itself; the same input gives the same bytes.

    Args:
        metrics: a training log, any that `rmetric.readers.read_log` reads.
        telemetry: what `rmetric telemetry --jsonl` recorded.

    Raises LogError and OSError for files that cannot be read.
    """
    metric = None if metrics is None else read_metric(metrics, diagnosis)
    gpus = None if telemetry is None else read_gpus(telemetry)
    times, remarks = timelines(diagnosis, metric, gpus)
    shown, more = listed([] if metric is None else metric.trace.began, MOST_ALARMS)
    news, more_news = listed([] if gpus is None else rows(gpus, diagnosis), MOST_NEWS)
    return render_incident(
        None if metric is None else metric.charts,
        diagnosis=diagnosis,
        title=words.headline(diagnosis), what=words.what(diagnosis), where=words.where(diagnosis),
        when=words.when(diagnosis), sureness=words.sureness(diagnosis),
        acts=words.WHO_ACTS.get(diagnosis.actor or "", diagnosis.actor or ""),
        text=words.verdict(diagnosis),
        said=cutting.said, plain=cutting.plain, place=words.place,
        speakers=_speakers, moment=_moment,
        timelines=times, remarks=remarks,
        metric=metric,
        saying=None if metric is None else say(metric.scored.run, metric.trace),
        shown=shown, more=more,
        gpus=gpus, gpu_words=None if gpus is None else in_words(gpus, diagnosis),
        news=news, more_news=more_news,
        version=__version__,
    )  # fmt: skip


def _speakers(evidence: Evidence) -> list[str]:
    """Who said it; a file whose speaker is not known stands in a column of its own."""
    return [cutting.plain(one) for one in evidence.who if one != evidence.file]


def _moment(time: float | None) -> str:
    return "" if time is None else words.clock(time)
