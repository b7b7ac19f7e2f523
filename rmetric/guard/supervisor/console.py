"""Human-readable rendering of journal events (no I/O)."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rmetric._util.printed import counted, printable
from rmetric.guard.supervisor.journal import Line


def console_line(line: Line, unit: str = "GPU") -> str:
    """Format one journal line for the terminal, with the local time; empty for a minor event.

    Args:
        line: line of the journal.
        unit: name of one device of the pool.

    >>> console_line({"time": 0.0, "event": "waiting", "words": "", "seconds": 2.04})[8:]
    ' restarts in 2.0 s'
    """
    words = FORMATTERS[line["event"]](line, unit) if line["event"] in FORMATTERS else _other(line)
    at = time.strftime("%H:%M:%S", time.localtime(line["time"]))
    return f"{at} {printable(words)}" if words else ""


def gpu_name(gpu: Sequence[Any]) -> str:
    """Name of a GPU given as node and index.

    >>> gpu_name(["", 2]), gpu_name(["a", 2])
    ('GPU 2', 'node a GPU 2')
    """
    node, index = gpu
    return f"node {node} GPU {index}" if node else f"GPU {index}"


def _other(line: Line) -> str:
    return f"{line['event']}: {line['words']}" if line.get("words") else str(line["event"])


def _pool(pool: Mapping[str, Sequence[int]], unit: str) -> str:
    """GPUs by node: `GPUs 0-2,4`, or `node a GPUs 0-7, node b GPUs 0-7`."""
    if unit != "GPU":
        number = counted(sum(map(len, pool.values())), unit)
        return f"{number} on {', '.join(pool)}" if any(pool) else number
    parts = []
    for node, gpus in pool.items():
        where = f"node {node} " if node else ""
        parts.append(f"{where}GPU{'s' * (len(gpus) != 1)} {_ranges(gpus)}")
    return ", ".join(parts)


def _ranges(numbers: Iterable[int]) -> str:
    """Sorted numbers as ranges.

    >>> _ranges([0, 1, 2, 4])
    '0-2,4'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def _ended(line: Line, _unit: str) -> str:
    if not (line["found"] or line["left"] or line["unreachable"]):
        return ""
    killed = f", {line['killed']} of them had to be killed" if line["killed"] else ""
    left = f", {line['left']} CANNOT BE ENDED" if line["left"] else ""
    nodes = ", ".join(line["unreachable"])
    unreachable = f"; not reached: {nodes}" if nodes else ""
    return f"ended {counted(line['found'], 'process')}{killed}{left}{unreachable} ({line['words']})"


def _failure(line: Line, _unit: str) -> str:
    where = f" (on {gpu_name(line['gpu'])})" if line.get("gpu") and line["kind"] != "gpu" else ""
    number = line.get("launch")
    see = f"; see {launch_log(number)}" if number else ""
    return f"FAILED: {line['words']}{where}{_saved(line)}{see}"


def _saved(line: Line) -> str:
    good = line.get("checkpoint")
    return "" if good is None else f"; newest good checkpoint: step {good}"


def launch_log(launch: int) -> str:
    """Path of a launch's output, relative to the run folder."""
    return f"logs/launch-{launch}.log"


def _resumed(line: Line, _unit: str) -> str:
    over = line.get("passed_over")
    passed = f"; the checkpoint of step {over} was skipped" if over is not None else ""
    return f"launch {line['launch']} resumed training at step {line['step']}{passed}"


def _asked(line: Line, _unit: str) -> str:
    then = " and a stop" if line["stop"] else ""
    return f"requested a checkpoint{then} (request {line['number']}): {line['reason']}"


#: Source of a request -> name in messages.
_SOURCE_NAMES = {"user": "a user", "risk": "telemetry", "rule": "telemetry", "alarm": "an alarm"}


def _request(line: Line, _unit: str) -> str:
    then = " and a stop" if line["stop"] else ""
    who = _SOURCE_NAMES.get(line["source"], line["source"])
    return f"{who} requested a checkpoint{then} (request {line['number']}): {line['words']}"


def _answered(line: Line, _unit: str) -> str:
    step = "" if line.get("step") is None else f" by the checkpoint of step {line['step']}"
    return f"request {line['number']} answered{step}"


def _dropped(line: Line, _unit: str) -> str:
    return f"{', '.join(map(gpu_name, line['gpus']))} dropped: {line['words']}"


def _waiting(line: Line, _unit: str) -> str:
    return f"restarts in {line['seconds']:.1f} s" if line["seconds"] else ""


def _verdict(line: Line, _unit: str) -> str:
    advice = "" if line["action"] == "none" else f" (advised: {line['action'].replace('_', ' ')})"
    return f"{line['words']}{advice}"


def _over(line: Line, _unit: str) -> str:
    return f"{line['outcome']}: {line['words']}{_saved(line)}"


FORMATTERS: dict[str, Callable[[Line, str], str]] = {
    "supervisor": lambda line, unit: (
        f"supervises `{shlex.join(line['command'])}`"
        + (f" on {_pool(line['gpus'], unit)}" if unit == "GPU" else "")
    ),
    "plan": lambda line, unit: f"plan: {line['words']}",
    "launch": lambda line, unit: (
        f"launch {line['launch']}: {line['words']}, {_pool(line['gpus'], unit)}"
    ),
    "started": lambda line, unit: "",
    "progress": lambda line, unit: "",
    "resumed": _resumed,
    "not saved": lambda line, unit: f"NOT SAVED: {line['words']}",
    "saved again": lambda line, unit: "saves succeed again",
    "asked": _asked,
    "request": _request,
    "answered": _answered,
    "verdict": _verdict,
    "failure": _failure,
    "ended": _ended,
    "dropped": _dropped,
    "waiting": _waiting,
    "enough progress": lambda line, unit: (
        f"step {line['step']}: enough new steps, restart counter reset"
    ),
    "trouble": lambda line, unit: f"problem: {line['words']}",
    "over": _over,
}  # fmt: skip
