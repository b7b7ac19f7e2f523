"""Injected failures, each once per run folder, so that a restarted run continues.

``kill@30:1`` is a SIGKILL of rank 1 instead of its step 30. A file ``injected/kill@30:1.json``
records that it was injected. Needs no torch.
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
    """One injected failure.

    Attributes:
        kind: kill (SIGKILL), exception, hang (sleeps for ever), slow (sleeps for
            `SLOW_SECONDS`) or nan (in this rank's part of the gradient).
        step: step that it replaces, or that slow and nan affect.
    """

    kind: str
    step: int
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}:{self.rank}"

    @classmethod
    def parsed(cls, text: str) -> Injection:
        """Parse KIND@STEP[:RANK]. Raises ValueError for other input."""
        found = re.fullmatch(rf"({'|'.join(KINDS)})@([1-9][0-9]*)(?::([0-9]+))?", text)
        if not found:
            raise ValueError(
                f"--inject is {text!r}: KIND@STEP[:RANK] is accepted, with a step from 1 and a "
                f"kind of {', '.join(KINDS)}"
            )
        kind, step, rank = found.groups()
        return cls(kind=kind, step=int(step), rank=int(rank or 0))


class Injector:
    """Injects the failures of this rank, of those of all ranks, into a run folder."""

    def __init__(self, folder: Path, injections: tuple[Injection, ...], rank: int) -> None:
        self._folder = folder / FOLDER
        self._own = [one for one in injections if one.rank == rank]

    def before(self, step: int) -> None:
        """Inject the failures that replace a step or precede it."""
        if self._due("kill", step):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._due("exception", step):
            raise InjectedError(f"injected at step {step}")
        if self._due("slow", step):
            time.sleep(SLOW_SECONDS)
        if self._due("hang", step):
            while True:
                time.sleep(3600.0)

    def corrupts_gradient(self, step: int) -> bool:
        """A nan is injected into the gradient of this step."""
        return self._due("nan", step)

    def _due(self, kind: str, step: int) -> bool:
        """An injection of this kind is due; it is recorded so that it happens once."""
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
