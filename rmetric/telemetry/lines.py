"""Telemetry as JSONL: readings, signs and verdicts, one object a line.

    {"event": "READING", "node": "", "gpu": 0, "time": 1760000000.0, "temperature_celsius": 61}
    {"event": "SIGN", "node": "", "gpu": 0, "time": 1760000004.0, "kind": "xid_79"}
    {"event": "VERDICT", "node": "", "gpu": 0, "time": 1760000004.0, "level": "fatal", ...}

Times are seconds since the epoch, the other names and units those of `Reading` and
`GpuVerdict`. Missing values are absent. Lines of other events are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from rmetric._util.errors import LogError
from rmetric._util.strict_json import encode_line, mapping, parse_line
from rmetric.telemetry.reading import GpuIndex, GpuSign, JsonRecord, Reading, Time

READING, SIGN, VERDICT = "READING", "SIGN", "VERDICT"
#: Input of a judge.
TelemetryEvent = Reading | GpuSign
#: Recommended actions, the mildest first.
ACTIONS = ("none", "watch", "restart_application", "reset", "drain", "reboot")
#: `risk`: the score reached its threshold; save a checkpoint. `fatal`: a rule holds; the GPU
#: must not be used in its present state.
LEVELS = ("healthy", "risk", "fatal")


def one_of(words: tuple[str, ...]) -> msgspec.Meta:
    return msgspec.Meta(pattern=f"^({'|'.join(words)})$")


@dataclass(frozen=True, kw_only=True)
class GpuVerdict(JsonRecord):
    """Verdict on one GPU at one time.

    Attributes:
        node: its name; empty with a single node.
        time: seconds since the epoch.
        level: one of `LEVELS`.
        action: one of `ACTIONS`.
        risk: weighted score, 0 to 1; None if no factor is known.
        reachable: greatest score that the known factors allow, 0 to 1.
        factors: normalised factors of the score by name, 0 to 1; None if unknown.
        rules: kinds of the active signs, most severe first (see `judge.RULES`).
        reasons: human-readable reasons, most severe first; empty if there are none.
    """

    gpu: GpuIndex
    node: str = ""
    time: Time
    level: Annotated[str, one_of(LEVELS)] = "healthy"
    action: Annotated[str, one_of(ACTIONS)] = "none"
    risk: float | None = None
    reachable: float | None = None
    factors: dict[str, float | None] = field(default_factory=dict)
    rules: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Unique name of the GPU: `node:gpu`, or `gpu` with a single node."""
        return f"{self.node}:{self.gpu}" if self.node else str(self.gpu)

    @property
    def gist(self) -> tuple[str, str, tuple[str, ...]]:
        """Level, action and rules: two verdicts with the same gist count as unchanged."""
        return self.level, self.action, self.rules


def event_line(event: TelemetryEvent, node: str = "") -> bytes:
    """A reading or a sign as one line, with the newline."""
    name = READING if isinstance(event, Reading) else SIGN
    return encode_line({"event": name, "node": node} | event.as_json())


def verdict_line(verdict: GpuVerdict) -> bytes:
    """A verdict as one line, with the newline."""
    return encode_line({"event": VERDICT} | verdict.as_json())


def read_line(line: bytes) -> tuple[str, TelemetryEvent | GpuVerdict] | None:
    """Decode a line into node and content; None for an empty line or another event.

    Raises:
        ValueError: the line is invalid; the message names the accepted values.
    """
    if not line.strip():
        return None
    entry = mapping(parse_line(line))
    node, event = entry.get("node") or "", entry.get("event")
    if not isinstance(node, str):
        raise ValueError(f"'node': found {node!r}; a string is accepted")
    if event == READING:
        return node, Reading.from_json(entry)
    if event == SIGN:
        return node, GpuSign.from_json(entry)
    if event != VERDICT:
        return None
    if entry.get("level") is None or entry.get("action") is None:
        raise ValueError("a verdict has a level and an action")
    return node, GpuVerdict.from_json(entry)


def read_recording(path: Path) -> Iterator[tuple[int, str, TelemetryEvent]]:
    """Line number, node and event of each reading or sign in a file.

    A truncated line is skipped.

    Raises:
        OSError: the file cannot be read.
        LogError: a line is not telemetry; with file and line number.
    """
    for line_number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            entry = read_line(line)
        except ValueError as error:
            if line.startswith(b'{"event":') and not line.endswith(b"}"):
                continue
            raise LogError(path, line_number, str(error)) from None
        if entry is not None and not isinstance(entry[1], GpuVerdict):
            yield line_number, entry[0], entry[1]
