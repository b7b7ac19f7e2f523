"""The folder of one model's checkpoints, as one process alone changes it. No torch here."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

from rmetric._util.durable import sync_folder
from rmetric.guard.good import (
    NOT_FINITE,
    PART,
    Good,
    candidates,
    differences,
    read_good,
    remove,
    take_name,
    write_good,
)


class Shelf:
    """What goes up, what stays and what is thrown away; called by rank 0, but for `differs`.

    Args:
        folder: for the checkpoints.
        keep, fingerprint: as of `Checkpoints`.

    Attributes:
        damaged: paths of those that were found so; they are the first to go.
    """

    def __init__(self, folder: Path, *, keep: int, fingerprint: Any) -> None:
        self.folder, self.keep, self.fingerprint = folder, keep, fingerprint
        self.damaged: set[Path] = set()

    def make(self, launch: str) -> None:
        """Make the folder, if it is missing; raises OSError where nothing can be written there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        probe = self.folder / f".writable-{launch}{PART}"
        probe.touch()
        probe.unlink()

    def clear(self) -> None:
        """What killed saves left goes before the first save: who only reads leaves it alone."""
        with contextlib.suppress(OSError):
            for left in self.folder.glob(f"*{PART}"):
                shutil.rmtree(left, ignore_errors=True)

    def differs(self, good: Good) -> str:
        """What this model is another in; empty where it is the same."""
        return differences(good.fingerprint, self.fingerprint)

    def commit(self, part: Path, step: int, **entry: Any) -> Good:
        """Make what lies in `part` the newest good one, under its name; older ones may go.

        Raises OSError; FileExistsError where another model's has the name.
        """
        older, _ = candidates(self.folder)
        final = self.folder / f"step-{step}"
        for other in older:
            if other.path == final and self.differs(other):
                raise FileExistsError(f"{final} is of another model: {self.differs(other)}")
        serial = max((one.serial for one in older), default=0) + 1
        entry |= {"step": step, "serial": serial, "fingerprint": self.fingerprint}
        write_good(part, entry)
        take_name(part, final)
        self.damaged.discard(final)
        self._tidy(final, older)
        return read_good(final)

    def put_aside(self, part: Path, step: int) -> Path:
        """Keep what is not finite to be looked at, in the place of any before; where it lies."""
        kept = self.folder / f"step-{step}{NOT_FINITE}"
        for other in self.folder.glob(f"step-*{NOT_FINITE}"):
            remove(other)
        part.replace(kept)
        sync_folder(self.folder)
        return kept

    def _tidy(self, newest: Path, older: list[Good]) -> None:
        others = [
            one
            for one in older
            if one.path != newest and one.path.exists() and not self.differs(one)
        ]
        others.sort(key=lambda one: one.path in self.damaged)  # the newest first, but for these
        for one in others[self.keep - 1 :]:
            with contextlib.suppress(OSError):  # it is only room that is lost
                remove(one.path)
