"""Failures on purpose, each once in a run folder: a run that is started again goes on.

``kill@30:1`` is a SIGKILL of rank 1 in place of its step 30. A file ``injected/kill@30:1.json``
says that it happened. Needs no torch.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rmetric.guard.run_folder import LAUNCH_VARIABLE

KINDS = ("kill", "exception", "hang", "slow", "nan")
SLOW_SECONDS = 3.0
FOLDER = "injected"


class InjectedError(RuntimeError):
    """Raised for ``exception``."""


@dataclass(frozen=True, kw_only=True)
class Injection:
    """One failure.

    Attributes:
        kind: kill (SIGKILL), exception, hang (sleeps for ever), slow (sleeps for
            `SLOW_SECONDS`) or nan (in this rank's part of the gradient).
        step: which it takes the place of, or, of slow and nan, befalls.
        rank: to which it happens.
    """

    kind: str
    step: int
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}:{self.rank}"

    @classmethod
    def parsed(cls, text: str) -> Injection:
        """Raises ValueError for what is none."""
        found = re.fullmatch(rf"({'|'.join(KINDS)})@([1-9][0-9]*)(?::([0-9]+))?", text)
        if not found:
            raise ValueError(
                f"--inject is {text!r}: KIND@STEP[:RANK] is accepted, with a step from 1 and a "
                f"kind of {', '.join(KINDS)}"
            )
        kind, step, rank = found.groups()
        return cls(kind=kind, step=int(step), rank=int(rank or 0))


class Injector:
    """What is to happen to this rank.

    Args:
        folder: of the run.
        injections: those of all ranks.
        rank: of this process.
    """

    def __init__(self, folder: Path, injections: tuple[Injection, ...], rank: int) -> None:
        self._folder = folder / FOLDER
        self._own = [one for one in injections if one.rank == rank]

    def before(self, step: int) -> None:
        """Whatever strikes in place of a step, or before it."""
        if self._strikes("kill", step):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._strikes("exception", step):
            raise InjectedError(f"injected at step {step}")
        if self._strikes("slow", step):
            time.sleep(SLOW_SECONDS)
        if self._strikes("hang", step):
            while True:
                time.sleep(3600.0)

    def spoils_gradient(self, step: int) -> bool:
        return self._strikes("nan", step)

    def _strikes(self, kind: str, step: int) -> bool:
        """Whether it is to happen now; if so that is noted, for good."""
        return any(self._noted(one) for one in self._own if (one.kind, one.step) == (kind, step))

    def _noted(self, injection: Injection) -> bool:
        entry: dict[str, Any] = {
            **asdict(injection),
            "pid": os.getpid(),
            "launch": os.environ.get(LAUNCH_VARIABLE, ""),
            "time": time.time(),
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            with open(self._folder / f"{injection}.json", "x") as file:
                file.write(json.dumps(entry))
        except FileExistsError:
            return False
        print(f"injected: {injection}", file=sys.stderr, flush=True)
        return True
