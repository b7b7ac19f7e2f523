"""Checkpoint directory: commit, retention and removal of checkpoints. No torch here."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rmetric._util.durable import sync_folder
from rmetric.guard.manifest import (
    FINAL_NAME,
    MANIFEST_NAME,
    NOT_FINITE,
    PART,
    CheckpointManifest,
    candidates,
    differences,
    read_manifest,
    remove,
    take_name,
    write_manifest,
)


class CheckpointDirectory:
    """Commits, retains and deletes checkpoints. Rank 0 only, except `differs`.

    Args:
        folder: directory of the checkpoints.
        keep: good checkpoints of this model to retain, at least 1.
        fingerprint: identifies the model; see `Checkpoints`.

    Attributes:
        damaged: paths of checkpoints found damaged; they are deleted first.
    """

    def __init__(self, folder: Path, *, keep: int, fingerprint: Any) -> None:
        self.folder = folder
        self.keep = keep
        self.fingerprint = fingerprint
        self.damaged: set[Path] = set()

    def make(self, launch: str) -> None:
        """Create the folder if it is missing. Raises OSError if it is not writable."""
        self.folder.mkdir(parents=True, exist_ok=True)
        probe = self.folder / f".writable-{launch}{PART}"
        probe.touch()
        probe.unlink()

    def clear(self) -> None:
        """Delete leftovers of killed saves; called before the first save, never by a reader."""
        with contextlib.suppress(OSError):
            for left in self.folder.glob(f"*{PART}"):
                shutil.rmtree(left, ignore_errors=True)

    def differs(self, good: CheckpointManifest) -> str:
        """Differences between the checkpoint's model and this one; empty if there are none."""
        return differences(good.fingerprint, self.fingerprint)

    def commit(self, part: Path, step: int, **entry: Any) -> CheckpointManifest:
        """Rename `part` to `step-N` as the newest good checkpoint and delete surplus ones.

        Args:
            part: folder of the written files.
            step: last completed step.
            entry: further fields of the manifest.

        Raises:
            FileExistsError: a checkpoint of another model has the name.
            OSError: the folder cannot be written.
        """
        older, _ = candidates(self.folder)
        final = self.folder / f"step-{step}"
        for other in older:
            if other.path == final and self.differs(other):
                raise FileExistsError(f"{final} is of another model: {self.differs(other)}")
        serial = max((each.serial for each in older), default=0) + 1
        entry |= {"step": step, "serial": serial, "fingerprint": self.fingerprint}
        write_manifest(part, entry)
        take_name(part, final)
        self.damaged.discard(final)
        self._tidy(final, older)
        return read_manifest(final)

    def put_aside(self, part: Path, step: int) -> Path:
        """Keep a non-finite checkpoint for inspection in place of an earlier one; its path."""
        kept = self.folder / f"step-{step}{NOT_FINITE}"
        for other in self.folder.glob(f"step-*{NOT_FINITE}"):
            remove(other)
        part.replace(kept)
        sync_folder(self.folder)
        return kept

    def _tidy(self, newest: Path, older: list[CheckpointManifest]) -> None:
        others = [
            each
            for each in older
            if each.path != newest and each.path.exists() and not self.differs(each)
        ]
        others.sort(key=lambda each: each.path in self.damaged)  # newest first, damaged last
        for each in others[self.keep - 1 :]:
            with contextlib.suppress(OSError):  # only disk space is lost
                remove(each.path)


@dataclass(frozen=True, kw_only=True)
class LastCheckpoint:
    """Newest checkpoints of a folder, by step; None without one, or in a foreign format.

    Attributes:
        good: newest with a readable manifest.
        there: newest, also if its manifest cannot be read.
    """

    good: int | None = None
    there: int | None = None


def last_checkpoint(folder: Path) -> LastCheckpoint:
    """Newest checkpoints in a folder by name and manifest; files are not verified.

    Args:
        folder: checkpoint directory; an unreadable one counts as empty.
    """
    try:
        found, _ = candidates(folder)
        readable = {each.path for each in found}
        unreadable = [
            int(match[1])
            for path in folder.glob(f"*/{MANIFEST_NAME}")
            if (match := FINAL_NAME.fullmatch(path.parent.name)) and path.parent not in readable
        ]
    except OSError:
        return LastCheckpoint()
    good = found[0].step if found else None
    return LastCheckpoint(
        good=good, there=max([*unreadable, *([] if good is None else [good])], default=None)
    )
