"""Timelines of an incident: lanes of stages, alarms, GPUs and events over one time axis.

Positions are percentages of the axis, so that a lane scales with the page and text does not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import isfinite
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from rmetric._util.printed import counted
from rmetric.diagnosis.facts.job import STAGES
from rmetric.diagnosis.report.layout import excerpt, plain
from rmetric.diagnosis.report.render import clock
from rmetric.diagnosis.result import Diagnosis, Evidence
from rmetric.reporting.page.render import MOST_ALARMS
from rmetric.reporting.page.sentences import decisions_of, short_words
from rmetric.telemetry.reading import LAST_TIME

if TYPE_CHECKING:
    from rmetric.diagnosis.report.incident import Gpus, Metric

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


class Mark(NamedTuple):
    """A stretch of time, or with `end` None a moment.

    Attributes:
        start, end: seconds since 1970.
        kind: of its colour: a role, a level, ``stage1`` to ``stage8``, ``alarm``, ``decision``.
        label: shown where the pointer is on it.
        shown: written into a stretch.
    """

    start: float
    kind: str
    label: str
    end: float | None = None
    shown: str = ""

    @property
    def until(self) -> float:
        return self.start if self.end is None else self.end


class Lane(NamedTuple):
    """Marks under one name."""

    name: str
    marks: Sequence[Mark]


class Timeline(NamedTuple):
    """Lanes over an axis from `start` to `end`, in seconds since 1970; `end` is the later."""

    start: float
    end: float
    lanes: Sequence[Lane]

    def place(self, time: float) -> str:
        """Position of a moment; of one beyond the axis, its end."""
        return self._percent(min(time, self.end) - self.start)

    def width(self, mark: Mark) -> str:
        """Width of a stretch, as far as it is on the axis."""
        return self._percent(min(mark.until, self.end) - max(mark.start, self.start))

    def _percent(self, seconds: float) -> str:
        return f"{100 * max(seconds / (self.end - self.start), 0.0):.6g}%"

    @property
    def ticks(self) -> list[tuple[str, str, str]]:
        """Place, label and anchor; the first has the date."""
        times = [self.start + (self.end - self.start) * i / _TICKS for i in range(_TICKS + 1)]
        anchors = ["start", *["middle"] * (_TICKS - 1), "end"]
        return [
            (self.place(time), clock(time, date=anchor == "start"), anchor)
            for time, anchor in zip(times, anchors, strict=True)
        ]


def on_axis(time: float | None) -> bool:
    """Return True for a date with its year."""
    return time is not None and isfinite(time) and FIRST_TIME <= time <= LAST_TIME


def timeline(lanes: Iterable[Lane], start: float, end: float) -> Timeline:
    """The lanes that have marks on the axis, with those marks; `end` is after `start`."""
    kept = [
        Lane(name, [one for one in marks if one.start <= end and one.until >= start])
        for name, marks in lanes
    ]
    return Timeline(start, end, [lane for lane in kept if lane.marks])


def around(times: Sequence[float], start: float, end: float) -> tuple[float, float] | None:
    """An axis for these moments alone; None if they have room on that from start to end."""
    if len(set(times)) < 2 or max(times) - min(times) > _CROWDED * (end - start):
        return None
    beside = max(0.1 * (max(times) - min(times)), _BESIDE)
    return min(times) - beside, max(times) + beside


def timelines(
    diagnosis: Diagnosis, metric: Metric | None, gpus: Gpus | None
) -> tuple[list[Timeline], list[str]]:
    """The whole job and, where the events are too close there, the events alone; and remarks."""
    events = [(i, one) for i, one in enumerate(diagnosis.events, 1) if on_axis(one.time)]
    moments = [float(one.time or 0) for _, one in events]
    ends = [diagnosis.job.get(name) for name in ("first_time", "last_time")]
    times = [*moments, *(float(one) for one in ends if one and on_axis(one))]
    remarks = _remarks(diagnosis, len(events))
    if not times:
        return [], [*remarks, "The logs state no times, so nothing stands on an axis of time."]
    start, end = min(times), max(times)
    if start == end:
        return [], [*remarks, f"The logs state one time only, {clock(start)}."]
    of_gpus = _gpu_lanes(gpus)
    lanes = [*_stages(diagnosis, end), *_alarms(metric), *decisions_lane(metric), *of_gpus]
    if of_gpus and not timeline(of_gpus, start, end).lanes:
        remarks.append("The GPUs' recording does not overlap with the logs' times: other clocks, "
                       "or another day.")  # fmt: skip
    single = [
        Lane(f"{i}. {one.role}: {plain(one.why) or excerpt(one)}", [_event(i, one)])
        for i, one in events
    ][:_MOST_EVENTS]
    near = around(moments, start, end)
    if near is None:
        return [timeline([*lanes, *single], start, end)], remarks
    together = Lane("What indicates the failure", [mark for lane in single for mark in lane.marks])
    whole = timeline([*lanes, together], start, end)
    return [whole, timeline([*lanes, *single], *near)], remarks


def _remarks(diagnosis: Diagnosis, on_it: int) -> list[str]:
    without = sum(one.time is None for one in diagnosis.events)
    booted = len(diagnosis.events) - without - on_it
    kinds = (("without a time", on_it and without), ("whose time has no date and year", booted))
    return [f"{counted(n, 'event')} {kind}: only in the table." for kind, n in kinds if n]


def _stages(diagnosis: Diagnosis, end: float) -> list[Lane]:
    stages = [one for one in diagnosis.job.get("stages", ()) if on_axis(one["time"])]
    marks = []
    for one, after in zip(stages, [*(one["time"] for one in stages[1:]), end], strict=False):
        name, time = one["stage"], one["time"]
        kind = f"stage{STAGES.index(name) + 1 if name in STAGES else 7}"
        label = f"{name}, from {clock(time)}"
        marks.append(Mark(time, kind, label, end=max(after, time), shown=name))
    return [Lane("Stage", marks)]


def _alarms(metric: Metric | None) -> list[Lane]:
    if metric is None or metric.offset is None:
        return []
    alarms = [(one, metric.scored.run.records[one.position].time) for one in metric.trace.began]
    marks = [
        Mark(time + metric.offset, "alarm", f"alarm at step {alarm.step}: {alarm.reason}")
        for alarm, time in alarms[:MOST_ALARMS]
        if time is not None
    ]
    return [Lane("Alarms of the calibrated detector", marks)]


def decisions_lane(metric: Metric | None) -> list[Lane]:
    """The decisions of a rescue, where the records have times.

    The monitor's clock goes back with the training, so a return stands at the record that it
    went back to, and what was left out at its own.
    """
    if metric is None or metric.offset is None:
        return []
    timed = [(one.step, one.time) for one in metric.scored.run.records if one.time is not None]
    marks = []
    for event in decisions_of(metric.scored.run)[:MOST_ALARMS]:
        step = event.step if event.to is None else event.to
        if at := bisect_right(timed, step, key=itemgetter(0)):
            label = f"step {event.step}: {event.reason or short_words(event)}"
            marks.append(Mark(timed[at - 1][1] + metric.offset, "decision", label))
    return [Lane("Decisions of the rescue", marks)]


def _gpu_lanes(gpus: Gpus | None) -> list[Lane]:
    if gpus is None:
        return []
    lanes = []
    for key in gpus.unwell[:_MOST_GPUS]:
        own = [one for one in gpus.news if one.key == key]
        ends = [*(one.time for one in own[1:]), max(gpus.until[key], own[-1].time)]
        marks = []
        for one, end in zip(own, ends, strict=True):
            label = f"{one.level}: {'; '.join(one.reasons)}".rstrip(": ")
            shown = "" if one.level == "healthy" else one.level
            marks.append(Mark(one.time, one.level, label, end, shown))
        lanes.append(Lane(f"GPU {key}", [one for one in marks if one.start >= FIRST_TIME]))
    return lanes


def _event(number: int, event: Evidence) -> Mark:
    who = f" ({plain(event.who[0])})" if event.who else ""
    time = event.time or 0.0
    label = f"{number}. {clock(time)}{who}: {excerpt(event)[:300]}"
    return Mark(time, event.role, label, shown=str(number))
