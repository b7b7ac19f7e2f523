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
    _refuse_target(path)
    part = path.with_name(f".{path.name}.part")
    try:
        part.unlink(missing_ok=True)  # of a killed writer, or a planted link
        with open(part, "xb", opener=no_follow) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
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
    _refuse_target(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with open(part, "xb", opener=no_follow) as file:
            file.writelines(lines)
        part.replace(path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink()
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _refuse_target(path: Path) -> None:
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if what := special_kind(path):
        raise OSError(errno.EINVAL, f"it is {what}, not a file of a disk", str(path))


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
