"""Files: complete before they get their name, durable, unpacked; refuses special files."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, BinaryIO

from rmetric._util.errors import LogError

_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
_KINDS |= dict.fromkeys((stat.S_IFCHR, stat.S_IFBLK), "a device")
#: File systems of the kernel. Their files have no size, and some never end.
_OF_KERNEL = ("/proc", "/sys", "/dev", "/sys/kernel/debug", "/sys/kernel/tracing")
#: Bytes that are unpacked at a time: of a file full of zeros they become many more.
_PACKED = 1 << 10
_GZIP_MAGIC, _ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_XZ_MAGIC, _BZIP2_MAGIC = b"\xfd7zXZ\0", re.compile(rb"BZh[1-9]1AY&SY")
_LONGEST_MAGIC = 10
#: What `unpacked` unpacks, for messages and documents.
PACKED = ".gz, .bz2, .xz and .zst"
#: Endings that such a file's name may have.
PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")


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

    Anything but a regular file is also refused: opening a named pipe would wait.
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
    """Kind of a path that is not a file or folder on a disk, links followed; else empty."""
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


class _FirstBlockCut(EOFError):
    """A file that ends within its first block, of which nothing was unpacked."""


def is_packed(head: bytes) -> bool:
    """True if `unpacked` unpacks a file that begins with these bytes."""
    begins = head.startswith((_GZIP_MAGIC, _ZSTD_MAGIC, _XZ_MAGIC))
    return begins or _BZIP2_MAGIC.match(head) is not None


def unpacked(
    path: Path,
    block: int,
    notes: list[str],
    on_bytes: Callable[[int], None] | None = None,
    *,
    may_be_empty: bool = False,
) -> Iterator[bytes]:
    """Blocks of about `block` bytes of the unpacked file; what is lost becomes one of `notes`.

    `on_bytes` is called with the bytes of the file that were read so far, packed as they are.
    LogError: it cannot be read, or nothing of it can be unpacked, unless it `may_be_empty` and ends
    within its first block, which of .zst is 128 KiB of text.
    """
    import gzip
    import zlib

    refuse_special(path)
    read_any = False
    try:
        with open(path, "rb") as file:
            for piece in _blocks(path, file, block):
                read_any = True
                if on_bytes is not None:
                    on_bytes(file.tell())
                yield piece
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        if read_any:
            words = f"damaged or cut off ({error}): what comes before is kept"
        elif may_be_empty and isinstance(error, _FirstBlockCut):
            words = f"cut off ({error}): nothing of it can be unpacked"
        else:
            raise LogError(path, None, f"compressed and damaged or cut off ({error})") from None
        notes.append(f"the compressed file is {words}")
    except OSError as error:
        raise LogError(path, None, f"cannot be read: {error.strerror}") from None


def _blocks(path: Path, file: Any, block: int) -> Iterator[bytes]:
    magic = file.peek(_LONGEST_MAGIC)[:_LONGEST_MAGIC]
    if magic.startswith(_ZSTD_MAGIC):
        return _of_frames(file, block, *_zstd(path))
    if magic.startswith(_XZ_MAGIC):
        import lzma

        return _of_frames(file, block, lzma.LZMADecompressor, lzma.LZMAError)
    if _BZIP2_MAGIC.match(magic):
        import bz2

        return _of_frames(file, block, bz2.BZ2Decompressor, OSError)
    read = file.read
    if magic.startswith(_GZIP_MAGIC):
        import gzip

        # Not `read`, which loses what it has gathered when it meets the cut.
        read = gzip.GzipFile(fileobj=file).read1
    return iter(lambda: read(block), b"")


def _zstd(path: Path) -> tuple[Callable[[], Any], type[Exception]]:
    try:
        import zstandard
    except ImportError:
        raise LogError(
            path, None, "compressed with zstd: pip install zstandard, or unpack it first"
        ) from None
    # Not its reader of streams, which takes a cut for the end.
    return (lambda: zstandard.ZstdDecompressor().decompressobj()), zstandard.ZstdError


def _of_frames(
    file: IO[bytes], block: int, begin: Callable[[], Any], damage: type[Exception]
) -> Iterator[bytes]:
    """Unpack frames one behind the other; `begin` makes the decompressor of the next one."""
    gathered = bytearray()
    piece, frame = file.read(_PACKED), begin()
    while piece:
        try:
            gathered += frame.decompress(piece)
        except damage as error:
            if gathered:
                yield bytes(gathered)
            raise EOFError(str(error)) from None
        if len(gathered) >= block:
            yield bytes(gathered)
            gathered.clear()
        rest = frame.unused_data.lstrip(b"\0") if frame.eof else b""  # .xz may end in zeros
        piece = rest or file.read(_PACKED)
        if frame.eof and piece:
            frame = begin()
    if gathered:
        yield bytes(gathered)
    if not frame.eof:
        cut = EOFError if gathered else _FirstBlockCut
        raise cut("it ended before the end of its last frame")
