"""Figures 1 to 6 of a study, each from its logs and in a separate module.

Each module has one function for the data of the figure and one for the plot.
"""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.figure import Figure

from rmetric.detectors import DETECTORS
from rmetric.evaluation import Study, Trace, trace_all
from rmetric.evaluation.study import REFERENCE
from rmetric.metric_settings import settings_of
from studies.paper.analysis import OWN_SETTINGS, metric_trace
from studies.paper.anatomy import ANATOMY_SEEDS, anatomy
from studies.paper.claims import PAPER_F1
from studies.paper.figures.anatomy_figure import anatomy_figure
from studies.paper.figures.diagram import (
    Diagram,
    Layout,
    by_columns,
    by_dot,
    dot_version,
    draw,
    kept,
)
from studies.paper.figures.example_runs import RULE, example_runs, pick_examples
from studies.paper.figures.failure_process import failure_process, system_diagram
from studies.paper.figures.lead_times import lead_times
from studies.paper.figures.threshold_curves import DETECTORS_NEEDED, threshold_curves
from studies.paper.published_tables import is_published

__all__ = ["build_figures", "diagrams", "dot_version", "kept"]


def diagrams(study: Study) -> tuple[Diagram, Diagram]:
    """Diagrams of figures 1 and 2."""
    return system_diagram(study), failure_process(study.reference)


def build_figures(
    study: Study, *, with_dot: bool, num_processes: int = 1
) -> Iterator[tuple[str, str, Figure]]:
    """Name, caption and figure of each, in their order; draw and save them inside `style()`.

    Graphviz places the two diagrams with `with_dot`, unless their places are kept. Only the
    published study has figure 6, whose studies `num_processes` simulate.
    """
    runs = study.reference
    traces = {name: traces_of(name, study) for name in DETECTORS_NEEDED}

    def drawn(diagram: Diagram) -> Figure:
        if found := kept(diagram):
            return draw(diagram, Layout(**found["layout"]))
        return draw(diagram, by_dot(diagram) if with_dot else by_columns(diagram))

    system, process = diagrams(study)
    yield (
        "figure1_system",
        "The system: records of any training run, the three signals of R-Metric and its alert, "
        "and the evaluation beside.",
        drawn(system),
    )
    yield (
        "figure2_failure_process",
        "What each fault changes and how its runs end; on each arrow the number of these runs.",
        drawn(process),
    )
    chosen = ", ".join(example.run.id for example in pick_examples(runs))
    yield (
        "figure3_example_runs",
        f"Example runs: {RULE}. Here: {chosen}.",
        example_runs(runs, traces["r_metric"]),
    )
    yield (
        "figure4_thresholds",
        "Precision, recall and F1 under every threshold. The ablations are computed from the "
        "records of the full metric's runs; the filled circles are at the published threshold.",
        threshold_curves(runs, traces),
    )
    yield (
        "figure5_lead_times",
        "Lead times against the steps from fault to failure; only an alert before the fault can "
        "exceed these.",
        lead_times(runs, traces["r_metric"]),
    )
    if is_published(study):
        yield (
            "figure6_anatomy",
            f"The anatomy of {PAPER_F1}: the published F1 with one thing changed at a time. Means "
            f"of {ANATOMY_SEEDS} studies; the bars hold 95 % of single studies.",
            anatomy_figure(anatomy(num_processes=num_processes)),
        )


def traces_of(name: str, study: Study) -> list[Trace]:
    """One detector on the runs of the full metric, the metric by the settings of the logs."""
    entry, runs = DETECTORS[name], study.reference
    if entry.kind not in OWN_SETTINGS:
        return trace_all(name, runs)
    if entry.mode == REFERENCE:
        stated = study.stated[REFERENCE]
        return [metric_trace(name, run, own) for run, own in zip(runs, stated, strict=True)]
    return [
        metric_trace(name, run, config=settings_of(run).config.with_mode(entry.mode))
        for run in runs
    ]
