"""Run folder shared by a training and its supervisor: its small files; docs/supervisor.md has all.

    lock                  held by the one supervisor
    layout.json           layout of the current launch (supervisor)
    request.json          last numbered checkpoint request (supervisor, user, telemetry)
    answered.json         last request answered by a durable checkpoint (rank 0)
    heartbeats/rank-N.json  step and phase of each rank (each rank)
    heartbeats/rank-N.stacks  stacks that a rank writes on STACK_SIGNAL (each rank)
    checkpoints/step-N/   complete and verified if it contains good.json (all ranks)
    rescue-hold/          weights and verdict of a training that its rescue holds (rank 0)

The supervisor passes the folder and the name of the launch by environment variables. No
torch here.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import logging
import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

import msgspec

from rmetric._util.durable import no_follow, write_atomically
from rmetric._util.errors import require
from rmetric.guard.layout import Layout
from rmetric.guard.policy import check_source
from rmetric.guard.trust import distrust, make_private
from rmetric.telemetry.reading import Time

logger = logging.getLogger("rmetric")
T = TypeVar("T")

#: Environment variables: path of the run folder, and name of the launch, by which its processes are
#: found.
FOLDER_VARIABLE, LAUNCH_VARIABLE = "RMETRIC_FOLDER", "RMETRIC_LAUNCH"
#: Environment variable with the checkpoint to resume from: the newest good one, or the newest that
#: is not suspect.
RESUME_VARIABLE, RESUMES = "RMETRIC_RESUME", ("newest", "clean")
#: On it a rank writes the stacks of its threads. No other program is known to use this one.
STACK_SIGNAL = getattr(signal, "SIGRTMAX", 64) - 7

PHASES = ("starting", "training", "saving", "finished")

#: Greatest size of a small file, bytes.
MOST_BYTES = 1 << 20
#: Greatest number that is exact as a float, too.
MOST = 2**53
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]


def decode_file(path: Path, kind: type[T]) -> T | None:
    """Content of a file as `kind`; None if the file is missing.

    Raises:
        ValueError: the content is not of this kind.
        OSError: the file cannot be read.
    """
    try:
        with open(path, "rb", opener=no_follow) as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error) or type(error).__name__) from None


def converted(entry: Any, kind: type[T]) -> T:
    """A decoded JSON value as `kind`. Raises ValueError if it is of another."""
    try:
        return msgspec.convert(entry, type=kind)
    except (msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise ValueError(str(error) or type(error).__name__) from None


@dataclass(frozen=True, kw_only=True)
class FileRequest:
    """Checkpoint request in the run folder; `number` runs from 1 over the life of the folder.

    `stop`: training ends when the checkpoint is durable. The others are as of `Guard.request`.
    """

    number: Annotated[int, msgspec.Meta(ge=1, le=MOST)]
    source: str
    reason: str
    fatal: bool = False
    stop: bool = False


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Heartbeat of one rank.

    Attributes:
        launch: value of LAUNCH_VARIABLE; empty without a supervisor.
        step: last step that is done.
        phase: one of `PHASES`.
        time: time of writing, seconds since the epoch.
        resumed: step at which this process resumed, from its last heartbeat while starting.
        every: least time between heartbeats while training, seconds; 0 for each step.
        problem: reason why its last save failed; empty if it did not.
    """

    rank: Count
    pid: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    node: str
    launch: str
    step: Count
    phase: str
    time: Time
    resumed: Count | None = None
    every: Time = 0.0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Last answered request; `step` is None for a withdrawn one."""

    number: Count
    step: Count | None = None


class RunFolder:
    """Paths and small files of a run folder.

    Each small file is replaced atomically, so that a reader never sees a partial one. A
    missing or invalid file reads as None; `take_problems` returns why it is invalid.
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
        self.stacks = self.path / "stacks"
        self.hold = self.path / "rescue-hold"
        self.verdict_file = self.hold / "verdict.json"
        self._resumed: int | None = None
        self._stack_file: IO[bytes] | None = None
        self._distrusted: set[str] = set()
        self._problems: dict[Path, str] = {}
        self._reported: dict[Path, str] = {}

    @classmethod
    def of_environment(cls) -> RunFolder | None:
        """Run folder of the supervisor that launched this process; None without one."""
        path = os.environ.get(FOLDER_VARIABLE)
        return cls(path) if path else None

    def ask(self, source: str, reason: str, *, fatal: bool = False, stop: bool = False) -> int:
        """Write a checkpoint request, with the fields of `FileRequest`; returns its number.

        It replaces a pending one and keeps its fatal and stop flags. Raises ValueError for an
        unknown source.
        """
        check_source(source)
        make_private(self.path)
        with open(self.path / ".request.lock", "a", opener=no_follow) as lock:
            with suppress(OSError):  # the file system may not support locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            last, answered = self.request(), self.answered()
            number = max(answered, last.number if last else 0) + 1
            if last is not None and last.number > answered:
                fatal, stop = fatal or last.fatal, stop or last.stop
                reason = last.reason if reason in last.reason else f"{reason}; {last.reason}"[:500]
            entry = {"number": number, "source": source, "reason": reason, "fatal": fatal}
            _replace(self.request_file, entry | {"stop": stop})
        return number

    def request(self) -> FileRequest | None:
        """Last request, answered or not.

        None also if other users can write the file or the folder, which is logged once.
        """
        if why := self.why_ignored():
            if why not in self._distrusted:
                logger.error("rmetric: requests are ignored: %s", why)
                self._distrusted.add(why)
            return None
        return self._read(self.request_file, FileRequest)

    def why_ignored(self) -> str:
        """Reason why the training ignores the requests here; empty if it does not."""
        return distrust(self.path) or distrust(self.request_file, parents=False)

    def answer(self, number: int, step: int) -> None:
        """Mark every request up to `number` as answered by the checkpoint of `step`."""
        _replace(self.answered_file, {"number": number, "step": step})

    def answered(self) -> int:
        """Number of the last answered request; 0 before the first."""
        return self._answer().number

    def answered_step(self) -> int | None:
        """Step of the checkpoint that answered; None if there is none."""
        return self._answer().step

    def _answer(self) -> Answer:
        return self._read(self.answered_file, Answer) or Answer(number=0)

    def held(self) -> str:
        """Verdict of a rescue that holds the training; empty without one, or once it went on."""
        verdict = self._read(self.verdict_file, dict[str, Any])
        if verdict is None:
            there = self.verdict_file.exists()
            return f"the rescue holds it: {self.verdict_file} cannot be read" if there else ""
        if verdict.get("went_on"):
            return ""
        saved = verdict.get("saved")
        weights = f"its weights are in {saved}" if saved else "its weights are not saved"
        return (
            f"the rescue holds it at step {verdict.get('step')}: {verdict.get('reason')}; "
            f"{weights}, the verdict is in {self.verdict_file}"
        )

    def withdraw(self) -> None:
        """Withdraw the pending request, so that a new launch ignores it."""
        last = self.request()
        if last is not None and last.number > self.answered():
            _replace(self.answered_file, {"number": last.number, "step": None})

    def set_layout(self, layout: Layout) -> None:
        _replace(self.layout_file, layout.as_json())

    def layout(self) -> Layout | None:
        """Layout of the current launch; None if it is missing or invalid."""
        entry = self._read(self.layout_file, dict[str, Any])
        try:
            return None if entry is None else Layout.from_json(entry)
        except ValueError as error:
            self._problems[self.layout_file] = str(error)
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
        """Write the `Heartbeat` of this process; each rank calls it, about once a second.

        Raises ValueError for an unknown phase.
        """
        require("phase", phase, phase in PHASES, f"of {', '.join(PHASES)}")
        if phase == "starting":
            self._resumed = step
        beat = Heartbeat(
            rank=rank, pid=os.getpid(), node=os.uname().nodename,
            launch=os.environ.get(LAUNCH_VARIABLE, ""), step=step, phase=phase, time=time.time(),
            resumed=self._resumed, every=every, problem=problem,
        )  # fmt: skip
        _replace(self.heartbeats / f"rank-{rank}.json", asdict(beat))
        self._register_stacks(rank)

    def _register_stacks(self, rank: int) -> None:
        """Write stacks on `STACK_SIGNAL` from now on, unless the training has a use for it."""
        if self._stack_file or signal.getsignal(STACK_SIGNAL) != signal.SIG_DFL:
            return
        if hasattr(faulthandler, "register"):
            path = self.heartbeats / f"rank-{rank}.stacks"
            self._stack_file = open(path, "wb", opener=no_follow)  # noqa: SIM115
            faulthandler.register(STACK_SIGNAL, self._stack_file)

    def beats(self, launch: str | None = None) -> dict[int, Heartbeat]:
        """Last heartbeat of each rank; of one launch only, if it is given."""
        found: dict[int, Heartbeat] = {}
        try:
            paths = sorted(self.heartbeats.glob("rank-*.json"))
        except OSError as error:
            self._problems[self.heartbeats] = str(error)
            return {}
        self._problems.pop(self.heartbeats, None)
        for path in paths:
            beat = self._read(path, Heartbeat)
            if beat is None or (launch is not None and beat.launch != launch):
                continue
            if beat.phase not in PHASES or path.stem != f"rank-{beat.rank}":
                self._problems[path] = f"rank {beat.rank} in phase {beat.phase!r}"[:100]
                continue
            found[beat.rank] = beat
        return found

    def take_problems(self) -> list[str]:
        """Files that were found invalid since the last call: each once, until it changes."""
        new = {path: why for path, why in self._problems.items() if self._reported.get(path) != why}
        self._reported |= new
        return [f"{path} is ignored: {why}" for path, why in new.items()]

    def _read(self, path: Path, kind: type[T]) -> T | None:
        try:
            content = decode_file(path, kind)
        except (OSError, ValueError) as error:
            self._problems[path] = str(error)
            return None
        self._problems.pop(path, None)
        return content

    def write_problem(self) -> str:
        """Reason why a file of a few kilobytes cannot be written; empty if it can."""
        probe = self.path / ".writable"
        try:
            write_atomically(probe, [b"0" * 8192])
            probe.unlink()
        except OSError as error:
            return str(error)
        return ""


def _replace(path: Path, entry: dict[str, Any]) -> None:
    make_private(path.parent)
    write_atomically(path, [json.dumps(entry).encode()])
