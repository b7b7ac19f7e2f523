"""Process signals that request a checkpoint: recorded by the handler, processed at a step."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from types import FrameType
from typing import Any

logger = logging.getLogger("rmetric")

STOP, SAVE = "stop", "save"
#: SIGTERM is what SLURM, Kubernetes and torchrun send before they kill.
SIGNALS: Mapping[int, str] = {signal.SIGTERM: STOP, signal.SIGUSR1: SAVE}


class SignalListener:
    """Records received signals and does nothing else inside the handler.

    A handler that was installed before is not called until `close`; a warning is logged.
    """

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
