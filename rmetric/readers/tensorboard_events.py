"""Reader of TensorBoard's event files, by its package: one of them, or all of a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from rmetric._util.errors import LogError
from rmetric.readers.rows import Row
from rmetric.readers.source import PathOnly, Source
from rmetric.readers.stream import Reader, Stream, columns_of_table, stream_rows

_VERSION = "brain.Event:"
_IN_NAME = "tfevents"
_STEP, _TIME = "(step)", "(wall time)"


def matches(head: str) -> bool:
    return _VERSION in head[:100]


def event_files(folder: Path) -> list[Path]:
    """The event files in `folder`, the oldest first."""
    return sorted(p for p in folder.iterdir() if is_event_file(p) and p.is_file())


def is_event_file(path: Path) -> bool:
    """True if the package accepts the file, which it decides by name."""
    return _IN_NAME in path.name


def stream(source: Source, mapping: Mapping[str, str]) -> Stream:
    return stream_files(source.path, [source.path], mapping)


def stream_files(path: Path, files: list[Path], mapping: Mapping[str, str]) -> Stream:
    """The records of one run, whose events stand in `files`."""
    loader = _loader(path)
    # The tags come in any order: they are listed first, and the files read again.
    tags: dict[str, None] = {}
    for file in files:
        for _, _, values in _scalars(loader, file):
            tags |= dict.fromkeys(values)
    if not tags:
        raise LogError(path, None, "the event files hold no scalars")
    source = PathOnly(path)
    own = {"step": _STEP, "time": _TIME}
    columns = columns_of_table(source, [*tags, *own.values()], own | dict(mapping))
    if "step" not in mapping:
        columns.other_steps = []
    return stream_rows(source, columns, _rows(loader, files))


def _rows(loader: Any, files: list[Path]) -> Iterator[Row]:
    began: float | None = None
    for file in files:
        for step, wall_time, values in _scalars(loader, file):
            began = wall_time if began is None else began
            yield Row(None, {_STEP: step, _TIME: wall_time - began, **values})


def _scalars(loader: Any, file: Path) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Step, time and scalars of each event in the file that has some."""
    from tensorboard.util.tensor_util import make_ndarray

    try:
        for event in loader(str(file)).Load():
            values = {}
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    values[value.tag] = float(value.simple_value)
                elif value.HasField("tensor") and _is_scalar(value):
                    values[value.tag] = float(make_ndarray(value.tensor).item())
            if values:
                yield event.step, event.wall_time, values
    except LogError:
        raise
    except Exception as error:  # the package's own, and those of what it stands on
        raise LogError(file, None, f"no event file that can be read: {error}") from None


def _is_scalar(value: Any) -> bool:
    number_types = (1, 2, 3, 9)  # float, double, int32, int64
    size = prod(dimension.size for dimension in value.tensor.tensor_shape.dim)
    return size == 1 and value.tensor.dtype in number_types


def _loader(path: Path) -> Any:
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    except ImportError:
        raise LogError(
            path,
            None,
            "TensorBoard event files are read by its package: pip install tensorboard",
        ) from None
    return EventFileLoader


READER = Reader("TensorBoard event files", matches, stream)
