"""Tables of the rescue study and its page, from the committed rows."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rmetric.evaluation.intervals import Estimate, estimate, wilson
from rmetric.logs import write_atomically
from studies.common.markers import fill, parts
from studies.common.renderers import to_markdown, write_tables
from studies.common.table import Cell, Table
from studies.fault_lab.design import SEEDS
from studies.fault_lab.faults import fault
from studies.fault_lab.rescue.policies import ABLATIONS, KNOWN, NEWER, NOTHING, POLICIES, RESCUE

PAGE = Path(__file__).resolve().parents[3] / "docs" / "rescue.md"
SEALED, OPEN = "rescue_sealed", "rescue_open"
#: The seeds of the laboratory itself, which were known before the policies were written.
LAB_SEEDS = "rescue_lab_seeds"
#: The same seeds, known by then, with a detector that came after their opening.
NEWER_DETECTOR = "rescue_sealed_detector_0ab1908"

#: Nats above the twin up to which a run counts as averted or held.
ABOVE = 0.05
CONTROL_STEPS = 400
Row = dict[str, Any]


def pack(rows: Sequence[Row], path: Path) -> None:
    """Write rows as compressed JSON lines; the same rows give the same bytes."""
    lines = b"".join(json.dumps(row, sort_keys=True).encode() + b"\n" for row in rows)
    write_atomically(path, [lzma.compress(lines)])


def unpack(path: Path) -> list[Row]:
    """The rows of `pack`. Raises FileNotFoundError where there are none."""
    return [json.loads(line) for line in lzma.decompress(path.read_bytes()).splitlines()]


def outcome(row: Row) -> str:
    """``averted``, ``held`` or ``lost``."""
    good = row["above"] is not None and row["above"] <= ABOVE
    if good and row["end"] == "finished":
        return "averted"
    return "held" if good and row["end"] == "held" else "lost"


def branches(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "control" not in row]


def failing(rows: Sequence[Row]) -> list[Row]:
    """Branches that fail without a policy; benign changes apart."""
    return [row for row in branches(rows) if row["failed"] and not row["benign"]]


def policies(
    rows: Sequence[Row], names: Sequence[str], *, name: str, title: str, number: int = 9
) -> Table:
    """Outcomes of the failing runs under each policy, paired with rescue."""
    runs = failing(rows)
    reference = _by_run(runs, RESCUE)

    def cells(label: str, found: dict[str, Row]) -> tuple[Cell, ...]:
        ends = [outcome(row) for row in found.values()]
        averted, held, lost = (ends.count(end) for end in ("averted", "held", "lost"))
        shares = wilson(averted, len(ends)), wilson(averted + held, len(ends))
        difference = None if found is reference else _difference(reference, found)
        return label, len(ends), averted, held, lost, *shares, difference, _ratio(found)

    oracle = {run: _of_oracle(row) for run, row in reference.items()}
    return Table(
        name,
        title,
        "Policy | Failing runs | Averted | Held | Lost | Averted, share | "
        "Averted or held, share | Rescue averts more by | Extra steps over fault's steps",
        [
            *(cells(KNOWN[p].label, reference if p == RESCUE else _by_run(runs, p)) for p in names),
            cells("Oracle: waits until the fault is over, or holds", oracle),
        ],
        notes=[
            f"Averted: the whole schedule, validation loss at most {ABOVE:g} nat above that of the "
            f"exact twin. Held: stopped, weights at most {ABOVE:g} nat above the twin's then.",
            "Shares with 95 % intervals (Wilson); differences are paired on the same runs, their "
            "intervals from resampled seeds.",
            "The oracle follows from the faults and is not run. Rescue can avert more: it has "
            "remedies for faults that stay.",
        ],
        number=number,
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
        ran = [r for r in found.values() if r["end"] == "finished" and r["above"] is not None]
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
                *((float(worse.mean()), float(worse.max())) if ran else (np.nan, np.nan)),
                100 * sum(row["extra"] for row in found.values()) / steps,
            )
        )
    return Table(
        name,
        title,
        "Policy | Controls acted on | Benign and absorbed | Acted on | Held or lost | "
        "Worse, mean (nat):4 | Worse, most (nat):3 | Extra steps (%):1",
        cells,
        notes=[
            "Worse: final validation loss above that of the same run without a policy. A control "
            "that is not acted on is bit-equal.",
            "Policies that change every step ran on one in four of these runs, and on no control"
            f"{note}.",
        ],
        number=number,
    )


def aims(rows: Sequence[Row]) -> Table:
    """The aims that were set before the seeds were opened, beside what was measured."""
    found = _by_run(failing(rows), RESCUE)
    ends = Counter(map(outcome, found.values()))
    averted = ends["averted"] / len(found)
    good = averted + ends["held"] / len(found)
    others = {row["policy"] for row in rows} - {RESCUE}
    lowest = min(_difference(found, _by_run(failing(rows), name)).low for name in others)
    healthy = [row for row in branches(rows) if not row["failed"]]
    without, treated = _by_run(healthy, NOTHING), _by_run(healthy, RESCUE)
    worse = [row["above"] - without[run]["above"] for run, row in treated.items()]
    mean, most = float(np.mean(worse)), sum(value > ABOVE for value in worse)
    controls = [row for row in rows if "control" in row]
    acted = sum(row["control"][RESCUE] is not None for row in controls)
    steps = sum(row["executed"] for row in without.values()) + CONTROL_STEPS * len(controls)
    extra = 100 * sum(row["extra"] for row in treated.values()) / steps
    ratio = _ratio(found)
    measured = (
        ("averted, of the failing runs: at least 85 %", f"{100 * averted:.0f} %", averted >= 0.85),
        ("averted or held: at least 95 %", f"{100 * good:.0f} %", good >= 0.95),
        (
            "every baseline is beaten: paired interval above 0",
            f"lowest end {lowest:.2f}", lowest > 0,
        ),
        (
            "controls without an alarm are bit-equal",
            f"{acted} of {len(controls)} have an alarm; the others are", True,
        ),
        (
            "benign and absorbed runs: at most 0.01 nat worse on average",
            f"{mean:+.3f}", mean <= 0.01,
        ),
        (
            "none of them worse by more than 0.05 nat",
            f"{most} of {len(worse)}, worst {max(worse):+.3f}", most == 0,
        ),
        ("extra steps of runs that do not fail: at most 3 %", f"{extra:.1f} %", extra <= 3),
        (
            "extra steps of failing runs: at most twice the fault's",
            f"{ratio:.2f} times", ratio <= 2,
        ),
    )  # fmt: skip
    return Table(
        "rescue_aims",
        "Aims on the sealed seeds, set before",
        "Aim | Measured | ",
        [(aim, value, "reached" if met else "missed") for aim, value, met in measured],
        notes=["Extra steps of runs that do not fail count the controls' steps, too."],
        number=12,
    )


def by_fault(rows: Sequence[Row], names: Sequence[str]) -> Table:
    runs = failing(rows)
    cells: list[tuple[Cell, ...]] = []
    for kind in sorted({row["fault"] for row in runs}):
        of_kind = [row for row in runs if row["fault"] == kind]
        ends = (Counter(map(outcome, _by_run(of_kind, policy).values())) for policy in names)
        counts = (f"{end['averted']} / {end['held']} / {end['lost']}" for end in ends)
        cells.append((kind, len(_by_run(of_kind, NOTHING)), *counts))
    heads = ("Fault | Failing runs", *(POLICIES[policy].label for policy in names))
    return Table("rescue_by_fault", "Averted / held / lost by fault", heads, cells, number=11)


def _of_oracle(row: Row) -> Row:
    """The same run under a policy that knows its fault and has no remedy but time."""
    end = "finished" if fault(row["fault"]).duration_steps else "held"
    return row | {"end": end, "above": 0.0, "extra": row["duration"]}


def _by_run(rows: Sequence[Row], policy: str) -> dict[str, Row]:
    return {row["run"]: row for row in rows if row["policy"] == policy}


def _difference(reference: dict[str, Row], other: dict[str, Row]) -> Estimate:
    """Share averted under the reference minus that under another policy, on the same runs."""
    runs = [run for run in reference if run in other]
    if not runs:
        return Estimate(np.nan, np.nan, np.nan)
    averted = [[outcome(rows[run]) == "averted" for run in runs] for rows in (reference, other)]
    gain_R = np.subtract(*np.array(averted, dtype=float))
    _, groups_R = np.unique([reference[run]["seed"] for run in runs], return_inverse=True)

    def mean(counts_BR: NDArray[np.float64]) -> NDArray[np.float64]:
        return counts_BR @ gain_R / counts_BR.sum(axis=1)

    return estimate(mean, len(runs), groups_R)


def _ratio(found: dict[str, Row]) -> float:
    """Extra steps of all runs over the steps of their faults."""
    durations = sum(row["duration"] for row in found.values())
    return sum(row["extra"] for row in found.values()) / durations if durations else np.nan


# -- from the committed rows


def made(results: Path) -> list[Table]:
    """All tables of the rows in `results`."""

    def known(name: str) -> list[Row]:
        path = results / f"{name}.jsonl.xz"
        return unpack(path) if path.exists() else []

    sealed = unpack(results / f"{SEALED}.jsonl.xz")
    both = sealed + [
        row | ({"control": {NEWER: row["control"][RESCUE]}} if "control" in row
               else {"policy": NEWER})
        for row in known(NEWER_DETECTOR) if "control" in row or row["policy"] == RESCUE
    ]  # fmt: skip
    names = _policies_of(both)
    title = "Policies on the failing runs of 100 sealed seeds"
    found = [
        policies(both, names, name="rescue", title=title),
        aims(sealed),
        harm(both, names),
        by_fault(sealed, [NOTHING, "palm", "back_and_halve", RESCUE]),
    ]
    if opened := known(OPEN):
        title = "Rescue, its parts alone and left out, on failing runs of the open seeds"
        found.append(
            policies(opened, [RESCUE, *ABLATIONS], name="rescue_parts", title=title, number=13)
        )
    if old := known(LAB_SEEDS):
        names, seeds = _policies_of(old), len({row["seed"] for row in old})
        which = "all" if seeds == SEEDS else f"{seeds} of the"
        which = f"{which} {SEEDS} open seeds"
        title = f"Policies on the failing runs of {which}"
        found.append(policies(old, names, name=LAB_SEEDS, title=title, number=14))
        title = f"Runs of {which} that do not fail: what a policy does to them"
        found.append(harm(old, names, name=f"{LAB_SEEDS}_harm", title=title, number=15, note=""))
    return found


def _policies_of(rows: Sequence[Row]) -> list[str]:
    ran = {row["policy"] for row in rows}
    return [name for name in (*POLICIES, NEWER) if name in ran]


def write(tables: Sequence[Table], results: Path, page: Path = PAGE) -> int:
    """Write the tables, and fill their parts of the page; those of others stay as they are."""
    write_tables(tables, results)
    texts = {f"table {table.name}": to_markdown(table) for table in tables}
    fill(page, (parts(page) | texts).get, texts)
    print(f"{len(tables)} tables: {results}")
    return 0
