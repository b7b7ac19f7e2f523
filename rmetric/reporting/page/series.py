"""Panels of series over one step axis, and the points of them that a page draws.

Of each stretch of a series its extremes are drawn, so that every spike survives.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

#: Share of a step over which its records are spread.
_WITHIN = 0.4
#: Greatest value over the median, above which a scale starts logarithmic.
WIDE = 20.0


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve.

    Attributes:
        colour: the name of a colour in page.css, without the dashes.
        positions: the records that it has values at, rising, shape (N,).
        values: at those records; nan and inf were logged so, shape (N,).
        stairs: a value that holds until the next.
    """

    label: str
    colour: str
    positions: NDArray[np.intp]
    values: Floats
    stairs: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves on one scale.

    Attributes:
        name: in the page's HTML, unique.
        bounds: of the vertical axis; None fits it to what is shown.
        log: whether it starts on a logarithmic scale; None for no choice.
        alarms: at which records it is shaded, shape (T,).
        cap: on a linear scale what is above is drawn there, and marked; None draws all.
        tone: of threshold and shading: ``alert``, or ``neutral`` where an alarm means less.
    """

    name: str
    title: str
    series: list[Series]
    hint: str = ""
    threshold: float | None = None
    bounds: tuple[float, float] | None = None
    log: bool | None = None
    alarms: Bools | None = None
    small: bool = False
    cap: float | None = None
    tone: str = "neutral"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A step that matters, as a vertical line.

    Attributes:
        kind: onset, failure, decision (of a rescue), ``event`` (of the verdict), or an alarm:
            ``alarm`` is the calibrated detector's, ``published-alarm`` the R-Metric's,
            ``own-alarm`` any other's.
        tag: one or two words beside the line in the first chart; empty for none.
    """

    step: int
    kind: str
    label: str
    tag: str = ""


@dataclass(frozen=True, kw_only=True)
class Charts:
    """All that is drawn of one run.

    Attributes:
        steps: of the records, shape (T,).
        groups: heading -> its panels.
        event: first step and end of each stretch of the verdict's event, shaded in the chart of
            the loss; None for the end of the log.
    """

    steps: NDArray[np.int64]
    groups: dict[str, list[Panel]]
    lines: list[Line] = field(default_factory=list)
    event: list[tuple[int, int | None]] = field(default_factory=list)

    @property
    def panels(self) -> list[Panel]:
        return [panel for panels in self.groups.values() for panel in panels]

    @property
    def by_record(self) -> bool:
        """True if the axis must count records, as the steps fall back somewhere."""
        return bool(np.any(np.diff(self.steps) < 0))

    @property
    def places(self) -> Floats:
        """Position of each record on the axis, rising, shape (T,).

        Records of one step lie beside each other within it, so that none hides another.
        """
        count = len(self.steps)
        if self.by_record:
            return np.arange(1, count + 1, dtype=float)
        _, sizes = np.unique(self.steps, return_counts=True)
        sizes_T = np.repeat(sizes, sizes)
        number = np.arange(count) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        places: Floats = self.steps + _WITHIN * number / sizes_T
        return places

    def place(self, step: int) -> float:
        """Position of a step: on an axis of records, that of the first record that reached it."""
        if not self.by_record:
            return float(step)
        reached = self.steps >= step
        return float(reached.argmax() + 1 if reached.any() else len(self.steps) + 1)

    @property
    def range(self) -> tuple[float, float]:
        """Range of the axis, with all records and lines; a failure follows the last record."""
        places, at = self.places, [self.place(line.step) for line in self.lines]
        low, high = min([float(places[0]), *at]), max([float(places[-1]), *at])
        edge = 0.02 * (high - low) or 1.0
        return low - edge, high + edge


def kept(values: Floats, num_buckets: int) -> NDArray[np.intp]:
    """Indices of the `values`, shape (N,), to draw, rising.

    The values are cut into stretches of equally many. Each keeps its smallest and its
    greatest finite value and its first nan, inf and -inf. The first and the last value of
    all stay. Up to two values a stretch, all stay.

    >>> kept(np.array([1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 0.5, 1.0]), 2).tolist()
    [0, 2, 4, 6, 7]
    """
    count = len(values)
    if count <= 2 * num_buckets:
        return np.arange(count)
    size = -(-count // num_buckets)
    rows = -(-count // size)
    # The last value again, as a filling, changes neither the extremes nor which comes first.
    filled = np.concatenate([values, np.full(rows * size - count, values[-1])])
    table = filled.reshape(rows, size)
    finite = np.isfinite(table)
    strange = (np.isnan(table), np.isposinf(table), np.isneginf(table))
    chosen = [np.array([0, count - 1])]
    for there, rank in ((finite, table), (finite, -table), *((kind, kind) for kind in strange)):
        first = np.where(there, rank, -np.inf).argmax(axis=1)
        having = np.flatnonzero(there.any(axis=1))
        chosen.append(having * size + first[having])
    return np.unique(np.minimum(np.concatenate(chosen), count - 1))


def spans(alarms: Bools) -> NDArray[np.intp]:
    """From which record to which each alarm holds, shape (N, 2).

    An alarm holds until the next record, the last one until itself.
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], alarms, [False]]).astype(np.int8)))
    return np.minimum(edges.reshape(-1, 2), max(len(alarms) - 1, 0))


def merged(spans: Floats, most: int) -> Floats:
    """At most about `most` spans, shape (N, 2): those with the least between them become one."""
    if len(spans) <= most:
        return spans
    gaps = spans[1:, 0] - spans[:-1, 1]
    split = np.sort(np.argsort(-gaps, kind="stable")[: most - 1])
    starts = np.concatenate([[0], split + 1])
    ends = np.concatenate([split, [len(spans) - 1]])
    return np.column_stack([spans[starts, 0], spans[ends, 1]])
