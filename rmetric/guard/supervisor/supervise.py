"""Event loop of the supervisor: sends events to the core and carries out its actions."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

import numpy as np

from rmetric._util.durable import write_atomically
from rmetric._util.webhook import WebhookSender
from rmetric.guard.checkpoint_dir import last_checkpoint
from rmetric.guard.run_folder import RunFolder
from rmetric.guard.supervisor import Settings, attempt, core, journal, processes
from rmetric.guard.supervisor.allocation import Planner, Pool
from rmetric.guard.supervisor.launch_failure import LaunchFailure, with_disk_full_first
from rmetric.guard.supervisor.stacks import Adviser
from rmetric.guard.supervisor.summary import summarise, to_markdown
from rmetric.telemetry.lines import GpuVerdict
from rmetric.telemetry.sources import AllSources, VerdictFiles, VerdictSource

#: Signals that end the supervisor, and the signal that requests a checkpoint.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAVING = signal.SIGUSR1
#: Seconds from TERM to KILL where the ranks wait for one that is lost, and nothing is saved.
QUICK_GRACE = 0.5
#: Events that are sent to a webhook.
POSTED = ("failure", "advice", "dropped", "not saved", "over")
#: Exit code after an internal error.
CODE_INTERNAL_ERROR = 1


class Supervisor:
    """Runs one training in a run folder until it finishes, is stopped, or is given up.

    `pool` has the GPUs by node, `plan` maps those that remain to an allocation. `sources` give
    verdicts on GPUs beside the files in the run folder. `echo`, `webhook`, `again`, `spare`,
    `preload` and `watch_log` are as the options of `rmetric supervise`. `adopt` makes this process
    the parent of the training's orphans, where it has no other children. `print_line` is called
    with each line for the terminal; None prints to stderr. ModuleNotFoundError: without psutil.
    """

    def __init__(
        self,
        folder: RunFolder,
        program: processes.Program,
        pool: Pool,
        plan: Planner,
        *,
        settings: Settings | None = None,
        sources: Iterable[VerdictSource] = (),
        watch_log: Path | None = None,
        echo: bool = False,
        webhook: str | None = None,
        again: bool = False,
        spare: bool = False,
        preload: Sequence[str] = (),
        adopt: bool = False,
        print_line: Callable[[str], None] | None = None,
    ) -> None:
        processes.require_psutil()
        self.folder, self.program = folder, program
        self.pool, self.plan = pool, plan
        self.settings = settings or Settings()
        self.sources, self.watch_log, self.echo = list(sources), watch_log, echo
        self.again = again
        self._print_line = print_line or _print_to_stderr
        # Calls for the loop, from other threads and from signal handlers.
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._attempt: attempt.Attempt | None = None
        self._timer_at = self._poll_at = 0.0
        self._code: int | None = None
        self._adopts_orphans = adopt
        self._unit = program.unit(pool)
        self._adviser = Adviser(folder, program, self.settings.look_seconds)
        self._advisers = ThreadPoolExecutor(1)
        self._advice: list[Future[dict[str, Any]]] = []
        unposted = "the webhook {}; an event was not posted".format
        self._webhook = webhook and WebhookSender(
            webhook, "--webhook", lambda problem: self._print_line(unposted(problem)), form="slack"
        )
        self._spare = None
        if spare and len(pool) == 1 and not any(program.prefixes.values()):
            self._spare = processes.WarmSpare(preload, folder.logs / "spare.log")

    def run(self) -> int:
        """Run until the end; returns the exit code.

        Raises:
            FolderLockedError: another supervisor holds the folder.
        """
        with (
            journal.folder_lock(self.folder),
            closing(journal.Journal(self.folder.journal)) as self.journal,
        ):
            return self._run()

    def _run(self) -> int:
        inode = self.folder.path.stat().st_ino
        #: Shared by all launches of this folder; drawn by its first supervisor.
        self._token = journal.token_of(self.journal.lines, inode) or secrets.token_hex(8)
        state = journal.journal_state(self.journal.lines)
        self.core = core.Core(
            self.settings, self.pool, self.plan,
            rng=np.random.default_rng([0, state.launches]), state=state, again=self.again,
        )  # fmt: skip
        left = self.folder.request()
        self._last_request = left.number if left else 0  # earlier requests are ignored
        self._verdicts = attempt.VerdictDedup(self.pool, os.uname().nodename)
        self._record(
            "supervisor", pid=os.getpid(), node=os.uname().nodename, token=self._token,
            inode=inode, command=list(self.program.arguments), gpus=dict(self.pool),
        )  # fmt: skip
        if self.journal.num_invalid:
            words = f"{self.folder.journal}: {self.journal.num_invalid} lines are not events"
            self._record("trouble", words=f"{words} and are ignored")
        self._adopts_orphans = self._adopts_orphans and processes.adopt_orphans()
        stop_watching = self._watch()
        try:
            with self._signals():
                self._send(self.core.supervisor_started)
                while self._code is None:
                    self._next_event()
            return self._code
        except Exception as error:
            traceback.print_exc()
            return self._stop_after(error)
        finally:
            for stop in stop_watching:
                stop()
            if self._spare is not None:
                self._spare.close()
            self._take_advice(to_the_end=True)
            if self._code is None:  # KeyboardInterrupt, for example: leave no process behind
                self._end("the supervisor failed")
            self._write_summary()
            if self._webhook:
                self._webhook.close()

    def _stop_after(self, error: Exception) -> int:
        """End the training after an internal error, with a checkpoint if it makes one in time."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        words = (
            f"internal error: {type(error).__name__}: {error} "
            f"({Path(where.filename).name}:{where.lineno})"
        )
        self._record("trouble", words=words)
        launch = self._attempt
        if launch is not None:
            with suppress(Exception):
                self.folder.ask("rule", words, fatal=True, stop=True)
            until = time.monotonic() + self.settings.stop_seconds
            while launch.alive() and time.monotonic() < until:
                time.sleep(0.1)
        if left := self._end(words):
            words += f"; {left} processes cannot be ended: end them by hand"
        good = last_checkpoint(self.folder.checkpoints).good
        self._code = CODE_INTERNAL_ERROR
        self._record("over", outcome="failed", words=words, code=self._code, checkpoint=good)
        return self._code

    def _watch(self) -> list[Callable[[], None]]:
        """Start to watch GPUs and the log; returns the functions that stop it."""
        files = VerdictFiles(self.folder.telemetry)
        on_verdict = partial(self._later, self._on_gpu_verdict)
        on_alarm = partial(self._later, self._send, self.core.checkpoint_requested, "alarm")

        def on_problem(words: str) -> None:
            self._later(self._record, "trouble", words=words)

        for verdict in attempt.fresh_verdicts(files, time.time()):
            on_verdict(verdict)
        source = AllSources([files, *self.sources])
        seconds, log = self.settings.poll_seconds, self.watch_log
        stops = [attempt.poll_verdicts(source, on_verdict, on_problem, seconds)]
        if log is not None:
            stops.append(attempt.follow_alarms(log, on_alarm, on_problem, seconds))
        return stops

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def on_signal(number: int, _frame: FrameType | None) -> None:
            if number == SAVING:
                self._later(self._send, self.core.checkpoint_requested, "signal", "SIGUSR1")
            else:
                self._later(self._send, self.core.signal_received, time.monotonic(), number)

        before = {number: signal.signal(number, on_signal) for number in (*ENDING, SAVING)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _next_event(self) -> None:
        """Process the next event; wait at most until the next poll or timer."""
        now = time.monotonic()
        due = min(self._timer_at or now + self.settings.poll_seconds, self._poll_at)
        try:
            handle = self._queue.get(timeout=max(0.0, due - now))
        except Empty:
            handle = None
        now = time.monotonic()
        self._poll_requests()
        if handle is not None:
            handle()
        if now >= self._poll_at:
            self._look(now)
            self._poll_at = now + self.settings.poll_seconds
        if self._timer_at and now >= self._timer_at:
            self._timer_at = 0.0
            self._send(self.core.timer_fired, now)

    def _poll_requests(self) -> None:
        """Record a new request in the run folder; a request to stop is kept."""
        request = self.folder.request()
        if request is None or request.number <= self._last_request:
            return
        self._last_request = request.number
        # A request written while our request to stop is pending inherits its stop flag.
        stop = request.stop and not (self._attempt and self._attempt.stop_number)
        number, source = request.number, request.source
        self._record("request", number=number, source=source, stop=stop, words=request.reason)
        if stop:
            if self._attempt:
                self._attempt.stop_number = number
            self._send(self.core.stop_requested)

    def _later(self, handle: Callable[..., None], *arguments: Any, **more: Any) -> None:
        """Call `handle` in the event loop, from any thread and signal handler."""
        self._queue.put(partial(handle, *arguments, **more))

    def _on_gpu_verdict(self, verdict: GpuVerdict) -> None:
        gpu = self._verdicts.changed(verdict)
        if gpu is None:
            return
        fields: Any = {"gpu": gpu, "level": verdict.level, "action": verdict.action}
        fields["words"] = attempt.words_of(verdict)
        self._record("verdict", **fields)
        self._send(self.core.gpu_verdict, time.monotonic(), **fields)

    def _on_exit(self, number: int, node: str, code: int) -> None:
        launch, now = self._attempt, time.monotonic()
        if launch is None or number != launch.number:
            return
        self._look(now)
        found = launch.exited(node, code)
        if found is not None and self._attempt is launch:
            self._send(self.core.launch_exited, now, **found)

    def _look(self, now: float) -> None:
        """Send the events of the launch since the last poll."""
        launch = self._attempt
        self._take_advice()
        found = launch.look(now) if launch else attempt.Look()
        if found.step_reached is not None:
            self._send(self.core.step_reached, *found.step_reached)
        if found.durable:
            self._send(self.core.checkpoint_durable, now)
        if found.hung is not None:
            self._send(self.core.launch_hung, now, self._looked_at(found.hung))
        if launch and self._spare is not None and (launch.tracker.step or 0) > 0:
            if problem := self._spare.problem():
                self._record("trouble", words=f"{problem}; launches are started without one")
                self._spare = None
            else:
                name = f"{self._token}-{launch.number + 1}"
                self._spare.start(self.program.arguments, name, launch.allocation.per_node)
        for words in self.folder.take_problems():
            self._record("trouble", words=words)
        if launch and self.echo:
            launch.echo()

    def _looked_at(self, failure: LaunchFailure) -> LaunchFailure:
        """The failure of a hang with the rank that the diagnosis of its ranks names."""
        launch, running = self._attempt, self.core.phase == "running"
        if launch is None or not (running and launch.tracker.beats and self._adviser.seconds):
            return failure
        found = self._adviser.of_hang(launch.number)
        self._record(**found)
        rank = found.get("rank")
        if rank in (None, failure.rank) or found["outcome"] != "failed":
            return failure
        words = f"{failure.words}; rank {rank} by the diagnosis of {found['look']}"
        gpu = launch.allocation.gpu_of(rank)
        return replace(failure, words=words, rank=rank, node=gpu[0] if gpu else "", gpu=None)

    def _take_advice(self, *, to_the_end: bool = False) -> None:
        """Record the diagnoses of failures that are made, at the end also those to come."""
        if to_the_end and (self._code is None or self._code > 128):  # nobody may wait
            for process in [*self._adviser.processes.values()]:
                process.kill()
            self._advisers.shutdown(cancel_futures=True)
        while self._advice and (to_the_end or self._advice[0].done()):
            if not (future := self._advice.pop(0)).cancelled():
                self._record(**future.result())

    def _send(self, event: Callable[..., list[core.Action]], *arguments: Any, **more: Any) -> None:
        """Carry out the actions that answer an event of the core."""
        before = self.core.restarts
        for action in event(*arguments, **more):
            self._act(action)
        if before and not self.core.restarts:
            self._record("enough progress", step=self.core.best_step)

    def _act(self, action: core.Action) -> None:
        match action:
            case core.StartLaunch():
                self._launch(action)
            case core.RequestCheckpoint():
                self._ask(action)
            case core.EndProcesses():
                self._end(action.why, answers=action.answers)
            case core.SetTimer():
                self._timer_at = action.time
            case core.DropGpus():
                self._record("dropped", gpus=action.gpus, words=action.why)
            case core.WriteJournal():
                self._write_journal(action)
            case core.Finish():
                good = last_checkpoint(self.folder.checkpoints).good
                beats = self.folder.beats(f"{self._token}-{self.core.launches}").values()
                step = max((beat.step for beat in beats), default=None)
                self._record("over", **action._asdict(), checkpoint=good, step=step)
                self._code = action.code

    def _write_journal(self, note: core.WriteJournal) -> None:
        fields: dict[str, Any] = {"words": note.words}
        if note.seconds is not None:
            fields["seconds"] = round(note.seconds, 3)
        if note.failure is not None and self._attempt is not None:
            self._attempt.progress(time.monotonic())
            fields |= self._attempt.failure_fields(note.failure)
            if note.failure.kind not in ("hang", "gpu") and self._adviser.seconds:
                ask = self._advisers.submit(self._adviser.of_failure, self._attempt.number)
                self._advice.append(ask)
        self._record(note.event, **fields)

    def _launch(self, action: core.StartLaunch) -> None:
        self._timer_at = 0.0
        try:
            self._attempt = attempt.Attempt(
                action, f"{self._token}-{action.number}", self.program, self.folder, self.settings,
                write=self._record, on_exit=partial(self._later, self._on_exit),
                now=time.monotonic(), spare=self._spare,
            )  # fmt: skip
        except OSError as error:  # a full disk, for example
            words = with_disk_full_first(f"it cannot be started: {error}")
            failure, now = LaunchFailure(kind="exit", words=words), time.monotonic()
            self._later(self._send, self.core.launch_exited, now, failure=failure)

    def _ask(self, action: core.RequestCheckpoint) -> None:
        try:
            number = self.folder.ask(**action._asdict())
        except OSError as error:
            self._record("trouble", words=f"the request cannot be written: {error}")
            return
        self._last_request = number
        self._record("asked", number=number, **action._asdict())
        if action.stop and self._attempt is not None:
            self._attempt.stop_number = number

    def _end(self, why: str, *, answers: bool = True) -> int:
        """End every process of every launch of this folder; the number that cannot be ended."""
        launch, self._attempt = self._attempt, None
        also: list[int] = []
        grace = self.settings.grace_seconds
        if launch is not None:
            also = launch.alive()
            try:
                launch.look(time.monotonic())
                launch.progress(time.monotonic())
            except Exception as error:  # the processes must end, whatever their files contain
                self._record("trouble", words=f"last state unknown: {error!r}")
            if not answers and not launch.saves:
                grace = min(grace, QUICK_GRACE)
        if self._adopts_orphans:
            also += processes.children()
        keep = [*(self._spare.pids if self._spare else []), *self._adviser.processes]
        ending = processes.end_everywhere(
            self._token, self.program, grace=grace, also=set(also) - set(keep), keep=keep
        )
        if self._adopts_orphans:
            processes.reap()
        self._record("ended", words=why, **asdict(ending))
        self._write_summary()
        more = {"left": ending.left, "unreachable": ending.unreachable}
        self._later(self._send, self.core.processes_ended, time.monotonic(), **more)
        return ending.left

    def _record(self, event: str, **fields: Any) -> None:
        try:
            line = self.journal.write(event, **fields)
        except OSError as error:
            self._print_line(f"the journal cannot be written: {error}")
            line = self.journal.lines[-1]
        if words := journal.console_line(line, self._unit):
            self._print_line(words)
            if self._webhook and event in POSTED:
                self._webhook.post({"text": f"{self.folder.path.name}: {words}"})

    def _write_summary(self) -> None:
        try:
            summary = summarise(self.journal.lines)
            write_atomically(self.folder.summary, [to_markdown(summary).encode()])
            text = json.dumps(asdict(summary), indent=1) + "\n"
            write_atomically(self.folder.summary.with_suffix(".json"), [text.encode()])
        except Exception as error:  # a bad journal must not stop the training
            self._print_line(f"the summary cannot be written: {error}")


def _print_to_stderr(line: str) -> None:
    with suppress(OSError):  # a closed terminal must not stop the training
        print(line, file=sys.stderr, flush=True)
