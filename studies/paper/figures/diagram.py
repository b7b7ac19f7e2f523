"""A diagram as a value, its places, and how it is drawn.

Graphviz places a diagram: it computes positions and nothing else. Its input are boxes and labels
of the sizes that they have in matplotlib's own font. So neither the fonts of the machine nor the
dates that Graphviz writes into its files matter. The places of the published study's diagrams are
kept in placed.json, so that every machine draws the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from graphlib import TopologicalSorter
from hashlib import sha256
from math import dist
from pathlib import Path
from typing import Any

import graphviz
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path as DrawnPath

from rmetric.reporting.style import COLUMN_WIDTH, GREY, TEXT_WIDTH, style

FONT_SIZE = 7.0
# Inches: around the whole; between a text and its box, boxes above each other, and columns.
MARGIN, PADDING, GAP, LAYER_GAP = 0.04, 0.06, 0.14, 0.15
PLAIN_GAP = 0.4  # between columns without Graphviz, at most

Point = tuple[float, float]


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

    @property
    def ends(self) -> list[str]:
        """The boxes that no arrow leaves."""
        tails = {edge.tail for edge in self.edges}
        return [name for name in self.nodes if name not in tails]

    def ranks(self) -> dict[str, int]:
        """Arrows from the start to each box, by the longest way; ends last. Raises CycleError."""
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

    A curve is a start, then three points for each cubic Bézier piece; curves and labels are in the
    order of the arrows.
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
    """Without Graphviz: a column for each rank, stacked about the middle, and straight arrows."""
    ranks, left = diagram.ranks(), 0.0
    sizes = {name: node.size for name, node in diagram.nodes.items()}
    rights: list[float] = []
    tops: dict[str, float] = {}
    centres: dict[str, Point] = {}
    order = sorted(set(ranks.values()))
    columns = [[name for name in diagram.nodes if ranks[name] == rank] for rank in order]
    widths = [max(sizes[name][0] for name in column) for column in columns]
    room = (TEXT_WIDTH - 3 * MARGIN - sum(widths)) / max(1, len(widths) - 1)
    gap = max(LAYER_GAP, min(PLAIN_GAP, room))
    for column, width in zip(columns, widths, strict=True):
        top = (sum(sizes[name][1] + GAP for name in column) - GAP) / 2
        for name in column:
            tops[name] = top
            centres[name] = (left + width / 2, top - sizes[name][1] / 2)
            top -= sizes[name][1] + GAP
        rights.append(left + width)
        left += width + gap
    height = 2 * max(tops.values())
    centres = {name: (x, y + height / 2) for name, (x, y) in centres.items()}
    curves: list[list[Point]] = []
    labels: list[Point | None] = []
    for edge in diagram.edges:
        (x, y), (to_x, to_y) = centres[edge.tail], centres[edge.head]
        x, to_x = x + sizes[edge.tail][0] / 2, to_x - sizes[edge.head][0] / 2
        line = [(x + part * (to_x - x), y + part * (to_y - y)) for part in (0, 1 / 3, 2 / 3, 1)]
        curves.append(line)
        # Beside the tail's column, where no box is, and apart from the labels before it.
        across = [rights[ranks[edge.tail]] + part * gap for part in (0.5, 0.8, 0.2)]
        places = [(at, y + (to_y - y) * (at - x) / (to_x - x)) for at in across]
        apart = [min([GAP, *(dist(place, label) for label in labels if label)]) for place in places]
        labels.append(places[apart.index(max(apart))] if edge.label else None)
    return Layout(width=left - gap, height=height, centres=centres, curves=curves, labels=labels)


def draw(diagram: Diagram, layout: Layout) -> Figure:
    """Draw a diagram centred, one column or two wide; only a wider one is shrunk with its text."""
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
    codes = [DrawnPath.MOVETO, *[DrawnPath.CURVE4] * (len(curve) - 1)]
    axes.add_patch(
        FancyArrowPatch(
            path=DrawnPath(curve, codes), arrowstyle="-|>,head_width=1.6,head_length=3.2",
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


# -- places by Graphviz

POINTS_PER_INCH = 72
PLACED = Path(__file__).with_name("placed.json")


def dot_version() -> str | None:
    """The version of Graphviz on this machine; None where there is no `dot` that works."""
    try:
        return ".".join(str(number) for number in graphviz.version())
    except (graphviz.ExecutableNotFound, graphviz.CalledProcessError, RuntimeError):
        return None


def digest(diagram: Diagram) -> str:
    return sha256(dot_source(diagram).source.encode()).hexdigest()


def kept(diagram: Diagram) -> dict[str, Any] | None:
    """`version` of Graphviz and `layout` that are kept of a diagram."""
    found: dict[str, Any] | None = json.loads(PLACED.read_text("utf-8")).get(digest(diagram))
    return found


def keep(diagrams: Iterable[Diagram]) -> None:
    """Make placed.json anew: `keep(diagrams(read_study(Path())))` of the package above."""
    version = dot_version()
    made = {digest(item): {"version": version, "layout": asdict(by_dot(item))} for item in diagrams}
    PLACED.write_text(json.dumps(made) + "\n", encoding="utf-8")


def by_dot(diagram: Diagram) -> Layout:
    """Layout by Graphviz. Raises graphviz.ExecutableNotFound without `dot`."""
    placed = json.loads(dot_source(diagram).pipe(format="json0", encoding="utf-8"))
    _, _, width, height = _numbers(placed["bb"])
    boxes = {box["name"]: box for box in placed["objects"]}
    lines = {line["id"]: line for line in placed.get("edges", [])}
    in_order = [lines[f"e{index}"] for index in range(len(diagram.edges))]
    return Layout(
        width=width,
        height=height,
        centres={
            name: _points(boxes[f"n{index}"]["pos"])[0] for index, name in enumerate(diagram.nodes)
        },
        curves=[_points(line["pos"]) for line in in_order],
        labels=[_points(line["lp"])[0] if "lp" in line else None for line in in_order],
    )


def dot_source(diagram: Diagram) -> graphviz.Digraph:
    """The diagram for Graphviz. Its names are numbers: ours may hold any character."""
    graph = graphviz.Digraph(
        graph_attr={"rankdir": "LR", "nodesep": f"{GAP}", "ranksep": f"{LAYER_GAP}"},
        node_attr={"shape": "box", "fixedsize": "true", "label": ""},
        edge_attr={"dir": "none"},
    )
    number = {name: f"n{index}" for index, name in enumerate(diagram.nodes)}
    for name, node in diagram.nodes.items():
        width, height = node.size
        graph.node(number[name], width=f"{width:.4f}", height=f"{height:.4f}")
    with graph.subgraph(graph_attr={"rank": "sink"}) as last:
        for name in diagram.ends:
            last.node(number[name])
    for index, edge in enumerate(diagram.edges):
        label = _empty_table(*text_size(edge.label)) if edge.label else ""
        graph.edge(number[edge.tail], number[edge.head], id=f"e{index}", label=label)
    return graph


def _empty_table(width: float, height: float) -> str:
    """A label that takes this room and holds no text."""
    points = [round(POINTS_PER_INCH * side) + 2 for side in (width, height)]
    sides = 'fixedsize="true" width="{}" height="{}"'.format(*points)
    bare = 'border="0" cellborder="0" cellpadding="0" cellspacing="0"'
    return f"<<table {bare} {sides}><tr><td></td></tr></table>>"


def _points(text: str) -> list[Point]:
    return [(x, y) for x, y in (_numbers(pair) for pair in text.split())]


def _numbers(text: str) -> list[float]:
    return [float(number) / POINTS_PER_INCH for number in text.split(",")]
