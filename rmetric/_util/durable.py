"""Files that are complete before they have their name, durable files, what is no file."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

from rmetric._util.errors import LogError

_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
_KINDS |= dict.fromkeys((stat.S_IFCHR, stat.S_IFBLK), "a device")
#: File systems of the kernel. Their files have no size, and some of them no end.
_OF_KERNEL = ("/proc", "/sys", "/dev", "/sys/kernel/debug", "/sys/kernel/tracing")


@contextmanager
def durable_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file that takes its name when all of it is on the disk; else it is absent.

    Unlike `write_atomically` it outlives a machine that dies. Raises OSError as that does.
    """
    with _named_when_whole(path, ".part") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file that is either whole or absent.

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


def refuse_special(path: Path | str) -> None:
    """Raise LogError for a pipe, a socket, a device, and what lies in /proc, /sys or /dev.

    Files and folders pass, links to them, and what does not exist.
    """
    if what := special_kind(path):
        raise LogError(path, None, f"{what}; files and folders of a disk are accepted")


def special_kind(path: Path | str) -> str:
    """What the path, or what it links to, is besides a file or folder of a disk; else empty."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return ""
    what = _KINDS.get(stat.S_IFMT(found.st_mode), "")
    if not what and found.st_dev in _kernel_devices():
        what = f"in a file system of the kernel ({', '.join(_OF_KERNEL[:3])})"
    return what


@cache
def _kernel_devices() -> frozenset[int]:
    found = set()
    for path in map(Path, _OF_KERNEL):
        with suppress(OSError):
            found.add(path.stat().st_dev)
    return frozenset(found - {Path("/").stat().st_dev})  # none of them is mounted
