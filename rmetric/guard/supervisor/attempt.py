"""One launch, from its start to its end, and what is seen of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from rmetric._util.standard_output import OutputError
from rmetric.guard.checkpoint_dir import last_checkpoint
from rmetric.guard.run_folder import RunFolder
from rmetric.guard.supervisor import diagnosis
from rmetric.guard.supervisor.events import (
    Durable,
    Event,
    Exited,
    Failure,
    Hung,
    Launch,
    Stepped,
)
from rmetric.guard.supervisor.launch import Program, Running
from rmetric.guard.supervisor.watch import Patience, Pulse

#: Writes a line of the journal: the event, and what else there is to say.
Write = Callable[..., Any]


class Attempt:
    """Starts a launch when it is made; `look` and `exited` say what has become of it.

    Args:
        launch: what the core asks for.
        token: names the launch.
        program, folder, patience: see `Supervisor`.
        write: notes a line in the journal.
        exited: called, from another thread, with number, node and code of each exit.
        progress_seconds: between two lines of progress.
        now: seconds, on the supervisor's clock.
    """

    def __init__(
        self,
        launch: Launch,
        token: str,
        program: Program,
        folder: RunFolder,
        patience: Patience,
        *,
        write: Write,
        exited: Callable[[int, str, int], None],
        progress_seconds: float,
        now: float,
    ) -> None:
        self.number, self.allocation, self.folder = launch.number, launch.allocation, folder
        self.token, self._write, self._every = token, write, progress_seconds
        folder.withdraw()
        folder.set_layout(self.allocation.layout)
        request = folder.request()
        self._request_before = request.number if request else 0
        self._answered = folder.answered()
        self._stop_number: int | None = None
        self._launcher = program.is_torchrun
        self._checkpoint = last_checkpoint(folder.checkpoints)
        self._noted_step: int | None = None
        self._problem = ""
        self._progress_at, self._echoed = 0.0, 0
        self._codes: dict[str, int] = {}
        # Written before it is started: whoever comes after a crash knows what to look for.
        write(
            "launch", launch=self.number, token=token, gpus=dict(self.allocation.gpus),
            layout=self.allocation.layout.as_json(), words=str(self.allocation),
        )  # fmt: skip
        self.running = Running(self.number, token, self.allocation, program, folder, exited)
        self.pulse = Pulse(patience, self.allocation, self.running.log, now)
        write("started", launch=self.number, pids=self.running.pids)

    def look(self, now: float) -> list[Event]:
        """What the heartbeats, the answers and the output say."""
        events: list[Event] = []
        resumed, step = self.pulse.resumed, self.pulse.step
        failure = self.pulse.look(self.folder.beats(self.token), now)
        if resumed is None and self.pulse.resumed is not None:
            resumed = self._noted_step = self.pulse.resumed
            self._progress_at = now + self._every
            self._write(
                "resumed", launch=self.number, step=resumed, at=self.pulse.resumed_at,
                passed_over=self._passed_over(resumed),
            )  # fmt: skip
        if self.pulse.step is not None and self.pulse.step != step and resumed is not None:
            if now >= self._progress_at:
                self.progress(now)
            events.append(Stepped(time=now, step=self.pulse.step, resumed=resumed))
        events += self._answers(now)
        self._note_problem()
        if failure is not None:
            events.append(Hung(time=now, failure=failure))
        return events

    def progress(self, now: float) -> None:
        """Note the step, if it is another than before."""
        self._progress_at = now + self._every
        if self.pulse.step is not None and self.pulse.step != self._noted_step:
            self._noted_step = self.pulse.step
            self._write("progress", launch=self.number, step=self.pulse.step, at=self.pulse.step_at)

    @property
    def stops(self) -> bool:
        """Whether a request to stop waits for its answer."""
        return self._stop_number is not None

    def stops_at(self, number: int) -> None:
        """The answer to this request is waited for."""
        self._stop_number = number

    def exited(self, node: str, code: int, now: float) -> Exited | None:
        """What it means that the process of a node has ended; None while others run on well."""
        self._codes[node] = code
        if code:
            return Exited(time=now, failure=self._why(node, code))
        if len(self._codes) < len(self.allocation.gpus):
            return None
        phases = [beat.phase for beat in self.pulse.beats.values()]
        finished = bool(phases) and all(phase == "finished" for phase in phases)
        early = bool(phases) and not finished
        return Exited(time=now, stopped=self._was_asked() and not finished, early=early)

    def told(self, failure: Failure) -> dict[str, Any]:
        """What the journal says of a failure beside its words."""
        return {
            "kind": failure.kind, "code": failure.code, "rank": failure.rank,
            "node": failure.node, "gpu": failure.gpu,
            "launch": self.number, "last_sign": self.pulse.last_sign,
            "checkpoint": last_checkpoint(self.folder.checkpoints).good,
        }  # fmt: skip

    def echo(self) -> None:
        """Show what it has printed since the last time."""
        # A pipe that is closed is not worth a training.
        with contextlib.suppress(OSError, OutputError):
            with open(self.running.log, "rb") as file:
                file.seek(self._echoed)
                data = file.read()
            self._echoed += len(data)
            sys.stdout.write(data.decode("utf-8", "replace"))
            sys.stdout.flush()

    def _answers(self, now: float) -> list[Event]:
        answered = self.folder.answered()
        if answered <= self._answered:
            return []
        self._answered = answered
        self._write("answered", number=answered, step=self.folder.answered_step())
        if self._stop_number is None or answered < self._stop_number:
            return []
        self._stop_number = None
        return [Durable(time=now)]

    def _passed_over(self, resumed: int) -> int | None:
        """The newest checkpoint that was there, if it came back at an earlier one."""
        step = self._checkpoint.there
        return step if step is not None and step > resumed else None

    def _note_problem(self) -> None:
        """Say when saves begin to fail, and when one is good again."""
        said = [beat.problem for beat in self.pulse.beats.values() if beat.problem]
        problem = said[0] if said else ""
        if problem != self._problem:
            self._problem = problem
            self._write("not saved" if problem else "saved again", words=problem)

    def _was_asked(self) -> bool:
        """Whether somebody has asked this launch to stop."""
        request = self.folder.request()
        return request is not None and request.stop and request.number > self._request_before

    def _why(self, node: str, code: int) -> Failure:
        return diagnosis.of_exit(
            code,
            node=node,
            allocation=self.allocation,
            log=diagnosis.tail(self.running.log),
            error_file=self.running.error_files.get(node),
            beats=self.pulse.beats,
            launcher=self._launcher,
        )
