"""Render one HTML incident page: diagnosis, metric alarms and GPU telemetry.

The three sources have different clocks: text logs have times and steps, a training log has steps
and at most seconds since its start, GPU readings have times. The page shows a common axis where
one exists and states what cannot be aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rmetric._util import __version__
from rmetric._util.printed import counted
from rmetric.diagnosis.report import layout, render
from rmetric.diagnosis.report.timeline import on_axis, timelines
from rmetric.diagnosis.result import Diagnosis
from rmetric.readers import read_log
from rmetric.replay.scored_run import ScoredRun, score_run
from rmetric.reporting.page import (
    DetectorTrace,
    monitor_events,
    trace_of_r_metric,
    trace_with_reasons,
)
from rmetric.reporting.page.columns import charts_of
from rmetric.reporting.page.render import MOST_ALARMS, listed, render_incident
from rmetric.reporting.page.sentences import summarise
from rmetric.reporting.page.series import Charts, Line
from rmetric.telemetry.lines import GpuVerdict
from rmetric.telemetry.sources import ReplayedReadings

__all__ = ["incident_page"]

#: Rows of the table of GPUs.
MOST_NEWS = 200
DETECTOR = "calibrated"
#: Panels of a run's page that are shown here too.
_PANELS = ("loss", "gradient_norm", f"score_{DETECTOR}")
#: Of a training log's steps, beyond which a step of the logs is not of the same count.
_BEYOND = 0.1


class Metric(NamedTuple):
    """A training log and the alarms of the calibrated detector.

    Attributes:
        offset: seconds from its records' times to the logs' clock; None where not known.
        remarks: on how it joins the logs.
    """

    scored: ScoredRun
    trace: DetectorTrace
    charts: Charts
    source: Path
    offset: float | None
    remarks: list[str]


class Gpus(NamedTuple):
    """Verdicts of a recording: those that changed, in order; key -> time of its last reading."""

    news: Sequence[GpuVerdict]
    until: dict[str, float]

    @property
    def unwell(self) -> list[str]:
        """Keys of those that were not always healthy, in the order in which they showed it."""
        return list(dict.fromkeys(one.key for one in self.news if one.level != "healthy"))


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
    gpus = None
    if telemetry is not None:
        source = ReplayedReadings(telemetry)
        gpus = Gpus(source.poll(), {key: one.time for key, one in source.verdicts().items()})
    times, remarks = timelines(diagnosis, metric, gpus)
    shown, more = listed([] if metric is None else metric.trace.began, MOST_ALARMS)
    news, more_news = listed([] if gpus is None else _rows(gpus, diagnosis), MOST_NEWS)
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
        gpus=gpus, gpu_words=None if gpus is None else _in_words(gpus, diagnosis),
        news=news, more_news=more_news,
        version=__version__,
    )  # fmt: skip


def read_metric(path: Path, diagnosis: Diagnosis) -> Metric:
    """A training log of the same job, its steps and times aligned with the text logs."""
    runs = read_log(path).runs
    scored = score_run(runs[0])
    trace = trace_with_reasons(DETECTOR, runs[0])
    charts = charts_of(scored, [trace_of_r_metric(scored), trace])
    remarks = []
    if len(runs) > 1:
        remarks.append(f"the log holds {counted(len(runs), 'run')}: this is the first")
    panels = [one for one in charts.panels if one.name in _PANELS]
    # As published the R-Metric alarms in most healthy runs too: it explains no incident.
    own = [one for one in charts.lines if one.kind != "published-alarm"]
    lines = [*own, *_lines(diagnosis, charts, remarks)]
    charts = replace(charts, groups={"Loss and alarms": panels}, lines=lines)
    return Metric(scored, trace, charts, path, _offset(scored, diagnosis, remarks), remarks)


def _lines(diagnosis: Diagnosis, charts: Charts, remarks: list[str]) -> list[Line]:
    """The steps in the logs, where they can be those of the training log."""
    first, last = int(charts.steps.min()), int(charts.steps.max())
    reach = _BEYOND * max(last - first, 1)
    lines = []
    for label, kind, step in (
        ("the logs' first iteration that differs", "onset", diagnosis.since),
        ("the logs' last step", "failure", diagnosis.iteration),
    ):
        if step is not None and first - reach <= step <= last + reach:
            lines.append(Line(step=step, kind=kind, label=label))
        elif step is not None:
            steps = f"this log's steps are {first:,} to {last:,}"
            remarks.append(f"{label}, {step:,}, is not drawn: {steps}")
    return lines


def _offset(scored: ScoredRun, diagnosis: Diagnosis, remarks: list[str]) -> float | None:
    """Seconds from a record's time to the logs' clock, by the last step, which is in both."""
    timed = [one for one in scored.run.records if one.time is not None]
    if timed and on_axis(timed[0].time):
        return 0.0
    step, time = diagnosis.iteration, diagnosis.job.get("last_step_time")
    same = [one.time for one in timed if one.step == step]
    if not same or time is None or not on_axis(time):
        remarks.append("its alarms are not on the axis of time: it shares no time with the logs")
        return None
    remarks.append(f"on the axis of time it is placed by step {step}, which both tell")
    return float(time) - float(same[-1] or 0.0)


def _rows(gpus: Gpus, diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Verdict changes since a GPU was first unhealthy, with their time before the cause."""
    nodes = {one.node for one in diagnosis.nodes if one.node}
    rows, unwell = [], set()
    for one in gpus.news:
        # That a GPU was well is news where it was not before.
        if one.level != "healthy" or one.key in unwell:
            unwell.add(one.key)
            before = _before(one.time, diagnosis)
            rows.append({"verdict": one, "suspect": one.node in nodes, "before": before})
    return rows


def _before(time: float, diagnosis: Diagnosis) -> str:
    if diagnosis.time is None or not on_axis(diagnosis.time):
        return ""
    apart = abs(diagnosis.time - time)
    words = f"{apart:.0f} s" if apart < 120 else f"{apart / 60:.0f} min"
    words = words if apart < 7200 else f"{apart / 3600:.1f} h"
    return f"{words} {'before' if diagnosis.time >= time else 'after'} the cause"


def _in_words(gpus: Gpus, diagnosis: Diagnosis) -> tuple[str, list[str]]:
    """A headline and sentences."""
    count = counted(len(gpus.until), "GPU")
    unwell = [one for one in gpus.news if one.level != "healthy"]
    if not unwell:
        return "All healthy", [f"{count} recorded; none was at risk or failed."]
    worst = next((one for one in unwell if one.level == "fatal"), unwell[0])
    when = _before(worst.time, diagnosis) or render.clock(worst.time)
    named = worst.node and worst.node in {one.node for one in diagnosis.nodes}
    found = [
        f"{'; '.join(worst.reasons)}." if worst.reasons else "",
        f"{when[0].upper()}{when[1:]}.",
        "The logs point to its node too." if named else "",
        f"{len(gpus.unwell)} of {count} were not always healthy.",
    ]
    return f"GPU {worst.key}: {worst.level}", [one for one in found if one]
