"""One launch of the training, from start to exit; GPU verdicts and alarms meanwhile."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import IO, Any, NamedTuple

from rmetric._util.durable import no_follow
from rmetric._util.errors import OutputError
from rmetric.guard.checkpoint_dir import last_checkpoint
from rmetric.guard.run_folder import FOLDER_VARIABLE, LAUNCH_VARIABLE, RunFolder
from rmetric.guard.supervisor import Settings, launch_failure
from rmetric.guard.supervisor.allocation import Gpu
from rmetric.guard.supervisor.core import StartLaunch
from rmetric.guard.supervisor.journal import gpu_name
from rmetric.guard.supervisor.launch_failure import HeartbeatTracker, LaunchFailure
from rmetric.guard.supervisor.processes import Program, WarmSpare
from rmetric.guard.trust import make_private
from rmetric.telemetry.lines import GpuVerdict
from rmetric.telemetry.sources import VerdictSource

#: Greatest age of a verdict that existed before the supervisor started, seconds.
FRESH_SECONDS = 600.0
#: Writes a line of the journal: name of the event, and fields.
JournalWriter = Callable[..., Any]


class Look(NamedTuple):
    """Events of a launch since the last look; see the methods of `Core`."""

    step_reached: tuple[int, int] | None = None  # the step, and that where it resumed
    durable: bool = False
    hung: LaunchFailure | None = None


class Attempt:
    """Starts a launch on construction, a process a node; `look` and `exited` return its events.

    `token` is the name of the launch. `on_exit` is called from another thread with number, node
    and exit code, 127 for what cannot be started; the reason is in the log. `stop_number` is that
    of the pending request to stop.
    """

    def __init__(
        self,
        launch: StartLaunch,
        token: str,
        program: Program,
        folder: RunFolder,
        settings: Settings,
        *,
        write: JournalWriter,
        on_exit: Callable[[int, str, int], None],
        now: float,
        spare: WarmSpare | None = None,
    ) -> None:
        self.number, self.allocation = launch.number, launch.allocation
        self.folder, self.token, self.program = folder, token, program
        self._write, self._progress_seconds = write, settings.progress_seconds
        folder.withdraw()
        folder.set_layout(self.allocation.layout)
        request = folder.request()
        self._request_before = request.number if request else 0
        self._answered = folder.answered()
        self.stop_number: int | None = None
        self._newest_at_start = last_checkpoint(folder.checkpoints).there
        self._verdict_before = self._verdict_version()
        self._noted_step: int | None = None
        self._problem = ""
        self._progress_at, self._echoed = 0.0, 0
        self._codes: dict[str, int] = {}
        # Written before the start, so that a later supervisor finds the processes after a crash.
        write(
            "launch", launch=self.number, token=token, gpus=dict(self.allocation.gpus),
            layout=self.allocation.layout.as_json(), words=str(self.allocation),
        )  # fmt: skip
        self.log = folder.logs / f"launch-{self.number}.log"
        self.pids: dict[str, int] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._on_exit, self._spare = on_exit, spare
        make_private(folder.logs)
        with socket.socket() as probe:
            probe.bind(("", 0))
            free_port = int(probe.getsockname()[1])
        with open(self.log, "ab", buffering=0, opener=no_follow) as log:
            commands = program.commands(self.allocation, free_port)
            warm = [self._start(node, command, log) for node, command in commands.items()]
        self.tracker = HeartbeatTracker(settings, self.allocation, self.log, now)
        write("started", launch=self.number, pids=self.pids, warm=any(warm))

    def alive(self) -> list[int]:
        """Pids of running processes only: the pid of an exited one may have been reused."""
        return [process.pid for process in self._processes if process.returncode is None]

    def look(self, now: float) -> Look:
        """Events since the last call, from heartbeats, answered requests and output."""
        reached = None
        resumed, step = self.tracker.resumed, self.tracker.step
        hung = self.tracker.look(self.folder.beats(self.token), now)
        if resumed is None and self.tracker.resumed is not None:
            resumed = self._noted_step = self.tracker.resumed
            self._progress_at = now + self._progress_seconds
            newest = self._newest_at_start
            self._write(
                "resumed", launch=self.number, step=resumed, at=self.tracker.resumed_at,
                passed_over=newest if newest is not None and newest > resumed else None,
            )  # fmt: skip
        if self.tracker.step is not None and self.tracker.step != step and resumed is not None:
            if now >= self._progress_at:
                self.progress(now)
            reached = (self.tracker.step, resumed)
        problem = next((b.problem for b in self.tracker.beats.values() if b.problem), "")
        if problem != self._problem:  # saves began to fail, or succeed again
            self._problem = problem
            self._write("not saved" if problem else "saved again", words=problem)
        if self._held():  # it may wait
            self.tracker.restart(now)
            hung = None
        return Look(reached, self._is_answered(), hung)

    def progress(self, now: float) -> None:
        """Write the step to the journal, if it changed."""
        self._progress_at = now + self._progress_seconds
        if self.tracker.step is not None and self.tracker.step != self._noted_step:
            self._noted_step = self.tracker.step
            step, at = self.tracker.step, self.tracker.step_at
            self._write("progress", launch=self.number, step=step, at=at)

    def exited(self, node: str, code: int) -> dict[str, Any] | None:
        """Arguments of `Core.launch_exited` at the exit of a node; None while other nodes run."""
        self._codes[node] = code
        held = self._held()
        if held and (code or len(self._codes) == len(self.allocation.gpus)):
            return {"held": held}
        if code:
            failure = launch_failure.explain_exit(
                code, node=node, allocation=self.allocation, beats=self.tracker.beats,
                log=launch_failure.read_tail(self.log), error_file=self._error_file(node),
                launcher=self.program.is_torchrun, arguments=self.program.arguments,
            )  # fmt: skip
            if launch_failure.is_disk_full(problem := self.folder.write_problem()):
                words = failure.words
                words = words if launch_failure.is_disk_full(words) else f"{words}: {problem}"
                words = launch_failure.with_disk_full_first(words)
                failure = replace(failure, words=words, lasting=False)
            return {"failure": failure}
        if len(self._codes) < len(self.allocation.gpus):
            return None
        phases = [beat.phase for beat in self.tracker.beats.values()]
        finished = bool(phases) and all(phase == "finished" for phase in phases)
        early = bool(phases) and not finished
        request = self.folder.request()
        stop = request is not None and request.stop and request.number > self._request_before
        return {"stopped": stop and not finished, "early": early, "unsaved": self._unsaved()}

    @property
    def saves(self) -> bool:
        return any(beat.phase == "saving" for beat in self.tracker.beats.values())

    def failure_fields(self, failure: LaunchFailure) -> dict[str, Any]:
        return {
            "kind": failure.kind, "code": failure.code, "rank": failure.rank,
            "node": failure.node, "gpu": failure.gpu,
            "launch": self.number, "last_sign": self.tracker.last_sign,
            "checkpoint": last_checkpoint(self.folder.checkpoints).good,
        }  # fmt: skip

    def echo(self) -> None:
        """Print the output of the launch since the last call."""
        # A closed pipe must not stop the training.
        with contextlib.suppress(OSError, OutputError):
            with open(self.log, "rb", opener=no_follow) as file:
                file.seek(self._echoed)
                data = file.read()
            self._echoed += len(data)
            sys.stdout.write(data.decode("utf-8", "replace"))
            sys.stdout.flush()

    def _start(self, node: str, command: list[str], log: IO[bytes]) -> bool:
        """Start the process of a node; True if it is the spare launcher."""
        variables = self.program.variables(node, self.allocation) | {
            FOLDER_VARIABLE: str(self.folder.path.resolve()),
            LAUNCH_VARIABLE: self.token,
            "TORCHELASTIC_ERROR_FILE": str(self._error_file(node).resolve()),
        }
        process = None
        if self._spare is not None and not self.program.prefixes.get(node):
            process = self._spare.take(command, variables, self.allocation, self.log)
        warm = process is not None
        try:
            process = process or subprocess.Popen(
                self.program.behind(node, command, variables), env={**os.environ, **variables},
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            log.write(f"{command[0]} cannot be started: {error}\n".encode())
            self._on_exit(self.number, node, 127)
            return False
        self.pids[node] = process.pid
        self._processes.append(process)

        def report(running: subprocess.Popen[bytes] = process) -> None:
            self._on_exit(self.number, node, running.wait())

        threading.Thread(target=report, daemon=True).start()
        return warm

    def _error_file(self, node: str) -> Path:
        return self.folder.logs / f"launch-{self.number}-error{f'-{node}' if node else ''}.json"

    def _verdict_version(self) -> tuple[int, int] | None:
        """Changes when a rescue of any launch writes its verdict; None without one."""
        with contextlib.suppress(OSError):
            status = self.folder.verdict_file.stat()
            return status.st_ino, status.st_mtime_ns
        return None

    def _held(self) -> str:
        """Verdict of a rescue that holds this launch; empty if none does."""
        version = self._verdict_version()
        return self.folder.held() if version and version != self._verdict_before else ""

    def _unsaved(self) -> str:
        """Why the last steps of a training that exited with 0 are in no checkpoint; else empty."""
        problem = self.folder.write_problem()
        problem = self._problem or (problem if launch_failure.is_disk_full(problem) else "")
        good, step = last_checkpoint(self.folder.checkpoints).good, self.tracker.step
        if not problem or not self.tracker.beats or (good is not None and good >= (step or 0)):
            return ""
        newest = f"the newest good checkpoint is of step {good}"
        newest = "there is no good checkpoint" if good is None else newest
        return launch_failure.with_disk_full_first(
            f"the training exited with 0 at step {step} or later, but {newest}: {problem}"
        )

    def _is_answered(self) -> bool:
        """Note answered requests; True if that to stop is among them."""
        answered = self.folder.answered()
        if answered <= self._answered:
            return False
        self._answered = answered
        self._write("answered", number=answered, step=self.folder.answered_step())
        if self.stop_number is None or answered < self.stop_number:
            return False
        self.stop_number = None
        return True


def fresh_verdicts(source: VerdictSource, now: float) -> list[GpuVerdict]:
    """Verdicts of one poll that are at most `FRESH_SECONDS` old; `now`: since the epoch."""
    source.poll()
    oldest = now - FRESH_SECONDS
    return [verdict for verdict in source.verdicts().values() if verdict.time >= oldest]


class VerdictDedup:
    """Drops verdicts that repeat the last level and action of their GPU.

    A verdict without a node, or of this machine (`here`), applies to a single node in use.
    """

    def __init__(self, nodes: Iterable[str], here: str) -> None:
        self._nodes, self._here = list(nodes), here
        self._last: dict[Gpu, tuple[str, str]] = {}

    def changed(self, verdict: GpuVerdict) -> Gpu | None:
        """GPU whose verdict changed; None for a repetition or an unknown node."""
        node = verdict.node
        if node not in self._nodes:
            if len(self._nodes) != 1 or node not in ("", self._here):
                return None
            node = self._nodes[0]
        gpu = (node, verdict.gpu)
        current = (verdict.level, verdict.action)
        if self._last.get(gpu, ("healthy", "none")) == current:
            return None
        self._last[gpu] = current
        return gpu


def words_of(verdict: GpuVerdict) -> str:
    name = gpu_name((verdict.node, verdict.gpu))
    level = "at risk" if verdict.level == "risk" else verdict.level
    return f"{name} is {level}: {'; '.join(verdict.reasons) or verdict.action}"[:500]


def poll_verdicts(
    source: VerdictSource,
    on_verdict: Callable[[GpuVerdict], None],
    on_problem: Callable[[str], None],
    seconds: float,
) -> Callable[[], None]:
    """Poll a source of verdicts on a thread of its own, because a driver may block.

    `on_problem` is called when the problem of the source changes. Returns a function that stops.
    """
    stopped = threading.Event()

    def run() -> None:
        problem: str | None = None
        while not stopped.is_set():
            try:
                for verdict in source.poll():
                    on_verdict(verdict)
                before, problem = problem, source.problem
                if problem and problem != before:
                    on_problem(problem)
            except Exception as error:
                on_problem(f"GPU telemetry stopped: {type(error).__name__}: {error}")
                return
            stopped.wait(seconds)

    def stop() -> None:
        stopped.set()
        source.close()

    threading.Thread(target=run, name="verdicts", daemon=True).start()
    return stop


def follow_alarms(
    log: Path, on_alarm: Callable[[str], None], on_problem: Callable[[str], None], seconds: float
) -> Callable[[], None]:
    """Follow a training log with the calibrated detector, on a thread; returns what stops it.

    The log may not exist yet. Alarms that it already contains are ignored.
    """
    from rmetric._util.errors import LogError
    from rmetric.detectors import make_detector
    from rmetric.replay.follow import Follower
    from rmetric.replay.watch import AlarmEvent, Watch

    past = log.exists()

    def report(event: AlarmEvent) -> None:
        if event.urgent and not past:
            on_alarm(f"{event.id}: {event.words}")

    def caught_up(_log: object) -> None:
        nonlocal past
        past = False

    watch = Watch(lambda: make_detector("calibrated"), report)
    follower = Follower(
        log, watch.take, on_problem, wait=inf, poll=seconds,
        begun_again=watch.begin_again, caught_up=caught_up,
    )  # fmt: skip

    def run() -> None:
        try:
            follower.run()
        except LogError as error:
            on_problem(str(error))

    threading.Thread(target=run, name="alarms", daemon=True).start()
    return follower.stop
