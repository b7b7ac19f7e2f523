"""Refusal of folders and files that other users can write, as ssh refuses such keys.

A checkpoint or a request from there could be anybody's. A parent that all users can write is
refused without the sticky bit, since they could put another folder in the place; a parent of a
group or of another user is accepted, as the shared folders of a cluster are.
RMETRIC_TRUST_FOLDER=1 switches the check off, for containers with umask 000 and for folders
that a group shares.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

#: Environment variable that switches the check off with the value 1.
TRUST_VARIABLE = "RMETRIC_TRUST_FOLDER"


def is_trusted_by_user() -> bool:
    """True if the user switched the check off. Raises ValueError for other values than 0 and 1."""
    value = os.environ.get(TRUST_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{TRUST_VARIABLE} is {value!r}: 1 or 0 is accepted")
    return value == "1"


def foreign_writers(found: os.stat_result, *, user: int) -> str:
    """Other users that can write a file with this status; empty if there are none.

    A group that has the number of its owner is taken for the owner's private one. For root the
    owner does not matter: a container's root works in folders of the user outside.
    """
    mode = f"mode {stat.S_IMODE(found.st_mode):o}"
    if found.st_uid not in (user, 0) and user != 0:
        return f"it belongs to user {found.st_uid}, not to {user} or root"
    if found.st_mode & stat.S_IWOTH:
        return f"all users can write it ({mode})"
    if found.st_mode & stat.S_IWGRP and found.st_gid not in (found.st_uid, 0):
        return f"group {found.st_gid} can write it ({mode})"
    return ""


def open_parent(path: Path) -> str:
    """First parent in which all users can replace what lies below it; empty if there is none."""
    for parent in path.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            mode = stat.S_IMODE(mode)
            return f"all users can write its parent {parent} (mode {mode:o}, no sticky bit)"
    return ""


def distrust(path: Path, *, parents: bool = True) -> str:
    """Reason to refuse a file or folder, and with `parents` them, that may be missing; else empty.

    Raises ValueError if RMETRIC_TRUST_FOLDER is neither 0 nor 1.
    """
    if os.name != "posix" or is_trusted_by_user():
        return ""
    try:
        why = foreign_writers(path.stat(), user=os.geteuid())
        why = why or (open_parent(path) if parents else "")
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path} cannot be examined: {error}"
    remedy = f"change its owner or mode (chmod go-w), or set {TRUST_VARIABLE}=1 if that is meant"
    return f"{path} is not trusted: {why}; {remedy}" if why else ""


def distrusted_file(folder: Path, names: Iterable[str]) -> str:
    """Reason to refuse the first of these files of a trusted folder that others can write."""
    return next(filter(None, (distrust(folder / name, parents=False) for name in names)), "")


def require_trusted(path: Path) -> None:
    """Raise ValueError if other users can write the file or folder; see `distrust`."""
    if why := distrust(path):
        raise ValueError(why)


def make_private(path: Path) -> None:
    """Create a folder and its parents, where missing, that no other user can write."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o755, exist_ok=True)
    if not missing:
        path.mkdir(exist_ok=True)  # raises if it is a file


def withdraw_write(path: Path) -> None:
    """Take the right to write from group and others, unless the user trusts the folder."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if os.name == "posix" and mode & 0o022 and not is_trusted_by_user():
        path.chmod(mode & ~0o022)
