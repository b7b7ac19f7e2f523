"""Results of the benchmark as tables: one row per detector, columns in groups that fit a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rmetric._util.strict_json import number
from rmetric.evaluation.intervals import NUM_RESAMPLES, Estimate
from studies.common.table import Cell, Column, Table, columns
from studies.detector_benchmark.benchmark import Results
from studies.detector_benchmark.cases import BROKEN_NATS, SMOOTH_RECORDS, TREND_RECORDS
from studies.detector_benchmark.hindsight import QUARTILES
from studies.detector_benchmark.real_logs import EARLY_INTERVALS, LATE_INTERVALS
from studies.detector_benchmark.verdicts import EARLY_STEPS

#: Detectors in the figures and the tables by fault; the csv files have all.
FEATURED = (
    "calibrated",
    "loss_ewma",
    "loss_cusum",
    "bayesian_change_point",
    "isolation_forest_online",
    "llm_foundry_spike",
    "r_metric",
)


class Field(NamedTuple):
    """Key of a number in a row of results, and its format."""

    key: str
    label: str
    digits: int = 2
    percent: bool = False


class Group(NamedTuple):
    """Columns of one table."""

    name: str
    title: str
    fields: tuple[Field, ...]
    notes: tuple[str, ...] = ()


INTERVALS = (
    f"Brackets: 95 % intervals. F1, precision, recall, utility and differences: {NUM_RESAMPLES} "
    "bootstrap resamples of whole groups. Shares: Wilson. –: undefined (division by 0)."
)
SCORES = Group(
    "scores",
    "accuracy of the alarms (causal rule, first alarm latched)",
    (
        Field("f1", "F1"),
        Field("f1_strict", "F1, strict"),
        Field("f1_warned", "F1 where there is a warning"),
        Field("f1_strict_warned", "Strict, where there is a warning"),
        Field("f1_checked", "F1 with the check before the step"),
        Field("precision", "Precision"),
        Field("recall", "Recall"),
        Field("recall_warned", "Recall where there is a warning"),
        Field("minus_loss_ewma", "F1 minus EWMA's"),
        Field("minus_r_metric", "F1 minus R-Metric's"),
    ),
    (
        "Hit: the first alarm falls from the onset up to, not including, the failure. F1 counts "
        "an alarm in a fault that the run absorbed separately (the fault was real); the strict F1 "
        "counts it as false. An alarm before the onset is false in every run, and the run is "
        "then missed.",
        "Where there is a warning: only failures with a record from the onset up to the failure. "
        "Instant failures have none. With the check before the step, an instant failure counts as "
        "detected if the loss or the gradient of its step is not finite.",
        INTERVALS,
    ),
)
ALARMS = Group(
    "alarms",
    "false alarms and their cost",
    (
        Field("controls", "Controls alarmed (%)", 1, True),
        Field("benign", "Benign changes alarmed (%)", 1, True),
        Field("absorbed", "Absorbed faults alarmed (%)", 1, True),
        Field("premature", "Alarmed before the onset (%)", 1, True),
        Field("episodes_per_1000", "Episodes per 1000 healthy steps"),
        Field("share_alarmed", "Healthy records alarmed (%)", 1, True),
        Field("utility", "Utility"),
    ),
    (
        "An episode is a period of alarmed records, so an alarm that never ends is one episode; "
        "the share of alarmed records shows its length. Healthy steps that branches share are "
        "counted once.",
    ),
)
TIMES = Group(
    "times",
    "warning times",
    (
        *(Field(f"lead_acute_{q}", f"Acute: lead, {q} % (steps)", 0) for q in (25, 50, 75)),
        *(Field(f"lead_degraded_{q}", f"Degraded: lead, {q} % (steps)", 0) for q in (25, 50, 75)),
        Field("recall_acute", "Recall, acute"),
        Field("recall_degraded", "Recall, degraded"),
        Field("early", "Early among acute"),
        Field("early_possible", "Early where possible"),
    ),
    (
        "Lead: failure minus first alarm, quartiles over the hits. Early: an alarm from the onset "
        f"on, at least {EARLY_STEPS} steps before the training loss has visibly broken: before the "
        f"median of its last {SMOOTH_RECORDS} values is more than {BROKEN_NATS} nat above that of "
        f"the last {TREND_RECORDS} before the onset, it is not finite, or the run has failed. "
        "Where possible: only acute failures with a record that early.",
    ),
)
PROTOCOLS = Group(
    "protocols",
    "the same alarms under other rules",
    (
        Field("f1_published", "F1, published rule"),
        Field("f1", "F1, causal, first alarm"),
        Field("f1_unlatched", "F1, causal, any alarm"),
        Field("recall_unlatched", "Recall, causal, any alarm"),
    ),
    (
        "Published: any alarm of a failing run is a hit, also before its fault. First alarm: only "
        "the first alarm counts. Any alarm: an alarm in time counts after earlier false alarms.",
    ),
)
FAULT_GROUPS = (SCORES, ALARMS, TIMES, PROTOCOLS)

REAL_CAUGHT = Group(
    "caught",
    "runs caught in time, and healthy runs alarmed",
    (
        Field("caught_high", "Caught, high confidence (%)", 0, True),
        Field("healthy_high", "Healthy alarmed, high confidence (%)", 0, True),
        Field("caught", "Caught, all (%)", 0, True),
        Field("caught_failing", "Failing caught (%)", 0, True),
        Field("caught_spiking", "Spiking caught (%)", 0, True),
        Field("healthy", "Healthy alarmed, all (%)", 0, True),
    ),
    (
        f"Caught: the first alarm came at most {LATE_INTERVALS} logging intervals after the "
        "labelled onset, or at any time before it. A constant alarm catches every run: compare "
        "with the healthy runs alarmed.",
        "Shares with 95 % Wilson intervals, which treat runs as independent; runs of one "
        "configuration are not.",
    ),
)
REAL_CAUSAL = Group(
    "causal",
    f"alarms more than {EARLY_INTERVALS} logging intervals before the onset are false",
    (
        Field("f1", "F1"),
        Field("precision", "Precision"),
        Field("recall", "Recall"),
        Field("causal_high", "Caught, high confidence, causal (%)", 0, True),
        *(Field(f"delay_{q}", f"Delay, {q} % (intervals)", 1) for q in (25, 50, 75)),
        Field("episodes_per_1000", "Episodes per 1000 healthy records"),
        Field("share_alarmed", "Healthy records alarmed (%)", 1, True),
        Field("minus_loss_ewma", "F1 minus EWMA's"),
        Field("minus_r_metric", "F1 minus R-Metric's"),
    ),
    (
        "Delay: first alarm minus labelled onset in logging intervals, quartiles over the caught "
        "runs with an onset; below 0 is before it.",
        INTERVALS,
    ),
)
REAL_GROUPS = (REAL_CAUGHT, REAL_CAUSAL)


def tables(results: Results) -> list[Table]:
    """One for each group of columns, then those by fault, numbered in this order."""
    found = [table(results, group) for group in groups_of(results)]
    found[0] = replace(found[0], notes=[*found[0].notes, *results["notes"]])
    if results["name"] != "real":
        found += [recall_by_fault(results), alarms_by_change(results)]
        makers = {"left_out": left_out, "missed": missed, "absorbed": absorbed}
        found += [make(results) for name, make in makers.items() if name in results]
        if "opened" in results["made"] and "calibrated" in results["rows"]:
            found.append(aims(results))
    return [replace(table, number=place) for place, table in enumerate(found, start=1)]


def groups_of(results: Results) -> tuple[Group, ...]:
    return REAL_GROUPS if results["name"] == "real" else FAULT_GROUPS


def table(results: Results, group: Group) -> Table:
    """The rows of all detectors under one group of columns."""
    rows: list[tuple[Cell, ...]] = [
        (row["title"], *(cell(row.get(field.key), field) for field in group.fields))
        for row in results["rows"].values()
    ]
    return Table(
        name=f"{results['name']}_{group.name}",
        number=0,
        title=f"{results['title']}: {group.title}",
        columns=(
            Column(label="Detector"),
            *(Column(label=f.label, digits=f.digits) for f in group.fields),
        ),
        rows=rows,
        notes=list(group.notes),
    )


#: Columns of the short table for a terminal, without intervals.
SHORT = (
    Field("f1", "F1"),
    Field("f1_strict", "Strict"),
    Field("recall_warned", "Recall"),
    Field("controls", "Controls (%)", 0, True),
    Field("benign", "Benign (%)", 0, True),
    Field("utility", "Utility"),
)
SHORT_REAL = (
    Field("caught_high", "Caught (%)", 0, True),
    Field("healthy_high", "Healthy (%)", 0, True),
    Field("caught", "Caught, all (%)", 0, True),
    Field("f1", "F1, causal"),
)


def short(results: Results) -> Table:
    """The most important numbers, without their intervals."""
    fields = SHORT_REAL if results["name"] == "real" else SHORT
    whole = table(results, Group("short", "in short", fields))
    rows: list[tuple[Cell, ...]] = [
        tuple(c.point if isinstance(c, Estimate) else c for c in row) for row in whole.rows
    ]
    what = (
        "Runs with a confident label: caught in time, healthy runs alarmed; all runs caught."
        if results["name"] == "real"
        else "Causal, first alarm latched. Recall where there is a warning; controls and benign "
        "changes alarmed."
    )
    return replace(
        whole, rows=rows, notes=[f"{what} Intervals and the rest: {results['name']}.md."]
    )


def wide(results: Results) -> Table:
    """Every column, for the csv file."""
    fields: dict[str, Field] = {}
    for field in (field for group in groups_of(results) for field in group.fields):
        fields.setdefault(field.key, field)
    whole = Group("all", "all columns", (*COUNTS, *fields.values()))
    return table(results, whole)


COUNTS = (
    Field("failed", "Failing runs"),
    Field("hits", "Hits"),
    Field("false_alarms", "False alarms"),
)


def recall_by_fault(results: Results, names: Sequence[str] = FEATURED) -> Table:
    """Failures that each detector detects in time, by fault."""
    title = "failures detected in time, by fault"
    return _by_fault(results, names, "failed", "hit", "faults", title)


def alarms_by_change(results: Results, names: Sequence[str] = FEATURED) -> Table:
    """Benign changes and absorbed faults with an alarm, by detector."""
    title = "runs without a failure that alarmed from the onset on"
    return _by_fault(results, names, "not_failed", "alarmed", "changes", title)


def left_out(results: Results) -> Table:
    """The calibrated detector on benign changes that it was not calibrated on."""
    found = results["left_out"]
    rows: list[tuple[Cell, ...]] = [
        (kind, row["runs"], row["alarmed"]) for kind, row in found["kinds"].items()
    ]
    share = Estimate(*(100 * number(value) for value in found["share"]))
    runs, alarmed = (
        sum(row[key] for row in found["kinds"].values()) for key in ("runs", "alarmed")
    )
    return Table(
        name=f"{results['name']}_left_out",
        number=0,
        title=f"{results['title']}: benign changes of a kind that the calibration did not include",
        columns=columns("Change | Runs | Alarmed | Share (%):1"),
        rows=[*((*row, None) for row in rows), ("all", runs, alarmed, share)],
        notes=[
            "The calibrated detector, with thresholds calibrated for each row without that kind. "
            "No faulty run enters a calibration, so the recall by fault is always that of unseen "
            "kinds."
        ],
    )


class Aim(NamedTuple):
    """A goal of the calibrated detector on the sealed part, set before it was opened.

    `bound` is a least value, or, of shares of false alarms, a most; `low` a least for the lower
    end of the interval.
    """

    key: str
    words: str
    bound: float
    most: bool = False
    low: float | None = None


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
    """The goals set before the opening, the results, and the ceilings."""
    row, best = results["rows"]["calibrated"], results["rows"].get("ceiling", {})
    rows: list[tuple[Cell, ...]] = []
    for aim in AIMS:
        measured = Estimate(*(number(value) for value in row[aim.key]))
        ceiling = best.get(aim.key)
        rows.append(
            (
                aim.words,
                _aim(aim),
                measured,
                number(ceiling[0]) if ceiling else None,
                "reached" if _reached(aim, measured) else "missed",
            )
        )
    return Table(
        name=f"{results['name']}_aims",
        number=0,
        title=f"{results['title']}: the goals set before the opening",
        columns=columns("Calibrated detector | Goal | Measured | Ceiling | "),
        rows=rows,
        notes=["The ceiling is the result of a detector that uses the truth."],
    )


def _aim(aim: Aim) -> str:
    words = f"{'at most' if aim.most else 'at least'} {aim.bound:g}"
    return words if aim.low is None else f"{words}, lower end at least {aim.low:g}"


def _reached(aim: Aim, measured: Estimate) -> bool:
    if aim.most:
        return measured.point <= aim.bound
    return measured.point >= aim.bound and (aim.low is None or measured.low > aim.low)


def missed(results: Results) -> Table:
    """The detectable failures that the calibrated detector missed."""
    rows: list[tuple[Cell, ...]] = [
        (row["run"], row["kind"], row["steps"], number(row["highest"])) for row in results["missed"]
    ]
    return Table(
        name=f"{results['name']}_missed",
        number=0,
        title=f"{results['title']}: failures that the calibrated detector missed",
        columns=columns(
            "Run | Kind | Onset to failure (steps) | Highest score before it (1 alarms)"
        ),
        rows=rows,
        notes=["Only failures with a record from the onset up to the failure."],
    )


def absorbed(results: Results) -> Table:
    """The effect of faults on the runs that absorbed them."""
    rows: list[tuple[Cell, ...]] = [
        (name, group["runs"], *(number(v) for key in ("most", "end") for v in group[key]))
        for name, group in results["absorbed"].items()
    ]
    return Table(
        name=f"{results['name']}_absorbed",
        number=0,
        title=f"{results['title']}: the effect of absorbed faults",
        columns=(
            *columns("The calibrated detector was | Runs"),
            *(Column(label=f"Most, {q} % (nats)") for q in QUARTILES),
            *(Column(label=f"At the end, {q} % (nats)") for q in QUARTILES),
        ),
        rows=rows,
        notes=[
            "Validation loss above the twin's, from the onset on: the maximum, and the mean of the "
            "last three evaluations; quartiles over the runs. A run has failed if it ends 0.1 nat "
            "worse.",
        ],
    )


def _by_fault(
    results: Results, names: Sequence[str], of: str, counted: str, name: str, title: str
) -> Table:
    shown = [results["rows"][key] for key in names if key in results["rows"]]
    about = next(iter(results["rows"].values()))["faults"]
    order = sorted(about, key=lambda fault: (about[fault]["benign"], fault))
    chosen = [fault for fault in order if about[fault][of]]
    rows: list[tuple[Cell, ...]] = [
        (
            fault,
            "benign" if about[fault]["benign"] else "fault",
            about[fault][of],
            *(row["faults"][fault][counted] for row in shown),
        )
        for fault in chosen
    ]
    sums = (
        sum(about[fault][of] for fault in chosen),
        *(sum(row["faults"][fault][counted] for fault in chosen) for row in shown),
    )
    return Table(
        name=f"{results['name']}_{name}",
        number=0,
        title=f"{results['title']}: {title}",
        columns=(
            *columns("Fault or change | Kind | Runs"),
            *(Column(label=row["title"]) for row in shown),
        ),
        rows=[*rows, ("all", "", *sums)],
        notes=["Numbers of runs."],
    )


def cell(value: Any, field: Field) -> Cell:
    """A value of the JSON file as a cell; shares of percent fields become percentages."""
    if value is None:
        return None
    factor = 100 if field.percent else 1
    if isinstance(value, (list, tuple)):
        return Estimate(*(factor * number(part) for part in value))
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return factor * number(value)
