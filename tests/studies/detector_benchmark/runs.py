"""Runs as the laboratory leaves them, made by hand: a loss that falls, and what is done to it."""

from math import nan
from pathlib import Path

import numpy as np

from rmetric.evaluation import Trace
from rmetric.readers.archive import run_to_line, write_archive
from rmetric.records import Record, Run, Truth

STEPS = 100
ONSET = 50


def made_run(
    name: str,
    kind: str = "control",
    failure: int | None = None,
    seed: int = 0,
    onset: int = ONSET,
    **changes: dict[int, object],
) -> Run:
    """A run of one kind; `training_loss={60: 9.0}` and the like change single records."""
    truth = Truth()
    if kind != "control":
        truth = Truth(
            fault="RATE_CUT" if kind.startswith("benign") else "LR_SPIKE",
            severity=2.0,
            benign=kind.startswith("benign"),
            onset_step=onset,
            duration_steps=5,
            outcome="absorbed",
        )
    if failure is not None:
        truth.outcome, truth.failure_step = "failed", failure
        truth.failure_kind = "degraded" if kind.endswith("degraded") else "non_finite"
    rng = np.random.default_rng(list(f"{seed}".encode()))
    noise = 0.01 * rng.standard_normal(STEPS)
    records = [
        Record(
            step=step,
            training_loss=float(3 + 2 / step + noise[step - 1]),
            gradient_norm=1.0,
            parameter_norm=10.0,
            non_finite_gradients=0,
            validation_loss=float(3 + 2 / step) if step % 10 == 0 else None,
        )
        for step in range(1, STEPS + 1)
    ]
    for field, values in changes.items():
        for step, value in values.items():
            setattr(records[step - 1], field, value)
    config = {
        "seed": seed,
        "branch_of": f"seed{seed:03d}" if kind != "control" else None,
        "fault_injection": {"type": truth.fault, "trigger_step": truth.onset_step, "params": {}},
    }
    return Run(id=name, records=records, config=config, truth=truth)


def rising(start: int, last: int = STEPS) -> dict[int, object]:
    """A loss that climbs from `start` on."""
    return {step: 3.0 + 0.3 * (step - start) for step in range(start, last + 1)}


def alarmed(run: Run, *alerts: int) -> Trace:
    """A detector that is alarmed at these steps."""
    steps = np.array([record.step for record in run.records])
    alarms = np.isin(steps, alerts)
    return Trace(detector="d", run_id=run.id, steps=steps, scores=alarms * 1.0, alarms=alarms)


def campaign(num_seeds: int = 4) -> list[Run]:
    """Each seed's control, then its branches: a failure, an absorbed fault, a benign change."""
    runs: list[Run] = []
    for seed in range(num_seeds):
        control = made_run(f"seed{seed:03d}", seed=seed)
        failing = made_run(
            f"seed{seed:03d}_fails", "acute", failure=80, seed=seed,
            training_loss=rising(55, 79) | {80: nan}, gradient_norm={80: nan},
        )  # fmt: skip
        absorbed = made_run(
            f"seed{seed:03d}_absorbs", "absorbed", seed=seed, training_loss={52: 4.0}
        )
        benign = made_run(f"seed{seed:03d}_benign", "benign", seed=seed)
        for branch in (failing, absorbed, benign):
            branch.records[: ONSET - 1] = control.records[: ONSET - 1]
        runs += [control, failing, absorbed, benign]
    return runs


def write_lab(folder: Path, *parts: str) -> Path:
    """Archives of the laboratory's parts, with the same few runs in each."""
    folder.mkdir(exist_ok=True)
    for part in parts:
        lines = [(run.id, run_to_line(run)) for run in campaign()]
        write_archive(folder / f"{part}.tar.xz", lines)
    return folder
