"""Panels of series over one step axis, before any is thinned out."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

#: Of a step: what its records are spread over.
_WITHIN = 0.4


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve.

    Attributes:
        label: as the legend names it.
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
        title, hint: above the panel.
        threshold: drawn as a line.
        bounds: of the vertical axis; None fits it to what is shown.
        log: whether it starts on a logarithmic scale; None for no choice.
        alarms: at which records it is shaded, shape (T,).
        small: drawn at less height.
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
        lines: drawn through the panels.
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
        """Where each record lies on the axis, rising, shape (T,).

        Records of one step lie beside each other within it, so that none hides another.
        """
        count = len(self.steps)
        if self.by_record:
            return np.arange(1, count + 1, dtype=float)
        starts = np.flatnonzero(np.concatenate([[True], np.diff(self.steps) > 0]))
        sizes = np.diff(np.append(starts, count))
        number = np.arange(count) - np.repeat(starts, sizes)
        places: Floats = self.steps + _WITHIN * number / np.repeat(sizes, sizes)
        return places

    def place(self, step: int) -> float:
        """Where a step lies on the axis: on an axis of records, at the first that reached it."""
        if not self.by_record:
            return float(step)
        reached = self.steps >= step
        return float(reached.argmax() + 1 if reached.any() else len(self.steps) + 1)

    @property
    def range(self) -> tuple[float, float]:
        """Of the axis, with all records and lines; a failure comes after the last record."""
        places, at = self.places, [self.place(line.step) for line in self.lines]
        low, high = min([float(places[0]), *at]), max([float(places[-1]), *at])
        edge = 0.02 * (high - low) or 1.0
        return low - edge, high + edge
