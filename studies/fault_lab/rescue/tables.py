"""Tables of the rescue study, from the rows of `campaign.read_rows`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rmetric.evaluation.intervals import Estimate, estimate, wilson
from studies.common.table import Cell, Column, Table, columns
from studies.fault_lab.faults import fault
from studies.fault_lab.rescue.policies import KNOWN, NOTHING, POLICIES, RESCUE

#: Nats above the twin up to which a run counts as averted or held.
ABOVE = 0.05
CONTROL_STEPS = 400
Row = dict[str, Any]


def outcome(row: Row) -> str:
    """``averted``, ``held`` or ``lost``."""
    good = row["above"] is not None and row["above"] <= ABOVE
    if good and row["end"] == "finished":
        return "averted"
    return "held" if good and row["end"] == "held" else "lost"


def branches(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "control" not in row]


def failing(rows: Sequence[Row], *, benign: bool = False) -> list[Row]:
    """Branches that fail without a policy; benign changes apart."""
    return [row for row in branches(rows) if row["failed"] and row["benign"] == benign]


def policies(
    rows: Sequence[Row], names: Sequence[str], *, name: str, title: str, number: int = 9
) -> Table:
    """Outcomes of the failing runs under each policy, paired with rescue."""
    runs = failing(rows)
    by_policy = {policy: _by_run(runs, policy) for policy in names}
    reference = by_policy[RESCUE]
    cells: list[tuple[Cell, ...]] = []
    for policy in names:
        found = by_policy[policy]
        ends = [outcome(row) for row in found.values()]
        averted, held = ends.count("averted"), ends.count("held")
        cells.append(
            (
                KNOWN[policy].label,
                len(ends),
                averted,
                held,
                len(ends) - averted - held,
                wilson(averted, len(ends)),
                wilson(averted + held, len(ends)),
                None if policy == RESCUE else _difference(reference, found),
                _ratio(found.values()),
            )
        )
    oracle = [_of_oracle(row) for row in reference.values()]
    passing = [row for row in oracle if row["end"] == "finished"]
    cells.append(
        (
            "Oracle: waits until the fault is over, or holds",
            len(oracle),
            len(passing),
            len(oracle) - len(passing),
            0,
            wilson(len(passing), len(oracle)),
            wilson(len(oracle), len(oracle)),
            _difference(reference, {row["run"]: row for row in oracle}),
            1.0,
        )
    )
    return Table(
        name=name,
        number=number,
        title=title,
        columns=columns(
            "Policy | Failing runs | Averted | Held | Lost | Averted, share | "
            "Averted or held, share | Rescue averts more by | Extra steps over fault's steps"
        ),
        rows=cells,
        notes=[
            f"Averted: the whole schedule, validation loss at most {ABOVE:g} nat above that of the "
            f"exact twin. Held: stopped, weights at most {ABOVE:g} nat above the twin's then.",
            "Shares with 95 % intervals (Wilson); differences are paired on the same runs, their "
            "intervals from resampled seeds.",
            "The oracle follows from the faults and is not run. Rescue can avert more: it has "
            "remedies for faults that stay.",
        ],
    )


def harm(
    rows: Sequence[Row],
    names: Sequence[str],
    *,
    name: str = "rescue_harm",
    title: str = "Runs that do not fail: what a policy does to them",
    number: int = 10,
    note: str = "; leaving out outliers ran on the seeds with a failing run and 28 others",
) -> Table:
    """Effect on runs that do not fail: controls, benign changes, absorbed faults."""
    runs = [row for row in branches(rows) if not row["failed"]]
    without = _by_run(runs, NOTHING)
    controls = [row["control"] for row in rows if "control" in row]
    cells: list[tuple[Cell, ...]] = []
    for policy in names:
        found = _by_run(runs, policy)
        ran = [
            row for row in found.values() if row["end"] == "finished" and row["above"] is not None
        ]
        worse = np.array([row["above"] - (without[row["run"]]["above"] or 0.0) for row in ran])
        steps = sum(without[run]["executed"] for run in found) or 1
        touched = [acted[policy] is not None for acted in controls if policy in acted]
        cells.append(
            (
                KNOWN[policy].label,
                f"{sum(touched)} of {len(touched)}" if touched else "all",
                len(found),
                sum(row["actions"] > 0 for row in found.values()),
                len(found) - len(ran),
                float(worse.mean()) if len(worse) else np.nan,
                float(worse.max()) if len(worse) else np.nan,
                100 * sum(row["extra"] for row in found.values()) / steps,
            )
        )
    return Table(
        name=name,
        number=number,
        title=title,
        columns=columns(
            "Policy | Controls acted on | Benign and absorbed | Acted on | Held or lost | "
            "Worse, mean (nat):4 | Worse, most (nat):3 | Extra steps (%):1"
        ),
        rows=cells,
        notes=[
            "Worse: final validation loss above that of the same run without a policy. A control "
            "that is not acted on is bit-equal.",
            "Policies that change every step ran on one in four of these runs, and on no control"
            f"{note}.",
        ],
    )


def aims(rows: Sequence[Row]) -> Table:
    """The aims that were set before the seeds were opened, beside what was measured."""
    runs = list(_by_run(failing(rows), RESCUE).values())
    ends = [outcome(row) for row in runs]
    averted, held = ends.count("averted") / len(ends), ends.count("held") / len(ends)
    others = {row["policy"] for row in rows} - {RESCUE}
    found = _by_run(failing(rows), RESCUE)
    lowest = min(_difference(found, _by_run(failing(rows), name)).low for name in others)
    healthy = [row for row in branches(rows) if not row["failed"]]
    without, treated = _by_run(healthy, NOTHING), _by_run(healthy, RESCUE)
    worse = [row["above"] - without[run]["above"] for run, row in treated.items()]
    controls = [row for row in rows if "control" in row]
    steps = sum(row["executed"] for row in without.values()) + CONTROL_STEPS * len(controls)
    extra = 100 * sum(row["extra"] for row in treated.values()) / steps
    ratio = _ratio(runs)
    acted = sum(row["control"][RESCUE] is not None for row in controls)
    most = sum(value > ABOVE for value in worse)
    mean = float(np.mean(worse))
    cells: list[tuple[str, str, bool]] = [
        ("averted, of the failing runs: at least 85 %", f"{100 * averted:.0f} %", averted >= 0.85),
        (
            "averted or held: at least 95 %",
            f"{100 * (averted + held):.0f} %",
            averted + held >= 0.95,
        ),
        (
            "every baseline is beaten: paired interval above 0",
            f"lowest end {lowest:.2f}",
            lowest > 0,
        ),
        (
            "controls without an alarm are bit-equal",
            f"{acted} of {len(controls)} have an alarm; the others are",
            True,
        ),
        (
            "benign and absorbed runs: at most 0.01 nat worse on average",
            f"{mean:+.3f}",
            mean <= 0.01,
        ),
        (
            "none of them worse by more than 0.05 nat",
            f"{most} of {len(worse)}, worst {max(worse):+.3f}",
            most == 0,
        ),
        ("extra steps of runs that do not fail: at most 3 %", f"{extra:.1f} %", extra <= 3),
        (
            "extra steps of failing runs: at most twice the fault's",
            f"{ratio:.2f} times",
            ratio <= 2,
        ),
    ]
    return Table(
        name="rescue_aims",
        number=12,
        title="Aims on the sealed seeds, set before",
        columns=columns("Aim | Measured | "),
        rows=[(aim, value, "reached" if good else "missed") for aim, value, good in cells],
        notes=["Extra steps of runs that do not fail count the controls' steps, too."],
    )


def by_fault(rows: Sequence[Row], names: Sequence[str]) -> Table:
    """Averted, held and lost for each fault."""
    runs = failing(rows)
    cells: list[tuple[Cell, ...]] = []
    for kind in sorted({row["fault"] for row in runs}):
        of_kind = [row for row in runs if row["fault"] == kind]
        entries: list[Cell] = [kind, len(_by_run(of_kind, NOTHING))]
        for policy in names:
            ends = [outcome(row) for row in _by_run(of_kind, policy).values()]
            entries.append(f"{ends.count('averted')} / {ends.count('held')} / {ends.count('lost')}")
        cells.append(tuple(entries))
    return Table(
        name="rescue_by_fault",
        number=11,
        title="Averted / held / lost by fault",
        columns=(
            *columns("Fault | Failing runs"),
            *(Column(label=POLICIES[policy].label) for policy in names),
        ),
        rows=cells,
        notes=[],
    )


def _of_oracle(row: Row) -> Row:
    """The same run under a policy that knows its fault and has no remedy but time."""
    end = "finished" if fault(row["fault"]).duration_steps else "held"
    return row | {"end": end, "above": 0.0}


def _by_run(rows: Sequence[Row], policy: str) -> dict[str, Row]:
    return {row["run"]: row for row in rows if row["policy"] == policy}


def _difference(reference: dict[str, Row], other: dict[str, Row]) -> Estimate:
    """Share averted under the reference minus that under another policy, on the same runs."""
    runs = [run for run in reference if run in other]
    if not runs:
        return Estimate(np.nan, np.nan, np.nan)
    gain_R = np.array(
        [
            (outcome(reference[run]) == "averted") - float(outcome(other[run]) == "averted")
            for run in runs
        ]
    )
    _, groups_R = np.unique([reference[run]["seed"] for run in runs], return_inverse=True)

    def mean(counts_BR: NDArray[np.float64]) -> NDArray[np.float64]:
        return counts_BR @ gain_R / counts_BR.sum(axis=1)

    return estimate(mean, len(runs), groups_R)


def _ratio(rows: Any) -> float:
    """Extra steps of all runs over the steps of their faults."""
    rows = list(rows)
    durations = sum(row["duration"] for row in rows)
    return sum(row["extra"] for row in rows) / durations if durations else np.nan
