"""Places a diagram without Graphviz: layer by layer, after Sugiyama, Tagawa and Toda (1981).

A box stands in the column of its rank. Between two such columns lies one for
labels, and an arrow has a stop in every column that it passes, so that no arrow
runs through a box. Within a column the order follows the neighbours' places,
and the heights come as near to theirs as the order and the gaps allow.
"""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from rmetric.reporting.figures.diagram import Diagram, text_size
from rmetric.reporting.figures.layout import GAP, LAYER_GAP, Layout, Point

SWEEPS = 12
#: How much more a long arrow is kept level than a short one, as in Graphviz.
STRAIGHTNESS = 8

#: Inches that are no distance: an arrow's last piece must have a direction.
SAME = 1e-6

#: A box's name, or an arrow's number and the column of its stop.
Item = str | tuple[int, int]


def by_layers(diagram: Diagram) -> Layout:
    """As these layers place it; the same diagram gives the same layout."""
    layers = _Layers(diagram)
    layers.order()
    layers.level()
    return layers.layout()


class _Layers:
    """Columns of boxes and stops, from top to bottom; heights count downwards."""

    def __init__(self, diagram: Diagram) -> None:
        self.diagram = diagram
        ranks = diagram.ranks()
        self.sizes: dict[Item, Point] = {name: node.size for name, node in diagram.nodes.items()}
        self.columns: list[list[Item]] = [[] for _ in range(2 * max(ranks.values()) + 1)]
        for name in diagram.nodes:
            self.columns[2 * ranks[name]].append(name)
        self.before: dict[Item, list[Item]] = {name: [] for name in diagram.nodes}
        self.after: dict[Item, list[Item]] = {name: [] for name in diagram.nodes}
        self.chains = [
            self._add_chain(index, 2 * ranks[edge.tail], 2 * ranks[edge.head])
            for index, edge in enumerate(diagram.edges)
        ]
        self.heights: dict[Item, float] = {}

    def _add_chain(self, index: int, first: int, last: int) -> list[Item]:
        """Tail, a stop in each column between, head; the first stop holds the label."""
        edge = self.diagram.edges[index]
        stops: list[Item] = [(index, column) for column in range(first + 1, last)]
        for column, stop in enumerate(stops, start=first + 1):
            self.sizes[stop] = (0.0, 0.0)
            self.before[stop], self.after[stop] = [], []
            self.columns[column].append(stop)
        if edge.label:
            self.sizes[stops[0]] = text_size(edge.label)
        chain = [edge.tail, *stops, edge.head]
        for item, following in pairwise(chain):
            self.after[item].append(following)
            self.before[following].append(item)
        return chain

    def order(self) -> None:
        """Sort every column by its neighbours' mean place; keep the order with fewest crossings."""
        best = [list(column) for column in self.columns]
        fewest = self.crossings()
        for _ in range(SWEEPS):
            for fixed, moved in pairwise(self.columns):
                _sort(moved, fixed, self.before)
            for fixed, moved in pairwise(self.columns[::-1]):
                _sort(moved, fixed, self.after)
            if self.crossings() < fewest:
                best, fewest = [list(column) for column in self.columns], self.crossings()
        self.columns = best

    def crossings(self) -> int:
        number = 0
        for left, right in pairwise(self.columns):
            place = {item: index for index, item in enumerate(right)}
            ends = [[place[following] for following in self.after[item]] for item in left]
            for upper, lower in combinations(ends, 2):
                number += sum(above > below for above in upper for below in lower)
        return number

    def level(self) -> None:
        """Heights in the order as it is, every item drawn to its neighbours."""
        for column in self.columns:
            self._set(column, np.zeros(len(column)))
        for _ in range(SWEEPS):
            for column in (*self.columns, *self.columns[::-1]):
                self._set(column, np.array([self._wanted(item) for item in column]))

    def _wanted(self, item: Item) -> float:
        beside = self.before[item] + self.after[item] or [item]
        both_stops = [isinstance(item, tuple) and isinstance(other, tuple) for other in beside]
        weights = np.where(both_stops, STRAIGHTNESS, 1)
        return float(np.average([self.heights[other] for other in beside], weights=weights))

    def _set(self, column: list[Item], wanted: NDArray[np.float64]) -> None:
        """The heights nearest to those wanted that keep order and gaps."""
        sides = np.array([self.sizes[item][1] for item in column])
        apart = np.concatenate([[0.0], np.cumsum((sides[1:] + sides[:-1]) / 2 + GAP)])
        rising = nearest_rising(wanted - apart)
        self.heights.update(zip(column, (rising + apart).tolist(), strict=True))

    def layout(self) -> Layout:
        top = min(self.heights[item] - self.sizes[item][1] / 2 for item in self.sizes)
        bottom = max(self.heights[item] + self.sizes[item][1] / 2 for item in self.sizes)
        spans: dict[Item, tuple[float, float]] = {}
        right = -LAYER_GAP
        for column in self.columns:
            width = max(self.sizes[item][0] for item in column)
            left = right + LAYER_GAP if width else right
            right = left + width
            spans.update(dict.fromkeys(column, (left, right)))
        centres = {item: (sum(spans[item]) / 2, bottom - self.heights[item]) for item in spans}
        return Layout(
            width=right,
            height=bottom - top,
            centres={name: centres[name] for name in self.diagram.nodes},
            curves=[self._curve(chain, spans, centres) for chain in self.chains],
            labels=[
                centres[chain[1]] if edge.label else None
                for edge, chain in zip(self.diagram.edges, self.chains, strict=True)
            ],
        )

    def _curve(
        self,
        chain: list[Item],
        spans: dict[Item, tuple[float, float]],
        centres: dict[Item, Point],
    ) -> list[Point]:
        """Level across every column that it passes, bent between them."""
        tail, *stops, head = chain
        levels = [(centres[tail][0] + self.sizes[tail][0] / 2, spans[tail][1], centres[tail][1])]
        # A column without any width is no place to be level at.
        passed = [stop for stop in stops if spans[stop][0] < spans[stop][1]]
        levels += [(*spans[stop], centres[stop][1]) for stop in passed]
        levels += [(spans[head][0], centres[head][0] - self.sizes[head][0] / 2, centres[head][1])]
        points = [(x, y) for left, right, y in levels for x in (left, right)]
        curve = points[:1]
        for (x, y), (next_x, next_y) in pairwise(points):
            if next_x - x > SAME:
                middle = (x + next_x) / 2
                curve += [(middle, y), (middle, next_y), (next_x, next_y)]
        return curve


def _sort(moved: list[Item], fixed: list[Item], beside: dict[Item, list[Item]]) -> None:
    """By the mean place of their neighbours in the fixed column; without any, where they are."""
    place = {item: index for index, item in enumerate(fixed)}
    now = {item: index for index, item in enumerate(moved)}
    wanted = {
        item: np.mean([place[other] for other in beside[item]]) if beside[item] else now[item]
        for item in moved
    }
    moved.sort(key=lambda item: wanted[item])


def nearest_rising(x_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """The numbers that never fall and are nearest to these in the sum of squares.

    Neighbours that fall are pooled into their mean until none are left.
    """
    pools: list[tuple[float, int]] = []  # mean, and of how many
    for x in x_N.tolist():
        mean, number = x, 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean = (mean * number + before * count) / (number + count)
            number += count
        pools.append((mean, number))
    return np.repeat([mean for mean, _ in pools], [number for _, number in pools])
