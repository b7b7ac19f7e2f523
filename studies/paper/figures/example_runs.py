"""Figure 3: the metric in one run of each kind, selected by a rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf, nan
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from rmetric.evaluation.traces import Trace
from rmetric.metric import Components
from rmetric.metric_settings import settings_of
from rmetric.records import Run, Truth
from rmetric.reporting.style import FAILURE_LINE, FAILURE_MARK, MEANING, ONSET_LINE, TEXT_WIDTH
from studies.paper.analysis import computed
from studies.paper.figures.failure_process import in_order, look_of, name_of
from studies.paper.transfer import normalised_signals

RULE = (
    "of each outcome the middle run (the lower of two) in the order of the steps from fault to "
    "failure, then of names"
)
BENIGN = "benign change"
MOST_COLUMNS = 5
SIGNALS = {"failure_rate": "n(λ)", "gradient_variance": "n(σ²)", "loss_drift": "n(ΔL)"}
#: The lines differ in grey, too.
_LINE_STYLES: dict[str, dict[str, Any]] = {
    "training_loss": {"linewidth": 0.6},
    "validation_loss": {"linewidth": 1.3},
    "failure_rate": {"linewidth": 0.9, "linestyle": (0, (1, 1))},
    "gradient_variance": {"linewidth": 0.7},
    "loss_drift": {"linewidth": 0.9, "linestyle": (0, (4, 1.2))},
    "score": {"linewidth": 0.8},
}
_LOOKS = {name: {"color": MEANING[name]} | look for name, look in _LINE_STYLES.items()}


class Example(NamedTuple):
    """A run, and the kind that it represents."""

    kind: str
    run: Run


def pick_examples(runs: Sequence[Run]) -> list[Example]:
    """One run of each kind that there is, by `RULE`; a fault without effect only if alone."""
    known = [run for run in runs if run.truth is not None]
    by_kind: dict[str, list[Run]] = {}
    for run in [run for run in known if run.truth and run.truth.applicable] or known:
        assert run.truth is not None
        benign = run.truth.benign and not run.truth.failed
        by_kind.setdefault(BENIGN if benign else name_of(run.truth), []).append(run)
    kinds = in_order(set(by_kind) - {BENIGN}) + [BENIGN] * (BENIGN in by_kind)
    return [Example(kind, _middle(by_kind[kind])) for kind in kinds]


def _middle(runs: list[Run]) -> Run:
    in_turn = sorted(runs, key=lambda run: (_steps_to_failure(run.truth), run.id))
    return in_turn[(len(runs) - 1) // 2]


def _steps_to_failure(truth: Truth | None) -> float:
    if truth is None or truth.failure_step is None:
        return inf
    return truth.failure_step - (truth.onset_step or 0)


#: Inches: the legend, and one row of examples with its titles and its axis.
_LEGEND, _BLOCK = 0.32, 3.1
_RUN_MARGINS = {
    "left": 0.07, "right": 0.975, "top": 0.87, "bottom": 0.12, "wspace": 0.22, "hspace": 0.1
}  # fmt: skip


def example_runs(runs: Sequence[Run], traces: Sequence[Trace]) -> Figure:
    """For each example its losses, the normalised signals, and R (`traces`) with its alerts."""
    examples = pick_examples(runs)
    scored = {run.id: trace for run, trace in zip(runs, traces, strict=True)}
    num_blocks = ceil(len(examples) / MOST_COLUMNS)
    num_columns = ceil(len(examples) / num_blocks)
    heights = [_LEGEND, *[_BLOCK] * num_blocks]
    figure = Figure(figsize=(TEXT_WIDTH, sum(heights)))
    legend, *blocks = figure.subfigures(len(heights), height_ratios=heights, squeeze=False)[:, 0]
    legend.legend(handles=_meanings(_unlogged(examples)), loc="center", ncols=6)
    losses = _loss_range(examples)
    top = max(_top(example.run) for example in examples)
    for number, block in enumerate(blocks):
        shown = examples[number * num_columns : (number + 1) * num_columns]
        panels = block.subplots(
            3, num_columns, sharex="col", sharey="row", squeeze=False,
            height_ratios=(3, 2, 2.4), gridspec_kw=_RUN_MARGINS,
        )  # fmt: skip
        for column, example in zip(panels.T, shown, strict=False):
            _plot(column, example, scored[example.run.id])
        for axes in panels[:, len(shown) :].flat:
            axes.remove()
        _scale(panels[:, 0], losses, top)
        block.align_ylabels()
    return figure


def _top(run: Run) -> float:
    """Just above the highest R that there can be."""
    return 1.06 * sum(settings_of(run).config.weights)


def _scale(panels: Sequence[Axes], losses: tuple[float, float], top: float) -> None:
    """The heights that all examples share, so that they can be compared."""
    of_loss, of_signals, of_score = panels
    of_loss.set(yscale="log", ylim=losses, ylabel="loss (nats)")
    of_loss.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 6, 8), numticks=20))
    of_loss.yaxis.set_major_formatter("{x:g}")
    of_loss.yaxis.set_minor_locator(NullLocator())
    of_signals.set(ylim=(-0.06, 1.06), yticks=(0, 0.5, 1), ylabel="component")
    of_score.set(ylim=(-0.06, top), yticks=(0, 0.5, 1), ylabel="R")


def _loss_range(examples: Sequence[Example]) -> tuple[float, float]:
    losses = [
        loss
        for example in examples
        for record in example.run.records
        for loss in (record.training_loss, record.validation_loss)
        if loss is not None and 0 < loss < inf
    ]
    return (min(losses) / 1.05, max(losses) * 1.05) if losses else (1.0, 10.0)


def _plot(panels: Sequence[Axes], example: Example, trace: Trace) -> None:
    run, config = example.run, settings_of(example.run).config
    steps = trace.steps
    normalised = normalised_signals(run, config)
    of_loss, of_signals, of_score = panels
    for name in ("training_loss", "validation_loss"):
        losses = [getattr(record, name) for record in run.records]
        values = [nan if loss is None else loss for loss in losses]
        of_loss.plot(steps, values, **_LOOKS[name])
    if all(r.training_loss is None and r.validation_loss is None for r in run.records):
        of_loss.text(0.5, 0.5, "no loss in the log", transform=of_loss.transAxes, ha="center")
    missing = _missing(run)
    normalised = np.where(missing, nan, normalised)
    if all(missing):
        middle: dict[str, Any] = {"transform": of_signals.transAxes, "ha": "center"}
        of_signals.text(0.5, 0.5, "no signal in the log", **middle)
    drawn = [(of_signals, *pair) for pair in zip(normalised.T, SIGNALS, strict=True)]
    drawn.append((of_score, trace.scores, "score"))
    for axes, values, name in drawn:
        axes.step(steps, values, where="post", **_LOOKS[name])
    # A step ends where the next begins: without a mark the last value would not be seen.
    for axes, values, name in drawn:
        axes.plot(steps[-1:], values[-1:], "o", color=MEANING[name], markersize=2, zorder=4)
    of_score.axhline(config.threshold, color=MEANING["alert"], linestyle="--", linewidth=0.8)
    _mark_alerts(of_score, steps, trace.alarms, _top(run))
    _mark_truth(panels, run)
    of_loss.set_title(_title(example), fontsize=7, linespacing=1.25, pad=4)
    of_score.xaxis.set_major_locator(MaxNLocator(3, integer=True, steps=[1, 2.5, 5, 10]))
    of_score.set(xlabel="step", xlim=(0, _length(run)))


def _missing(run: Run) -> list[bool]:
    """True for each of `SIGNALS` that the run never logged, whatever its weight."""
    config = settings_of(run).config
    _, missing = computed(run, replace(config, weights=Components(1.0, 1.0, 1.0)))
    return [bool(flag) for flag in missing]


def _unlogged(examples: Sequence[Example]) -> dict[str, str]:
    """A word for each signal that some or all of the runs never logged."""
    missing = np.array([_missing(example.run) for example in examples])
    return {
        name: ", not logged" if absent.all() else ", where logged"
        for name, absent in zip(SIGNALS, missing.T, strict=True)
        if absent.any()
    }


def _mark_alerts(
    axes: Axes, steps: NDArray[np.int64], alarms: NDArray[np.bool_], top: float
) -> None:
    """Shade from each alert to the record that ends it; a mark where the first is."""
    turns = np.flatnonzero(np.diff(alarms, prepend=False, append=False))
    begins = steps[turns[::2]]
    ends = np.append(steps, steps[-1])[turns[1::2]]
    spans = list(zip(begins, ends - begins, strict=True))
    axes.broken_barh(spans, (-0.06, top + 0.06), color=MEANING["alert"], alpha=0.22, linewidth=0)
    axes.plot(begins[:1], [top] * len(begins[:1]), "v", color=MEANING["alert"], clip_on=False)


def _mark_truth(panels: Sequence[Axes], run: Run) -> None:
    """Lines at onset and failure, each with a mark at one end of the first panel."""
    truth, above = run.truth or Truth(), panels[0].get_xaxis_transform()
    for step, height, line, mark in (
        (truth.failure_step, 1, FAILURE_LINE, FAILURE_MARK),
        (truth.onset_step, 0, ONSET_LINE, _ONSET_MARK),
    ):
        if step is not None:
            for axes in panels:
                axes.axvline(step, **line)
            panels[0].plot(step, height, transform=above, **mark, clip_on=False, zorder=5)


_ONSET_MARK: dict[str, Any] = {
    "color": MEANING["onset"], "marker": "^", "markersize": 5, "markeredgewidth": 0,
}  # fmt: skip


def _title(example: Example) -> str:
    truth, model = example.run.truth, example.run.config.get("model_type", "")
    assert truth is not None
    severity = "" if not truth.severity else f", severity {truth.severity:g}"
    after = f" after {_steps_to_failure(truth)} steps" if truth.failure_step is not None else ""
    fault = "no fault" if truth.fault == "NONE" else truth.fault
    return f"{look_of(example.kind).title.upper()}{after}\n{fault}\n{model}{severity}"


def _length(run: Run) -> int:
    """Planned steps, so that an early end of a run is visible."""
    last = max(record.step for record in run.records)
    planned = run.config.get("total_training_steps")
    return max(planned, last) if isinstance(planned, int) else last


def _meanings(unlogged: dict[str, str]) -> list[Artist]:
    alert: dict[str, Any] = {"color": MEANING["alert"]}
    names = {"training_loss": "training loss", "validation_loss": "validation loss"}
    names |= {name: label + unlogged.get(name, "") for name, label in SIGNALS.items()}
    return [
        *(Line2D([], [], **_LOOKS[n], label=label) for n, label in {**names, "score": "R"}.items()),
        Line2D([], [], **alert, linestyle="--", label="threshold"),
        Line2D([], [], **alert, linestyle="", marker="v", label="first alert"),
        Patch(**alert, alpha=0.22, linewidth=0, label="alerted"),
        Line2D([], [], **ONSET_LINE | _ONSET_MARK, label="onset"),
        Line2D([], [], **FAILURE_LINE | FAILURE_MARK, label="failure"),
    ]
