"""Where the boxes and arrows of a diagram lie; `dot` or `layers` decides it, `drawing` draws it."""

from __future__ import annotations

from dataclasses import dataclass

Point = tuple[float, float]

#: Inches between boxes above each other, and between layers.
GAP, LAYER_GAP = 0.14, 0.22


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Centres of boxes and labels, and the arrows' curves; inches, from the lower left.

    Attributes:
        width, height: of the whole.
        centres: of each box.
        curves: of each arrow in the diagram's order: a start, then three points for each
            cubic Bézier piece.
        labels: centre of each arrow's label; None where it has none.
    """

    width: float
    height: float
    centres: dict[str, Point]
    curves: list[list[Point]]
    labels: list[Point | None]
