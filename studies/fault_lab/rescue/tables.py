"""Tables of the rescue study and its page, from the committed rows."""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
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
#: The sealed seeds, known by then, with the detector of commit 0ab1908.
DETECTOR_AFTER_OPENING = "rescue_sealed_detector_after_opening"

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


def judged(rows: Sequence[Row]) -> pd.DataFrame:
    """All rows but those of controls, with an `outcome`: ``averted``, ``held`` or ``lost``."""
    runs = pd.DataFrame([row for row in rows if "control" not in row])
    outcome = runs.end.map({"finished": "averted", "held": "held"})
    return runs.assign(outcome=outcome.where(runs.above.astype(float) <= ABOVE).fillna("lost"))


def failing(rows: Sequence[Row]) -> pd.DataFrame:
    """Runs that fail without a policy; benign changes apart."""
    return judged(rows).query("failed and not benign")


def policies(
    rows: Sequence[Row], names: Sequence[str], *, name: str, title: str, number: int = 9
) -> Table:
    """Outcomes of the failing runs under each policy, paired with rescue."""
    runs = failing(rows)
    reference = _under(runs, RESCUE)

    def cells(label: str, found: pd.DataFrame, difference: Estimate | None) -> tuple[Cell, ...]:
        averted, held, lost = _counts(found)
        shares = wilson(averted, len(found)), wilson(averted + held, len(found))
        return label, len(found), averted, held, lost, *shares, difference, _ratio(found)

    # The same runs under a policy that knows its fault and has no remedy but time.
    ends = ["averted" if fault(name).duration_steps else "held" for name in reference.fault]
    oracle = reference.assign(outcome=ends, extra=reference.duration)
    found = {KNOWN[policy].label: _under(runs, policy) for policy in names}
    found["Oracle: waits until the fault is over, or holds"] = oracle
    return Table(
        name,
        title,
        "Policy | Failing runs | Averted | Held | Lost | Averted, share | "
        "Averted or held, share | Rescue averts more by | Extra steps over fault's steps",
        [
            cells(label, of, None if label == KNOWN[RESCUE].label else _difference(reference, of))
            for label, of in found.items()
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
    runs = judged(rows).query("not failed")
    controls = [row["control"] for row in rows if "control" in row]

    def cells(policy: str) -> dict[str, Cell]:
        found = _under(runs, policy)
        ran = found[(found.end == "finished") & found.above.notna()]
        worse = _worse(runs, ran)
        steps = found.run.map(_under(runs, NOTHING).set_index("run").executed).sum() or 1
        touched = [acted[policy] is not None for acted in controls if policy in acted]
        return {
            "Policy": KNOWN[policy].label,
            "Controls acted on": f"{sum(touched)} of {len(touched)}" if touched else "all",
            "Benign and absorbed": len(found),
            "Acted on": int((found.actions > 0).sum()),
            "Held or lost": len(found) - len(ran),
            "Worse, mean (nat):4": float(worse.mean()),
            "Worse, most (nat):3": float(worse.max()),
            "Extra steps (%):1": float(100 * found.extra.sum() / steps),
        }

    return Table.of(
        name,
        title,
        map(cells, names),
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
    runs, healthy = failing(rows), judged(rows).query("not failed")
    found, treated = _under(runs, RESCUE), _under(healthy, RESCUE)
    averted, held, _ = np.array(_counts(found)) / len(found)
    good = averted + held
    others = {*runs.policy} - {RESCUE}
    lowest = min(_difference(found, _under(runs, name)).low for name in others)
    worse = _worse(healthy, treated)
    mean, most = worse.mean(), (worse > ABOVE).sum()
    controls = [row["control"][RESCUE] for row in rows if "control" in row]
    acted = sum(alarm is not None for alarm in controls)
    steps = _under(healthy, NOTHING).executed.sum() + CONTROL_STEPS * len(controls)
    extra, ratio = 100 * treated.extra.sum() / steps, _ratio(found)
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
            f"{most} of {len(worse)}, worst {worse.max():+.3f}", most == 0,
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
    cells: list[dict[str, Cell]] = []
    for kind, runs in failing(rows).groupby("fault"):
        cells.append({"Fault": str(kind), "Failing runs": len(_under(runs, NOTHING))})
        for policy in names:
            ends = " / ".join(map(str, _counts(_under(runs, policy))))
            cells[-1][POLICIES[policy].label] = ends
    return Table.of("rescue_by_fault", "Averted / held / lost by fault", cells, number=11)


def _under(runs: pd.DataFrame, policy: str) -> pd.DataFrame:
    return runs[runs.policy == policy]


def _counts(runs: pd.DataFrame) -> list[int]:
    return [int((runs.outcome == end).sum()) for end in ("averted", "held", "lost")]


def _worse(runs: pd.DataFrame, treated: pd.DataFrame) -> pd.Series[float]:
    """Nats of each treated run above the same run without a policy."""
    without = _under(runs, NOTHING).set_index("run").above.astype(float).fillna(0.0)
    return treated.above.astype(float) - treated.run.map(without)


def _difference(reference: pd.DataFrame, other: pd.DataFrame) -> Estimate:
    """Share averted under the reference minus that under another policy, on the same runs."""
    both = reference.merge(other[["run", "outcome"]], on="run", suffixes=("", "_other"))
    averted = (both[["outcome", "outcome_other"]] == "averted").to_numpy(dtype=float)
    gain_R = averted @ [1, -1]

    def mean(counts_BR: NDArray[np.float64]) -> NDArray[np.float64]:
        return counts_BR @ gain_R / counts_BR.sum(axis=1)

    return estimate(mean, len(both), both.seed.factorize(sort=True)[0])


def _ratio(found: pd.DataFrame) -> float:
    """Extra steps of all runs over the steps of their faults."""
    return float(found.extra.sum() / (found.duration.sum() or np.nan))


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
        for row in known(DETECTOR_AFTER_OPENING) if "control" in row or row["policy"] == RESCUE
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
