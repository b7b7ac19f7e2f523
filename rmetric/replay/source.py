"""The bytes of a log: unpacked, and told apart from what is no text."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from rmetric.logs import LogError

_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_HEAD_BYTES = 1 << 16


def read_bytes(path: Path) -> bytes:
    """The unpacked content of `path`. Raises LogError for what cannot be a log."""
    try:
        data = path.read_bytes()
        if data.startswith(_GZIP_MAGIC):
            data = gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise LogError(path, None, f"compressed and damaged or cut off ({error})") from None
    except OSError as error:
        raise LogError(path, None, f"cannot be read: {error.strerror}") from None
    data = data.removeprefix(_BYTE_ORDER_MARK)
    if not data.strip():
        raise LogError(path, None, "the file is empty")
    if b"\0" in data:
        raise LogError(path, None, "a binary file; a log is text, .gz allowed")
    return data


def head_of(data: bytes) -> str:
    """The beginning of the text, by which a format is recognised."""
    return data[:_HEAD_BYTES].decode("utf-8", "replace")


def text_of(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise LogError(path, line, "not text in UTF-8") from None
