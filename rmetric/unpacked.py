"""The bytes of a file, .gz and .zst unpacked, in blocks; what a damaged one still gives."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rmetric.logs import LogError

_GZIP_MAGIC, _ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def is_packed(head: bytes) -> bool:
    """Whether a file that begins so is one that `unpacked` unpacks."""
    return head.startswith((_GZIP_MAGIC, _ZSTD_MAGIC))


def unpacked(path: Path, block: int, notes: list[str]) -> Iterator[bytes]:
    """Blocks of about `block` bytes of the unpacked file; what is lost becomes one of `notes`.

    Raises:
        LogError: it cannot be read, or is packed and nothing of it can be unpacked.
    """
    read_any = False
    try:
        with open(path, "rb") as file:
            read = _unpacker(path, file)
            while piece := read(block):
                read_any = True
                yield piece
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        if not read_any:
            raise LogError(path, None, f"compressed and damaged or cut off ({error})") from None
        notes.append(
            f"the compressed file is damaged or cut off ({error}): what comes before is kept"
        )
    except OSError as error:
        raise LogError(path, None, f"cannot be read: {error.strerror}") from None


def _unpacker(path: Path, file: Any) -> Any:
    magic = file.peek(4)[:4]
    if magic.startswith(_GZIP_MAGIC):
        # Not `read`, which loses what it has gathered when it meets the cut.
        return gzip.GzipFile(fileobj=file).read1
    if magic == _ZSTD_MAGIC:
        return _zstd_reader(path, file)
    return file.read


def _zstd_reader(path: Path, file: IO[bytes]) -> Any:
    try:
        import zstandard
    except ImportError:
        raise LogError(
            path, None, "compressed with zstd: pip install zstandard, or unpack it first"
        ) from None
    reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)

    def read(size: int) -> bytes:
        try:
            return reader.read(size)
        except zstandard.ZstdError as error:
            raise EOFError(str(error)) from None

    return read
