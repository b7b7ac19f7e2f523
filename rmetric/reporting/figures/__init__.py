"""Figures 1 to 5 of the study, each from its logs: one module for each, named for it.

A figure's data come from a function of their own, beside the one that draws them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from matplotlib.figure import Figure

from rmetric.evaluation import Study, trace_all
from rmetric.reporting.figures.diagram import Diagram
from rmetric.reporting.figures.dot import by_dot, dot_version
from rmetric.reporting.figures.drawing import draw
from rmetric.reporting.figures.example_runs import RULE, example_runs, pick_examples
from rmetric.reporting.figures.failure_process import failure_process
from rmetric.reporting.figures.layers import by_layers
from rmetric.reporting.figures.lead_times import lead_times
from rmetric.reporting.figures.system import system_diagram
from rmetric.reporting.figures.threshold_curves import DETECTORS_NEEDED, threshold_curves

__all__ = ["Captioned", "build_figures", "dot_version"]


class Captioned(NamedTuple):
    """A figure, the name of its files, and what to print below it."""

    name: str
    caption: str
    figure: Figure


def build_figures(study: Study, *, with_dot: bool) -> Iterator[Captioned]:
    """All of them, in the order of their numbers; draw and save them inside `style()`.

    Args:
        with_dot: let Graphviz place the two diagrams.
    """
    runs = study.reference

    def drawn(diagram: Diagram) -> Figure:
        return draw(diagram, by_dot(diagram) if with_dot else by_layers(diagram))

    yield Captioned(
        "figure1_system",
        "The system: records of any training run, the three signals of R-Metric and its alert, "
        "and the evaluation beside.",
        drawn(system_diagram(study)),
    )
    yield Captioned(
        "figure2_failure_process",
        "What a fault turns and what becomes of it; on each arrow the number of these runs.",
        drawn(failure_process(runs)),
    )
    chosen = ", ".join(example.run.id for example in pick_examples(runs))
    yield Captioned(
        "figure3_example_runs",
        f"Example runs: {RULE}. Here: {chosen}.",
        example_runs(runs),
    )
    traces = {name: trace_all(name, runs) for name in DETECTORS_NEEDED}
    yield Captioned(
        "figure4_thresholds",
        "Precision, recall and F1 under every threshold. The ablations are computed from the "
        "records of the full metric's runs; the filled circles are at the published threshold.",
        threshold_curves(runs, traces),
    )
    yield Captioned(
        "figure5_lead_times",
        "Lead times against the time there is: an alert cannot lead by more than the steps from "
        "fault to failure unless it came before the fault.",
        lead_times(runs, traces["r_metric"]),
    )
