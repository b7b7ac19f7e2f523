"""Reader of W&B's own ``run-ID.wandb``, the record of a run that was never synchronised.

The file is a log in blocks, as LevelDB writes it, of records in protobuf's wire format. Of
these only the history is read, the values that a program logged, and no package is needed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from rmetric._util.errors import LogError
from rmetric._util.printed import counted
from rmetric._util.strict_json import parse_line
from rmetric.readers.rows import Row
from rmetric.readers.source import Source
from rmetric.readers.stream import Reader, Stream, stream_wide

MARK = b":W&B\xe1\xbe"
_FILE_HEADER, _BLOCK, _HEADER = 7, 32768, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
#: Numbers of the fields: a record's history, its items and step; an item's names and value.
_HISTORY_FIELD, _ITEM_FIELD, _STEP_FIELD, _KEY_FIELD, _NESTED_FIELD, _JSON_FIELD = 2, 1, 2, 1, 2, 16
_VARINT, _WIDE, _BYTES, _NARROW = 0, 1, 2, 5
_EMPTY = (
    "this W&B file holds no history that can be read; where the run was synchronised, export it "
    "(wandb.Api().run(...).history().to_csv(...)), or run wandb sync on its folder first"
)


def has_history(path: Path) -> bool:
    """True if the file is W&B's own and holds logged values."""
    try:
        return next(_entries(path, []), None) is not None
    except (OSError, LogError):
        return False


def stream(source: Source, mapping: Mapping[str, str]) -> Stream:
    problems, notes = list[str](), list[str]()

    def rows() -> Iterator[Row]:
        problems.clear()
        yield from (Row(None, entry) for entry in _entries(source.path, problems))

    stream = stream_wide(source.path, rows, mapping, notes, empty=_EMPTY)
    if problems:
        records = counted(len(problems), "record")
        notes.append(f"{records} of the file could not be read, the first {problems[0]}")
    return stream


def _entries(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Names and values of each call of ``wandb.log``; what is damaged goes into `problems`."""
    with open(path, "rb") as file:
        if file.read(_FILE_HEADER)[: len(MARK)] != MARK:
            raise LogError(path, None, "not W&B's own file, its first bytes differ")
        for place, record in _records(file, problems):
            try:
                found: dict[str, Any] = {}
                for number, value in _fields(record):
                    if number == _HISTORY_FIELD and isinstance(value, bytes):
                        found |= _history(value)
            except (ValueError, IndexError):
                problems.append(f"at byte {place:,}")
                continue
            if found.keys() - {"_step"}:
                yield found


def _records(file: BinaryIO, problems: list[str]) -> Iterator[tuple[int, bytes]]:
    """Place and bytes of each whole record, whose checksum holds."""
    held, place = b"", _FILE_HEADER
    while True:
        left = _BLOCK - file.tell() % _BLOCK
        if left < _HEADER:
            file.read(left)
        at = file.tell()
        header = file.read(_HEADER)
        if len(header) < _HEADER or not any(header):
            return  # the end, or what was never written
        size, kind = int.from_bytes(header[4:6], "little"), header[6]
        data = file.read(size)
        if len(data) < size:
            problems.append(f"at byte {at:,}, which is cut off")
            return
        if zlib.crc32(header[6:] + data) != int.from_bytes(header[:4], "little"):
            problems.append(f"at byte {at:,}")
            file.seek(at - at % _BLOCK + _BLOCK)  # its size may be wrong too
            held = b""
        elif kind in (_FULL, _FIRST):
            held, place = data, at
            if kind == _FULL:
                yield place, held
        elif held and kind in (_MIDDLE, _LAST):
            held += data
            if kind == _LAST:
                yield place, held
                held = b""


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Fields of a message. Raises ValueError and IndexError for other bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind not in (_BYTES, _WIDE, _NARROW):
            raise ValueError(f"wire type {kind}")
        size, at = _varint(data, at) if kind == _BYTES else (8 if kind == _WIDE else 4, at)
        if at + size > len(data):
            raise ValueError("a field longer than its message")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number longer than 64 bits")


def _history(message: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    for number, part in _fields(message):
        if number == _ITEM_FIELD and isinstance(part, bytes):
            name, value = _item(part)
            if name and isinstance(value, (int, float, str)):
                entry[name] = value
        elif number == _STEP_FIELD and isinstance(part, bytes):
            for _, step in _fields(part):
                if isinstance(step, int):
                    entry.setdefault("_step", step)
    return entry


def _item(message: bytes) -> tuple[str, Any]:
    names: list[str] = []
    value: Any = None
    for number, part in _fields(message):
        if isinstance(part, bytes) and part and number in (_KEY_FIELD, _NESTED_FIELD):
            names.append(part.decode("utf-8", "replace"))
        elif isinstance(part, bytes) and number == _JSON_FIELD:
            value = parse_line(part)
    return "/".join(names), value


READER = Reader("W&B run file (.wandb)", lambda head: head.startswith(":W&B"), stream)
