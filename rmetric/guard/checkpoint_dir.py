"""Checkpoint directory: manifests, commit, retention and removal of checkpoints. No torch here.

step-120/
  good.json                 the manifest, written last: it marks a complete checkpoint
  index.json                which tensor is where
  .metadata, __R_*.distcp   tensors in the format of torch.distributed.checkpoint
  rank-R.json               plain values of rank R, if it gave any

The manifest is one JSON object with ``format``, the fields of `CheckpointManifest` except
``path``, and ``sha256``, the digest of the others. ``suspect`` is absent in a clean
checkpoint; else it is ``{"since": STEP, "reason": TEXT}``.

Of the Hugging Face Trainer's checkpoints a suspect one has a file `rmetric_suspect.json` with
``since`` and ``reason``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rmetric._util.durable import durable_file, no_follow, sync_folder, write_atomically
from rmetric.guard.policy import SuspectMark, surplus, suspect_note, suspects_of
from rmetric.guard.run_folder import converted, decode_file
from rmetric.guard.trust import distrusted_file, make_private, require_trusted

logger = logging.getLogger("rmetric")

MANIFEST_NAME = "good.json"
#: Version of the format; the first had no index.json, which every load needs.
FORMAT = 2
#: Name of a complete checkpoint: the folder is renamed to it when all files are durable.
#: `.old`: the previous checkpoint of the same step while it is being replaced.
FINAL_NAME = re.compile(r"step-(\d+)(\.old)?")
#: Suffix of a save in progress, or of the remains of a killed one.
PART = ".part"
#: Suffix of a checkpoint with non-finite tensors: kept for inspection, never loaded.
NOT_FINITE = ".not-finite"


class UnfitCheckpoint(ValueError):
    """A complete checkpoint of another model."""


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """Manifest of a checkpoint that was durable, verified and finite when it was written.

    Attributes:
        serial: running number of good checkpoints in the directory; the greatest is the newest.
        about: plain values given by the training.
        request: number of the answered request in the run folder; 0 for none.
        world_size: number of ranks that wrote it.
        written: time of writing, seconds since the epoch.
        files: name -> ``size`` in bytes and ``sha256``.
        suspect: mark of a checkpoint that was saved during an alarm; None for a clean one.
    """

    path: Path
    step: int
    serial: int
    about: dict[str, Any]
    fingerprint: Any
    request: int
    world_size: int
    written: float
    files: dict[str, dict[str, Any]]
    suspect: SuspectMark | None = None

    def own(self, rank: int) -> Any:
        """Values that rank `rank` saved for itself; None if there are none."""
        path = self.path / own_name(rank)
        return json.loads(path.read_bytes()) if path.name in self.files else None


def own_name(rank: int) -> str:
    """File name of the plain values of one rank."""
    return f"rank-{rank}.json"


def _seal(entry: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()


def write_manifest(part: Path, entry: Mapping[str, Any]) -> None:
    """Write the manifest of the checkpoint in `part`; durable on return."""
    entry = {**entry, "format": FORMAT, "written": time.time()}
    write_durably(part / MANIFEST_NAME, json.dumps({**entry, "sha256": _seal(entry)}))


def read_manifest(path: Path) -> CheckpointManifest:
    """Read the manifest in a folder. Raises ValueError if there is no readable one."""
    try:
        require_trusted(path)
        if why := distrusted_file(path, [MANIFEST_NAME]):
            raise ValueError(why)
        with open(path / MANIFEST_NAME, opener=no_follow) as file:
            entry = json.loads(file.read())
        if entry.pop("sha256") != _seal(entry):
            raise ValueError("it was changed after it was written")
        if entry.pop("format") != FORMAT:
            raise ValueError(f"it is of another format than {FORMAT}")
        return converted({**entry, "path": path}, CheckpointManifest)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        words = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path / MANIFEST_NAME} cannot be read: {words}") from None


def _mark(path: Path, suspect: SuspectMark) -> None:
    read_manifest(path)  # a changed manifest must not be sealed again
    entry = json.loads((path / MANIFEST_NAME).read_text())
    del entry["sha256"]
    entry["suspect"] = asdict(suspect)
    write_durably(path / MANIFEST_NAME, json.dumps({**entry, "sha256": _seal(entry)}))


def candidates(folder: Path) -> tuple[list[CheckpointManifest], list[str]]:
    """Manifests in a directory, newest first, and the problems of unreadable ones."""
    good, problems = [], []
    for path in folder.iterdir() if folder.is_dir() else ():
        if FINAL_NAME.fullmatch(path.name):
            try:
                good.append(read_manifest(path))
            except ValueError as error:
                problems.append(str(error))
    # Two share a serial if the newest was unreadable for a while.
    return sorted(good, key=lambda saved: (-saved.serial, -saved.written)), problems


def write_durably(path: Path, text: str) -> None:
    with durable_file(path) as file:
        file.write(text.encode())


def remove(path: Path) -> None:
    """Remove a folder; it is renamed first, so that an interrupted removal leaves no checkpoint."""
    if path.exists():
        going = path.with_name(f"{path.name}.going{PART}")
        shutil.rmtree(going, ignore_errors=True)
        path.replace(going)
        shutil.rmtree(going, ignore_errors=True)


class CheckpointDirectory:
    """Commits, retains and deletes checkpoints. Rank 0 only, except `differs`.

    Arguments as of `Checkpoints`. `damaged` are the paths of checkpoints found damaged, which are
    deleted first. `alarm` is the open alarm.
    """

    def __init__(self, folder: Path, *, keep: int, fingerprint: Any, keep_suspect: int = 2) -> None:
        self.folder, self.fingerprint = folder, fingerprint
        self.keep, self.keep_suspect = keep, keep_suspect
        self.damaged: set[Path] = set()
        self.alarm: SuspectMark | None = None
        # `set_alarm` is called by the training, `commit` by the thread that saves.
        self._lock = threading.Lock()

    def make(self, launch: str) -> None:
        """Create the folder; OSError if it is not writable, ValueError if it is for others."""
        make_private(self.folder)
        require_trusted(self.folder)
        probe = self.folder / f".writable-{launch}{PART}"
        probe.open("xb").close()
        probe.unlink()

    def clear(self) -> None:
        """Delete leftovers of killed saves; called before the first save, never by a reader."""
        with contextlib.suppress(OSError):
            for left in self.folder.glob(f"*{PART}"):
                shutil.rmtree(left, ignore_errors=True)

    def differs(self, good: CheckpointManifest) -> str:
        """Differences between the checkpoint's model and this one; empty if there are none."""
        there, here = good.fingerprint, self.fingerprint
        if there == here:
            return ""
        if not (isinstance(there, dict) and isinstance(here, dict)):
            return f"{there!r} there, {here!r} here"
        names = sorted(n for n in there.keys() | here.keys() if there.get(n) != here.get(n))
        words = [f"{n} is {there.get(n)!r} there, {here.get(n)!r} here" for n in names]
        return "; ".join(words[:5]) + (f" and {len(words) - 5} more" if len(words) > 5 else "")

    def set_alarm(self, alarm: SuspectMark | None, step: int) -> None:
        """Set the open alarm at `step`; mark the checkpoints from its onset on as suspect."""
        with self._lock:
            self.alarm = alarm
            if alarm is None:
                return
            found = [saved for saved in candidates(self.folder)[0] if not self.differs(saved)]
            for saved in suspects_of(found, since=alarm.since, step=step):
                try:
                    _mark(saved.path, alarm)
                    logger.warning("rmetric: checkpoint %s is suspect now", saved.path)
                except (OSError, ValueError) as error:
                    logger.error("rmetric: %s cannot be marked suspect: %s", saved.path, error)

    def commit(
        self, part: Path, step: int, *, suspect: SuspectMark | None = None, **entry: Any
    ) -> CheckpointManifest:
        """Rename `part` to `step-N` as the newest good checkpoint and delete surplus ones.

        `suspect`: alarm that was open when the save began. `entry`: further fields of the
        manifest. Raises FileExistsError if a checkpoint of another model has the name.
        """
        final = self.folder / f"step-{step}"
        old = final.with_name(f"{final.name}.old")  # it stays until the new one has its name
        with self._lock:
            older, _ = candidates(self.folder)
            for other in older:
                if other.path == final and self.differs(other):
                    raise FileExistsError(f"{final} is of another model: {self.differs(other)}")
            serial = max((saved.serial for saved in older), default=0) + 1
            entry |= {"step": step, "serial": serial, "fingerprint": self.fingerprint}
            if self.alarm is not None and step >= self.alarm.since:
                suspect = self.alarm
            if suspect is not None:
                entry["suspect"] = asdict(suspect)
            write_manifest(part, entry)
            if final.exists():
                remove(old)
                final.replace(old)
            part.replace(final)
            sync_folder(self.folder)
            with contextlib.suppress(OSError):  # only disk space is lost
                remove(old)
            self.damaged.discard(final)
        good = read_manifest(final)
        self._tidy(good, older)
        return good

    def put_aside(self, part: Path, step: int) -> Path:
        """Keep a non-finite checkpoint for inspection in place of an earlier one; its path."""
        kept = self.folder / f"step-{step}{NOT_FINITE}"
        for other in self.folder.glob(f"step-*{NOT_FINITE}"):
            remove(other)
        part.replace(kept)
        sync_folder(self.folder)
        return kept

    def _tidy(self, newest: CheckpointManifest, older: list[CheckpointManifest]) -> None:
        others = [
            saved
            for saved in older
            if saved.path != newest.path and saved.path.exists() and not self.differs(saved)
        ]
        damaged = [saved for saved in others if saved.path in self.damaged]
        quotas = {"keep": self.keep, "keep_suspect": self.keep_suspect}
        for saved in surplus([newest, *others], damaged=damaged, **quotas):
            with contextlib.suppress(OSError):  # only disk space is lost
                remove(saved.path)


class LastCheckpoint(NamedTuple):
    """Newest checkpoints of a folder, by step; None without one, or in a foreign format."""

    good: int | None = None  # newest with a readable manifest
    there: int | None = None  # newest, also if its manifest cannot be read


def last_checkpoint(folder: Path) -> LastCheckpoint:
    """Newest checkpoints in a folder, not verified; an unreadable folder counts as empty."""
    try:
        found, _ = candidates(folder)
        readable = {saved.path for saved in found}
        steps = [
            int(match[1])
            for path in folder.glob(f"*/{MANIFEST_NAME}")
            if (match := FINAL_NAME.fullmatch(path.parent.name)) and path.parent not in readable
        ]
    except OSError:
        return LastCheckpoint()
    good = found[0].step if found else None
    steps += [] if good is None else [good]
    return LastCheckpoint(good=good, there=max(steps, default=None))


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A save that succeeded; `good` is None if another program saved it in its own format.

    The seconds are those that training waited, until all files were on disk, and until the
    checkpoint was verified.
    """

    step: int
    path: Path
    good: CheckpointManifest | None = None
    blocking_seconds: float
    durable_seconds: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FailedSave:
    """A save that failed; earlier good checkpoints are unchanged.

    `kept`: folder of the rejected files, for inspection; None if nothing was kept.
    """

    step: int
    problem: str
    kept: Path | None = None


SaveOutcome = SavedCheckpoint | FailedSave


class Saver(Protocol):
    """Saves one checkpoint at a time, on all ranks together; see `Checkpoints` for the methods.

    `saves_later`: `begin` only schedules the save, which runs after the step hook returns; the
    guard must not wait for it inside the hook. `Checkpoints.set_alarm` is optional.
    """

    saves_later: bool

    def begin(
        self,
        step: int,
        state: Mapping[str, Any],
        about: Mapping[str, Any] | None = None,
        *,
        own: Any = None,
        request: int = 0,
        problem: str = "",
    ) -> None: ...

    def poll(self) -> SaveOutcome | None: ...

    def wait(self, timeout: float | None = None) -> SaveOutcome | None: ...

    def newest_good(self, *, trusted_only: bool = False) -> CheckpointManifest | None: ...

    def load(self, good: CheckpointManifest, state: dict[str, Any]) -> dict[str, Any]: ...


# -- checkpoints of the Hugging Face Trainer

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
            with contextlib.suppress(FileNotFoundError):  # another process has just deleted it
                time = (path / STATE_NAME).stat().st_mtime_ns
                found.append((time, step, TrainerCheckpoint(path, step, _mark_of(path))))
    return [checkpoint for *_, checkpoint in sorted(found, key=lambda item: item[:2], reverse=True)]


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
    """Delete surplus checkpoints but the Trainer's best one.

    `limit`, its `save_total_limit`, is the quota of clean ones; None or 0 deletes none.
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
