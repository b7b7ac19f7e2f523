"""Sources of checkpoint requests: signals, other threads, the run folder, GPU telemetry."""

from __future__ import annotations

import logging
import queue
import signal
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any

from rmetric.guard.policy import SOURCES, CheckpointPolicy
from rmetric.guard.process_signals import STOP, SignalListener
from rmetric.guard.run_folder import RunFolder
from rmetric.telemetry.sources import VerdictSource

logger = logging.getLogger("rmetric")

#: Least time between two polls of the run folder and the telemetry, seconds.
POLL_SECONDS = 1.0


class RequestSources:
    """Collects checkpoint requests of one rank and forwards them to its policy.

    Args:
        signals: signal number -> ``"stop"`` or ``"save"``.
        folder: run folder whose requests are read; None on all ranks but rank 0.
        telemetry: GPU verdicts of this rank's node; None for none.
        grace_seconds: time to stop after the step at which a stop signal was processed.
        clock: current time, seconds.

    Attributes:
        deadline: clock time at which the grace period ends; inf without a stop signal.
    """

    def __init__(
        self,
        *,
        signals: Mapping[int, str],
        folder: RunFolder | None,
        telemetry: VerdictSource | None,
        grace_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.deadline = inf
        self._folder, self._telemetry = folder, telemetry
        self._grace, self._clock = grace_seconds, clock
        self._queued: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._newest = 0
        self._polled_at = -inf
        self._source_failed = False
        self._numbers: dict[int, int] = {}  # number of the policy -> number in the folder
        self._listener = SignalListener(signals)

    def ask(self, **request: Any) -> None:
        """Queue a request, from any thread; arguments as of `CheckpointPolicy.request`."""
        self._queued.put(request)

    def forward(self, policy: CheckpointPolicy) -> None:
        """Forward every request since the last call to the policy."""
        now = self._clock()
        for number, meaning in self._listener.take():
            name, stops = signal.Signals(number).name, meaning == STOP
            if stops:
                self.deadline = min(self.deadline, now + self._grace)
            self._request(policy, "signal", name, key=name, fatal=stops, final=stops)
        while not self._queued.empty():
            self._request(policy, **self._queued.get())
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

    def close(self) -> None:
        """Restore the signal handlers."""
        self._listener.close()

    def _request(
        self, policy: CheckpointPolicy, source: str, reason: str, **more: Any
    ) -> int | None:
        number = policy.request(source, reason, now=self._clock(), **more)
        if number is not None and number > self._newest:
            self._newest = number
            logger.warning("rmetric: checkpoint requested by %s: %s", source, reason)
        return number

    def _read_folder(self, policy: CheckpointPolicy) -> None:
        asked = self._folder.request() if self._folder else None
        if self._folder is None or asked is None:
            return
        if asked.number <= max(self._folder.answered(), *self._numbers.values(), 0):
            return
        number = self._request(
            policy,
            asked.source if asked.source in SOURCES else "user",
            asked.reason,
            fatal=asked.fatal,
            final=asked.stop,
            key=f"request {asked.number}",
        )
        if number is not None:
            self._numbers[number] = asked.number

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
