"""Whoever may ask for a checkpoint: signals, any thread, the run folder, the GPUs."""

from __future__ import annotations

import logging
import queue
import signal
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any

from rmetric.guard.policy import SOURCES, CheckpointPolicy
from rmetric.guard.process_signals import STOP, Ears
from rmetric.guard.run_folder import RunFolder
from rmetric.telemetry.sources import VerdictSource

logger = logging.getLogger("rmetric")

#: Seconds between two looks at the folder and the GPUs, at least.
LOOK_EVERY = 1.0


class Askers:
    """Turns what they ask for into requests of the policy, when it is told to; one a rank.

    Args:
        signals, telemetry, clock: as of `Guard`.
        folder: where requests are read; None for none, as on all ranks but one.
        grace_seconds: from the boundary at which a signal that ends the training is heard.

    Attributes:
        ends_at: by the clock, when that time is over; inf where no such signal came.
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
        self.ends_at = inf
        self._folder, self._telemetry = folder, telemetry
        self._grace, self._clock = grace_seconds, clock
        self._asked: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._newest, self._looked_at, self._deaf = 0, -inf, False
        self._numbers: dict[int, int] = {}  # of the policy's request -> of the folder's
        self._ears = Ears(signals)

    def ask(self, **request: Any) -> None:
        """From any thread; arguments as of `CheckpointPolicy.request`."""
        self._asked.put(request)

    def heard(self, policy: CheckpointPolicy) -> None:
        """All that was asked for since the last time becomes requests of the policy."""
        now = self._clock()
        for number, meaning in self._ears.heard():
            name, stops = signal.Signals(number).name, meaning == STOP
            if stops:
                self.ends_at = min(self.ends_at, now + self._grace)
            self._ask(policy, "signal", name, key=name, fatal=stops, final=stops)
        while not self._asked.empty():
            self._ask(policy, **self._asked.get())
        if now - self._looked_at >= LOOK_EVERY:
            self._looked_at = now
            self._read_folder(policy)
            self._read_telemetry(policy)

    def in_folder(self, numbers: Iterable[int]) -> int:
        """Of these requests of the policy, the last that came from the folder, by its number
        there; 0 for none."""
        return max((self._numbers.get(number, 0) for number in numbers), default=0)

    def forget(self) -> None:
        """Another policy begins: what waits in the folder is for it."""
        self._newest, self._numbers = 0, {}

    def close(self) -> None:
        """Give the signals back."""
        self._ears.close()

    def _ask(self, policy: CheckpointPolicy, source: str, reason: str, **more: Any) -> int | None:
        number = policy.request(source, reason, now=self._clock(), **more)
        if number is not None and number > self._newest:
            self._newest = number
            logger.warning("rmetric: a checkpoint is asked for by %s: %s", source, reason)
        return number

    def _read_folder(self, policy: CheckpointPolicy) -> None:
        asked = self._folder.request() if self._folder else None
        if self._folder is None or asked is None:
            return
        if asked.number <= max(self._folder.answered(), *self._numbers.values(), 0):
            return
        number = self._ask(
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
            self._telemetry.poll()  # what it heard is judged when it is asked
            for verdict in self._telemetry.verdicts().values():
                if verdict.level != "healthy":
                    fatal, key = verdict.level == "fatal", f"GPU {verdict.key}"
                    words = f"{key}: {'; '.join(verdict.reasons) or verdict.level}"
                    self._ask(policy, "rule" if fatal else "risk", words, fatal=fatal, key=key)
            self._deaf = False
        except Exception as error:  # a driver that is loaded anew, for example
            if not self._deaf:
                logger.error("rmetric: no verdicts on GPUs: %s: %s", type(error).__name__, error)
            self._deaf = True
