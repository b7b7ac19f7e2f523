"""Tables of the laboratory: failures, their times, the signals before them, the simulator beside.

Outcomes and times are those of all runs. Signals and detectors use the calibration and
development runs alone: the test part is reserved for the benchmark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import nan

import numpy as np
import pandas as pd

from rmetric.detectors import IN_PAPER
from rmetric.evaluation import judge, score, trace_all
from rmetric.evaluation.intervals import wilson
from rmetric.records import Run, Truth
from rmetric.simulation import simulate
from rmetric.simulation.study import batches, stress_specs
from studies.common.table import Cell, Table, show
from studies.fault_lab.signals import SIGNALS, SignalResponse, area, column, response

WILSON = "Shares with 95 % Wilson intervals."
SCOPE = "Calibration and development runs only; the test part is kept for the benchmark."
#: How a disturbed run ended, and its words in the tables.
ENDS = {
    "non_finite": "not finite",
    "diverged": "diverged",
    "degraded": "degraded",
    "absorbed": "absorbed",
    "benign": "benign",
}
KINDS = tuple(ENDS)[:3]
PERCENTILES = (10, 25, 50, 75, 90)
SOON = 30  # steps
COMPARED = ("DATA_CORRUPTION", "EXPERT_FAILURE")
LATER = 10  # steps

#: Fault of the simulator -> what is done to a real run for it.
SHARED = {
    name: {
        "GQA_MISMATCH": ("ATTENTION_SCALE",),
        "BATCH_SIZE_CHANGE": ("BATCH_SIZE_DOWN", "BATCH_SIZE_UP"),
    }.get(name, (name,))
    for name in (
        "NONE", "LR_SPIKE", "GRADIENT_EXPLOSION", "DATA_CORRUPTION", "GQA_MISMATCH",
        "EXPERT_FAILURE", "ROUTER_IMBALANCE", "DOMAIN_SHIFT", "RATE_REWARMUP", "BAD_BATCH",
        "NOISY_EVALUATION", "BATCH_SIZE_CHANGE",
    )
}  # fmt: skip
#: Those whose severities mean the same in both, so that they are compared one by one.
SAME_SEVERITY = (
    "LR_SPIKE", "GRADIENT_EXPLOSION", "DATA_CORRUPTION", "GQA_MISMATCH", "EXPERT_FAILURE",
    "ROUTER_IMBALANCE", "RATE_REWARMUP",
)  # fmt: skip
#: As many as the laboratory's: one in four outweighs the others sooner than one in eight.
SIMULATED_WORKERS = 4


def facts(runs: Iterable[Run]) -> pd.DataFrame:
    """A row for each run: what was done to it, how it ended, and steps from onset to failure."""
    columns = ["fault", "kind", "severity", "benign", "failed", "end", "onset", "failure"]
    rows = [
        (truth.fault, _kind(truth), truth.severity or 0.0, truth.benign, truth.failed, end_of(run),
         truth.onset_step, truth.failure_step)
        for run in runs
        if (truth := run.truth) is not None
    ]  # fmt: skip
    found = pd.DataFrame(rows, columns=columns)
    return found.assign(steps=found.pop("failure").astype(float) - found.pop("onset"))


def _kind(truth: Truth) -> str:
    return "benign" if truth.benign else "control" if truth.fault == "NONE" else "fault"


def end_of(run: Run) -> str:
    truth = run.truth
    assert truth is not None
    if truth.failed:
        return str(truth.failure_kind)
    return "absorbed" if (kind := _kind(truth)) == "fault" else kind


def by_fault(found: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Fault -> its rows; faults before benign changes, those that fail most first."""
    faults = found.groupby(["kind", "fault"], as_index=False).agg(
        failed=("failed", "mean"), steps=("steps", "median")
    )
    faults["kind"] = pd.Categorical(faults.kind, ["fault", "benign", "control"], ordered=True)
    order = {"kind": True, "failed": False, "steps": True, "fault": True}
    faults = faults.sort_values([*order], ascending=[*order.values()])
    return {name: found[found.fault == name] for name in faults.fault}


def outcomes(found: pd.DataFrame, by_severity: bool = False) -> Table:
    """Outcomes of the runs under each fault, and times to failure."""
    if by_severity:
        rows = [
            (name, f"{severity:g}", *_outcome(equal))
            for name, under in by_fault(found).items()
            for severity, equal in under.groupby("severity")
        ]
    else:
        rows = [
            (name, under.kind.iloc[0], *_outcome(under)) for name, under in by_fault(found).items()
        ]
        for kind, words in (("fault", "all faults"), ("benign", "all benign changes")):
            rows.append((words, kind, *_outcome(found[found.kind == kind])))
    return Table(
        "outcomes_by_severity" if by_severity else "outcomes",
        "Failures and times to failure" + (", by severity" if by_severity else ""),
        (
            "Fault",
            "Severity" if by_severity else "Kind",
            "Runs | Failed (share) | Not finite | Diverged | Degraded | "
            "Onset to failure, 25 % (steps):0 | 50 %:0 | 75 %:0",
        ),
        rows,
        notes=[WILSON, "All runs of the campaign, the test part's outcomes included."],
        grouped=by_severity,
    )


def _outcome(rows: pd.DataFrame) -> tuple[Cell, ...]:
    counts = (int((rows.end == kind).sum()) for kind in KINDS)
    failed = wilson(int(rows.failed.sum()), len(rows))
    return len(rows), failed, *counts, *_percentiles(rows, (25, 50, 75))


def _percentiles(rows: pd.DataFrame, percents: Sequence[int]) -> list[float]:
    steps = rows.steps.dropna()
    return np.percentile(steps, percents).tolist() if len(steps) else [nan] * len(percents)


def times(found: pd.DataFrame) -> Table:
    """Steps from onset to failure, of all runs that a fault made fail."""
    failed = found[found.failed & ~found.benign]

    def row(label: str, rows: pd.DataFrame) -> tuple[Cell, ...]:
        steps = rows.steps.dropna()
        at_once, soon = int((steps == 0).sum()), int((steps <= SOON).sum())
        return label, len(steps), at_once, soon, *_percentiles(rows, PERCENTILES)

    return Table(
        "times",
        "Steps from the onset of a fault to the failure",
        (
            f"Failure | Runs | In the step of the onset | Within {SOON} steps",
            *(f"{p} %:1" for p in PERCENTILES),
        ),
        [*(row(ENDS[kind], failed[failed.end == kind]) for kind in KINDS), row("all", failed)],
        notes=[
            "All runs that failed under a fault, the test part's outcomes included; benign "
            "changes are left out.",
            "The evaluation every 10 steps and the median of three make 10 to 20 steps the "
            "smallest time that a diverged or degraded run can show.",
        ],
    )


# -- the simulator beside the laboratory


def simulated(seed: int = 0) -> list[Run]:
    """The stress study's runs under the faults that the laboratory has too, with its workers."""
    specs = [
        replace(spec, num_workers=SIMULATED_WORKERS)
        for spec in stress_specs(seed)
        if spec.fault in SHARED and spec.applicable
    ]
    return [run for batch in batches(specs) for run in simulate(batch)]


def comparison(real: pd.DataFrame, made: pd.DataFrame) -> Table:
    """Outcome shares and times to failure, side by side."""

    def side(rows: pd.DataFrame) -> tuple[Cell, ...]:
        low, middle, high = _percentiles(rows, (25, 50, 75))
        shown = "" if np.isnan(middle) else f"{middle:.0f} ({low:.0f} to {high:.0f})"
        return len(rows), wilson(int(rows.failed.sum()), len(rows)), shown

    table: list[tuple[Cell, ...]] = []
    for name, counterparts in SHARED.items():
        sides = real[real.fault.isin(counterparts)], made[made.fault == name]
        if name not in SAME_SEVERITY:
            table.append((name, "all", *side(sides[0]), *side(sides[1])))
            continue
        for severity in sorted({*sides[0].severity, *sides[1].severity}):
            theirs, ours = (rows[rows.severity == severity] for rows in sides)
            table.append((name, f"{severity:g}", *side(theirs), *side(ours)))
    return Table(
        "simulator",
        "The laboratory and the simulator under the same faults",
        "Fault | Severity | Real runs | Real: failed | Real: onset to failure (steps) | "
        "Simulated runs | Simulated: failed | Simulated: onset to failure (steps)",
        table,
        notes=[
            f"{WILSON} Times: median (quartiles) of the runs that failed.",
            "Real runs have 400 steps, simulated ones 2000; both have 4 workers, "
            "are evaluated every 10 steps and judged by the same definitions. Faults act for the "
            "same share of the run, but for DATA_CORRUPTION, which lasts to the end in the "
            "simulator, and GQA_MISMATCH: there the attention logits are multiplied for a quarter "
            "of the run; in the laboratory (ATTENTION_SCALE) the query weights are, once, and can "
            "be learnt back.",
        ],
        grouped=True,
    )


def twins(runs: Sequence[Run]) -> Table:
    """Losses of disturbed runs minus the twin's at four times; `runs` include the controls."""
    controls = {run.id: run for run in runs}
    disturbed = [run for run in runs if run.truth is not None and run.truth.fault in COMPARED]
    above = pd.DataFrame([_above(run, controls[run.config["branch_of"]]) for run in disturbed])
    about = facts(disturbed)
    rows = [
        (fault, f"{severity:g}", len(found), *found.agg(_range))
        for (fault, severity), found in above.groupby([about.fault, about.severity])
    ]
    return Table(
        "twins",
        "Nats above the exact twin",
        "Fault | Severity | Runs | Training loss, at the onset | Probe loss, at the onset | "
        f"{LATER} steps later | In the fault's last step | At the end",
        rows,
        notes=[
            f"{SCOPE} Lowest to highest of the runs, in nats per token.",
            "The probe batch is of clean text. An expert is reset in one step, which is the "
            "fault's first and last.",
        ],
        grouped=True,
    )


def _above(run: Run, control: Run) -> tuple[float, ...]:
    truth, last = run.truth, len(run.records) - 1
    assert truth is not None
    assert truth.onset_step is not None
    onset = truth.onset_step - 1  # records begin with step 1
    lifted = onset + (truth.duration_steps or last) - 1
    training, probe = (
        column(name, run.records) - column(name, control.records[: last + 1])
        for name in ("training_loss", "probe_loss")
    )
    watched = (min(place, last) for place in (onset, onset + LATER, lifted, last))
    return float(training[onset]), *(float(probe[place]) for place in watched)


def _range(values: pd.Series[float]) -> str:
    low, high = show(values.min()), show(values.max())
    return low if low == high else f"{low} to {high}"


# -- signals and detectors


def all_responses(runs: Sequence[Run]) -> pd.DataFrame:
    """`facts` of each disturbed run for each `signal`, with its `SignalResponse`."""
    controls = {run.id: run for run in runs}
    branches = [run for run in runs if run.config.get("branch_of")]
    about, found = facts(branches), []
    for name, signal in SIGNALS.items():
        seen = [response(signal, run, controls[run.config["branch_of"]]) for run in branches]
        responses = pd.DataFrame(seen, columns=SignalResponse._fields)
        found.append(about.assign(signal=name).join(responses))
    return pd.concat(found)


def signals(seen: pd.DataFrame) -> Table:
    """Separation of disturbed runs from their twins by each signal."""
    rows: list[tuple[Cell, ...]] = []
    for name, signal in SIGNALS.items():
        found = seen[seen.signal == name]
        groups = (found[found.end == end] for end in ENDS)
        rows.append((signal.label, area(found[found.end.isin(KINDS)]), *map(area, groups)))
    rows.sort(key=lambda row: -float(row[1]) if isinstance(row[1], float) else 0.0)
    counts = ", ".join(f"{(found.end == end).sum()} {words}" for end, words in ENDS.items())
    return Table(
        "signals",
        "Signals before the failure: area under the ROC curve, compared with the exact twin",
        ("Signal | All failing", *(words.capitalize() for words in ENDS.values())),
        rows,
        notes=[
            f"{SCOPE} Runs: {counts}.",
            "The largest value (of losses and R) or deviation either way (of the rest) from the "
            "onset up to, not including, the failure, or over 60 steps where nothing fails, "
            "against the twin's over the same steps. 0.5 is no information; under benign and "
            "absorbed a high number means false alarms.",
        ],
    )


def signals_by_fault(seen: pd.DataFrame) -> Table:
    """The same for the failing runs of each fault."""
    rows: list[tuple[Cell, ...]] = []
    for fault, failing in by_fault(seen[seen.failed]).items():
        of_signals = [failing[failing.signal == name] for name in SIGNALS]
        rows.append((fault, len(of_signals[0]), *map(area, of_signals)))
    return Table(
        "signals_by_fault",
        "Signals before the failure, by fault: area under the ROC curve, failing runs",
        ("Fault | Failing runs", *(signal.label for signal in SIGNALS.values())),
        rows,
        notes=[
            SCOPE,
            "Few runs per fault: differences between neighbouring rows are not significant.",
        ],
    )


def detectors(runs: Sequence[Run], num_processes: int = 1) -> Table:
    """Every registered detector with its own settings, under two protocols."""
    rows: list[tuple[Cell, ...]] = []
    found = facts(runs)
    healthy = found.fault == "NONE", found.end == "benign"
    for name, entry in IN_PAPER.items():
        traces = trace_all(name, runs, num_processes=num_processes)
        published = score(judge(runs, traces, "published"))
        verdicts = judge(runs, traces, "causal")
        causal = score(verdicts)
        alarmed = (
            wilson(int((verdicts.false_alarm & chosen).sum()), int(chosen.sum()))
            for chosen in healthy
        )
        ratios = published.f1, causal.f1, causal.recall
        rows.append((entry.title, *ratios, *alarmed, causal.median_lead_steps))
    controls, benign = (int(chosen.sum()) for chosen in healthy)
    return Table(
        "detectors",
        "The detectors with their own settings, on real runs",
        "Detector | F1, published rule | F1, causal rule | Recall, causal | "
        "Controls alarmed | Benign alarmed | Median lead (steps):0",
        rows,
        notes=[
            f"{SCOPE} {len(runs)} runs, {int(found.failed.sum())} failing, {controls} controls, "
            f"{benign} benign.",
            "Published: any alarm at any step counts. Causal: the first alarm must fall between "
            "onset and failure. Branches share their control's steps before the onset, so an "
            "error of a detector there counts several times.",
            "Settings are those of the paper or the detector's own; nothing was fitted here.",
        ],
    )
