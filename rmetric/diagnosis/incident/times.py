"""Build the timeline lanes of the incident page: stages, alarms, GPUs and events."""

from __future__ import annotations

from typing import Any

from rmetric._util.printed import counted
from rmetric.diagnosis.incident.gpus import Gpus
from rmetric.diagnosis.incident.metric import Metric
from rmetric.diagnosis.incident.timeline import (
    FIRST_TIME,
    Lane,
    Mark,
    Timeline,
    around,
    on_axis,
    timeline,
)
from rmetric.diagnosis.job import STAGES
from rmetric.diagnosis.render import clock
from rmetric.diagnosis.result import Diagnosis
from rmetric.diagnosis.text_layout import plain, said
from rmetric.reporting.page.render import MOST_ALARMS

#: Lanes of single events, and of GPUs.
_MOST_EVENTS = 8
_MOST_GPUS = 16


def timelines(
    diagnosis: Diagnosis, metric: Metric | None, gpus: Gpus | None
) -> tuple[list[Timeline], list[str]]:
    """The whole job and, where they would stick together there, the events alone; and remarks."""
    events = [one for one in diagnosis.events if on_axis(one.time)]
    told = [diagnosis.job.get(name) for name in ("first_time", "last_time")]
    times = [float(one) for one in [*(one.time for one in events), *told] if one and on_axis(one)]
    remarks = _remarks(diagnosis, len(events))
    if not times:
        return [], [*remarks, "The logs state no times, so nothing stands on an axis of time."]
    start, end = min(times), max(times)
    if start == end:
        return [], [*remarks, f"The logs state one time only, {clock(start)}."]
    lanes = [*_stages(diagnosis, end), *_alarms(metric), *_gpu_lanes(gpus)]
    if (
        gpus is not None
        and gpus.unwell
        and not any(one.name.startswith("GPU") for one in timeline(lanes, start, end).lanes)
    ):
        remarks.append("The GPUs' recording does not overlap with the logs' times: other clocks, "
                       "or another day.")  # fmt: skip
    single = [
        Lane(name=f"{i}. {one.role}: {plain(one.why) or said(one)}", marks=[_event(i, one)])
        for i, one in enumerate(diagnosis.events, 1)
        if on_axis(one.time)
    ][:_MOST_EVENTS]
    near = around([float(one.time or 0) for one in events], start, end)
    if near is None:
        return [timeline([*lanes, *single], start, end)], remarks
    together = Lane(name="What indicates the failure", marks=[m for s in single for m in s.marks])
    whole = timeline([*lanes, together], start, end)
    return [whole, timeline([*lanes, *single], *near)], remarks


def _remarks(diagnosis: Diagnosis, on_it: int) -> list[str]:
    without = sum(one.time is None for one in diagnosis.events)
    booted = len(diagnosis.events) - without - on_it
    found = []
    if without and on_it:
        found.append(f"{counted(without, 'event')} without a time: only in the table.")
    if booted:
        found.append(
            f"{counted(booted, 'event')} whose time has no date and year: only in the table."
        )
    return found


def _stages(diagnosis: Diagnosis, end: float) -> list[Lane]:
    told = [one for one in diagnosis.job.get("stages", ()) if on_axis(one["time"])]
    marks = []
    ends = [*(one["time"] for one in told[1:]), end]
    for one, after in zip(told, ends, strict=False):
        name = one["stage"]
        number = STAGES.index(name) + 1 if name in STAGES else 7
        label = f"{name}, from {clock(one['time'])}"
        marks.append(Mark(start=one["time"], end=max(after, one["time"]), kind=f"stage{number}",
                          label=label, shown=name))  # fmt: skip
    return [Lane(name="Stage", marks=marks)] if marks else []


def _alarms(metric: Metric | None) -> list[Lane]:
    if metric is None or metric.offset is None:
        return []
    records, marks = metric.scored.run.records, []
    for alarm in metric.trace.began[:MOST_ALARMS]:
        time = records[alarm.position].time
        if time is not None:
            label = f"alarm at step {alarm.step}: {alarm.reason}"
            marks.append(Mark(start=time + metric.offset, kind="alarm", label=label))
    return [Lane(name="Alarms of the calibrated detector", marks=marks)]


def _gpu_lanes(gpus: Gpus | None) -> list[Lane]:
    if gpus is None:
        return []
    lanes = []
    for key in gpus.unwell[:_MOST_GPUS]:
        own = [one for one in gpus.news if one.key == key]
        ends = [*(one.time for one in own[1:]), max(gpus.until[key], own[-1].time)]
        marks = [
            Mark(start=one.time, end=end, kind=one.level,
                 shown="" if one.level == "healthy" else one.level,
                 label=f"{one.level}: {'; '.join(one.reasons)}".rstrip(": "))
            for one, end in zip(own, ends, strict=True)
            if one.time >= FIRST_TIME
        ]  # fmt: skip
        lanes.append(Lane(name=f"GPU {key}", marks=marks))
    return lanes


def _event(number: int, event: Any) -> Mark:
    who = f" ({plain(event.who[0])})" if event.who else ""
    label = f"{number}. {clock(event.time)}{who}: {said(event)[:300]}"
    return Mark(start=event.time, kind=event.role, label=label, shown=str(number))
