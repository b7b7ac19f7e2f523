"""Places a diagram with Graphviz, which computes positions and nothing else.

Its input are boxes and labels of the sizes that they have in matplotlib's own font. So neither
the fonts of the machine nor the dates that Graphviz writes into its files matter. The places of the
published study's diagrams are kept in placed.json, so that every machine draws the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import graphviz

from studies.paper.figures.diagram import GAP, LAYER_GAP, Diagram, Layout, Point, text_size

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
    made = {digest(one): {"version": version, "layout": asdict(by_dot(one))} for one in diagrams}
    PLACED.write_text(json.dumps(made) + "\n", encoding="utf-8")


def by_dot(diagram: Diagram) -> Layout:
    """As Graphviz places it. Raises graphviz.ExecutableNotFound without `dot`."""
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
