"""Diagrams: where boxes, labels and arrows lie, with Graphviz and without."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric.evaluation import Study
from rmetric.records import Run, Truth
from rmetric.reporting.style import TEXT_WIDTH, style
from studies.paper.figures.diagram import Diagram, Edge, Node, by_columns, draw, text_size
from studies.paper.figures.dot import by_dot, dot_version
from studies.paper.figures.failure_process import MECHANISM, failure_process, system_diagram

few = settings(max_examples=25)

RENDERERS = [
    pytest.param(
        by_dot,
        marks=pytest.mark.skipif(dot_version() is None, reason="Graphviz is not installed"),
    ),
    by_columns,
]
SLACK = 0.01  # inches; Graphviz rounds sizes to whole points


def every_way() -> list[Run]:
    """A run for every fault and every end that it could come to."""
    runs = [Run(id="none", records=[], truth=Truth())]
    for fault in (*MECHANISM, "NEW_FAULT"):
        for kind in (None, "degraded", "diverged", "non_finite", "lost_worker", 'a: <b>|"c\\'):
            for applicable in (True, False):
                outcome = "failed" if kind else "absorbed" if applicable else "not_applicable"
                truth = Truth(
                    fault=fault, benign=fault == "BAD_BATCH", applicable=applicable,
                    outcome=outcome, failure_kind=kind, failure_step=9 if kind else None,
                )  # fmt: skip
                runs.append(Run(id=f"{fault}_{kind}_{applicable}", records=[], truth=truth))
    return runs


DIAGRAMS = {
    "system": system_diagram(Study(folder=None, runs={"FULL_METRIC": every_way()})),
    "paper": failure_process([r for r in every_way() if r.truth.fault in list(MECHANISM)[:6]]),
    "everything": failure_process(every_way()),
    "one box": Diagram(nodes={"a": Node(text="alone")}),
}


@st.composite
def diagrams(draw) -> Diagram:
    number = draw(st.integers(1, 8))
    nodes = {str(i): Node(text="\n".join("wide" * (i % 3 + 1) for _ in range(i % 2 + 1)))
             for i in range(number)}  # fmt: skip
    arrows = draw(st.sets(st.sampled_from([*combinations(nodes, 2)]))) if number > 1 else ()
    return Diagram(
        nodes=nodes,
        edges=[Edge(tail=a, head=b, label=a * draw(st.integers(0, 3))) for a, b in sorted(arrows)],
    )


def rectangle(centre, size):
    (x, y), (width, height) = centre, size
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def overlap(one, other):
    return (
        min(one[2], other[2]) - max(one[0], other[0]) > SLACK
        and min(one[3], other[3]) - max(one[1], other[1]) > SLACK
    )


def boxes(diagram, layout):
    return {n: rectangle(layout.centres[n], node.size) for n, node in diagram.nodes.items()}


def labels(diagram, layout):
    pairs = zip(diagram.edges, layout.labels, strict=True)
    return [rectangle(place, text_size(edge.label)) for edge, place in pairs if edge.label]


def check_legible(diagram, layout):
    """Nothing covers anything, nothing leaves the page."""
    placed = [*boxes(diagram, layout).values(), *labels(diagram, layout)]
    assert not any(overlap(one, other) for one, other in combinations(placed, 2))
    for left, low, right, high in placed:
        assert min(left, low) > -SLACK
        assert right < layout.width + SLACK
        assert high < layout.height + SLACK


def points_along(curve):
    """Many points of the Bézier pieces."""
    t = np.linspace(0, 1, 25)[:, None]
    for i in range(0, len(curve) - 1, 3):
        p = np.array(curve[i : i + 4])
        first, last = (1 - t) ** 3 * p[0], t**3 * p[3]
        yield from first + 3 * (1 - t) ** 2 * t * p[1] + 3 * (1 - t) * t**2 * p[2] + last


@pytest.mark.parametrize("place", RENDERERS)
@pytest.mark.parametrize("name", DIAGRAMS)
def test_nothing_covers_anything_and_arrows_run_from_tail_to_head(place, name):
    diagram, layout = DIAGRAMS[name], place(DIAGRAMS[name])
    check_legible(diagram, layout)
    at = boxes(diagram, layout)
    for edge, curve in zip(diagram.edges, layout.curves, strict=True):
        assert len(curve) % 3 == 1
        assert curve[0][0] < curve[-1][0]
        for end, name_of_box in ((curve[0], edge.tail), (curve[-1], edge.head)):
            left, low, right, high = at[name_of_box]
            assert left - 0.03 < end[0] < right + 0.03
            assert low - 0.03 < end[1] < high + 0.03


@pytest.mark.parametrize("place", RENDERERS)
@pytest.mark.parametrize("name", ["system", "paper"])
def test_the_text_of_a_printed_diagram_is_hardly_shrunk(place, name):
    diagram = DIAGRAMS[name]
    with style():
        figure = draw(diagram, place(diagram))
    assert figure.get_figwidth() <= TEXT_WIDTH
    assert {text.get_text() for text in figure.axes[0].texts} >= {
        node.text for node in diagram.nodes.values()
    }
    assert min(text.get_fontsize() for text in figure.axes[0].texts) > 5.9


@few
@given(diagrams())
def test_columns_cover_nothing_and_no_arrow_runs_through_a_box_or_back(diagram):
    layout = by_columns(diagram)
    check_legible(diagram, layout)
    at = boxes(diagram, layout)
    for edge, curve in zip(diagram.edges, layout.curves, strict=True):
        assert at[edge.tail][2] < at[edge.head][0]
        others = [box for name, box in at.items() if name not in (edge.tail, edge.head)]
        for x, y in points_along(curve):
            point = (x - SLACK, y - SLACK, x + SLACK, y + SLACK)
            assert not any(overlap(point, box) for box in others)
    last = max(centre[0] for centre in layout.centres.values())
    assert all(layout.centres[name][0] == pytest.approx(last) for name in diagram.ends)


def test_an_arrow_to_nowhere_is_named():
    with pytest.raises(ValueError, match=r"'b'.*the boxes are a"):
        Diagram(nodes={"a": Node(text="a")}, edges=[Edge(tail="a", head="b")])


def test_arrows_in_a_circle_are_refused():
    nodes = {name: Node(text=name) for name in "ab"}
    with pytest.raises(ValueError, match="cycle"):
        Diagram(nodes=nodes, edges=[Edge(tail="a", head="b"), Edge(tail="b", head="a")])
