"""Training logs that exist already, whoever wrote them, as runs of records.

One reader a file, each with a `NAME`, `matches(head)` and `read(path, data,
mapping)`; a new format is a new file and a line in `READERS`. What a log is, is
seen from its content and never from its name.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from rmetric.logs import LogError
from rmetric.records import Run
from rmetric.replay import algoperf, experiment_log, hugging_face, json_lines, list_table, table
from rmetric.replay.columns import TARGETS
from rmetric.replay.rows import UnknownFormat
from rmetric.replay.source import head_of, read_bytes

#: The first that matches reads the file: the more particular come first.
READERS = (experiment_log, hugging_face, json_lines, algoperf, list_table, table)

__all__ = [
    "READERS",
    "TARGETS",
    "LogError",
    "ReadLog",
    "UnknownFormat",
    "find_logs",
    "read_log",
    "read_runs",
]


class ReadLog(NamedTuple):
    """What a file held, and the name of the format it was in."""

    format: str
    runs: list[Run]


def find_logs(paths: Iterable[str | Path]) -> list[Path]:
    """The files that `paths` stand for: files, folders with all below them, globs.

    Hidden files and unfinished ``.part`` files are passed over. Raises ValueError
    for a path that is not there, a glob that matches nothing and an empty folder.
    """
    found: dict[Path, None] = {}
    for given in paths:
        path = Path(given)
        matching = [path] if path.exists() else _matching(str(given))
        files = [file for match in matching for file in _files(match)]
        if not files:
            what = "no file in this folder" if path.is_dir() else "no such file or folder"
            raise ValueError(f"{given}: {what}")
        found |= dict.fromkeys(files)
    return list(found)


def read_log(path: Path, mapping: Mapping[str, str] | None = None) -> ReadLog:
    """The runs in the log `path`; their notes say what was guessed.

    Args:
        mapping: target (see `TARGETS`) -> column, where guessing by name fails.

    Raises LogError for a file that is damaged or cannot be read, and its kind
    UnknownFormat for one that no reader knows.
    """
    data = read_bytes(path)
    head = head_of(data)
    for reader in READERS:
        try:
            if reader.matches(head):
                return ReadLog(reader.NAME, reader.read(path, data, mapping or {}))
        except RecursionError:
            raise LogError(path, None, "nested too deeply to be read") from None
    first = next(line for line in head.splitlines() if line.strip()).strip()
    known = ", ".join(reader.NAME for reader in READERS)
    raise UnknownFormat(
        path,
        None,
        f"not a log that replay knows; its first line is {first[:60]!r}; known are: {known}. "
        "For a table whose columns have other names, --map loss=COLUMN says which to read",
    )


def read_runs(path: Path, *, mapping: Mapping[str, str] | None = None) -> list[Run]:
    """The runs in the log `path`; see `read_log`."""
    return read_log(path, mapping).runs


def _matching(pattern: str) -> list[Path]:
    # Path.glob takes no absolute pattern, and its ** does not match files before 3.13.
    return [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]  # noqa: PTH207


def _files(folder: Path) -> list[Path]:
    """All files below `folder`, or itself where it is one."""
    if folder.is_file():
        return [folder]
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.suffix != ".part"
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
