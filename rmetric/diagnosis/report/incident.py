"""Render one HTML incident page: diagnosis, metric alarms and GPU telemetry.

The three sources have different clocks: text logs have times and steps, a training log has steps
and at most seconds since its start, GPU readings have times. The page shows a common axis where
one exists, with a lane for stages, alarms, GPUs and events each, and states what cannot be aligned.
Positions on it are percentages, so that a lane scales with the page and text does not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from rmetric._util import __version__
from rmetric._util.printed import counted
from rmetric.diagnosis.facts.job import STAGES
from rmetric.diagnosis.report import render
from rmetric.diagnosis.report.render import clock, excerpt, plain
from rmetric.diagnosis.report.result import Diagnosis, Evidence
from rmetric.readers import read_log
from rmetric.replay.scored_run import ScoredRun, score_run
from rmetric.reporting.page import (
    DetectorTrace,
    monitor_events,
    trace_of_r_metric,
    trace_with_reasons,
)
from rmetric.reporting.page.columns import OURS, charts_of
from rmetric.reporting.page.render import MOST_ALARMS, listed, render_incident
from rmetric.reporting.page.sentences import decisions_of, short_words, summarise
from rmetric.reporting.page.series import Charts, Line
from rmetric.telemetry.lines import GpuVerdict
from rmetric.telemetry.reading import LAST_TIME
from rmetric.telemetry.sources import ReplayedReadings

#: Rows of the table of GPUs.
MOST_NEWS = 200
#: Panels of a run's page that are shown here too.
_PANELS = ("loss", "gradient_norm", f"score_{OURS}")
#: A step of the logs beyond this share of a training log's steps is of another count.
_BEYOND = 0.1
#: Seconds; what is earlier has no year, or counts from a machine's start.
FIRST_TIME = 1e8
#: Share of the axis below which the events are shown on an axis of their own, too.
_CROWDED = 0.15
#: Least seconds beside the events on such an axis.
_BESIDE = 5.0
_TICKS = 4
#: Lanes of single events, and of GPUs.
_MOST_EVENTS = 8
_MOST_GPUS = 16


class Metric(NamedTuple):
    """A training log and the alarms of the calibrated detector.

    `offset`: seconds from its records' times to the logs' clock; `remarks` on how it joins them.
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
        return list(dict.fromkeys(state.key for state in self.news if state.level != "healthy"))


class Mark(NamedTuple):
    """A stretch of time in seconds since 1970, or with `end` None a moment."""

    start: float
    kind: str  # of its colour: a role, a level, "stage1" to "stage8", "alarm", "decision"
    label: str  # shown where the pointer is on it
    end: float | None = None
    shown: str = ""  # written into a stretch


#: Name of a lane -> its marks.
Lanes = Mapping[str, Sequence[Mark]]


class Timeline:
    """The lanes that have marks on an axis from `start` to `end`, in seconds since 1970."""

    def __init__(self, lanes: Lanes, start: float, end: float) -> None:
        self.start, self.end = start, end
        self.lanes = dict[str, list[Mark]]()
        for name, marks in lanes.items():
            on = [mark for mark in marks if mark.start <= end and (mark.end or mark.start) >= start]
            self.lanes |= {name: on} if on else {}

    def place(self, time: float) -> str:
        """Position of a moment; of one beyond the axis, its end."""
        share = (min(max(time, self.start), self.end) - self.start) / (self.end - self.start)
        return f"{100 * share:.6g}%"

    def width(self, mark: Mark) -> str:
        """Width of a stretch, as far as it is on the axis."""
        start, end = max(mark.start, self.start), min(mark.end or mark.start, self.end)
        return self.place(self.start + max(end - start, 0.0))

    @property
    def ticks(self) -> list[tuple[str, str, str]]:
        """Place, label and anchor; the first has the date."""
        times = [self.start + (self.end - self.start) * i / _TICKS for i in range(_TICKS + 1)]
        anchors = ["start", *["middle"] * (_TICKS - 1), "end"]
        return [
            (self.place(time), clock(time, date=anchor == "start"), anchor)
            for time, anchor in zip(times, anchors, strict=True)
        ]


def incident_page(
    diagnosis: Diagnosis, *, metrics: Path | None = None, telemetry: Path | None = None
) -> str:
    """The page, as HTML that needs nothing beside itself; the same input gives the same bytes.

    `metrics` is a training log, any that `rmetric.readers.read_log` reads; `telemetry` what
    `rmetric telemetry --jsonl` recorded. Raises LogError, OSError: a file cannot be read.
    """
    metric = None if metrics is None else read_metric(metrics, diagnosis)
    gpus, rows = None, list[dict[str, Any]]()
    if telemetry is not None:
        source = ReplayedReadings(telemetry)
        gpus = Gpus(source.poll(), {key: state.time for key, state in source.verdicts().items()})
        rows = _rows(gpus, diagnosis)
    times, remarks = timelines(diagnosis, metric, gpus)
    shown, more = listed([] if metric is None else metric.trace.began, MOST_ALARMS)
    news, more_news = listed(rows, MOST_NEWS)
    return render_incident(
        None if metric is None else metric.charts,
        diagnosis=diagnosis,
        title=render.headline(diagnosis), what=render.what(diagnosis),
        where=render.where(diagnosis), when=render.when(diagnosis),
        sureness=render.sureness(diagnosis),
        acts=render.owner(diagnosis),
        text=render.verdict(diagnosis),
        excerpt=excerpt, plain=plain, place=render.place,
        # Without its file, which has a column of its own.
        speakers=lambda event: [plain(who) for who in event.who if who != event.file],
        moment=lambda time: "" if time is None else clock(time),
        timelines=times, remarks=remarks,
        metric=metric, shown=shown, more=more,
        saying=None if metric is None else summarise(metric.scored.run, metric.trace),
        **({"decisions": []} if metric is None else monitor_events(metric.scored.run)),
        gpus=gpus, news=news, more_news=more_news,
        gpu_words=None if gpus is None else _in_words(gpus, rows),
        version=__version__,
    )  # fmt: skip


def on_axis(time: float | None) -> TypeGuard[float]:
    """Return True for a date with its year."""
    return time is not None and FIRST_TIME <= time <= LAST_TIME


def timelines(
    diagnosis: Diagnosis, metric: Metric | None, gpus: Gpus | None
) -> tuple[list[Timeline], list[str]]:
    """The whole job and, where the events are too close there, the events alone; and remarks."""
    numbered = enumerate(diagnosis.events, start=1)
    events = [_event(number, event) for number, event in numbered if on_axis(event.time)]
    moments = [mark.start for _, mark in events]
    untimed = sum(event.time is None for event in diagnosis.events)
    undated = len(diagnosis.events) - untimed - len(events)
    kinds = {"without a time": untimed * bool(events), "whose time has no date and year": undated}
    remarks = [f"{counted(n, 'event')} {how}: only in the table." for how, n in kinds.items() if n]
    ends = [diagnosis.job.get(name) for name in ("first_time", "last_time")]
    times = [*moments, *filter(on_axis, ends)]
    if not times:
        return [], [*remarks, "The logs state no times, so nothing stands on an axis of time."]
    start, end = min(times), max(times)
    if start == end:
        return [], [*remarks, f"The logs state one time only, {clock(start)}."]
    of_gpus = _gpu_lanes(gpus)
    lanes = {"Stage": _stages(diagnosis, end), **metric_lanes(metric), **of_gpus}
    if of_gpus and not Timeline(of_gpus, start, end).lanes:
        why = "other clocks, or another day"
        remarks.append(f"The GPUs' recording does not overlap with the logs' times: {why}.")
    single = {name: [mark] for name, mark in events[:_MOST_EVENTS]}
    apart = max(moments, default=0.0) - min(moments, default=0.0)
    if not 0 < apart <= _CROWDED * (end - start):
        return [Timeline(lanes | single, start, end)], remarks
    together = {"What indicates the failure": [mark for _, mark in events[:_MOST_EVENTS]]}
    beside = max(0.1 * apart, _BESIDE)
    near = Timeline(lanes | single, min(moments) - beside, max(moments) + beside)
    return [Timeline(lanes | together, start, end), near], remarks


def _stages(diagnosis: Diagnosis, end: float) -> list[Mark]:
    stages = [stage for stage in diagnosis.job.get("stages", ()) if on_axis(stage["time"])]
    marks = []
    for stage, after in zip(stages, [*(stage["time"] for stage in stages[1:]), end], strict=False):
        name, time = stage["stage"], stage["time"]
        kind = f"stage{STAGES.index(name) + 1 if name in STAGES else 7}"
        marks.append(Mark(time, kind, f"{name}, from {clock(time)}", max(after, time), name))
    return marks


def metric_lanes(metric: Metric | None) -> Lanes:
    """Alarms and the decisions of a rescue, where the records have times.

    The monitor's clock goes back with the training, so a return stands at the record that it
    went back to, and what was left out at its own.
    """
    if metric is None or metric.offset is None:
        return {}
    records, offset = metric.scored.run.records, metric.offset
    alarms = [
        Mark(time + offset, "alarm", f"alarm at step {alarm.step}: {alarm.reason}")
        for alarm in metric.trace.began[:MOST_ALARMS]
        if (time := records[alarm.position].time) is not None
    ]
    timed = [(record.step, record.time) for record in records if record.time is not None]
    decisions = []
    for event in decisions_of(metric.scored.run)[:MOST_ALARMS]:
        step = event.step if event.to is None else event.to
        if at := bisect_right(timed, step, key=itemgetter(0)):
            label = f"step {event.step}: {event.reason or short_words(event)}"
            decisions.append(Mark(timed[at - 1][1] + offset, "decision", label))
    return {"Alarms of the calibrated detector": alarms, "Decisions of the rescue": decisions}


def _gpu_lanes(gpus: Gpus | None) -> Lanes:
    if gpus is None:
        return {}
    lanes = dict[str, list[Mark]]()
    for key in gpus.unwell[:_MOST_GPUS]:
        own = [state for state in gpus.news if state.key == key and state.time >= FIRST_TIME]
        ends = [*(state.time for state in own[1:]), gpus.until[key]]
        marks = lanes[f"GPU {key}"] = []
        for state, end in zip(own, ends, strict=False):
            label = f"{state.level}: {'; '.join(state.reasons)}".rstrip(": ")
            shown = "" if state.level == "healthy" else state.level
            marks.append(Mark(state.time, state.level, label, end, shown))
    return lanes


def _event(number: int, event: Evidence) -> tuple[str, Mark]:
    """The name of its lane, and its mark."""
    time, text = event.time or 0.0, excerpt(event)
    who = f" ({plain(event.who[0])})" if event.who else ""
    mark = Mark(time, event.role, f"{number}. {clock(time)}{who}: {text[:300]}")
    return f"{number}. {event.role}: {plain(event.why) or text}", mark


def read_metric(path: Path, diagnosis: Diagnosis) -> Metric:
    """A training log of the same job, its steps and times aligned with the text logs."""
    runs = read_log(path).runs
    scored = score_run(runs[0])
    trace = trace_with_reasons(OURS, runs[0])
    charts = charts_of(scored, [trace_of_r_metric(scored), trace])
    remarks = []
    if len(runs) > 1:
        remarks.append(f"the log holds {counted(len(runs), 'run')}: this is the first")
    panels = [panel for panel in charts.panels if panel.name in _PANELS]
    # As published the R-Metric alarms in most healthy runs too: it explains no incident.
    own = [line for line in charts.lines if line.kind != "published-alarm"]
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
    step, time = diagnosis.iteration, diagnosis.job.get("last_step_time")
    timed = [(record.step, record.time) for record in scored.run.records if record.time is not None]
    if timed and on_axis(timed[0][1]):
        return 0.0
    same = [seconds for at, seconds in timed if at == step]
    if not same or not on_axis(time):
        remarks.append("its alarms are not on the axis of time: it shares no time with the logs")
        return None
    remarks.append(f"on the axis of time it is placed by step {step}, which both tell")
    return time - same[-1]


def _rows(gpus: Gpus, diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Verdict changes since a GPU was first unhealthy, with their time before the cause."""
    nodes = {suspect.node for suspect in diagnosis.nodes if suspect.node}
    rows, unwell = [], set[str]()
    for state in gpus.news:
        # That a GPU was well is news where it was not before.
        if state.level != "healthy" or state.key in unwell:
            unwell.add(state.key)
            before = _before(state.time, diagnosis)
            rows.append({"verdict": state, "suspect": state.node in nodes, "before": before})
    return rows


def _before(time: float, diagnosis: Diagnosis) -> str:
    if not on_axis(diagnosis.time):
        return ""
    apart = abs(diagnosis.time - time)
    words = f"{apart:.0f} s" if apart < 120 else f"{apart / 60:.0f} min"
    words = words if apart < 7200 else f"{apart / 3600:.1f} h"
    return f"{words} {'before' if diagnosis.time >= time else 'after'} the cause"


def _in_words(gpus: Gpus, rows: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """A headline and sentences."""
    count = counted(len(gpus.until), "GPU")
    if not rows:
        return "All healthy", [f"{count} recorded; none was at risk or failed."]
    row = next((row for row in rows if row["verdict"].level == "fatal"), rows[0])
    worst, when = row["verdict"], row["before"] or clock(row["verdict"].time)
    found = [
        f"{'; '.join(worst.reasons)}." if worst.reasons else "",
        f"{when[0].upper()}{when[1:]}.",
        "The logs point to its node too." if row["suspect"] else "",
        f"{len(gpus.unwell)} of {count} were not always healthy.",
    ]
    return f"GPU {worst.key}: {worst.level}", [sentence for sentence in found if sentence]
