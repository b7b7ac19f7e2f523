"""Results of the benchmark as tables: one row per detector, columns in groups that fit a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd

from rmetric._util.strict_json import number
from rmetric.evaluation.intervals import NUM_RESAMPLES, Estimate
from studies.common.table import Cell, Table, numbered
from studies.detector_benchmark.benchmark import Results
from studies.detector_benchmark.cases import BROKEN_NATS, EARLY_STEPS, SMOOTH_RECORDS, TREND_RECORDS
from studies.detector_benchmark.measure import QUARTILES
from studies.detector_benchmark.real_logs import EARLY_INTERVALS, LATE_INTERVALS

#: Detectors in the figures and the tables by fault; the csv files have all.
FEATURED = (
    *("calibrated", "loss_ewma", "loss_cusum", "bayesian_change_point"),
    *("isolation_forest_online", "llm_foundry_spike", "r_metric"),
)


class Group(NamedTuple):
    """Columns of one table: key in a row of results -> head, whose "(%)" makes a percentage."""

    name: str
    title: str
    heads: dict[str, str]
    notes: tuple[str, ...] = ()


INTERVALS = (
    f"Brackets: 95 % intervals. F1, precision, recall, utility and differences: {NUM_RESAMPLES} "
    "bootstrap resamples of whole groups. Shares: Wilson. –: undefined (division by 0)."
)
FAULT_GROUPS = (
    Group(
        "scores",
        "accuracy of the alarms (causal rule, first alarm latched)",
        {
            "f1": "F1",
            "f1_strict": "F1, strict",
            "f1_warned": "F1 where there is a warning",
            "f1_strict_warned": "Strict, where there is a warning",
            "f1_checked": "F1 with the check before the step",
            "precision": "Precision",
            "recall": "Recall",
            "recall_warned": "Recall where there is a warning",
            "minus_loss_ewma": "F1 minus EWMA's",
            "minus_r_metric": "F1 minus R-Metric's",
        },
        (
            "Hit: the first alarm falls from the onset up to, not including, the failure. F1 "
            "counts an alarm in a fault that the run absorbed separately (the fault was real); the "
            "strict F1 counts it as false. An alarm before the onset is false in every run, and "
            "the run is then missed.",
            "Where there is a warning: only failures with a record from the onset up to the "
            "failure. Instant failures have none. With the check before the step, an instant "
            "failure counts as detected if the loss or the gradient of its step is not finite.",
            INTERVALS,
        ),
    ),
    Group(
        "alarms",
        "false alarms and their cost",
        {
            "controls": "Controls alarmed (%):1",
            "benign": "Benign changes alarmed (%):1",
            "absorbed": "Absorbed faults alarmed (%):1",
            "premature": "Alarmed before the onset (%):1",
            "episodes_per_1000": "Episodes per 1000 healthy steps",
            "share_alarmed": "Healthy records alarmed (%):1",
            "utility": "Utility",
        },
        (
            "An episode is a period of alarmed records, so an alarm that never ends is one "
            "episode; the share of alarmed records shows its length. Healthy steps that branches "
            "share are counted once.",
        ),
    ),
    Group(
        "times",
        "warning times",
        {
            **{f"lead_acute_{q}": f"Acute: lead, {q} % (steps):0" for q in QUARTILES},
            **{f"lead_degraded_{q}": f"Degraded: lead, {q} % (steps):0" for q in QUARTILES},
            "recall_acute": "Recall, acute",
            "recall_degraded": "Recall, degraded",
            "early": "Early among acute",
            "early_possible": "Early where possible",
        },
        (
            "Lead: failure minus first alarm, quartiles over the hits. Early: an alarm from the "
            f"onset on, at least {EARLY_STEPS} steps before the training loss has visibly broken: "
            f"before the median of its last {SMOOTH_RECORDS} values is more than {BROKEN_NATS} nat "
            f"above that of the last {TREND_RECORDS} before the onset, it is not finite, or the "
            "run has failed. Where possible: only acute failures with a record that early.",
        ),
    ),
    Group(
        "protocols",
        "the same alarms under other rules",
        {
            "f1_published": "F1, published rule",
            "f1": "F1, causal, first alarm",
            "f1_unlatched": "F1, causal, any alarm",
            "recall_unlatched": "Recall, causal, any alarm",
        },
        (
            "Published: any alarm of a failing run is a hit, also before its fault. First alarm: "
            "only the first alarm counts. Any alarm: an alarm in time counts after earlier false "
            "alarms.",
        ),
    ),
)
REAL_GROUPS = (
    Group(
        "caught",
        "runs caught in time, and healthy runs alarmed",
        {
            "caught_high": "Caught, high confidence (%):0",
            "healthy_high": "Healthy alarmed, high confidence (%):0",
            "caught": "Caught, all (%):0",
            "caught_failing": "Failing caught (%):0",
            "caught_spiking": "Spiking caught (%):0",
            "healthy": "Healthy alarmed, all (%):0",
        },
        (
            f"Caught: the first alarm came at most {LATE_INTERVALS} logging intervals after the "
            "labelled onset, or at any time before it. A constant alarm catches every run: compare "
            "with the healthy runs alarmed.",
            "Shares with 95 % Wilson intervals, which treat runs as independent; runs of one "
            "configuration are not.",
        ),
    ),
    Group(
        "causal",
        f"alarms more than {EARLY_INTERVALS} logging intervals before the onset are false",
        {
            "f1": "F1",
            "precision": "Precision",
            "recall": "Recall",
            "causal_high": "Caught, high confidence, causal (%):0",
            **{f"delay_{q}": f"Delay, {q} % (intervals):1" for q in QUARTILES},
            "episodes_per_1000": "Episodes per 1000 healthy records",
            "share_alarmed": "Healthy records alarmed (%):1",
            "minus_loss_ewma": "F1 minus EWMA's",
            "minus_r_metric": "F1 minus R-Metric's",
        },
        (
            "Delay: first alarm minus labelled onset in logging intervals, quartiles over the "
            "caught runs with an onset; below 0 is before it.",
            INTERVALS,
        ),
    ),
)


def tables(results: Results) -> list[Table]:
    """One for each group of columns, then those by fault, numbered in this order."""
    found = [table(results, group) for group in groups_of(results)]
    found[0] = replace(found[0], notes=[*found[0].notes, *results["notes"]])
    if results["name"] != "real":
        found += [_by_fault(results, *by_fault) for by_fault in BY_FAULT]
        makers = {"left_out": left_out, "missed": missed, "absorbed": absorbed}
        found += [make(results) for name, make in makers.items() if name in results]
        if "opened" in results["made"] and "calibrated" in results["rows"]:
            found.append(aims(results))
    return numbered(found)


def groups_of(results: Results) -> tuple[Group, ...]:
    return REAL_GROUPS if results["name"] == "real" else FAULT_GROUPS


def table(results: Results, group: Group) -> Table:
    """The rows of all detectors under one group of columns."""
    return _table(
        results,
        group.name,
        group.title,
        ("Detector", *group.heads.values()),
        [
            (row["title"], *(cell(row.get(key), head) for key, head in group.heads.items()))
            for row in results["rows"].values()
        ],
        *group.notes,
    )


def _table(
    results: Results, name: str, title: str, heads: str | Sequence[str],
    rows: Sequence[tuple[Cell, ...]], *notes: str,
) -> Table:  # fmt: skip
    return Table(f"{results['name']}_{name}", f"{results['title']}: {title}", heads, rows, notes)


#: The short table for a terminal, without intervals.
SHORT = Group(
    "short",
    "in short",
    {
        "f1": "F1",
        "f1_strict": "Strict",
        "recall_warned": "Recall",
        "controls": "Controls (%):0",
        "benign": "Benign (%):0",
        "utility": "Utility",
    },
    (
        "Causal, first alarm latched. Recall where there is a warning; controls and benign changes "
        "alarmed.",
    ),
)
SHORT_REAL = Group(
    "short",
    "in short",
    {
        "caught_high": "Caught (%):0",
        "healthy_high": "Healthy (%):0",
        "caught": "Caught, all (%):0",
        "f1": "F1, causal",
    },
    ("Runs with a confident label: caught in time, healthy runs alarmed; all runs caught.",),
)


def short(results: Results) -> Table:
    whole = table(results, SHORT_REAL if results["name"] == "real" else SHORT)
    rows = [tuple(c.point if isinstance(c, Estimate) else c for c in row) for row in whole.rows]
    note = f"{whole.notes[0]} Intervals and the rest: {results['name']}.md."
    return replace(whole, rows=rows, notes=[note])


def wide(results: Results) -> Table:
    """Every column, for the csv file."""
    heads = {"failed": "Failing runs", "hits": "Hits", "false_alarms": "False alarms"}
    for group in groups_of(results):
        heads |= {key: head for key, head in group.heads.items() if key not in heads}
    return table(results, Group("all", "all columns", heads))


def left_out(results: Results) -> Table:
    found = results["left_out"]["kinds"]
    rows = [(kind, row["runs"], row["alarmed"], None) for kind, row in found.items()]
    sums = (sum(row[key] for row in found.values()) for key in ("runs", "alarmed"))
    share = cell(results["left_out"]["share"], "(%)")
    return _table(
        results,
        "left_out",
        "benign changes of a kind that the calibration did not include",
        "Change | Runs | Alarmed | Share (%):1",
        [*rows, ("all", *sums, share)],
        "The calibrated detector, with thresholds calibrated for each row without that kind. No "
        "faulty run enters a calibration, so the recall by fault is always that of unseen kinds.",
    )


class Aim(NamedTuple):
    """A goal set before the opening: the least value, or `most`; `low` is of the interval."""

    key: str
    words: str
    bound: float
    most: bool = False
    low: float | None = None

    def __str__(self) -> str:
        words = f"{'at most' if self.most else 'at least'} {self.bound:g}"
        return words if self.low is None else f"{words}, lower end at least {self.low:g}"

    def reached(self, measured: Estimate) -> bool:
        if self.most:
            return measured.point <= self.bound
        enough = self.low is None or measured.low > self.low
        return measured.point >= self.bound and enough


AIMS = (
    Aim("f1_warned", "F1 where there is a warning", 0.93, low=0.88),
    Aim("f1", "F1, instant failures counted as missed", 0.93, low=0.88),
    Aim("f1_strict_warned", "Strict F1 where there is a warning", 0.87),
    Aim("f1_strict", "Strict F1, instant failures counted as missed", 0.87),
    Aim("recall_warned", "Recall where there is a warning", 0.95),
    Aim("minus_loss_ewma", "F1 minus EWMA's", 0.08, low=0.0),
    Aim("early", "Early among acute failures", 0.6),
    Aim("controls", "Controls alarmed (share)", 0.02, most=True),
    Aim("benign", "Benign changes alarmed (share)", 0.05, most=True),
)


def aims(results: Results) -> Table:
    row, best = results["rows"]["calibrated"], results["rows"].get("ceiling", {})
    rows = []
    for aim in AIMS:
        measured, ceiling = Estimate(*map(number, row[aim.key])), best.get(aim.key)
        reached = "reached" if aim.reached(measured) else "missed"
        highest = number(ceiling[0]) if ceiling else None
        rows.append((aim.words, str(aim), measured, highest, reached))
    return _table(
        results,
        "aims",
        "the goals set before the opening",
        "Calibrated detector | Goal | Measured | Ceiling | ",
        rows,
        "The ceiling is the result of a detector that uses the truth.",
    )


def missed(results: Results) -> Table:
    return _table(
        results,
        "missed",
        "failures that the calibrated detector missed",
        "Run | Kind | Onset to failure (steps) | Highest score before it (1 alarms)",
        [(m["run"], m["kind"], m["steps"], number(m["highest"])) for m in results["missed"]],
        "Only failures with a record from the onset up to the failure.",
    )


def absorbed(results: Results) -> Table:
    return _table(
        results,
        "absorbed",
        "the effect of absorbed faults",
        (
            "The calibrated detector was | Runs",
            *(f"{when}, {q} % (nats)" for when in ("Most", "At the end") for q in QUARTILES),
        ),
        [
            (name, group["runs"], *map(number, [*group["most"], *group["end"]]))
            for name, group in results["absorbed"].items()
        ],
        "Validation loss above the twin's, from the onset on: the maximum, and the mean of the "
        "last three evaluations; quartiles over the runs. A run has failed if it ends 0.1 nat "
        "worse.",
    )


#: Counts of a fault's runs, and of those among them; name and title of the table.
BY_FAULT = (
    ("failed", "hit", "faults", "failures detected in time, by fault"),
    ("not_failed", "alarmed", "changes", "runs without a failure that alarmed from the onset on"),
)


def _by_fault(results: Results, of: str, counted: str, name: str, title: str) -> Table:
    first, *_ = results["rows"].values()
    about = pd.DataFrame(first["faults"]).T.sort_index().sort_values("benign", kind="stable")
    about = about[about[of] > 0]
    kinds = about.benign.map({False: "fault", True: "benign"})
    counts = pd.DataFrame({"Kind": kinds, "Runs": about[of]}, dtype=object)
    for row in (results["rows"][key] for key in FEATURED if key in results["rows"]):
        counts[row["title"]] = pd.DataFrame(row["faults"]).T[counted]
    counts.loc["all"] = ["", *counts.iloc[:, 1:].sum()]
    heads, rows = ("Fault or change", *counts), list(counts.itertuples(name=None))
    return _table(results, name, title, heads, rows, "Numbers of runs.")


def cell(value: Any, head: str) -> Cell:
    """A value of the JSON file as a cell; in percent under a head that says so."""
    if value is None:
        return None
    factor = 100 if "(%)" in head else 1
    if isinstance(value, (list, tuple)):
        return Estimate(*(factor * number(part) for part in value))
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return factor * number(value)
