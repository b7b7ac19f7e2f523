"""Telemetry as JSONL: readings, signs and verdicts, one object a line.

    {"event": "READING", "node": "", "gpu": 0, "time": 1760000000.0, "temperature_celsius": 61}
    {"event": "SIGN", "node": "", "gpu": 0, "time": 1760000004.0, "kind": "xid_79"}
    {"event": "VERDICT", "node": "", "gpu": 0, "time": 1760000004.0, "level": "fatal", ...}

Times are seconds since the epoch, the other names and units those of `Reading` and
`GpuVerdict`. Missing values are absent. Lines of other events are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rmetric._util.errors import LogError
from rmetric._util.strict_json import (
    encode_line,
    field,
    mapping,
    number,
    parse_line,
    text,
    whole_number,
)
from rmetric.telemetry.reading import GpuSign, Reading
from rmetric.telemetry.verdict import GpuVerdict

READING, SIGN, VERDICT = "READING", "SIGN", "VERDICT"
#: Seconds since the epoch at the end of the year 9999, the greatest accepted time.
LAST_TIME = 253_402_300_799.0
#: Input of a judge.
TelemetryEvent = Reading | GpuSign


def event_line(event: TelemetryEvent, node: str = "") -> bytes:
    """Encode a reading or a sign as one line, including the newline."""
    if isinstance(event, Reading):
        return encode_line({"event": READING, "node": node} | event.as_json())
    return encode_line({"event": SIGN, "node": node} | asdict(event))


def verdict_line(verdict: GpuVerdict) -> bytes:
    """Encode a verdict as one line, including the newline."""
    return encode_line({"event": VERDICT} | verdict.as_json())


def read_line(line: bytes) -> tuple[str, TelemetryEvent | GpuVerdict] | None:
    """Decode a line into node and content; None for an empty line or another event.

    Raises:
        ValueError: the line is invalid; the message names the accepted values.
    """
    if not line.strip():
        return None
    entry = mapping(parse_line(line))
    node = field(entry, "node", text) or ""
    event = entry.get("event")
    if event == READING:
        return node, _checked(Reading.from_json(entry))
    if event == SIGN:
        return node, _checked(_sign(entry))
    if event == VERDICT:
        return node, _checked(GpuVerdict.from_json(entry))
    return None


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


def _checked(found: Any) -> Any:
    if found.gpu < 0:
        raise ValueError(f"'gpu': found {found.gpu}; a whole number from 0 is accepted")
    if not 0 <= found.time <= LAST_TIME:
        raise ValueError(f"'time': found {found.time}; seconds since the epoch are accepted")
    return found


def _sign(entry: dict[str, Any]) -> GpuSign:
    gpu, time = field(entry, "gpu", whole_number), field(entry, "time", number)
    kind = field(entry, "kind", text)
    if gpu is None or time is None or kind is None:
        raise ValueError(f"a sign has gpu, time and kind; found {gpu!r}, {time!r} and {kind!r}")
    return GpuSign(gpu=gpu, time=time, kind=kind)
