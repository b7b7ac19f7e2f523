"""Reader of TensorBoard's event files, by its package: one of them, or all of a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from rmetric._util.errors import LogError
from rmetric.readers.rows import Row
from rmetric.readers.stream import Reader, Stream, stream_wide

_VERSION = "brain.Event:"
_IN_NAME = "tfevents"
_STEP_COLUMN, _TIME_COLUMN = "(step)", "(wall time)"


def is_event_file(path: Path) -> bool:
    """True if the package accepts the file, which it decides by name."""
    return _IN_NAME in path.name


def stream_folder(folder: Path, mapping: Mapping[str, str]) -> Stream:
    """The records of the one run whose event files are in `folder`, the oldest first."""
    files = sorted(p for p in folder.iterdir() if is_event_file(p) and p.is_file())
    return _stream(folder, files, mapping)


def _stream(path: Path, files: list[Path], mapping: Mapping[str, str]) -> Stream:
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    except ImportError:
        problem = "TensorBoard event files are read by its package: pip install tensorboard"
        raise LogError(path, None, problem) from None

    def rows() -> Iterator[Row]:
        began: float | None = None
        for file in files:
            for step, wall_time, values in _scalars(EventFileLoader, file):
                began = wall_time if began is None else began
                yield Row(None, {_STEP_COLUMN: step, _TIME_COLUMN: wall_time - began, **values})

    own = {"step": _STEP_COLUMN, "time": _TIME_COLUMN}
    return stream_wide(path, rows, mapping, own=own, empty="the event files hold no scalars")


def _scalars(loader: Any, file: Path) -> Iterator[tuple[int, float, dict[str, float]]]:
    from tensorboard.util.tensor_util import make_ndarray

    number_types = (1, 2, 3, 9)  # float, double, int32, int64
    try:
        for event in loader(str(file)).Load():
            values = {}
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    values[value.tag] = float(value.simple_value)
                elif (
                    value.HasField("tensor")
                    and value.tensor.dtype in number_types
                    and prod(dimension.size for dimension in value.tensor.tensor_shape.dim) == 1
                ):
                    values[value.tag] = float(make_ndarray(value.tensor).item())
            if values:
                yield event.step, event.wall_time, values
    except LogError:
        raise
    except Exception as error:  # the package's own, and those of what it stands on
        raise LogError(file, None, f"no event file that can be read: {error}") from None


READER = Reader(
    "TensorBoard event files",
    lambda head: _VERSION in head[:100],
    lambda source, mapping: _stream(source.path, [source.path], mapping),
)
