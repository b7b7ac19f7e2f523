"""Human-readable rendering of journal events (no I/O)."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rmetric._util.printed import counted, printable
from rmetric.guard.supervisor.journal import Line


def console_line(line: Line, unit: str = "GPU") -> str:
    """Format one journal line for the terminal, with the local time; empty for a minor event.

    `unit` is the name of one device of the pool.

    >>> console_line({"time": 0.0, "event": "waiting", "words": "", "seconds": 2.04})[8:]
    ' restarts in 2.0 s'
    """
    words = _words_of(line, unit)
    at = time.strftime("%H:%M:%S", time.localtime(line["time"]))
    return f"{at} {printable(words)}" if words else ""


def gpu_name(gpu: Sequence[Any]) -> str:
    """Name of a GPU given as node and index.

    >>> gpu_name(["", 2]), gpu_name(["a", 2])
    ('GPU 2', 'node a GPU 2')
    """
    node, index = gpu
    return f"node {node} GPU {index}" if node else f"GPU {index}"


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


def launch_log(launch: int) -> str:
    """Path of a launch's output, relative to the run folder."""
    return f"logs/launch-{launch}.log"


#: Source of a request -> name in messages.
_SOURCE_NAMES = {"user": "a user", "risk": "telemetry", "rule": "telemetry", "alarm": "an alarm"}


def _words_of(line: Line, unit: str) -> str:
    """Text of a journal line without the time; empty for a minor event."""
    event, number = line["event"], line.get("number")
    words: str = line.get("words", "")
    good, stop = line.get("checkpoint"), " and a stop" if line.get("stop") else ""
    saved = "" if good is None else f"; newest good checkpoint: step {good}"
    if good is not None and (line.get("step") or 0) > good:
        saved += f", THE STEPS AFTER IT ARE IN NONE (the last was {line['step']})"
    match event:
        case "supervisor":
            on = f" on {_pool(line['gpus'], unit)}" if unit == "GPU" else ""
            return f"supervises `{shlex.join(line['command'])}`{on}"
        case "launch":
            return f"launch {line['launch']}: {words}, {_pool(line['gpus'], unit)}"
        case "resumed":
            over = line.get("passed_over")
            passed = "" if over is None else f"; the checkpoint of step {over} was skipped"
            return f"launch {line['launch']} resumed training at step {line['step']}{passed}"
        case "not saved":
            return f"NOT SAVED: {words}"
        case "saved again":
            return "saves succeed again"
        case "asked":
            return f"requested a checkpoint{stop} (request {number}): {line['reason']}"
        case "request":
            who = _SOURCE_NAMES.get(line["source"], line["source"])
            return f"{who} requested a checkpoint{stop} (request {number}): {words}"
        case "answered":
            step = line.get("step")
            return f"request {number} answered" + (
                "" if step is None else f" by the checkpoint of step {step}"
            )
        case "verdict":
            action = line["action"]
            return words + ("" if action == "none" else f" (advised: {action.replace('_', ' ')})")
        case "failure":
            on_gpu = line.get("gpu") and line.get("kind") != "gpu"
            where = f" (on {gpu_name(line['gpu'])})" if on_gpu else ""
            see = f"; see {launch_log(line['launch'])}" if line.get("launch") else ""
            return f"FAILED: {words}{where}{saved}{see}"
        case "ended":
            if not (line["found"] or line["left"] or line["unreachable"]):
                return ""
            killed = f", {line['killed']} of them had to be killed" if line["killed"] else ""
            left = f", {line['left']} CANNOT BE ENDED" if line["left"] else ""
            nodes = ", ".join(line["unreachable"])
            lost = f"; not reached: {nodes}" if nodes else ""
            return f"ended {counted(line['found'], 'process')}{killed}{left}{lost} ({words})"
        case "dropped":
            return f"{', '.join(map(gpu_name, line['gpus']))} dropped: {words}"
        case "waiting":
            return f"restarts in {line['seconds']:.1f} s" if line.get("seconds") else ""
        case "enough progress":
            return f"step {line['step']}: enough new steps, restart counter reset"
        case "trouble":
            return f"problem: {words}"
        case "over":
            return f"{line['outcome']}: {words}{saved}"
        case "started" | "progress":
            return ""
    return f"{event}: {words}" if words else str(event)
