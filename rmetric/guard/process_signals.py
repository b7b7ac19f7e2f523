"""Signals, noted when they come and looked at when there is time."""

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


class Ears:
    """Notes signals, and nothing else while one is handled; until it is closed, a handler
    that was there before is not called, and that is said."""

    def __init__(self, signals: Mapping[int, str]) -> None:
        wrong = set(signals.values()) - {STOP, SAVE}
        if wrong:
            raise ValueError(f"signals has {sorted(wrong)}: {STOP!r} and {SAVE!r} are accepted")
        self._meaning, self._heard = dict(signals), set[int]()
        self._before: dict[int, Any] = {}
        for number in signals:
            try:
                before = self._before[number] = signal.signal(number, self._hear)
                if callable(before):
                    name, of = signal.Signals(number).name, getattr(before, "__qualname__", before)
                    logger.warning("rmetric: the guard hears %s, not %s, until it ends", name, of)
            except ValueError:
                logger.error("rmetric: signals are not heard outside of the main thread")
                break

    def heard(self) -> list[tuple[int, str]]:
        """Those since the last time."""
        numbers, self._heard = self._heard, set()
        return [(number, self._meaning[number]) for number in sorted(numbers)]

    def close(self) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._hear:  # else somebody hears in turn
                # None: what was there is not Python's, and Python cannot put it back.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard.add(number)
