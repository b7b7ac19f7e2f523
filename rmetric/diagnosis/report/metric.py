"""Read a training log of the same job and align its steps and times with the text logs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rmetric._util.printed import counted
from rmetric.diagnosis.report.timeline import on_axis
from rmetric.diagnosis.result import Diagnosis
from rmetric.readers import read_log
from rmetric.replay.scored_run import ScoredRun, score_run
from rmetric.reporting.page import DetectorTrace, trace_of_r_metric, trace_with_reasons
from rmetric.reporting.page.columns import charts_of
from rmetric.reporting.page.series import Charts, Line

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


def read_metric(path: Path, diagnosis: Diagnosis) -> Metric:
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
    steps = {
        "the logs' first iteration that differs": ("onset", diagnosis.since),
        "the logs' last step": ("failure", diagnosis.iteration),
    }
    lines = []
    for label, (kind, step) in steps.items():
        if step is not None and first - reach <= step <= last + reach:
            lines.append(Line(step=step, kind=kind, label=label))
        elif step is not None:
            remarks.append(
                f"{label}, {step:,}, is not drawn: this log's steps are {first:,} to {last:,}"
            )
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
