"""The folder that a training and its supervisor share: who writes what, and how it is read.

    lock                  held by the one supervisor
    journal.jsonl         what happened, one line an event (supervisor)
    summary.md, .json     the same in short (supervisor)
    layout.json           the layout of the present launch (supervisor)
    request.json          the last numbered request for a checkpoint (supervisor, user, telemetry)
    answered.json         the last request that a durable checkpoint answered (rank 0)
    heartbeats/rank-N.json  where each rank is (each rank)
    telemetry/NODE.jsonl  verdicts on a node's GPUs (`rmetric telemetry`, the supervisor)
    checkpoints/step-N/   durable and good where good.json is in it (all ranks)
    logs/launch-N.log     what the training printed (supervisor)

The supervisor tells its training where this is, and which launch it is, by environment
variables; nothing here needs torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rmetric._util.durable import write_atomically
from rmetric.guard.layout import Layout
from rmetric.guard.policy import check_source

#: The run folder, for the training that was launched.
FOLDER_VARIABLE = "RMETRIC_FOLDER"
#: Names one launch; in the environment of each process of it, by which they are found again.
LAUNCH_VARIABLE = "RMETRIC_LAUNCH"

PHASES = ("starting", "training", "saving", "finished")


@dataclass(frozen=True, kw_only=True)
class FileRequest:
    """A request for a checkpoint that lies in the folder.

    Attributes:
        number: counts up from 1 over the life of the folder.
        source, reason, fatal: as in `rmetric.guard.policy.Request`.
        stop: the training shall end when the checkpoint is durable.
    """

    number: int
    source: str
    reason: str
    fatal: bool = False
    stop: bool = False


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Where one rank is.

    Attributes:
        rank, pid, node: of the process.
        launch: what LAUNCH_VARIABLE said, empty without a supervisor.
        step: last step that is done.
        phase: one of `PHASES`.
        time: seconds since the epoch, of its writing.
        resumed: step at which this process came back: of its last beat while starting.
        every: seconds within which it beats but once while it trains; 0 for at each step.
        problem: why its last save failed; empty where it did not.
    """

    rank: int
    pid: int
    node: str
    launch: str
    step: int
    phase: str
    time: float
    resumed: int | None = None
    every: float = 0.0
    problem: str = ""


class RunFolder:
    """The paths of a run folder, and its small files.

    Each small file is replaced whole, so a reader never sees half of one. One that is
    missing reads as None, and so does one that cannot be read as what it should be:
    whoever watches must not fall over it.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.lock = self.path / "lock"
        self.journal = self.path / "journal.jsonl"
        self.summary = self.path / "summary.md"
        self.layout_file = self.path / "layout.json"
        self.request_file = self.path / "request.json"
        self.answered_file = self.path / "answered.json"
        self.heartbeats = self.path / "heartbeats"
        self.telemetry = self.path / "telemetry"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"
        self._resumed: int | None = None

    @classmethod
    def of_environment(cls) -> RunFolder | None:
        """The folder of the supervisor that launched this process; None without one."""
        path = os.environ.get(FOLDER_VARIABLE)
        return cls(path) if path else None

    def ask(self, source: str, reason: str, *, fatal: bool = False, stop: bool = False) -> int:
        """Leave a request for a checkpoint; returns its number.

        What is left while another waits takes its place, and keeps what that asked for.
        """
        check_source(source)
        with self._alone():
            last, answered = self.request(), self.answered()
            number = max(answered, last.number if last else 0) + 1
            if last is not None and last.number > answered:
                fatal, stop = fatal or last.fatal, stop or last.stop
                reason = last.reason if reason in last.reason else f"{reason}; {last.reason}"[:500]
            asked = FileRequest(number=number, source=source, reason=reason, fatal=fatal, stop=stop)
            _replace(self.request_file, asdict(asked))
        return number

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One asker at a time, as far as the file system knows locks."""
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / ".request.lock", "a") as file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def request(self) -> FileRequest | None:
        """The last request, answered or not."""
        entry = _read(self.request_file)
        try:
            asked = FileRequest(**entry) if entry else None
        except TypeError:
            return None
        return asked if asked and type(asked.number) is int else None

    def answer(self, number: int, step: int) -> None:
        """Every request up to `number` is answered by the durable checkpoint of `step`."""
        _replace(self.answered_file, {"number": number, "step": step})

    def answered(self) -> int:
        """The last request that was answered; 0 before the first."""
        number = (_read(self.answered_file) or {}).get("number")
        return number if isinstance(number, int) else 0

    def withdraw(self) -> None:
        """Whoever asked no longer wants it: a launch that begins now must not obey it."""
        last = self.request()
        if last is not None and last.number > self.answered():
            _replace(self.answered_file, {"number": last.number, "step": None})

    def answered_step(self) -> int | None:
        """The step of the checkpoint that answered; None where there is none."""
        step = (_read(self.answered_file) or {}).get("step")
        return step if isinstance(step, int) else None

    def set_layout(self, layout: Layout) -> None:
        _replace(self.layout_file, layout.as_json())

    def layout(self) -> Layout | None:
        entry = _read(self.layout_file)
        try:
            return None if entry is None else Layout.from_json(entry)
        except ValueError:
            return None

    def beat(
        self,
        rank: int,
        step: int,
        phase: str = "training",
        *,
        every: float = 0.0,
        problem: str = "",
    ) -> None:
        """Say where this process is; arguments as in `Heartbeat`.

        Called by each rank, at most about once a second.
        """
        if phase not in PHASES:
            raise ValueError(f"phase is {phase!r}: it must be of {', '.join(PHASES)}")
        if phase == "starting":
            self._resumed = step
        beat = Heartbeat(
            rank=rank,
            pid=os.getpid(),
            node=os.uname().nodename,
            launch=os.environ.get(LAUNCH_VARIABLE, ""),
            step=step,
            phase=phase,
            time=time.time(),
            resumed=self._resumed,
            every=every,
            problem=problem,
        )
        _replace(self.heartbeats / f"rank-{rank}.json", asdict(beat))

    def beats(self, launch: str | None = None) -> dict[int, Heartbeat]:
        """The last beat of each rank; only those of one launch, where it is given."""
        found: dict[int, Heartbeat] = {}
        for path in sorted(self.heartbeats.glob("rank-*.json")):
            try:
                beat = Heartbeat(**(_read(path) or {}))
            except TypeError:
                continue
            if launch is None or beat.launch == launch:
                found[beat.rank] = beat
        return found


def _replace(path: Path, entry: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [json.dumps(entry).encode()])


def _read(path: Path) -> dict[str, Any] | None:
    try:
        entry = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return entry if isinstance(entry, dict) else None
