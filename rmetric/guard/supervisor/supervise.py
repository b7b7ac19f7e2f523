"""What acts: carries out what the core decides, and tells it what is noticed."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

import numpy as np

from rmetric._util.durable import write_atomically
from rmetric.guard.checkpoint_dir import last_checkpoint
from rmetric.guard.run_folder import RunFolder
from rmetric.guard.supervisor import processes
from rmetric.guard.supervisor.allocation import Planner, Pool
from rmetric.guard.supervisor.attempt import Attempt
from rmetric.guard.supervisor.core import Core, Settings
from rmetric.guard.supervisor.events import (
    Action,
    Ask,
    Began,
    Drop,
    End,
    Ended,
    Event,
    Exited,
    Failure,
    Finish,
    Interrupted,
    Launch,
    Note,
    Stepped,
    StopWanted,
    Verdict,
    WakeAt,
    Wanted,
    Woke,
)
from rmetric.guard.supervisor.journal import Journal, Lock, past_of
from rmetric.guard.supervisor.launch import Program, unit_of
from rmetric.guard.supervisor.spoken import spoken
from rmetric.guard.supervisor.summary import in_words, summarise
from rmetric.guard.supervisor.watch import (
    News,
    Patience,
    Polled,
    follow_alarms,
    fresh_verdicts,
    words_of,
)
from rmetric.telemetry.followed import FollowedVerdicts
from rmetric.telemetry.sources import AllSources, VerdictSource
from rmetric.telemetry.verdict import GpuVerdict

#: Signals that ask the supervisor to end, and the one that asks for a checkpoint only.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAVING = signal.SIGUSR1


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds: between two looks, between two `progress` lines, from TERM to KILL."""

    poll: float = 1.0
    progress: float = 30.0
    grace: float = 15.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            zero = name == "grace"
            if not 0 <= value < inf or (value == 0 and not zero):
                least = "from 0" if zero else "above 0"
                raise ValueError(f"{name} is {value}: a number of seconds {least} is accepted")


@dataclass(kw_only=True)
class Watched:
    """What is looked at beside the processes and their heartbeats.

    Attributes:
        sources: of verdicts, beside the files in the run folder.
        log: that the calibrated detector follows; None for none.
        echo: show what the training prints.
    """

    sources: list[VerdictSource] = field(default_factory=list)
    log: Path | None = None
    echo: bool = False


@dataclass(frozen=True)
class _Exit:
    """A launcher has ended."""

    number: int
    node: str
    code: int


class Supervisor:
    """Runs one training in one folder until it has finished, is stopped, or is given up.

    Args:
        folder: that it shares with the training.
        program: what is run.
        pool: GPUs that there are.
        plan: from GPUs that are left to where and how it runs.
        settings, patience, pace, watched: see there.
        seed: of the jitter.
        again: run a folder that is finished.
        adopt: this process has no children but those of the training, and takes those in
            that the training leaves behind.
        say: called with a line for people; None to print it to stderr.
    """

    def __init__(
        self,
        folder: RunFolder,
        program: Program,
        pool: Pool,
        plan: Planner,
        *,
        settings: Settings | None = None,
        patience: Patience | None = None,
        pace: Pace | None = None,
        watched: Watched | None = None,
        seed: int = 0,
        again: bool = False,
        adopt: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.folder, self.program, self.pool, self.plan = folder, program, pool, plan
        self.settings, self.patience = settings or Settings(), patience or Patience()
        self.pace, self.watched = pace or Pace(), watched or Watched()
        self.seed, self.again, self._say = seed, again, say or _said_aloud
        self._heard: SimpleQueue[Event | _Exit | GpuVerdict | str] = SimpleQueue()
        self._attempt: Attempt | None = None
        self._wake_at = self._look_at = 0.0
        self._code: int | None = None
        self._adopts = adopt
        self._unit = unit_of(program, pool)

    def run(self) -> int:
        """Returns the exit code; raises LockedError where another supervisor is at it."""
        with Lock(self.folder):
            self.journal = Journal(self.folder.journal)
            try:
                return self._run()
            finally:
                self.journal.close()

    def _run(self) -> int:
        self._token = _token_of(self.journal)
        past = past_of(self.journal.lines)
        self.core = Core(
            self.settings, self.pool, self.plan,
            rng=np.random.default_rng([self.seed, past.launches]), past=past, again=self.again,
        )  # fmt: skip
        left = self.folder.request()
        self._heard_of = left.number if left else 0  # what was asked before it began is history
        self._news = News(self.pool, os.uname().nodename)
        self._note(
            "supervisor", pid=os.getpid(), node=os.uname().nodename, token=self._token,
            command=list(self.program.arguments), gpus=dict(self.pool),
        )  # fmt: skip
        self._adopts = self._adopts and processes.adopt_orphans()
        stop_watching = self._watch()
        try:
            with self._signals():
                self._tell(Began(time=time.monotonic()))
                while self._code is None:
                    self._hear()
            return self._code
        finally:
            for stop in stop_watching:
                stop()
            if self._code is None:  # an error of ours leaves nobody behind
                self._end("the supervisor failed")
            self._summarise()

    def _watch(self) -> list[Callable[[], object]]:
        files = FollowedVerdicts(self.folder.telemetry)
        for verdict in fresh_verdicts(files, time.time()):
            self._heard.put(verdict)
        source = AllSources([files, *self.watched.sources])
        polled = Polled(source, self._heard.put, self._heard.put, self.pace.poll)
        stops: list[Callable[[], object]] = [polled.close]
        if self.watched.log is not None:
            stops.append(
                follow_alarms(
                    self.watched.log,
                    lambda words: self._heard.put(
                        Wanted(time=time.monotonic(), source="alarm", words=words)
                    ),
                    self._heard.put,
                    self.pace.poll,
                )
            )
        return stops

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def heard(number: int, _frame: FrameType | None) -> None:
            now = time.monotonic()
            if number == SAVING:
                self._heard.put(Wanted(time=now, source="signal", words="SIGUSR1"))
            else:
                self._heard.put(Interrupted(time=now, signal=number))

        before = {number: signal.signal(number, heard) for number in (*ENDING, SAVING)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self) -> None:
        """Wait for the next thing, no longer than until the next look or waking."""
        now = time.monotonic()
        due = min(self._wake_at or now + self.pace.poll, self._look_at)
        try:
            heard = self._heard.get(timeout=max(0.0, due - now))
        except Empty:
            heard = None
        now = time.monotonic()
        self._heed(now)
        if heard is not None:
            self._take(heard, now)
        if now >= self._look_at:
            self._look(now)
            self._look_at = now + self.pace.poll
        if self._wake_at and now >= self._wake_at:
            self._wake_at = 0.0
            self._tell(Woke(time=now))

    def _heed(self, now: float) -> None:
        """Note a request that somebody else has left; who wants to stop shall not be forgotten."""
        request = self.folder.request()
        if request is None or request.number <= self._heard_of:
            return
        self._heard_of = request.number
        # One that is left while ours to stop waits inherits that, and says nothing of its own.
        stop = request.stop and not (self._attempt and self._attempt.stops)
        self._note(
            "request", number=request.number, source=request.source, stop=stop,
            words=request.reason,
        )  # fmt: skip
        if stop and self._attempt:
            self._attempt.stops_at(request.number)
        if stop:
            self._tell(StopWanted(time=now))

    def _take(self, heard: Event | _Exit | GpuVerdict | str, now: float) -> None:
        if isinstance(heard, str):
            self._note("trouble", words=heard)
        elif isinstance(heard, GpuVerdict):
            self._judge(heard, now)
        elif isinstance(heard, _Exit):
            self._exited(heard, now)
        else:
            self._tell(heard)

    def _judge(self, verdict: GpuVerdict, now: float) -> None:
        gpu = self._news.of(verdict)
        if gpu is None:
            return
        words = words_of(verdict)
        self._note("verdict", gpu=gpu, level=verdict.level, action=verdict.action, words=words)
        self._tell(
            Verdict(time=now, gpu=gpu, level=verdict.level, action=verdict.action, words=words)
        )

    def _exited(self, exit: _Exit, now: float) -> None:
        attempt = self._attempt
        if attempt is None or exit.number != attempt.number:
            return
        self._look(now)
        event = attempt.exited(exit.node, exit.code, now)
        if event is not None and self._attempt is attempt:
            self._tell(event)

    def _look(self, now: float) -> None:
        """What has become of the launch since the last look."""
        attempt = self._attempt
        for event in attempt.look(now) if attempt else ():
            self._tell(event)
        if attempt and self.watched.echo:
            attempt.echo()

    def _tell(self, event: Event) -> None:
        before = self.core.restarts
        for action in self.core.on(event):
            self._act(action)
        if isinstance(event, Stepped) and before and not self.core.restarts:
            self._note("enough progress", step=event.step)

    def _act(self, action: Action) -> None:
        if isinstance(action, Launch):
            self._launch(action)
        elif isinstance(action, Ask):
            self._ask(action)
        elif isinstance(action, End):
            self._heard.put(self._end(action.why))
        elif isinstance(action, WakeAt):
            self._wake_at = action.time
        elif isinstance(action, Drop):
            self._note("dropped", gpus=action.gpus, words=action.why)
        elif isinstance(action, Finish):
            self._note(
                "over", outcome=action.outcome, words=action.words, code=action.code,
                checkpoint=last_checkpoint(self.folder.checkpoints).good,
            )  # fmt: skip
            self._code = action.code
        else:
            self._note_of(action)

    def _note_of(self, note: Note) -> None:
        fields: dict[str, Any] = {"words": note.words}
        if note.seconds is not None:
            fields["seconds"] = round(note.seconds, 3)
        if note.failure is not None and self._attempt is not None:
            self._attempt.progress(time.monotonic())
            fields |= self._attempt.told(note.failure)
        self._note(note.event, **fields)

    def _launch(self, action: Launch) -> None:
        self._wake_at = 0.0
        try:
            self._attempt = self._begin(action)
        except OSError as error:  # a full disk, for example
            failure = Failure(kind="exit", words=f"it cannot be started: {error}")
            self._heard.put(Exited(time=time.monotonic(), failure=failure))

    def _begin(self, action: Launch) -> Attempt:
        return Attempt(
            action,
            f"{self._token}-{action.number}",
            self.program,
            self.folder,
            self.patience,
            write=self._note,
            exited=lambda number, node, code: self._heard.put(_Exit(number, node, code)),
            progress_seconds=self.pace.progress,
            now=time.monotonic(),
        )

    def _ask(self, action: Ask) -> None:
        try:
            number = self.folder.ask(
                action.source, action.reason, fatal=action.fatal, stop=action.stop
            )
        except OSError as error:
            self._note("trouble", words=f"the request cannot be written: {error}")
            return
        self._heard_of = number
        self._note("asked", number=number, **asdict(action))
        if action.stop and self._attempt is not None:
            self._attempt.stops_at(number)

    def _end(self, why: str) -> Ended:
        """End every process of every launch of this folder, here and on other nodes."""
        attempt, self._attempt = self._attempt, None
        also = attempt.running.alive() if attempt else []
        if attempt is not None:
            attempt.look(time.monotonic())
            attempt.progress(time.monotonic())
        if self._adopts:
            also += processes.children()
        ending = processes.end_everywhere(
            self._token, self.program, grace=self.pace.grace, also=also
        )
        if self._adopts:
            processes.reap()
        self._note("ended", words=why, **asdict(ending))
        self._summarise()
        return Ended(time=time.monotonic(), left=ending.left, unreachable=ending.unreachable)

    def _note(self, event: str, **fields: Any) -> None:
        try:
            line = self.journal.write(event, **fields)
        except OSError as error:
            self._say(f"the journal cannot be written: {error}")
            line = self.journal.lines[-1]
        words = spoken(line, self._unit)
        if words:
            self._say(words)

    def _summarise(self) -> None:
        try:
            summary = summarise(self.journal.lines)
            write_atomically(self.folder.summary, [in_words(summary).encode()])
            text = json.dumps(summary.as_json(), indent=1) + "\n"
            write_atomically(self.folder.summary.with_suffix(".json"), [text.encode()])
        except Exception as error:  # whatever a journal holds, it is not worth a training
            self._say(f"the summary cannot be written: {error}")


def _said_aloud(line: str) -> None:
    with suppress(OSError):  # a terminal that is gone is not worth a training
        print(line, file=sys.stderr, flush=True)


def _token_of(journal: Journal) -> str:
    """What all launches of this folder have in common; the first supervisor draws it."""
    for line in journal.lines:
        if isinstance(line.get("token"), str) and line["event"] == "supervisor":
            return str(line["token"])
    return secrets.token_hex(8)
