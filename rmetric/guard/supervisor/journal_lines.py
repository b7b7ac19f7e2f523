"""Types of the fields of journal lines, checked when the journal of an earlier supervisor is read.

Fields that the readers of the journal use are listed; others are ignored.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rmetric.guard.run_files import Count, Seconds, check

Node = str
Indices = tuple[Count, ...]
GpuField = tuple[Node, Count]


class _Line(msgspec.Struct, kw_only=True):
    event: str
    time: Seconds
    words: str = ""


class _Supervisor(_Line, kw_only=True):
    token: str
    gpus: dict[Node, Indices]
    command: list[str]


class _Launch(_Line, kw_only=True):
    launch: Count
    gpus: dict[Node, Indices]


class _Started(_Line, kw_only=True):
    launch: Count
    pids: dict[Node, Count]


class _Progress(_Line, kw_only=True):
    launch: Count
    step: Count
    at: Seconds
    passed_over: Count | None = None


class _Request(_Line, kw_only=True):
    number: Count
    source: str
    stop: bool = False


class _Asked(_Request, kw_only=True):
    reason: str


class _Answered(_Line, kw_only=True):
    number: Count
    step: Count | None = None


class _Verdict(_Line, kw_only=True):
    action: str


class _Failure(_Line, kw_only=True):
    kind: str = ""
    launch: Count | None = None
    gpu: GpuField | None = None
    last_sign: Seconds | None = None
    checkpoint: Count | None = None


class _Ended(_Line, kw_only=True):
    found: Count
    killed: Count
    left: Count
    unreachable: list[str]


class _Dropped(_Line, kw_only=True):
    gpus: list[GpuField]


class _Waiting(_Line, kw_only=True):
    seconds: Seconds | None = None


class _EnoughProgress(_Line, kw_only=True):
    step: Count


class _Over(_Line, kw_only=True):
    outcome: str
    checkpoint: Count | None = None
    step: Count | None = None


_KINDS: dict[str, type[_Line]] = {
    "supervisor": _Supervisor,
    "launch": _Launch,
    "started": _Started,
    "resumed": _Progress,
    "progress": _Progress,
    "asked": _Asked,
    "request": _Request,
    "answered": _Answered,
    "verdict": _Verdict,
    "failure": _Failure,
    "ended": _Ended,
    "dropped": _Dropped,
    "waiting": _Waiting,
    "enough progress": _EnoughProgress,
    "over": _Over,
}


def check_line(line: Any) -> None:
    """Raise ValueError unless a decoded line is a journal event with fields of the right types."""
    event = line.get("event") if isinstance(line, dict) else None
    check(line, _KINDS.get(event, _Line) if isinstance(event, str) else _Line)
