"""Training logs that exist already, whoever wrote them, as runs of records.

`open_log` streams a log of any size; `read_log` has the whole of it. A format is recognised by the
content of a file and never by its name. It is a `stream.Reader` in `READERS` or, for what a
program prints, a `text_parts.TextFormat`.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from rmetric._util.durable import refuse_special
from rmetric._util.errors import LogError
from rmetric._util.printed import counted
from rmetric.readers import (
    curves,
    json_document,
    json_lines,
    table,
    tensorboard_events,
    text_pairs,
    text_readers,
    trackers,
    wandb_file,
)
from rmetric.readers.assembler import Batches
from rmetric.readers.names import TARGETS
from rmetric.readers.rows import BadRow, UnknownFormat
from rmetric.readers.run_folders import FolderFiles, logs_among
from rmetric.readers.source import HEAD, LONGEST_LINE, Source
from rmetric.readers.stream import Reader, Stream
from rmetric.readers.whole_log import collect, with_evaluations_in_place
from rmetric.records import Record, Run

#: The first that matches reads the file: the more particular come first.
READERS: tuple[Reader, ...] = (
    json_lines.EXPERIMENT,
    json_document.TRAINER_STATE,
    trackers.READER,
    json_lines.READER,
    *map(text_readers.as_reader, text_readers.TEXT_FORMATS),
    json_document.READER,
    table.ALGOPERF,
    table.WANDB_EXPORT,
    curves.READER,
    *text_readers.LAST_READERS,
    table.READER,
)

#: Readers of binary formats, tried before `READERS`.
_BY_BYTES = (tensorboard_events.READER, wandb_file.READER, trackers.DATABASE)

__all__ = [
    "READERS",
    "TARGETS",
    "LogError",
    "OpenLog",
    "ReadLog",
    "UnknownFormat",
    "find_logs",
    "open_log",
    "read_log",
    "read_runs",
]


class ReadLog(NamedTuple):
    """The content of one log.

    Attributes:
        runs: one for each run in the log, with its records.
        thinned: of the runs of which not every record was kept, id -> what was done, in words.
            It is among the notes of the run too.
    """

    format: str
    runs: list[Run]
    thinned: Mapping[str, str] = MappingProxyType({})

    @property
    def run(self) -> Run:
        """The run of a log that holds one. Raises ValueError for a log of none or several."""
        if len(self.runs) != 1:
            raise ValueError(f"the log holds {len(self.runs)} runs, not one: see `runs`")
        return self.runs[0]


class OpenLog:
    """A log while it is read: iterate over it for (run id, record), once.

    Memory stays constant where the format is one of lines. Errors in the middle
    of the file are raised when they are reached, after what comes before.

    Attributes:
        format: its name.
        runs: run id -> what is known of the run, without its records. The notes
            are whole at the end, and so is ``Run.id``, which for the first of
            several parts is only known then.
        held: takes out the records that wait for what the next line may add to them.
    """

    def __init__(
        self, format: str, path: Path, stream: Stream, source: Source | None = None
    ) -> None:
        self.format, self.path = format, path
        self._stream, self._source = stream, source
        self.runs, self.held = stream.runs, stream.held

    @property
    def guessed(self) -> list[str]:
        """Notes on how columns and lines were interpreted so far, as sentences."""
        return self._stream.guessed()

    def __iter__(self) -> Iterator[tuple[str, Record]]:
        for id, records in self._batches():
            yield from zip(repeat(id), records)

    def _batches(self) -> Batches:
        with _errors_of(self.path):
            yield from self._stream.batches
        if (source := self._source) is not None:
            for run in self.runs.values():
                run.notes += source.notes
                run.unread = "; ".join(filter(None, [run.unread, source.unread]))


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Turn whatever reading raises into LogError: no log may cost the others."""
    try:
        yield
    except LogError:
        raise
    except OSError as error:
        raise LogError(path, None, f"cannot be read: {error.strerror or error}") from None
    except BadRow as error:
        raise LogError(path, error.line, error.problem) from None
    except RecursionError:
        raise LogError(path, None, "nested too deeply to be read") from None
    except Exception as error:
        problem = f"cannot be read: an error of the reader ({type(error).__name__}: {error})"
        raise LogError(path, None, problem) from error


def find_logs(paths: Iterable[str | Path]) -> list[Path]:
    """The files that `paths` stand for: files, folders with all below them, globs.

    A folder with several event files of TensorBoard stands for them: it is one run. So does that
    of an MLflow run for the files of its metrics. A folder that a trainer wrote stands for its
    log, see `run_folders`. Hidden files and unfinished ``.part`` files are passed over. Raises
    ValueError for a path that is not there, a glob that matches nothing and an empty folder.
    """
    return split_files(paths).logs


def split_files(paths: Iterable[str | Path]) -> FolderFiles:
    """Same as `find_logs`, with the files in folders that were passed over."""
    found: dict[Path, None] = {}
    rest: dict[Path, None] = {}
    for given in paths:
        path = Path(given)
        refuse_special(path)
        # Path.glob takes no absolute pattern, and its ** does not match files before 3.13.
        named = sorted(glob.glob(str(given), recursive=True))  # noqa: PTH207
        matching = [path] if path.exists() else list(map(Path, named))
        files: list[Path] = []
        for match in matching:
            below = _files(match)
            split = logs_among(below, match) if match.is_dir() else FolderFiles(below, [])
            files += split.logs
            rest |= dict.fromkeys(split.rest)
        files = _event_files_as_runs(files)
        if not files:
            raise ValueError(f"{given}: {_why_none(path, len(rest))}")
        found |= dict.fromkeys(files)
    return FolderFiles(list(found), [file for file in rest if file not in found])


def open_log(
    path: Path,
    mapping: Mapping[str, str] | None = None,
    *,
    longest_line: int = LONGEST_LINE,
    growing: Source | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> OpenLog:
    """The log `path`, to be read record by record; see `OpenLog`.

    Args:
        path: a file, or the folder of a TensorBoard run.
        mapping: target (see `TARGETS`) -> column, where guessing by name fails.
        longest_line: bytes; a longer line is an error and never in memory.
        growing: the bytes of a file that is still being written.
        on_bytes: called with the bytes of the file that were read so far, packed as they are.

    Raises LogError for a file that is damaged or cannot be read, and its kind
    UnknownFormat for one that no reader knows.
    """
    mapping = mapping or {}
    if trackers.run_folder(path / "metrics" / "loss") == path:
        return OpenLog("MLflow run (folder)", path, trackers.stream_folder(path, mapping))
    if path.is_dir():
        stream = tensorboard_events.stream_folder(path, mapping)
        return OpenLog(tensorboard_events.READER.name, path, stream)
    source = growing or Source(path, longest_line=longest_line, on_bytes=on_bytes)
    with _errors_of(path):
        reader = _reader_of(source, mapping)
        if growing and not reader.follows:
            problem = f"{reader.name}: written as a whole, there is nothing to follow"
            raise LogError(path, None, problem)
        by_text = None if reader in _BY_BYTES else source
        return OpenLog(reader.name, path, reader.stream(source, mapping), by_text)


def read_log(
    path: str | Path,
    mapping: Mapping[str, str] | None = None,
    *,
    on_bytes: Callable[[int], None] | None = None,
    most_records: int | None = None,
) -> ReadLog:
    """Read a whole training log of any known format, which is recognised by its content.

    Args:
        path: a file (.gz, .bz2, .xz and .zst are unpacked), or the folder of a TensorBoard run.
        mapping: target (see `TARGETS`) -> column or name in the log, where recognition by
            name fails, such as ``{"loss": "train/ce"}``.
        on_bytes: called with the bytes of the file that were read so far, packed as they are.
        most_records: bound of the records that are held; None for none. If a log has more,
            every second record of a run is kept, every fourth, and so on; records with an
            evaluation, an event or a value that is not finite are thinned last. A note of the
            run states what was kept.

    Returns:
        The format and the runs; `ReadLog.run` is the run of a log that holds one. The notes of
        a run state what was inferred. `open_log` streams a log that is too large for memory.

    Raises:
        LogError: the file is damaged or cannot be read.
        UnknownFormat: a LogError; no reader recognises the file.
    """
    log = open_log(Path(path), mapping, on_bytes=on_bytes)
    records, thinned = collect(log._batches(), log.runs, most_records)
    for name, run in log.runs.items():
        run.records += records.get(name, [])
        run.notes += [thinned[name]] if name in thinned else []
    # A run of our own log has two names where its id changes in the middle.
    runs = list({id(run): run for run in log.runs.values()}.values())
    if log.format == json_lines.EXPERIMENT.name:
        for run in runs:
            json_lines.compare(run, thinned=bool(thinned))
    else:
        runs = with_evaluations_in_place(runs)
    return ReadLog(log.format, runs, {log.runs[name].id: note for name, note in thinned.items()})


def _reader_of(source: Source, mapping: Mapping[str, str]) -> Reader:
    head = source.head_text()
    for reader in _BY_BYTES:
        if reader.matches(head):
            return reader
    source.check_is_text()
    found = next((reader for reader in READERS if reader.matches(head)), None)
    if found is not None and found is not text_readers.WITHOUT_LOSS:
        return found
    if "loss" in mapping or "eval_loss" in mapping:
        return text_readers.MAPPED
    if (further := text_readers.reader_further_on(source)) is not None:
        return further
    if not mapping and text_readers.WITHOUT_STEP.matches(head):
        return text_readers.WITHOUT_STEP
    raise _unknown(source, head)


def _unknown(source: Source, head: str) -> UnknownFormat:
    lines = enumerate(head.splitlines(), start=1)
    number, first = next((n, line.strip()) for n, line in lines if line.strip())
    known = ", ".join(reader.name for reader in (*READERS, *_BY_BYTES))
    remedy = "where lines hold NAME=number, --map step=NAME --map loss=NAME say which to read"
    if hint := text_pairs.hint(head):
        remedy = f"it would be read with {hint}"
    elif names := text_pairs.readable_names(head):
        remedy = f"--map loss=NAME says which to read, of {', '.join(map(repr, names))}"
    is_long = len(source.head) >= HEAD and b"\n" not in source.head
    long = f", without an end within {len(source.head):,} bytes" if is_long else ""
    problem = f"its first line, line {number}{long}, is {first[:60]!r}; {remedy}"
    problem = f"not a log that replay knows; {problem}; known are: {known}"
    return UnknownFormat(source.path, None, problem)


def read_runs(path: Path, *, mapping: Mapping[str, str] | None = None) -> list[Run]:
    """The runs in the log `path`; see `read_log`."""
    return read_log(path, mapping).runs


def _event_files_as_runs(files: list[Path]) -> list[Path]:
    """`files`, with the folder in place of its event files, if several, or of MLflow's metrics."""
    events = Counter(file.parent for file in files if tensorboard_events.is_event_file(file))
    runs: dict[Path, None] = {}
    for file in files:
        is_one_of_several = tensorboard_events.is_event_file(file) and events[file.parent] > 1
        runs[file.parent if is_one_of_several else trackers.run_folder(file) or file] = None
    return list(runs)


def _why_none(path: Path, num_passed_over: int) -> str:
    if num_passed_over:
        files = counted(num_passed_over, "file")
        return (
            f"no log among {files} (weights, pictures, settings; a .wandb file without logged "
            "values: wandb sync or an export of its history gives a log)"
        )
    return "no file in this folder" if path.is_dir() else "no such file or folder"


def _files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.suffix != ".part"
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
