"""Files that are complete before they have their name, durable files, and files without links."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from rmetric._util.special import special_kind


@contextmanager
def durable_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file that takes its name when all of it is on the disk; else it is absent.

    Unlike `write_atomically` it outlives a machine that dies, and takes as
    long as the disk does. Raises OSError as `write_atomically`.
    """
    with _named_when_whole(path, ".part") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_atomically(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file that is either whole or absent.

    The lines go to a hidden file beside it, which then takes the name; what a
    killed process leaves behind never carries the final name.

    Raises OSError that names `path`, also for a device or a pipe, which it would replace.
    """
    try:
        with _named_when_whole(path, f".{secrets.token_hex(8)}.part") as file:
            file.writelines(lines)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def _named_when_whole(path: Path, ending: str) -> Iterator[BinaryIO]:
    """A hidden file beside `path`, which takes its name at the end, or goes with an exception."""
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if what := special_kind(path):
        raise OSError(errno.EINVAL, f"it is {what}, not a file of a disk", str(path))
    part = path.with_name(f".{path.name}{ending}")
    try:
        part.unlink(missing_ok=True)  # of a killed writer, or a planted link
        with open(part, "xb", opener=no_follow) as file:
            yield file
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def no_follow(path: str, flags: int) -> int:
    """Opener for `open(..., opener=no_follow)`. Raises OSError if the file is a symbolic link.

    Also refused is what is no file, such as a named pipe, on which opening would wait.
    """
    if os.name != "posix":
        return os.open(path, flags, 0o666)
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            words = "it is a symbolic link, which is not followed; remove it"
            raise OSError(errno.ELOOP, words, os.fspath(path)) from None
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "it is a named pipe, not a file", os.fspath(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a file", os.fspath(path))
    os.set_blocking(descriptor, True)
    return descriptor
