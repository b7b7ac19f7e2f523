"""Fit the prior of the changes between evaluations, which the library ships.

    python -m studies.fault_lab.evaluation_prior

The changes are log(evaluation / the one before) in the healthy and benign runs of the open parts,
from the eleventh evaluation on, as the first ones fall fast. A run's changes have a variance of
their own, which is scaled inverse chi-squared over the runs: scale and degrees of freedom are
those under which all changes are most likely.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from math import exp, isfinite, lgamma, log
from pathlib import Path
from typing import NamedTuple

from scipy.optimize import minimize

from rmetric._util.durable import write_atomically
from rmetric._util.errors import FAILED, LogError, fail
from rmetric.detectors.calibrated.held_out_loss import PRIOR
from rmetric.readers.archive import read_runs
from rmetric.records import Run
from studies.common.command import command_parser
from studies.fault_lab import DATA

PRIOR_PARTS = ("calibration.tar.xz", "development.tar.xz", "training2.tar.xz")
_FALLING = 10


class Changes(NamedTuple):
    """Number of a run's changes, and the sum of their squares."""

    number: int
    squares: float


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("fault_lab.evaluation_prior", __doc__)
    parser.add_argument("--out", type=Path, default=PRIOR, metavar="FILE")
    options = parser.parse_args(argv)
    try:
        healthy = [
            changes_of(run)
            for part in PRIOR_PARTS
            for run in read_runs(DATA / part)
            if is_healthy(run)
        ]
        scale, freedom = fitted([changes for changes in healthy if changes.number])
        prior = {"scale": round(scale, 4), "degrees_of_freedom": round(freedom, 1)}
        content = json.dumps(prior | {"runs": len(healthy), "parts": PRIOR_PARTS}, indent=1)
        write_atomically(options.out, [f"{content}\n".encode()])
    except (LogError, OSError) as error:
        return fail(error, FAILED)
    print(f"{content}\n{options.out}")
    return 0


def is_healthy(run: Run) -> bool:
    truth = run.truth
    return truth is not None and not truth.failed and (truth.benign or truth.fault == "NONE")


def changes_of(run: Run) -> Changes:
    """Changes of a run's evaluations, announced changes of the training apart."""
    changes, before = [], None
    for record in run.records:
        before = None if record.planned_events else before
        loss = record.validation_loss
        if loss is None or not isfinite(loss) or loss <= 0:
            continue
        if before is not None:
            changes.append(log(loss / before))
        before = loss
    changes = changes[_FALLING:]
    return Changes(len(changes), sum(x * x for x in changes))


def fitted(runs: Sequence[Changes]) -> tuple[float, float]:
    """Scale and degrees of freedom of the most likely prior."""

    def surprise(logs: Sequence[float]) -> float:
        freedom, squares = exp(logs[1]), exp(2 * logs[0] + logs[1])
        return -sum(
            lgamma((freedom + n) / 2)
            - lgamma(freedom / 2)
            + freedom / 2 * log(squares)
            - (freedom + n) / 2 * log(squares + q)
            for n, q in runs
        )

    best = minimize(surprise, (log(0.01), log(3.0)), method="Nelder-Mead").x
    return exp(best[0]), exp(best[1])


if __name__ == "__main__":
    sys.exit(main())
