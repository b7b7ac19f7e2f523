"""Reader of TensorBoard's event files, by its package: one of them, or all of a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from rmetric._util.errors import LogError
from rmetric.readers.rows import Row
from rmetric.readers.source import Source
from rmetric.readers.stream import Reader, Stream, stream_wide

_VERSION = "brain.Event:"
_IN_NAME = "tfevents"
_EMPTY = "the event files hold no scalars"
_STEP, _TIME = "(step)", "(wall time)"


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
    own = {"step": _STEP, "time": _TIME}
    return stream_wide(path, lambda: _rows(loader, files), mapping, own=own, empty=_EMPTY)


def _rows(loader: Any, files: list[Path]) -> Iterator[Row]:
    began: float | None = None
    for file in files:
        for step, wall_time, values in _scalars(loader, file):
            began = wall_time if began is None else began
            yield Row(None, {_STEP: step, _TIME: wall_time - began, **values})


def _scalars(loader: Any, file: Path) -> Iterator[tuple[int, float, dict[str, float]]]:
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
            path, None, "TensorBoard event files are read by its package: pip install tensorboard"
        ) from None
    return EventFileLoader


READER = Reader("TensorBoard event files", lambda head: _VERSION in head[:100], stream)
