"""Write the failing runs that the library ships, from the laboratory's open parts.

    python -m studies.fault_lab.failing_runs

At most two runs of each fault, from 120 records before the onset to 20 after the failure, with
the signals that detectors read, rounded. `rmetric calibrate` counts how many of them new
thresholds still detect. The sealed part is not used.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from rmetric._util.durable import write_atomically
from rmetric._util.errors import FAILED, LogError, fail
from rmetric.detectors.calibrated.calibration import SIGNALS
from rmetric.detectors.calibrated.recall import (
    PATH,
    FailingRun,
    detected,
    failing_runs_to_bytes,
)
from rmetric.detectors.calibrated.thresholds import default_thresholds
from rmetric.readers.archive import read_runs
from rmetric.records import Record, Run
from studies.common.command import command_parser
from studies.fault_lab import DATA

OPEN_PARTS = ("calibration.tar.xz", "development.tar.xz")
_PER_FAULT = 2
_BEFORE, _AFTER = 120, 20


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("fault_lab.failing_runs", __doc__)
    parser.add_argument("--out", type=Path, default=PATH, metavar="FILE")
    options = parser.parse_args(argv)
    try:
        chosen = choose(chain.from_iterable(read_runs(DATA / part) for part in OPEN_PARTS))
        content = failing_runs_to_bytes(chosen)
        write_atomically(options.out, [content])
    except (LogError, OSError) as error:
        return fail(error, FAILED)
    print(f"{len(chosen)} failing runs, {len(content) / 1e3:.0f} kB: {options.out}")
    return 0


def choose(runs: Iterable[Run]) -> list[FailingRun]:
    """Up to two failing runs of each fault; those that the loss alone shows come first."""
    by_fault: dict[str, list[FailingRun]] = defaultdict(list)
    for run in runs:
        if run.truth is not None and run.truth.failed:
            cut = _cut(run)
            by_fault[cut.fault].append(cut)
    chosen = []
    for fault in sorted(by_fault):
        found = by_fault[fault]
        shown = detected(default_thresholds(), {"training_loss"}, found)
        found.sort(key=lambda run: (run.id not in shown, run.id))
        chosen += found[:_PER_FAULT]
    return chosen


def _cut(run: Run) -> FailingRun:
    truth = run.truth
    assert truth is not None
    onset, failure = truth.onset_step, truth.failure_step
    assert onset is not None
    assert failure is not None
    records = [
        Record(step=r.step, **{name: _rounded(getattr(r, name)) for name in SIGNALS})
        for r in run.records
        if onset - _BEFORE <= r.step <= failure + _AFTER
    ]
    return FailingRun(run.id, truth.fault, onset, tuple(records))


def _rounded(value: Any, digits: int = 4) -> Any:
    if isinstance(value, tuple):
        return tuple(_rounded(x, 3) for x in value)
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
