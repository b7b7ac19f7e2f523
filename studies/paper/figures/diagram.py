"""A diagram as a value, its places in columns without Graphviz (`dot`), and how it is drawn.

A box stands in the column of its rank. Between two columns of boxes is a column for labels. An
arrow has a stop in every column that it passes, so that no arrow runs through a box. A column is
stacked about the middle, sorted once by the mean height of the items before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from graphlib import TopologicalSorter
from itertools import pairwise
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path

from rmetric.reporting.style import COLUMN_WIDTH, GREY, TEXT_WIDTH, style

FONT_SIZE = 7.0
# Inches: around the whole; between a text and its box, boxes above each other, and columns.
MARGIN, PADDING, GAP, LAYER_GAP = 0.04, 0.06, 0.14, 0.15
#: Smaller distances, in inches, count as none: the last piece of an arrow needs a direction.
SAME = 1e-6

Point = tuple[float, float]
#: The name of a box, or the number of an arrow and the column of its stop.
Item = str | tuple[int, int]


@dataclass(frozen=True)
class Node:
    """A box: its lines of text, and the colour of its outline, paler inside."""

    text: str
    colour: str = GREY

    @property
    def size(self) -> tuple[float, float]:
        """Width and height, inches."""
        width, height = text_size(self.text)
        return width + 2 * PADDING, height + 2 * PADDING


@dataclass(frozen=True, kw_only=True)
class Edge:
    """An arrow from `tail` to `head`, `width` points wide, with a label beside it or none."""

    tail: str
    head: str
    label: str = ""
    width: float = 0.8


@dataclass(frozen=True, kw_only=True)
class Diagram:
    """Boxes by their names, read from left to right along the arrows, which run in no circle."""

    nodes: dict[str, Node]
    edges: list[Edge] = field(default_factory=list)

    def __post_init__(self) -> None:
        for edge in self.edges:
            for name in (edge.tail, edge.head):
                if name not in self.nodes:
                    raise ValueError(
                        f"an arrow names {name!r}: the boxes are {', '.join(self.nodes)}"
                    )
        self.ranks()

    @property
    def ends(self) -> list[str]:
        """The boxes that no arrow leaves."""
        tails = {edge.tail for edge in self.edges}
        return [name for name in self.nodes if name not in tails]

    def ranks(self) -> dict[str, int]:
        """Number of arrows from the start to each box, by the longest way; the ends are all last.

        Raises graphlib.CycleError, a ValueError, for arrows that run in a circle.
        """
        before: dict[str, list[str]] = {name: [] for name in self.nodes}
        for edge in self.edges:
            before[edge.head].append(edge.tail)
        ranks: dict[str, int] = {}
        for name in TopologicalSorter(before).static_order():
            ranks[name] = max((ranks[tail] + 1 for tail in before[name]), default=0)
        return ranks | dict.fromkeys(self.ends, max(ranks.values()))


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


@lru_cache(maxsize=256)
def text_size(text: str, font_size: float = FONT_SIZE) -> tuple[float, float]:
    """Width and height of some lines as matplotlib sets them, inches."""
    with style():
        figure = Figure(dpi=300)
        lines = figure.text(0, 0, text, fontsize=font_size, parse_math=False)
        extent = lines.get_window_extent(FigureCanvasAgg(figure).get_renderer())
    return extent.width / figure.dpi, extent.height / figure.dpi


def by_columns(diagram: Diagram) -> Layout:
    """The layout in columns; equal diagrams have equal layouts."""
    ranks = diagram.ranks()
    sizes: dict[Item, Point] = {name: node.size for name, node in diagram.nodes.items()}
    columns: list[list[Item]] = [[] for _ in range(2 * max(ranks.values()) + 1)]
    for name in diagram.nodes:
        columns[2 * ranks[name]].append(name)
    chains: list[list[Item]] = []  # tail, a stop in each column between, head
    for index, edge in enumerate(diagram.edges):
        stops = [(index, at) for at in range(2 * ranks[edge.tail] + 1, 2 * ranks[edge.head])]
        sizes |= dict.fromkeys(stops, (0.0, 0.0))
        if edge.label:
            sizes[stops[0]] = text_size(edge.label)
        for stop in stops:
            columns[stop[1]].append(stop)
        chains.append([edge.tail, *stops, edge.head])
    heights = _heights(columns, chains, sizes)
    spans = _spans(columns, sizes)
    low = min(heights[item] - size[1] / 2 for item, size in sizes.items())
    high = max(heights[item] + size[1] / 2 for item, size in sizes.items())
    centres = {item: (sum(spans[item]) / 2, heights[item] - low) for item in sizes}
    return Layout(
        width=max(right for _, right in spans.values()),
        height=high - low,
        centres={name: centres[name] for name in diagram.nodes},
        curves=[_curve(chain, sizes, spans, centres) for chain in chains],
        labels=[
            centres[chain[1]] if edge.label else None
            for edge, chain in zip(diagram.edges, chains, strict=True)
        ],
    )


def _heights(
    columns: list[list[Item]], chains: list[list[Item]], sizes: dict[Item, Point]
) -> dict[Item, float]:
    """The height of each item's centre: each column from top to bottom, its middle at 0."""
    before: dict[Item, list[Item]] = {item: [] for item in sizes}
    for chain in chains:
        for item, following in pairwise(chain):
            before[following].append(item)
    heights: dict[Item, float] = {}
    for column in columns:
        wanted = {
            item: fmean(heights[other] for other in before[item]) if before[item] else 0.0
            for item in column
        }
        top = (sum(sizes[item][1] for item in column) + GAP * (len(column) - 1)) / 2
        for item in sorted(column, key=lambda item: -wanted[item]):
            heights[item] = top - sizes[item][1] / 2
            top -= sizes[item][1] + GAP
    return heights


def _spans(columns: list[list[Item]], sizes: dict[Item, Point]) -> dict[Item, tuple[float, float]]:
    """The left and right edge of each item's column; a column without any width takes no room."""
    spans: dict[Item, tuple[float, float]] = {}
    right = -LAYER_GAP
    for column in columns:
        width = max(sizes[item][0] for item in column)
        left = right + LAYER_GAP if width else right
        right = left + width
        spans |= dict.fromkeys(column, (left, right))
    return spans


def _curve(
    chain: list[Item],
    sizes: dict[Item, Point],
    spans: dict[Item, tuple[float, float]],
    centres: dict[Item, Point],
) -> list[Point]:
    """Level across every column that the arrow passes, bent between them."""
    tail, *stops, head = chain
    levels = [(centres[tail][0] + sizes[tail][0] / 2, spans[tail][1], centres[tail][1])]
    passed = [stop for stop in stops if spans[stop][0] < spans[stop][1]]
    levels += [(*spans[stop], centres[stop][1]) for stop in passed]
    levels += [(spans[head][0], centres[head][0] - sizes[head][0] / 2, centres[head][1])]
    points = [(x, y) for left, right, y in levels for x in (left, right)]
    curve = points[:1]
    for (x, y), (next_x, next_y) in pairwise(points):
        if next_x - x > SAME:
            middle = (x + next_x) / 2
            curve += [(middle, y), (middle, next_y), (next_x, next_y)]
    return curve


def draw(diagram: Diagram, layout: Layout) -> Figure:
    """As wide as one column or both, in the middle; only what is wider is shrunk with its text."""
    needed, height = layout.width + 2 * MARGIN, layout.height + 2 * MARGIN
    width = max(needed, COLUMN_WIDTH if needed <= COLUMN_WIDTH else TEXT_WIDTH)
    shrink = min(1.0, TEXT_WIDTH / width)
    figure = Figure(figsize=(width * shrink, height * shrink))
    axes = figure.add_axes((0, 0, 1, 1))
    left = -(width - layout.width) / 2
    axes.set(xlim=(left, left + width), ylim=(-MARGIN, height - MARGIN))
    axes.set_axis_off()
    font_size = FONT_SIZE * shrink
    for edge, curve in zip(diagram.edges, layout.curves, strict=True):
        _arrow(axes, curve, edge.width)
    for edge, place in zip(diagram.edges, layout.labels, strict=True):
        if place is not None:
            _text(axes, place, edge.label, font_size, background="white")
    for name, node in diagram.nodes.items():
        _box(axes, layout.centres[name], node)
        _text(axes, layout.centres[name], node.text, font_size)
    return figure


def _arrow(axes: Axes, curve: list[Point], width: float) -> None:
    codes = [Path.MOVETO, *[Path.CURVE4] * (len(curve) - 1)]
    axes.add_patch(
        FancyArrowPatch(
            path=Path(curve, codes), arrowstyle="-|>,head_width=1.6,head_length=3.2",
            mutation_scale=1, linewidth=width, color="#404040",
            joinstyle="miter", capstyle="butt",
        )
    )  # fmt: skip


def _box(axes: Axes, centre: Point, node: Node) -> None:
    width, height = node.size
    corner = centre[0] - width / 2, centre[1] - height / 2
    axes.add_patch(
        FancyBboxPatch(
            corner, width, height, boxstyle="round,pad=0,rounding_size=0.05",
            facecolor=_paler(node.colour), edgecolor=node.colour,
            linewidth=0.9,
        )
    )  # fmt: skip


def _text(
    axes: Axes, place: Point, text: str, font_size: float, background: str | None = None
) -> None:
    box = {"facecolor": background, "edgecolor": "none", "pad": 0.4} if background else None
    axes.text(
        *place, text, fontsize=font_size, ha="center", va="center", bbox=box, parse_math=False
    )


def _paler(colour: str) -> tuple[float, float, float]:
    red, green, blue = (0.86 + 0.14 * part for part in to_rgb(colour))
    return red, green, blue
