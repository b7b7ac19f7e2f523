"""Short fine-tunings under faults: the campaign and its tables.

    python -m studies.fault_lab.rescue.fine_tuning --seeds 20     # open seeds, and their outcomes
    python -m studies.fault_lab.rescue.fine_tuning --sealed       # the 100 sealed seeds
    python -m studies.fault_lab.rescue.fine_tuning --report       # tables and page

`fine_tuning_run` has one run. The sealed seeds were opened once: results/fine_tuning_seal.json
has what was fixed before. `rescue_before` in the tables is
the rescue of commit 7c18e9b2, from before the set was made, on the same runs.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from math import inf, isfinite
from pathlib import Path
from typing import Any

import joblib
from tqdm import tqdm

from rmetric._util.options import add_jobs, whole
from rmetric._util.workers import delayed
from rmetric.evaluation.intervals import wilson
from studies.common.command import command_parser
from studies.common.table import Cell, Table
from studies.fault_lab.rescue.fine_tuning_run import row
from studies.fault_lab.rescue.tables import pack, unpack, write

RESULTS = Path(__file__).resolve().parents[1] / "results"
SEALED_RUNS, PREVIOUS_RESCUE = "fine_tuning_sealed", "fine_tuning_sealed_previous_rescue"
SEALED_SEEDS = range(1000, 1100)
#: Nats above the twin up to which a run is averted or held, and that rescue may cost.
ABOVE, COSTS = 0.05, 0.02
AIMS = {
    "averted, share of the failing runs, at least": 0.85,
    "averted or held, share, at least": 0.97,
    "worse than without rescue, not held, at most (nat)": COSTS,
    "undisturbed runs: bit-equal": True,
}


def run_seeds(seeds: Sequence[int], jobs: int) -> list[dict[str, Any]]:
    """The rows of some seeds, in their order."""
    work = joblib.Parallel(n_jobs=jobs, return_as="generator")(delayed(row)(s) for s in seeds)
    rows = list(tqdm(work, total=len(seeds), unit="seed"))
    return json.loads(json.dumps(rows))  # the names of steps are texts, as in a file


# -- outcomes


def ending(found: dict[str, Any]) -> str:
    """``averted``, ``held`` or ``lost``, of the row of a run under rescue."""
    rescue, good = found["rescue"], above(found) <= ABOVE
    return ("held" if rescue["held"] else "averted") if good else "lost"


def above(found: dict[str, Any]) -> float:
    """Nats above the twin: at the end, or at the step at which rescue holds; nan counts as inf."""
    rescue, twin = found["rescue"], found["twin"]
    at = twin["losses"].get(str(rescue["step"]), twin["loss"])
    if rescue["held"] and rescue["step"] == 0:
        return 0.0  # the weights that it began with
    return _number(rescue["loss"]) - (at if rescue["held"] else twin["loss"])


def failed(found: dict[str, Any]) -> bool:
    """Without rescue the run ends above its twin."""
    return _number(found["nothing"]["loss"]) - found["twin"]["loss"] > ABOVE


def harm(found: dict[str, Any]) -> float:
    """Nats by which a run that is not held ends above the run without rescue, at least 0.

    Where a fault makes a run better than its twin, the twin counts.
    """
    if found["rescue"]["held"]:
        return 0.0
    allowed = max(_number(found["nothing"]["loss"]), found["twin"]["loss"])
    return 0.0 if allowed == inf else max(0.0, _number(found["rescue"]["loss"]) - allowed)


def untouched(found: dict[str, Any]) -> bool:
    """An undisturbed run under rescue is its twin, bit for bit."""
    return bool(found["idle"]["digest"] == found["twin"]["digest"])


def _number(loss: float) -> float:
    return loss if isfinite(loss) else inf


# -- tables

WHICH = {"nothing": "Nothing", "before": "Rescue, as it was before", "rescue": "Rescue"}


def summary(rows: dict[str, list[dict[str, Any]]]) -> Table:
    cells: list[tuple[Cell, ...]] = []
    for name, runs in rows.items():
        failing = [found for found in runs if failed(found)]
        number = len(failing)
        if name == "nothing":
            ends, harms, held_others, changed = Counter(lost=number), [0.0], 0, 0
        else:
            ends = Counter(map(ending, failing))
            harms = list(map(harm, runs))
            held_others = sum(f["rescue"]["held"] for f in runs if not failed(f))
            changed = sum(not untouched(found) for found in runs)
        averted, held = ends["averted"], ends["held"]
        cells.append(
            (
                WHICH[name], number, averted, held, ends["lost"],
                wilson(averted, number), wilson(averted + held, number),
                max(harms), sum(value > COSTS for value in harms), held_others, changed,
            )
        )  # fmt: skip
    return Table(
        "fine_tuning",
        f"Rescue on {len(rows['rescue'])} sealed fine-tunings of 60 to 200 steps",
        "Policy | Failing runs | Averted | Held | Lost | Averted, share | "
        "Averted or held, share | Worse than nothing, most (nat):3 | Worse by more than 0.02 | "
        "Held, of the runs that do not fail | Undisturbed runs changed",
        cells,
        notes=[
            "Failing: without rescue the held-out loss ends more than 0.05 nat above the twin's. "
            "Averted: the whole schedule, at most 0.05 nat above it. Held: stopped, at most 0.05 "
            "nat above the twin's then. Shares with 95 % intervals (Wilson).",
            "Worse than nothing: runs that are not held; where a fault makes a run better than "
            "its twin, against the twin.",
            f"As it was before: commit 7c18e9b2 on the same runs. Aims, set before: {AIMS}.",
        ],
        number=16,
    )


def by_fault(rows: dict[str, list[dict[str, Any]]]) -> Table:
    cells: list[tuple[Cell, ...]] = []
    for fault in sorted({found["run"]["fault"] for found in rows["rescue"]}):
        for for_good in (False, True):
            chosen = {
                name: [
                    found for found in of_one
                    if found["run"]["fault"] == fault and failed(found)
                    if (found["run"]["duration"] == 0) == for_good
                ]
                for name, of_one in rows.items() if name != "nothing"
            }  # fmt: skip
            if not chosen["rescue"]:
                continue
            ends = [Counter(map(ending, found)) for found in chosen.values()]
            counts = (end[kind] for end in ends for kind in ("averted", "held", "lost"))
            lasts = "for good" if for_good else "passes"
            cells.append((fault.replace("_", " "), lasts, len(chosen["rescue"]), *counts))
    when = ("before", "now") if "before" in rows else ("now",)
    kinds = [f"{kind}, {moment}" for moment in when for kind in ("averted", "held", "lost")]
    return Table(
        "fine_tuning_by_fault",
        "The failing fine-tunings, by fault",
        ("Fault | It | Failing runs", *map(str.capitalize, kinds)),
        cells,
        notes=["The faults are those of `fine_tuning_run.Disturbed`."],
        number=17,
        grouped=True,
    )


def made(results: Path) -> list[Table]:
    """The tables of the rows in `results`."""
    sealed = unpack(results / f"{SEALED_RUNS}.jsonl.xz")
    before = results / f"{PREVIOUS_RESCUE}.jsonl.xz"
    rows = {"nothing": sealed} | ({"before": unpack(before)} if before.exists() else {})
    rows["rescue"] = sealed
    return [summary(rows), by_fault(rows)]


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("fault_lab.rescue.fine_tuning", __doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seeds", type=whole(1), metavar="N", help="run the first N open seeds")
    what.add_argument("--sealed", action="store_true", help="run the 100 sealed seeds")
    what.add_argument("--report", action="store_true", help="write the tables and end")
    parser.add_argument(
        "--out", type=Path, default=Path("rescue_runs"), metavar="DIR",
        help="folder of the rows (default: rescue_runs)",
    )  # fmt: skip
    add_jobs(parser)
    options = parser.parse_args(argv)
    if options.report:
        return write(made(RESULTS), RESULTS)
    seeds = SEALED_SEEDS if options.sealed else range(options.seeds)
    rows = run_seeds(seeds, options.jobs)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{SEALED_RUNS if options.sealed else 'fine_tuning_open'}.jsonl.xz"
    pack(rows, path)
    ends = Counter(ending(found) for found in rows if failed(found))
    print(f"{len(rows)} runs: {path}; of the failing ones: {dict(ends)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
