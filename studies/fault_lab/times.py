"""Times from onset to failure, by kind of failure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rmetric.records import Run
from studies.common.table import Cell, Table
from studies.fault_lab.tables import times_to_failure

PERCENTILES = (10, 25, 50, 75, 90)
SOON = 30  # steps
KINDS = {"non_finite": "not finite", "diverged": "diverged", "degraded": "degraded"}


def times(runs: Sequence[Run]) -> Table:
    """Steps from onset to failure, of all runs that a fault made fail."""
    failed = [run for run in runs if run.truth and run.truth.failed and not run.truth.benign]
    rows: list[tuple[Cell, ...]] = [
        (label, *_row([run for run in failed if run.truth and run.truth.failure_kind == kind]))
        for kind, label in KINDS.items()
    ]
    rows.append(("all", *_row(failed)))
    return Table(
        "times",
        "Steps from the onset of a fault to the failure",
        (
            f"Failure | Runs | In the step of the onset | Within {SOON} steps",
            *(f"{p} %:1" for p in PERCENTILES),
        ),
        rows,
        notes=[
            "All runs that failed under a fault, the test part's outcomes included; benign "
            "changes are left out.",
            "The evaluation every 10 steps and the median of three make 10 to 20 steps the "
            "smallest time that a diverged or degraded run can show.",
        ],
    )


def _row(runs: Sequence[Run]) -> tuple[Cell, ...]:
    steps = np.array(times_to_failure(runs), float)
    spread = np.percentile(steps, PERCENTILES).tolist() if len(steps) else [np.nan] * 5
    return len(steps), int((steps == 0).sum()), int((steps <= SOON).sum()), *spread
