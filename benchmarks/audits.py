"""The audits' share of a training step: a full audit, an ordinary step, and both over 1,000 steps.

    python benchmarks/audits.py [--models 5M 100M] [--steps N]

The models of the benchmark of the monitor's overhead train with the monitor and all audits. The
time inside the audits is taken by the processor's clock, of steps that measure all parameters and
of those that do not, and compared with the processor time of the same steps. Goal: at most 0.5 % of
a step of 100 M weights over 1,000 steps. Writes results/benchmarks/audits.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.overhead import MODELS
from benchmarks.report import write_report
from rmetric.audits import Auditor
from rmetric.audits.auditor import EVERY, FIRST
from rmetric.monitor import Monitor

METHODS = ("on_batch", "measure", "received")


class Timed:
    """Counts the processor time inside the methods of an auditor."""

    def __init__(self, auditor: Auditor) -> None:
        self.seconds = 0.0
        for name in METHODS:
            setattr(auditor, name, self._timed(getattr(auditor, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.process_time()
            try:
                return method(*args)
            finally:
                self.seconds += time.process_time() - began

        return call


def shares(name: str, steps: int) -> dict[str, float]:
    """Medians over steps: the audits' time over the rest of the step, full and ordinary."""
    make, (rows, length) = MODELS[name]
    torch.manual_seed(0)
    model = make().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    monitor = Monitor(model, optimizer, audits=True)
    timed = Timed(monitor._auditor)
    found: dict[bool, list[float]] = {True: [], False: []}
    for step in range(1, FIRST + steps + 2):
        tokens = torch.randint(0, 4096, (rows, length))
        began, inside = time.process_time(), timed.seconds
        monitor.batch_ready({"input_ids": tokens, "labels": tokens})
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        monitor.check_before_step(loss)
        optimizer.step()
        optimizer.zero_grad()
        spent = timed.seconds - inside
        whole = time.process_time() - began - spent
        if step > 2 and step != FIRST + 1:  # takes the last full one back
            found[step <= FIRST].append(spent / whole)
    monitor.close()
    full, ordinary = median(found[True]), median(found[False])
    often = FIRST + 2 * (1000 - FIRST) / EVERY
    amortised = (often * full + (1000 - often) * ordinary) / 1000
    return {"full": full, "ordinary": ordinary, "over 1,000 steps": amortised}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["5M", "100M"])
    parser.add_argument("--steps", type=int, default=20, help="ordinary steps")
    options = parser.parse_args()
    measured = {name: shares(name, options.steps) for name in options.models}
    for name, row in measured.items():
        print(name, ", ".join(f"{key} {100 * value:.3f} %" for key, value in row.items()))
    print(write_report("audits", measured))


if __name__ == "__main__":
    main()
