#!/usr/bin/env python3
"""Draw docs/figures/simulator.png: checks of the simulator.

    python docs/make_simulator_figure.py

(a) without faults, the loss and the scaling law; (b) learning-rate multiples: share of failing
runs and time to failure; (c) number of workers and noise of their average; (d) outcomes of every
fault and benign change. The runs are simulated from a fixed seed, in less than a minute on two
cores.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from joblib import Parallel, delayed
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rmetric.records import Run
from rmetric.reporting.style import BLACK, BLUE, CYCLE, GREY, TEXT_WIDTH, style
from rmetric.simulation import ARCHITECTURES, FAULTS, RunSpec, simulate
from rmetric.simulation.study import batches
from studies.paper.figures.failure_process import OUTCOMES, Outcome, in_order, look_of, name_of

Floats = NDArray[np.float64]

REPETITIONS = 5  # of each architecture, fault and severity
ONSET, STEPS = 1000, 2000  # of disturbed runs
SETTLED = 400  # steps after which the warm-up has left no trace
MULTIPLES = (1, 2, 3, 4, 5, 7, 10, 15, 25, 40)
WORKERS = (2, 4, 8, 16, 32, 64)
COEFFICIENT, EXPONENT = 410.7, 0.28  # of the data, Hoffmann et al. 2022, equation 10
MARGINS = {"left": 0.09, "right": 0.985, "top": 0.925, "bottom": 0.075}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "figures",
        metavar="DIR",
        help="where simulator.png goes (default: docs/figures)",
    )
    out = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    with style():
        draw().savefig(out / "simulator.png", metadata={"Software": None})
    print(out / "simulator.png")
    return 0


def draw() -> Figure:
    """The four panels, each from separate runs."""
    figure = Figure(figsize=(TEXT_WIDTH, 5.9))
    grid = figure.add_gridspec(3, 2, width_ratios=(1, 0.78), wspace=0.62, hspace=0.45, **MARGINS)
    plot_scaling(figure.add_subplot(grid[0, 0]), simulated(healthy_specs()))
    share, time = (figure.add_subplot(part) for part in grid[1, 0].subgridspec(2, 1, hspace=0.15))
    plot_multiples(share, time, simulated(spike_specs()))
    plot_workers(figure.add_subplot(grid[2, 0]), simulated(worker_specs()))
    plot_outcomes(figure.add_subplot(grid[:, 1]), simulated(fault_specs()))
    return figure


def simulated(specs: Sequence[RunSpec]) -> list[Run]:
    """These runs; the same whatever the number of processes."""
    done = Parallel(n_jobs=-1)(delayed(simulate)(batch) for batch in batches(specs))
    return [run for runs in done for run in runs]


def each_architecture(**settings: Any) -> list[RunSpec]:
    """Specs for each architecture; a run's noise depends on its id alone, not on `settings`."""
    return [
        RunSpec(experiment_id=f"{name}_{repetition}", architecture=name, **settings)
        for name in ARCHITECTURES
        for repetition in range(REPETITIONS)
    ]


def severity_of(run: Run) -> float:
    return run.config["fault_injection"]["params"]["severity"]


def healthy_specs() -> list[RunSpec]:
    return each_architecture(evaluate_every=25)


def excess_losses(runs: Sequence[Run]) -> tuple[Floats, Floats]:
    """Tokens seen (T,), and nats above the irreducible loss (R, T)."""
    kinds = [ARCHITECTURES[run.config["model_type"]] for run in runs]
    steps = np.array([record.step for record in runs[0].records])
    losses = np.array([[record.validation_loss for record in run.records] for run in runs])
    floors = np.array([kind.irreducible_loss for kind in kinds])
    return steps * kinds[0].batch_tokens, losses - floors[:, None]


def power_law(tokens: Floats, excess: Floats) -> tuple[float, float]:
    """Coefficient and exponent of excess = coefficient / tokens^exponent, by least squares."""
    slope, intercept = np.polyfit(np.log(tokens), np.log(excess), 1)
    return float(np.exp(intercept)), float(-slope)


def plot_scaling(axes: Axes, runs: Sequence[Run]) -> None:
    tokens, excess = excess_losses(runs)
    mean = excess.mean(axis=0)
    settled = tokens > SETTLED * tokens[-1] / runs[0].records[-1].step
    coefficient, exponent = power_law(tokens[settled], mean[settled])
    axes.fill_between(
        tokens, excess.min(axis=0), excess.max(axis=0), color=BLUE, alpha=0.25, linewidth=0,
    )  # fmt: skip
    axes.plot(tokens, mean, color=BLUE, label=f"mean and range of {len(runs)} runs")
    axes.plot(
        tokens, COEFFICIENT / tokens**EXPONENT, "--", color=BLACK,
        label=f"{COEFFICIENT} / D^{EXPONENT}, Hoffmann et al. 2022",
    )  # fmt: skip
    axes.plot(
        tokens[settled], coefficient / tokens[settled] ** exponent, ":", color=CYCLE[1],
        label=f"fitted from step {SETTLED} on: exponent {exponent:.2f}",
    )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="tokens D", ylabel="excess loss (nats)")
    axes.set(ylim=(0.1, 6))
    axes.set_yticks((0.2, 0.5, 1, 2, 5), labels=("0.2", "0.5", "1", "2", "5"))
    axes.minorticks_off()
    axes.legend(loc="lower left")
    axes.set_title("(a) healthy runs against the scaling law", loc="left")


def spike_specs() -> list[RunSpec]:
    disturbed = {"onset_step": ONSET, "total_steps": STEPS, "evaluate_every": 100}
    return [
        spec
        for multiple in MULTIPLES
        for spec in each_architecture(fault="LR_SPIKE", severity=multiple, **disturbed)
    ]


def times_to_failure(runs: Sequence[Run], multiple: float) -> Floats:
    """Steps from onset to failure of the runs under this multiple; inf for those that did not."""
    truths = [run.truth for run in runs if severity_of(run) == multiple]
    return np.array([t.failure_step - t.onset_step if t.failed else np.inf for t in truths])


def plot_multiples(share: Axes, time: Axes, runs: Sequence[Run]) -> None:
    times = [times_to_failure(runs, multiple) for multiple in MULTIPLES]
    share.plot(MULTIPLES, [np.isfinite(t).mean() for t in times], "o-", color=BLUE)
    share.set(ylabel="failing", ylim=(-0.06, 1.06), yticks=(0, 0.5, 1))
    share.tick_params(labelbottom=False)
    for multiple, steps in zip(MULTIPLES, times, strict=True):
        failed = steps[np.isfinite(steps)]
        if len(failed):
            low, middle, high = np.percentile(failed, (25, 50, 75))
            time.plot([multiple] * 2, [low, high], color=BLUE, linewidth=3, alpha=0.35)
            time.plot(multiple, middle, "o", color=BLUE)
    time.set(ylabel="steps to\nfailure", yscale="log", xlabel="multiple of the learning rate")
    time.set(ylim=(6, 600))
    time.set_yticks((10, 100), labels=("10", "100"))
    for axes in (share, time):
        axes.set(xscale="log", xlim=(0.9, 50))
        axes.set_xticks(MULTIPLES, labels=[str(multiple) for multiple in MULTIPLES])
        axes.minorticks_off()
    each = len(runs) // len(MULTIPLES)
    share.set_title(f"(b) learning-rate spikes, {each} runs each; quartiles", loc="left")
    share.figure.align_ylabels((share, time))


def worker_specs() -> list[RunSpec]:
    quick = {"onset_step": 1, "total_steps": 2 * SETTLED, "evaluate_every": 10}
    return [spec for number in WORKERS for spec in each_architecture(num_workers=number, **quick)]


def norms(runs: Sequence[Run], num_workers: int) -> tuple[float, float]:
    """Mean norm of the averaged gradient, and of one worker's own, after the warm-up."""
    records = [
        record
        for run in runs
        if run.config["num_workers"] == num_workers
        for record in run.records
        if record.step > SETTLED
    ]
    averaged = np.mean([record.gradient_norm for record in records])
    return float(averaged), float(np.mean([record.worker_gradient_norms for record in records]))


def plot_workers(axes: Axes, runs: Sequence[Run]) -> None:
    averaged, own = zip(*(norms(runs, number) for number in WORKERS), strict=True)
    axes.plot(WORKERS, own, "s-", color=CYCLE[1], label="one worker's own gradient")
    axes.plot(WORKERS, averaged, "o-", color=BLUE, label="the averaged gradient")
    numbers = np.array(WORKERS)
    axes.plot(numbers, own[0] / np.sqrt(numbers), "--", color=GREY, label="1 / √workers")
    axes.set(xscale="log", yscale="log", xlabel="workers", ylabel="gradient norm")
    axes.set_xticks(WORKERS, labels=[str(number) for number in WORKERS])
    axes.set_yticks((0.3, 0.5, 1, 2), labels=("0.3", "0.5", "1", "2"))
    axes.minorticks_off()
    axes.legend(loc="lower left")
    axes.set_title("(c) more workers, less noise", loc="left")


def severities_of(name: str) -> tuple[float, ...]:
    return FAULTS[name].stress_severities or FAULTS[name].severities


def fault_specs() -> list[RunSpec]:
    disturbed = {"onset_step": ONSET, "total_steps": STEPS, "evaluate_every": 100}
    return [
        spec
        for name in FAULTS
        if name != "NONE"
        for severity in severities_of(name)
        for spec in each_architecture(fault=name, severity=severity, **disturbed)
    ]


def outcome_counts(runs: Sequence[Run]) -> dict[tuple[str, float], Counter[str]]:
    """Number of runs by outcome, for each fault and severity."""
    ends: dict[tuple[str, float], Counter[str]] = {}
    for run in runs:
        ends.setdefault((run.truth.fault, severity_of(run)), Counter())[name_of(run.truth)] += 1
    return ends


def plot_outcomes(axes: Axes, runs: Sequence[Run]) -> None:
    ends = outcome_counts(runs)
    kinds = in_order({end for counts in ends.values() for end in counts})
    heights, labels, height = [], [], 0.0
    for name in FAULTS:
        if name == "NONE":
            continue
        benign = "\n(benign)" if FAULTS[name].benign else ""
        axes.text(
            -0.13, height + 1, name + benign, ha="right", va="center", fontsize=6,
            transform=axes.get_yaxis_transform(),
        )  # fmt: skip
        for severity in severities_of(name):
            _stack(axes, height, ends[name, severity], kinds)
            heights.append(height)
            labels.append(f"{severity:g}")
            height += 1
        height += 0.7
    axes.set_yticks(heights, labels=labels, fontsize=5.5)
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, 1), ylim=(height - 0.7, -0.8), xlabel="share of runs")
    axes.grid(False)
    looks = [look_of(kind) for kind in kinds]
    handles = [Patch(facecolor=_fill(look), label=look.title) for look in looks]
    axes.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1, 0.995), ncols=3, handlelength=1
    )
    axes.figure.text(0.53, 0.995, "(d) outcomes of each fault and severity", fontsize=8, va="top")


def _stack(axes: Axes, height: float, counts: Counter[str], kinds: Sequence[str]) -> None:
    left, total = 0.0, counts.total()
    for kind in kinds:
        width = counts[kind] / total
        axes.barh(height, width, left=left, height=0.85, color=_fill(look_of(kind)))
        left += width


def _fill(look: Outcome) -> tuple[str, float]:
    """Paler where nothing failed, so that failures stand out."""
    return look.colour, 0.3 if look in (OUTCOMES["absorbed"], OUTCOMES["not_applicable"]) else 1.0


if __name__ == "__main__":
    sys.exit(main())
