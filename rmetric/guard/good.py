"""What makes a checkpoint a good one: `good.json`, which is written last. No torch here.

step-120/
  good.json            this
  .metadata, __R_*.distcp   the tensors, in the format of torch.distributed.checkpoint
  rank-R.json          plain values of rank R alone, where it gave some
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rmetric._util.durable import durable_file, sync_folder

GOOD = "good.json"
#: What it means that one is in a folder; raised when the meaning changes.
FORMAT = 1
#: A folder under this name is whole: it took the name when everything in it was durable.
#: `.old` is one that another of the same step is taking the place of.
FINAL_NAME = re.compile(r"step-(\d+)(\.old)?")
#: What is under way, or what a killed save left, ends so.
PART = ".part"
#: Kept to look at, and never loaded: its tensors are not finite.
NOT_FINITE = ".not-finite"


class UnfitCheckpoint(ValueError):
    """A checkpoint that is whole, but of another model than the one at hand."""


@dataclass(frozen=True, kw_only=True)
class Good:
    """A checkpoint that was durable, read back and found finite when it was written.

    Attributes:
        path: of its folder.
        step: last step that is in it.
        serial: counts the good checkpoints of a folder; the greatest is the newest.
        about: plain values that the training gave.
        fingerprint: of the model.
        request: number of the request in the run folder that it answered; 0 for none.
        world_size: ranks that wrote it.
        written: seconds since the epoch.
        files: name -> ``size`` in bytes and ``sha256``.
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

    def own(self, rank: int) -> Any:
        """What rank `rank` alone had given; None where there is nothing of such a rank."""
        path = self.path / own_name(rank)
        return json.loads(path.read_bytes()) if path.name in self.files else None


@dataclass(frozen=True, kw_only=True)
class Done:
    """A save that ended well.

    Attributes:
        step: that was saved.
        path: where it lies.
        good: what is known of it; None where another program wrote it in its own form.
        blocking_seconds: that the training waited.
        durable_seconds: from the beginning until all files were on the disk.
        seconds: until it was read back and had its name.
    """

    step: int
    path: Path
    good: Good | None = None
    blocking_seconds: float
    durable_seconds: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A save that did not; whatever was good before is still there.

    Attributes:
        step: that was to be saved.
        problem: why not, in words.
        kept: where it lies nevertheless, to be looked at; None where nothing was kept.
    """

    step: int
    problem: str
    kept: Path | None = None


def own_name(rank: int) -> str:
    return f"rank-{rank}.json"


def write_good(part: Path, entry: Mapping[str, Any]) -> None:
    """Make the checkpoint in `part` a good one; durable when this returns."""
    entry = {**entry, "format": FORMAT, "written": time.time()}
    write_durably(part / GOOD, json.dumps({**entry, "sha256": _seal(entry)}))


def read_good(path: Path) -> Good:
    """The good checkpoint in a folder. Raises ValueError where there is none that can be read."""
    try:
        entry = json.loads((path / GOOD).read_text())
        if entry.pop("sha256") != _seal(entry):
            raise ValueError("it was changed after it was written")
        if entry.pop("format") != FORMAT:
            raise ValueError(f"it is of another format than {FORMAT}")
        return Good(path=path, **entry)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        words = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path / GOOD} cannot be read: {words}") from None


def candidates(folder: Path) -> tuple[list[Good], list[str]]:
    """Those that call themselves good, the newest first, and what is wrong with the others."""
    good, problems = [], []
    for path in folder.iterdir() if folder.is_dir() else ():
        if FINAL_NAME.fullmatch(path.name):
            try:
                good.append(read_good(path))
            except ValueError as error:
                problems.append(str(error))
    # Two have one serial where the newest could not be read for a while.
    return sorted(good, key=lambda one: (-one.serial, -one.written)), problems


def differences(there: Any, here: Any) -> str:
    """What two fingerprints differ in; empty where they are the same."""
    if there == here:
        return ""
    if not (isinstance(there, dict) and isinstance(here, dict)):
        return f"{there!r} there, {here!r} here"
    names = sorted(n for n in there.keys() | here.keys() if there.get(n) != here.get(n))
    words = [f"{name} is {there.get(name)!r} there, {here.get(name)!r} here" for name in names[:5]]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return "; ".join(words) + more


def write_durably(path: Path, text: str) -> None:
    """Write a small file that is on the disk, whole, before it has its name."""
    with durable_file(path) as file:
        file.write(text.encode())


def take_name(part: Path, final: Path) -> None:
    """Give a whole checkpoint its name; one that has it already stays until this is done."""
    old = final.with_name(f"{final.name}.old")
    if final.exists():
        remove(old)
        final.replace(old)
    part.replace(final)
    sync_folder(final.parent)
    with contextlib.suppress(OSError):  # it is only room that is lost
        remove(old)


def remove(path: Path) -> None:
    """Remove a folder; what is cut short no longer has a name that means something."""
    if path.exists():
        going = path.with_name(f"{path.name}.going{PART}")
        shutil.rmtree(going, ignore_errors=True)
        path.replace(going)
        shutil.rmtree(going, ignore_errors=True)


def _seal(entry: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()
