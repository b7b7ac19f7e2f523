"""Retention of the Hugging Face Trainer's checkpoints by the rule of `rmetric.guard.retention`.

A suspect checkpoint has a file `rmetric_suspect.json` with ``since`` and ``reason``. No torch
here.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rmetric._util.durable import write_atomically
from rmetric.guard.retention import SuspectMark, surplus, suspect_note, suspects_of
from rmetric.guard.run_files import decode_file

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

    Args:
        folder: output folder.
        limit: the Trainer's `save_total_limit`, here the quota of clean checkpoints; None or
            0 deletes none.
        best: path of the best checkpoint, if there is one.
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
    """Checkpoints, the one written last first; a suspect first one is logged.

    Args:
        folder: output folder of the Trainer.
        trusted_only: leave out suspect checkpoints.
    """
    found = checkpoints_in(folder)
    clean = [checkpoint for checkpoint in found if checkpoint.suspect is None]
    chosen = clean if trusted_only else found
    if chosen and chosen[0].suspect is not None:
        note = suspect_note(chosen[0].suspect, clean[0].path if clean else None)
        logger.warning("rmetric: checkpoint %s %s", chosen[0].path, note)
    return [checkpoint.path for checkpoint in chosen]
