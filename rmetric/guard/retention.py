"""Retention of checkpoints: which are suspect, and which are surplus. No torch here.

An alarm makes suspect what was saved from its onset on. A suspect checkpoint never takes the
place of a clean one: each kind has a quota of its own. The last clean one before a suspect stays
as long as the suspect does, so that an alarm which ends too early costs nothing.

The rule also holds for the Hugging Face Trainer's checkpoints, where a suspect one has a file
`rmetric_suspect.json` with ``since`` and ``reason``.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from rmetric._util.durable import write_atomically
from rmetric.guard.run_folder import decode_file


@dataclass(frozen=True, kw_only=True)
class SuspectMark:
    """Mark of a checkpoint that was saved during an alarm, of which `reason` is the text.

    `since`: first step whose state is suspect, the onset of the alarm.
    """

    since: int
    reason: str

    def __str__(self) -> str:
        return f"suspect since step {self.since} ({self.reason})"


def suspect_note(suspect: SuspectMark, clean: Path | None) -> str:
    """What to know of a suspect checkpoint; `clean` is the newest clean one."""
    which = f"the newest clean one is {clean}" if clean else "there is no clean one"
    return f"is {suspect}; {which}"


class Kept(Protocol):
    """Fields of a checkpoint that retention depends on."""

    @property
    def step(self) -> int: ...
    @property
    def suspect(self) -> SuspectMark | None: ...


AnyKept = TypeVar("AnyKept", bound=Kept)


def surplus(
    newest_first: Sequence[AnyKept],
    *,
    keep: int,
    keep_suspect: int,
    damaged: Collection[AnyKept] = (),
) -> list[AnyKept]:
    """Checkpoints to delete.

    The first is always kept. Of the clean ones the newest `keep` are kept, of the suspect
    ones the newest `keep_suspect`, and the newest clean one that is older than these. A damaged
    one is kept only where its quota has room.

    Args:
        newest_first: good checkpoints of one model, the newest first.
        keep: quota of clean ones, at least 1.
        keep_suspect: quota of suspect ones, at least 1.
        damaged: those among them that were found damaged.
    """
    kept = {0}
    places = [n for n, checkpoint in enumerate(newest_first) if checkpoint not in damaged]
    places += [n for n, checkpoint in enumerate(newest_first) if checkpoint in damaged]
    for quota, wanted in ((keep, False), (keep_suspect, True)):
        kept.update([n for n in places if (newest_first[n].suspect is not None) is wanted][:quota])
    oldest = max((n for n in kept if newest_first[n].suspect), default=len(newest_first))
    kept.update([n for n in places if newest_first[n].suspect is None and n > oldest][:1])
    return [checkpoint for n, checkpoint in enumerate(newest_first) if n not in kept]


def suspects_of(newest_first: Sequence[AnyKept], *, since: int, step: int) -> list[AnyKept]:
    """Clean checkpoints that an alarm makes suspect: ancestors of the state from `since` on.

    A checkpoint is no ancestor if training went back before it afterwards: its successor in
    the order of writing has the same or an earlier step.

    Args:
        newest_first: good checkpoints of one model, the newest first.
        since: first suspect step.
        step: current step.
    """
    found, earliest = [], step + 1
    for checkpoint in newest_first:
        if checkpoint.step < earliest:
            earliest = checkpoint.step
            if checkpoint.step >= since and checkpoint.suspect is None:
                found.append(checkpoint)
    return found


logger = logging.getLogger("rmetric")

MARK_NAME = "rmetric_suspect.json"
STATE_NAME = "trainer_state.json"
#: Quota of suspect checkpoints, in addition to `save_total_limit` clean ones.
KEEP_SUSPECT = 2
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class TrainerCheckpoint:
    """A complete checkpoint of the Trainer."""

    path: Path
    step: int
    suspect: SuspectMark | None


def checkpoints_in(folder: Path) -> list[TrainerCheckpoint]:
    """Checkpoints in an output folder, the one written last first."""
    found: list[tuple[int, int, TrainerCheckpoint]] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and (path / STATE_NAME).is_file():
            step = int(match[1])
            with suppress(FileNotFoundError):  # another process has just deleted it
                time = (path / STATE_NAME).stat().st_mtime_ns
                found.append((time, step, TrainerCheckpoint(path, step, _mark_of(path))))
    return [checkpoint for *_, checkpoint in sorted(found, key=lambda each: each[:2], reverse=True)]


def _mark_of(path: Path) -> SuspectMark | None:
    try:
        return decode_file(path / MARK_NAME, SuspectMark)
    except (OSError, ValueError) as error:  # there, so it is not clean
        return SuspectMark(since=0, reason=f"{MARK_NAME} cannot be read: {error}")


def mark_suspect(path: Path, suspect: SuspectMark | None) -> None:
    """Mark a checkpoint, or remove the mark of an earlier one of the same step."""
    try:
        if suspect is None:
            (path / MARK_NAME).unlink(missing_ok=True)
        else:
            write_atomically(path / MARK_NAME, [json.dumps(asdict(suspect)).encode()])
    except OSError as error:
        logger.error("rmetric: the mark of %s cannot be changed: %s", path, error)


def mark_since(folder: Path, suspect: SuspectMark, step: int) -> None:
    """Mark the checkpoints that an alarm at `step` makes suspect."""
    for checkpoint in suspects_of(checkpoints_in(folder), since=suspect.since, step=step):
        mark_suspect(checkpoint.path, suspect)
        logger.warning("rmetric: checkpoint %s is suspect now", checkpoint.path)


def rotate(folder: Path, limit: int | None, best: str | None) -> None:
    """Delete surplus checkpoints; the Trainer's best one stays.

    `limit` is the Trainer's `save_total_limit`, here the quota of clean ones; None or 0 deletes
    none.
    """
    if limit is None or limit <= 0:
        return
    try:
        found = checkpoints_in(folder)
        protected = None if best is None else Path(best).resolve()
        for checkpoint in surplus(found, keep=limit, keep_suspect=KEEP_SUSPECT) if found else ():
            if checkpoint.path.resolve() != protected:
                shutil.rmtree(checkpoint.path, ignore_errors=True)
    except OSError as error:
        logger.error("rmetric: checkpoints in %s cannot be rotated: %s", folder, error)


def newest_first(folder: Path, *, trusted_only: bool = False) -> list[Path]:
    """Checkpoints of the Trainer, the one written last first; a suspect first one is logged."""
    found = checkpoints_in(folder)
    clean = [checkpoint for checkpoint in found if checkpoint.suspect is None]
    chosen = clean if trusted_only else found
    if chosen and chosen[0].suspect is not None:
        note = suspect_note(chosen[0].suspect, clean[0].path if clean else None)
        logger.warning("rmetric: checkpoint %s %s", chosen[0].path, note)
    return [checkpoint.path for checkpoint in chosen]
