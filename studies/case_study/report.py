"""What came out of a case study: everything here is computed from its logs."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from rmetric.detectors import DETECTORS, IN_PAPER
from rmetric.evaluation import PROTOCOLS, Trace, judge, trace
from rmetric.logs import read_log, write_atomically
from rmetric.metric import Components
from rmetric.records import Record, Run, Truth
from rmetric.replay.scored_run import ScoredRun, score_run
from rmetric.reporting.page import trace_of_r_metric
from rmetric.reporting.style import (
    COLUMN_WIDTH,
    FAILURE_LINE,
    MEANING,
    ONSET_LINE,
    TEXT_WIDTH,
    save,
    style,
)
from rmetric.simulation.outcome import soft_failure
from studies.case_study.folder import Folder
from studies.case_study.page import write_pages
from studies.case_study.sentence import results_of, sentence
from studies.common.real_runs import COLUMNS, Summary, real_runs_rows
from studies.common.renderers import to_markdown
from studies.common.table import Table


def truth_of(injected: Truth, records: Sequence[Record], twin: Sequence[Record] | None) -> Truth:
    """The truth of a whole run: `injected` with what became of it.

    - non_finite: the loss is nan or infinite, and stays so to the end;
    - diverged: the validation loss stays 20 % above its best so far, and ends there;
    - degraded: it stays 0.10 nat above the twin's.

    The last two hold for the median of three evaluations, and count from the
    evaluation since which they do. A loss that falls fast leaves that median
    above its best as well: only one that also ends above it has diverged.
    `twin` are the records of the same run without the fault; None where it was not run.
    """
    failure = _not_finite(records) or _worse(records, twin)
    if failure is not None:
        kind, step = failure
        return replace(injected, outcome="failed", failure_kind=kind, failure_step=step)
    return replace(injected, outcome="healthy" if injected.fault == "NONE" else "absorbed")


def _not_finite(records: Sequence[Record]) -> tuple[str, int] | None:
    """A gradient that overflows is no failure: under loss scaling it is how the scale is found."""
    failed = None
    for record in records:
        losses = [x for x in (record.training_loss, record.validation_loss) if x is not None]
        if losses:
            failed = None if all(map(isfinite, losses)) else failed or record.step
    return None if failed is None else ("non_finite", failed)


def _worse(records: Sequence[Record], twin: Sequence[Record] | None) -> tuple[str, int] | None:
    """Diverged or degraded, and since which step."""
    loss = {r.step: r.validation_loss for r in records if r.validation_loss is not None}
    beside = {r.step: r.validation_loss for r in twin or ()}
    twin_T = None if twin is None else np.array([beside[step] for step in loss])
    failure = soft_failure(np.array(list(loss.values()), dtype=float), twin_T, ends_there=True)
    return failure and (failure[0], list(loss)[failure[1]])


MEASURED = (
    "time", "learning_rate", "training_loss", "validation_loss", "gradient_norm", "update_norm",
    "parameter_norm",
)  # fmt: skip
CALIBRATED = "calibrated"


def write_report(folder: Folder) -> None:
    """results.csv, the plot, the pages, claims.md, and the judgements in the summary."""
    done = folder.summary["runs"]
    scored = {name: score_run(read_log(folder.log(run["id"]))) for name, run in done.items()}
    for name, run in scored.items():
        done[name] |= about_run(run)
    others = {
        name: {of: trace(name, run.run) for of, run in scored.items()}
        for name, entry in (IN_PAPER | {CALIBRATED: DETECTORS[CALIBRATED]}).items()
        if entry.kind in ("baseline", "ours") and not entry.sees_future
    }
    folder.summary["other_detectors"] = {
        name: {of: _judged(scored[of].run, said) for of, said in traces.items()}
        for name, traces in others.items()
    }
    text = sentence(results_of(folder.summary))
    folder.summary["sentence"] = text
    folder.write()
    write_results(folder.path / "results.csv", scored, others[CALIBRATED])
    with style():
        save(plot_twins(scored, others[CALIBRATED]), folder.path / "case_study")
    claims = to_markdown(real_runs_table([folder.summary]))
    write_atomically(folder.path / "claims.md", [claims.encode()])
    write_pages(folder.summary, folder.path)


def about_run(scored: ScoredRun) -> dict[str, Any]:
    """Outcome, alerts and verdicts of one run."""
    truth = scored.run.truth
    assert truth is not None
    return {
        "fault": truth.fault,
        "severity": truth.severity,
        "onset_step": truth.onset_step,
        "duration_steps": truth.duration_steps,
        "outcome": truth.outcome,
        "failure_kind": truth.failure_kind,
        "failure_step": truth.failure_step,
        "max_r": max(score.score for score in scored.scores),
        "r_metric": _judged(scored.run, trace_of_r_metric(scored).as_trace(scored.run.id)),
    }


def _began(said: Trace) -> list[int]:
    """Steps at which an alarm began."""
    before = np.concatenate([[False], said.alarms[:-1]])
    return [int(step) for step in said.steps[said.alarms & ~before]]


def alerts_by_phase(run: Run, said: Trace) -> dict[str, dict[str, int]]:
    """Number of alarms that began, and of steps in alarm, by phase of the run."""
    in_alarm = said.steps[said.alarms]
    return {
        phase: {
            "alerts": sum(low <= step < high for step in _began(said)),
            "steps_in_alert": int(((low <= in_alarm) & (in_alarm < high)).sum()),
        }
        for phase, (low, high) in _phases(run.truth).items()
    }


def _phases(truth: Truth | None) -> dict[str, tuple[float, float]]:
    """Of a run, from the first step to the one that is no longer in it."""
    if truth is None or truth.onset_step is None:
        return {"whole_run": (-inf, inf)}
    onset, failure = truth.onset_step, truth.failure_step
    if failure is None:
        return {"before_onset": (-inf, onset), "after_onset": (onset, inf)}
    return {
        "before_onset": (-inf, onset),
        "onset_to_failure": (onset, failure),
        "after_failure": (failure, inf),
    }


def _judged(run: Run, said: Trace) -> dict[str, Any]:
    """A detector's alarms by phase, the first ones, and the verdict under each protocol."""
    onset = run.truth.onset_step if run.truth else None
    later = [step for step in _began(said) if onset is not None and step >= onset]
    verdicts: dict[str, Any] = {
        "first_alert_step": said.first_alert,
        "first_alert_since_onset": later[0] if later else None,
        "alerts": alerts_by_phase(run, said),
    }
    for protocol in PROTOCOLS:
        outcome = judge([run], [said], protocol)
        steps, minutes = float(outcome.lead_steps[0]), float(outcome.lead_minutes[0])
        verdicts[protocol] = {
            "hit": bool(outcome.hit[0]),
            "false_alarm": bool(outcome.false_alarm[0]),
            "lead_steps": None if isnan(steps) else int(steps),
            "lead_minutes": None if isnan(minutes) else minutes,
        }
    return verdicts


def write_results(
    path: Path, runs: Mapping[str, ScoredRun], calibrated: Mapping[str, Trace]
) -> None:
    """One row a step and run: what was measured, R, and the calibrated detector's score.

    Both with their alarm, 1 or 0. Blank: not logged, or not yet defined.
    """
    names = [*Components._fields, *(f"{name}_normalised" for name in Components._fields)]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        of_calibrated = ["calibrated_score", "calibrated_alarm"]
        writer.writerow(["run", "step", *MEASURED, *names, "r_metric", "alert", *of_calibrated])
        for name, scored in runs.items():
            said = calibrated[name]
            rows = zip(scored.run.records, scored.scores, said.scores, said.alarms, strict=True)
            for record, score, strength, alarm in rows:
                measured = [getattr(record, field) for field in MEASURED]
                values = [*measured, *score.raw, *score.normalised, score.score]
                row = [name, record.step, *map(_shown, values), int(score.alarm)]
                writer.writerow([*row, _shown(strength), int(alarm)])


def _shown(value: float | None) -> str:
    return "" if value is None or value != value else f"{value:.6g}"


LOSSES = {"training_loss": 0.6, "validation_loss": 1.2}  # width of the line
PANELS, LEGEND, AXIS = 3.3, 0.55, 0.38  # inches: a run's panels, and what stands above and below
SHADE = 0.22  # of an alarm
#: On the axis of the calibrated score, logarithmic above its threshold, 1.
TICKS = (0, 1, 3, 10, 30, 100)
#: The axis of the losses ends at this multiple of the highest loss of a run that did not fail.
ABOVE = 2.0
#: Highest loss over the lowest, above which the axis is logarithmic, and has decades only.
WIDE, VERY_WIDE = 20.0, 1000.0
FONT = 7.0  # points: the least that is read in print
#: White around a number that crosses a line.
HALO = (withStroke(linewidth=1.6, foreground="white"),)


def plot_twins(runs: Mapping[str, ScoredRun], calibrated: Mapping[str, Trace]) -> Figure:
    """A column for each run: losses, R and the calibrated score; draw it inside `style()`."""
    names = list(runs)
    shown = [runs[name] for name in names]
    width = COLUMN_WIDTH if len(shown) == 1 else TEXT_WIDTH
    height = PANELS + LEGEND + AXIS
    figure = Figure(figsize=(width, height))
    panels: Any = figure.subplots(
        3, len(shown), sharex=True, sharey="row", squeeze=False,
        gridspec_kw={
            "height_ratios": (3, 2, 2), "hspace": 0.14, "wspace": 0.08, "right": 0.985,
            "left": 0.55 / width, "bottom": AXIS / height, "top": 1 - LEGEND / height,
        },
    )  # fmt: skip
    # Steps planned: a run that ended early is seen to.
    last = max(scored.run.config["total_training_steps"] for scored in shown)
    highest = max(2.0, *(float(np.nanmax(calibrated[n].scores, initial=0.0)) for n in names))
    for number, (name, scored) in enumerate(zip(names, shown, strict=True)):
        losses, score, own = panels[:, number]
        _plot_losses(losses, scored, shown)
        _plot_score(score, scored)
        _plot_calibrated(own, calibrated[name], highest)
        for axes in panels[:, number]:
            _mark_truth(axes, scored)
        own.set_xlim(0, last)
        own.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10], integer=True))
        own.set_xlabel("step")
        ends = own.get_xticklabels()
        if number + 1 < len(shown) and ends:
            ends[-1].set_horizontalalignment("right")  # clear of the next column's first
    for axes, label in zip(
        panels[:, 0], ("loss (nats)", "R (published)", "calibrated"), strict=True
    ):
        axes.set_ylabel(label)
    figure.align_ylabels(panels[:, 0])
    meanings = _meanings(shown)
    rows = 1 if len(shown) > 1 else 3
    figure.legend(
        handles=meanings, loc="upper center", ncols=-(-len(meanings) // rows), fontsize=FONT,
        columnspacing=0.9, handletextpad=0.5,
    )  # fmt: skip
    return figure


def title_of(scored: ScoredRun) -> str:
    """The fault with its severity and the outcome of the run, in two lines."""
    truth = scored.run.truth
    assert truth is not None
    if truth.fault == "NONE":
        fault = "control, no fault"
    else:
        severity = "" if truth.severity is None else f" {truth.severity:g}"
        fault = f"{truth.fault}{severity}"
    kind = str(truth.failure_kind).replace("_", "-")
    return f"{fault}\n{f'{kind} at {truth.failure_step}' if truth.failed else truth.outcome}"


def _points(scored: ScoredRun, name: str) -> list[tuple[int, float]]:
    values = [(record.step, getattr(record, name)) for record in scored.run.records]
    return [(step, v if isfinite(v) else nan) for step, v in values if v is not None]


def _losses(scored: ScoredRun) -> list[float]:
    return [v for name in LOSSES for _, v in _points(scored, name) if v > 0]


def _plot_losses(axes: Axes, scored: ScoredRun, shown: Sequence[ScoredRun]) -> None:
    """On an axis that all runs share; a loss that leaves the others far behind leaves the axis."""
    axes.set_title(title_of(scored), loc="left")
    for name, width in LOSSES.items():
        axes.plot(*zip(*_points(scored, name), strict=True), color=MEANING[name], linewidth=width)
    every = [v for run in shown for v in _losses(run)]
    calm = [
        v for run in shown if not (run.run.truth and run.run.truth.failed) for v in _losses(run)
    ]
    low, high = min(every, default=1.0), max(every, default=2.0)
    if calm and high > ABOVE * max(calm):
        high = ABOVE * max(calm)
    if high <= WIDE * low:
        axes.set_ylim(max(0.0, low - 0.05 * (high - low)), high + 0.05 * (high - low))
    else:
        axes.set(yscale="log", ylim=(low / 1.1, high * 1.1))
        between = (1, 2, 5) if high < VERY_WIDE * low else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=between, numticks=20))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")  # 0.5 and 1000 instead of powers of ten
    most = max(_losses(scored), default=0.0)
    if most > high:
        axes.text(0.98, 0.97, f"up to {most:,.0f}", transform=axes.transAxes, ha="right", va="top",
                  fontsize=FONT, path_effects=HALO)  # fmt: skip


def _plot_score(axes: Axes, scored: ScoredRun) -> None:
    top, threshold = 1.06 * sum(scored.config.weights), scored.config.threshold
    _draw_score(
        axes, [(score.step, score.score, score.alarm) for score in scored.scores], threshold, top
    )
    axes.set(ylim=(-0.06, top), yticks=(0, threshold, 1))
    axes.yaxis.set_major_formatter("{x:g}")


def _plot_calibrated(axes: Axes, said: Trace, highest: float) -> None:
    top = 1.3 * highest
    points = list(zip(said.steps, said.scores, said.alarms, strict=True))
    axes.set_yscale("symlog", linthresh=1.0)
    _draw_score(axes, points, 1.0, top)
    axes.set(ylim=(-0.06, top), yticks=[x for x in TICKS if x <= highest])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    if not any(alarm for _, _, alarm in points):
        axes.text(0.02, 0.94, "no alarm", transform=axes.transAxes, va="top", fontsize=FONT)


def _draw_score(
    axes: Axes, points: Sequence[tuple[int, float, bool]], threshold: float, top: float
) -> None:
    """A detector's score, of (step, score, alarm); an alarm is shaded until the next record."""
    steps, values, alarms = zip(*points, strict=True)
    edges, at = np.flatnonzero(np.diff([0, *alarms, 0])), [*steps, steps[-1]]
    spans = [(at[a], at[b] - at[a]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    axes.broken_barh(spans, (-0.06, top + 0.06), color=MEANING["alert"], alpha=SHADE, linewidth=0)
    axes.step(steps, values, where="post", color=MEANING["score"], linewidth=0.6)
    axes.axhline(threshold, color=MEANING["alert"], linestyle="--", linewidth=0.8)
    first = [step for step, _, alarm in points if alarm][:1]
    axes.plot(first, [top] * len(first), "v", color=MEANING["alert"], clip_on=False, markersize=4)
    for step in first:
        side = "left" if step < 0.3 * steps[-1] else "right"
        axes.annotate(f" {step} ", (step, top), ha=side, va="top", fontsize=FONT, zorder=3,
                      color=MEANING["alert"], path_effects=HALO)  # fmt: skip


def _mark_truth(axes: Axes, scored: ScoredRun) -> None:
    truth = scored.run.truth
    if truth is not None and truth.failure_step is not None:
        axes.axvline(truth.failure_step, **FAILURE_LINE)
    if truth is not None and truth.onset_step is not None:
        axes.axvline(truth.onset_step, **ONSET_LINE)


def _meanings(runs: Sequence[ScoredRun]) -> list[Artist]:
    colour = MEANING
    failed = any(scored.run.truth is not None and scored.run.truth.failed for scored in runs)
    return [
        Line2D([], [], color=colour["training_loss"], label="training loss"),
        Line2D([], [], color=colour["validation_loss"], label="validation loss"),
        Line2D([], [], **ONSET_LINE, label="onset"),
        *[Line2D([], [], **FAILURE_LINE, label="failure")] * failed,
        Line2D([], [], color=colour["score"], linewidth=0.6, label="score"),
        Line2D([], [], color=colour["alert"], linestyle="--", label="threshold"),
        Line2D([], [], color=colour["alert"], linestyle="", marker="v", label="first alarm"),
        Patch(color=colour["alert"], alpha=SHADE, linewidth=0, label="alarm"),
    ]


def real_runs_table(summaries: Sequence[Summary]) -> Table:
    """The rows as a table of their own, for the output of one case study."""
    return Table(
        name="claims",
        number=5,
        title="The claims of the paper about real runs beside what was measured",
        columns=COLUMNS,
        rows=real_runs_rows(summaries),
    )
