"""Summary of a run folder, computed from its journal. Pure.

ETTR, the effective training time ratio of arXiv 2410.21680, is productive over wall time.

- Productive: for each launch the time from its first heartbeat in training to the last step that
  no later launch repeated; times between two reported steps are interpolated. Time in which a save
  blocks the steps is productive, since heartbeats do not show it.
- Wall: from the first start of a supervisor to the last line, less the time between supervisors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rmetric._util.printed import counted
from rmetric.guard.supervisor.journal import Line, gpu_name, launch_log


class LaunchRecord(NamedTuple):
    """One launch; `points` are (time, step) from where it resumed, empty if it never did."""

    number: int
    began: float
    points: list[tuple[float, int]]


@dataclass(kw_only=True)
class Incident:
    """One failure, detected at `time` (since the epoch), and the response to it.

    `layout` is that of the next launch. `notice_seconds` are from the oldest last heartbeat to the
    detection, `resume_seconds` from there to the next heartbeat in training; None if unknown.
    """

    time: float
    launch: int
    kind: str
    cause: str
    action: str = ""
    layout: str = ""
    steps_lost: int | None = None
    notice_seconds: float | None = None
    resume_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Summary of a journal; times in seconds, definitions in the module docstring."""

    outcome: str
    words: str
    launches: int
    step: int | None
    wall_seconds: float
    productive_seconds: float
    ettr: float | None
    steps_lost: int
    checkpoints_asked: int
    requests: int
    unanswered: int
    checkpoint: int | None
    passed_over: list[str]
    not_saved: str
    dropped: list[str]
    incidents: list[Incident]


def summarise(lines: Sequence[Line]) -> Summary:
    runs, incidents = _runs(lines), _incidents(lines)
    _set_costs(runs, incidents)
    wall, productive = _wall(lines), sum(_productive(runs))
    requests, unanswered = _requests(lines)
    over = next((line for line in reversed(lines) if line["event"] in ("over", "supervisor")), {})
    last = [run.points[-1][1] for run in runs if run.points]
    return Summary(
        outcome=over.get("outcome", "running or cut off"),
        words=over.get("words", ""),
        launches=len(runs),
        step=last[-1] if last else None,
        wall_seconds=round(wall, 3),
        productive_seconds=round(productive, 3),
        ettr=round(productive / wall, 4) if wall > 0 and last else None,
        steps_lost=sum(incident.steps_lost or 0 for incident in incidents),
        checkpoints_asked=sum(line["event"] == "asked" for line in lines),
        requests=requests,
        unanswered=unanswered,
        checkpoint=_newest(lines),
        passed_over=[
            f"launch {line['launch']} resumed at step {line['step']} and skipped the "
            f"checkpoint of step {line['passed_over']}: damaged, suspect or of another model? "
            f"see {launch_log(line['launch'])}"
            for line in lines
            if line["event"] == "resumed" and line.get("passed_over") is not None
        ],
        not_saved=_not_saved(lines),
        dropped=[
            gpu_name(gpu) for line in lines if line["event"] == "dropped" for gpu in line["gpus"]
        ],
        incidents=incidents,
    )


def _requests(lines: Iterable[Line]) -> tuple[int, int]:
    """Number of user requests, and of those not answered before their launch ended."""
    waiting: set[int] = set()
    total = lost = 0
    for line in lines:
        if line["event"] == "request" and line.get("source") == "user":
            total += 1
            waiting.add(line["number"])
        elif line["event"] == "answered":
            waiting = {number for number in waiting if number > line["number"]}
        elif line["event"] == "launch":
            lost, waiting = lost + len(waiting), set()
    return total, lost + len(waiting)


def _newest(lines: Sequence[Line]) -> int | None:
    """Step of the newest good checkpoint; None if unknown."""
    names = {"answered": "step", "failure": "checkpoint", "over": "checkpoint"}
    known = [line.get(names[line["event"]]) for line in lines if line["event"] in names]
    return next((step for step in reversed(known) if step is not None), None)


def _not_saved(lines: Sequence[Line]) -> str:
    """Reason why the last known save failed; empty if it did not."""
    known = ("not saved", "saved again", "answered", "launch")
    last = next((line for line in reversed(lines) if line["event"] in known), {})
    return str(last.get("words", "")) if last.get("event") == "not saved" else ""


def _runs(lines: Iterable[Line]) -> list[LaunchRecord]:
    runs: list[LaunchRecord] = []
    for line in lines:
        if line["event"] == "launch":
            runs.append(LaunchRecord(line["launch"], line["time"], []))
        elif line["event"] in ("resumed", "progress") and runs:
            # The clock of another node may be wrong: the local clock bounds it.
            at = min(max(line["at"], runs[-1].began), line["time"])
            point: tuple[float, int] = (at, line["step"])
            if not runs[-1].points or point > runs[-1].points[-1]:
                runs[-1].points.append(point)
    return runs


def _incidents(lines: Iterable[Line]) -> list[Incident]:
    incidents: list[Incident] = []
    for line in lines:
        event, done = line["event"], ""
        if event == "failure":
            sign, time = line.get("last_sign"), line["time"]
            incidents.append(
                Incident(
                    time=time, launch=line.get("launch", 0), kind=line.get("kind", ""),
                    cause=line.get("words", ""),
                    notice_seconds=None if sign is None else round(max(0.0, time - sign), 3),
                )
            )  # fmt: skip
        elif not incidents or incidents[-1].layout:
            continue
        elif event == "answered":
            done = f"checkpoint of step {line.get('step')}"
        elif event == "dropped":
            done = f"dropped {', '.join(map(gpu_name, line['gpus']))}"
        elif event in ("launch", "over"):
            done = line.get("outcome", "restarted")
        if done:
            incidents[-1].action = ", ".join(filter(None, (incidents[-1].action, done)))
        if event == "launch":
            incidents[-1].layout = line.get("words", "")
    return incidents


def _set_costs(runs: Sequence[LaunchRecord], incidents: Iterable[Incident]) -> None:
    """Set the cost of each incident from the first later launch that resumed."""
    booked: set[int] = set()
    for incident in incidents:
        failed = [run for run in runs if run.number <= incident.launch and run.points]
        after = next((run for run in runs if run.number > incident.launch and run.points), None)
        if after is None:
            continue
        if after.number == incident.launch + 1:
            incident.resume_seconds = round(max(0.0, after.points[0][0] - incident.time), 3)
        before = failed[-1].points[-1][1] if failed else after.points[0][1]
        # A launch that fails before it resumes loses no further steps.
        lost = before - after.points[0][1] if after.number not in booked else 0
        incident.steps_lost = max(0, lost)
        booked.add(after.number)


def _productive(runs: Sequence[LaunchRecord]) -> list[float]:
    """Productive seconds of each launch that resumed."""
    seconds, kept = [], float("inf")
    for run in reversed(runs):
        if run.points:
            times, steps = zip(*run.points, strict=True)
            # Until `kept`, or the last step before it, was reached.
            seconds.append(max(0.0, float(np.interp(kept, steps, times)) - times[0]))
            kept = min(kept, run.points[0][1])
    return seconds


def _wall(lines: Sequence[Line]) -> float:
    seconds, began, done = 0.0, None, False
    for line in lines:
        if began is None or (done and line["event"] == "supervisor"):
            began, done = line["time"], False
        if line["event"] == "over":
            seconds, done = seconds + line["time"] - began, True
    if began is not None and not done:
        seconds += lines[-1]["time"] - began
    return max(0.0, seconds)


COLUMNS = (
    *("launch", "cause", "action", "new layout", "steps lost"),
    *("noticed after s", "resumed after s"),
)


def to_markdown(summary: Summary) -> str:
    ettr = "unknown" if summary.ettr is None else f"{summary.ettr:.1%}"
    step = "unknown" if summary.step is None else summary.step
    saved = "none known" if summary.checkpoint is None else f"step {summary.checkpoint}"
    without = f", {summary.unanswered} of them unanswered" if summary.unanswered else ""
    lines = [
        "# Supervisor summary",
        "",
        f"**{summary.outcome}**{': ' if summary.words else ''}{summary.words}",
        "",
        f"- step reached: {step}",
        f"- {counted(summary.launches, 'launch')}, {counted(len(summary.incidents), 'failure')}, "
        f"{counted(summary.steps_lost, 'step')} lost",
        f"- ETTR {ettr}: {summary.productive_seconds:.1f} s advanced the training "
        f"of {summary.wall_seconds:.1f} s",
        f"- newest good checkpoint: {saved}",
        f"- checkpoints requested by the supervisor: {summary.checkpoints_asked}",
        *([f"- user requests: {summary.requests}{without}"] if summary.requests else []),
        *(f"- **{words}**" for words in summary.passed_over),
        *([f"- **the last save failed**: {summary.not_saved}"] if summary.not_saved else []),
        f"- dropped: {', '.join(summary.dropped) or 'nothing'}",
    ]
    if summary.launches:
        lines.append(f"- output of the last launch: {launch_log(summary.launches)}")
    if summary.incidents:
        lines += ["", f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS)]
        lines += [_row(incident) for incident in summary.incidents]
    return "\n".join(lines) + "\n"


def _row(incident: Incident) -> str:
    lost, times = incident.steps_lost, (incident.notice_seconds, incident.resume_seconds)
    cells = [
        f"[{incident.launch}]({launch_log(incident.launch)})",
        incident.cause.replace("|", "/"), incident.action, incident.layout,
        "-" if lost is None else str(lost),
        *("-" if seconds is None else f"{seconds:.1f}" for seconds in times),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"
