"""Places a diagram without Graphviz: in columns, each stacked about the middle.

A box stands in the column of its rank. Between two columns of boxes is a column for labels. An
arrow has a stop in every column that it passes, so that no arrow runs through a box. A column is
sorted once, by the mean height of the items before.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

from studies.paper.figures.diagram import GAP, LAYER_GAP, Diagram, Layout, Point, text_size

#: Smaller distances, in inches, count as none: the last piece of an arrow needs a direction.
SAME = 1e-6

#: The name of a box, or the number of an arrow and the column of its stop.
Item = str | tuple[int, int]


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
