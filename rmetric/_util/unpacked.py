"""The bytes of a file, unpacked where it is packed, in blocks; what a damaged one still gives."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from rmetric._util.durable import refuse_special
from rmetric._util.errors import LogError

#: Bytes that are unpacked at a time: of a file full of zeros they become many more.
_PACKED = 1 << 10
_GZIP_MAGIC, _ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_XZ_MAGIC, _BZIP2_MAGIC = b"\xfd7zXZ\0", re.compile(rb"BZh[1-9]1AY&SY")
_LONGEST_MAGIC = 10
#: What `unpacked` unpacks, for messages and documents.
PACKED = ".gz, .bz2, .xz and .zst"
#: Endings that such a file's name may have.
PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")


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
    `may_be_empty`: a file that ends before its first block does has no line; a block of .zst is
    128 KiB of text.

    Raises:
        LogError: it cannot be read, or is packed and nothing of it can be unpacked.
    """
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
        if not read_any and may_be_empty and isinstance(error, _FirstBlockCut):
            notes.append(f"the compressed file is cut off ({error}): nothing of it can be unpacked")
            return
        if not read_any:
            raise LogError(path, None, f"compressed and damaged or cut off ({error})") from None
        notes.append(
            f"the compressed file is damaged or cut off ({error}): what comes before is kept"
        )
    except OSError as error:
        raise LogError(path, None, f"cannot be read: {error.strerror}") from None


def _blocks(path: Path, file: Any, block: int) -> Iterator[bytes]:
    magic = file.peek(_LONGEST_MAGIC)[:_LONGEST_MAGIC]
    if magic.startswith(_ZSTD_MAGIC):
        return _of_frames(file, block, *_zstd(path))
    if magic.startswith(_XZ_MAGIC):
        return _of_frames(file, block, lzma.LZMADecompressor, lzma.LZMAError)
    if _BZIP2_MAGIC.match(magic):
        return _of_frames(file, block, bz2.BZ2Decompressor, OSError)
    # Not `read`, which loses what it has gathered when it meets the cut.
    read = gzip.GzipFile(fileobj=file).read1 if magic.startswith(_GZIP_MAGIC) else file.read
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
    """Unpack frames, or streams, one behind the other, in blocks of about `block` bytes.

    `begin` makes the decompressor of the next frame, and `damage` is what it raises.
    """
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
