"""Sources of checkpoint requests: signals, other threads, the run folder, GPU telemetry.

A signal is recorded by its handler and processed at the end of a step.
"""

from __future__ import annotations

import logging
import queue
import signal
from collections.abc import Callable, Iterable, Mapping
from math import inf
from types import FrameType
from typing import Any

from rmetric._util.open_alarms import OpenAlarms
from rmetric.guard.policy import SOURCES, CheckpointPolicy
from rmetric.guard.run_folder import RunFolder
from rmetric.telemetry.sources import VerdictSource

logger = logging.getLogger("rmetric")

#: Least time between two polls of the run folder and the telemetry, seconds.
POLL_SECONDS = 1.0
STOP, SAVE = "stop", "save"
#: SIGTERM is what SLURM, Kubernetes and torchrun send before they kill.
SIGNALS: Mapping[int, str] = {signal.SIGTERM: STOP, signal.SIGUSR1: SAVE}


class SignalListener:
    """Records received signals; a handler that was there before is not called until `close`."""

    def __init__(self, signals: Mapping[int, str]) -> None:
        wrong = set(signals.values()) - {STOP, SAVE}
        if wrong:
            raise ValueError(f"signals has {sorted(wrong)}: {STOP!r} and {SAVE!r} are accepted")
        self._meaning, self._received = dict(signals), set[int]()
        self._previous: dict[int, Any] = {}
        for number in signals:
            try:
                before = self._previous[number] = signal.signal(number, self._receive)
                if callable(before):
                    name, of = signal.Signals(number).name, getattr(before, "__qualname__", before)
                    logger.warning("rmetric: the guard handles %s instead of %s", name, of)
            except ValueError:
                logger.error("rmetric: signals can only be handled in the main thread")
                break

    def take(self) -> list[tuple[int, str]]:
        """Signals received since the last call: number and meaning."""
        numbers, self._received = self._received, set()
        return [(number, self._meaning[number]) for number in sorted(numbers)]

    def close(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._receive:  # else it was replaced since
                # None: the previous handler is not Python's, and Python cannot restore it.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.add(number)


class RequestSources:
    """Collects checkpoint requests of one rank, forwards them to its policy, holds its alarms.

    Arguments as of `Guard`; `folder` is None on all ranks but rank 0. `deadline` is the clock
    time at which the grace period ends; inf without a stop signal.
    """

    def __init__(
        self,
        *,
        signals: Mapping[int, str],
        folder: RunFolder | None,
        telemetry: VerdictSource | None,
        grace_seconds: float,
        alarm_steps: int,
        clock: Callable[[], float],
    ) -> None:
        self.deadline = inf
        self._folder, self._telemetry = folder, telemetry
        self._grace, self._clock = grace_seconds, clock
        self._queued: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.alarms = OpenAlarms(alarm_steps)
        self._newest = 0
        self._polled_at = -inf
        self._source_failed = False
        self._numbers: dict[int, int] = {}  # number of the policy -> number in the folder
        self.listener = SignalListener(signals)

    def ask(self, **request: Any) -> None:
        """Queue a request, from any thread, as of `Guard.request`; `ends` as of `clear_alarm`."""
        self._queued.put(request)

    def forward(self, policy: CheckpointPolicy, step: int) -> None:
        """Forward every request since the last call to the policy, after `step`."""
        now = self._clock()
        for number, meaning in self.listener.take():
            name, stops = signal.Signals(number).name, meaning == STOP
            if stops:
                self.deadline = min(self.deadline, now + self._grace)
            self._request(policy, "signal", name, key=name, fatal=stops, final=stops)
        while not self._queued.empty():
            self._take(policy, step, self._queued.get())
        if now - self._polled_at >= POLL_SECONDS:
            self._polled_at = now
            self._read_folder(policy)
            self._read_telemetry(policy)

    def in_folder(self, numbers: Iterable[int]) -> int:
        """Greatest run-folder number among these requests of the policy; 0 for none."""
        return max((self._numbers.get(number, 0) for number in numbers), default=0)

    def forget(self) -> None:
        """Reset for a new policy, which receives what is pending in the folder."""
        self._newest, self._numbers = 0, {}
        self.alarms.end()

    def _take(self, policy: CheckpointPolicy, step: int, queued: dict[str, Any]) -> None:
        if "ends" in queued:
            self.alarms.end(queued["ends"])
            return
        since, lasts = queued.pop("since", None), queued.pop("lasts", False)
        if since is not None:
            key = queued.get("key") or queued["source"]
            self.alarms.open(key, since, queued["reason"], step=step, lasts=lasts)
        self._request(policy, **queued)

    def _request(
        self, policy: CheckpointPolicy, source: str, reason: str, **more: Any
    ) -> int | None:
        number = policy.request(source, reason, **more)
        if number is not None and number > self._newest:
            self._newest = number
            logger.warning("rmetric: checkpoint requested by %s: %s", source, reason)
        return number

    def _read_folder(self, policy: CheckpointPolicy) -> None:
        if self._folder is None or (request := self._folder.request()) is None:
            return
        if request.number <= max(self._folder.answered(), *self._numbers.values(), 0):
            return
        source = request.source if request.source in SOURCES else "user"
        key = f"request {request.number}"
        number = self._request(
            policy, source, request.reason, fatal=request.fatal, final=request.stop, key=key
        )
        if number is not None:
            self._numbers[number] = request.number

    def _read_telemetry(self, policy: CheckpointPolicy) -> None:
        if self._telemetry is None:
            return
        try:
            self._telemetry.poll()
            for verdict in self._telemetry.verdicts().values():
                if verdict.level != "healthy":
                    fatal, key = verdict.level == "fatal", f"GPU {verdict.key}"
                    words = f"{key}: {'; '.join(verdict.reasons) or verdict.level}"
                    self._request(policy, "rule" if fatal else "risk", words, fatal=fatal, key=key)
            self._source_failed = False
        except Exception as error:  # a driver reload, for example
            if not self._source_failed:
                logger.error("rmetric: GPU telemetry failed: %s: %s", type(error).__name__, error)
            self._source_failed = True
