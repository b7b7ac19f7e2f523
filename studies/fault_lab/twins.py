"""Losses of disturbed runs above their exact twins, for the comparison with the simulator."""

from __future__ import annotations

from collections.abc import Sequence

from rmetric.records import Run
from studies.common.table import Cell, Table
from studies.fault_lab.signals import column
from studies.fault_lab.tables import SEALED

COMPARED = ("DATA_CORRUPTION", "EXPERT_FAILURE")
LATER = 10  # steps


def twins(runs: Sequence[Run]) -> Table:
    """Losses minus the twin's at four times; `runs` include the controls."""
    controls = {run.id: run for run in runs}
    groups: dict[tuple[str, float], list[tuple[float, ...]]] = {}
    for run in runs:
        if run.truth is not None and run.truth.fault in COMPARED:
            key = run.truth.fault, run.truth.severity or 0.0
            groups.setdefault(key, []).append(_above(run, controls[run.config["branch_of"]]))
    rows: list[tuple[Cell, ...]] = [
        (fault, f"{severity:g}", len(found), *map(_spread, zip(*found, strict=True)))
        for (fault, severity), found in sorted(groups.items())
    ]
    return Table(
        "twins",
        "Nats above the exact twin",
        "Fault | Severity | Runs | Training loss, at the onset | Probe loss, at the onset | "
        f"{LATER} steps later | In the fault's last step | At the end",
        rows,
        notes=[
            f"{SEALED} Lowest to highest of the runs, in nats per token.",
            "The probe batch is of clean text. An expert is reset in one step, which is the "
            "fault's first and last.",
        ],
        grouped=True,
    )


def _above(run: Run, control: Run) -> tuple[float, ...]:
    truth, last = run.truth, len(run.records) - 1
    assert truth is not None
    assert truth.onset_step is not None
    onset = truth.onset_step - 1  # records begin with step 1
    lifted = onset + (truth.duration_steps or last) - 1
    training, probe = (
        column(name, run.records) - column(name, control.records[: last + 1])
        for name in ("training_loss", "probe_loss")
    )
    watched = (min(place, last) for place in (onset, onset + LATER, lifted, last))
    return float(training[onset]), *(float(probe[place]) for place in watched)


def _spread(values: Sequence[float]) -> str:
    low, high = (f"{round(value, 2) + 0.0:.2f}" for value in (min(values), max(values)))  # no -0.00
    return low if low == high else f"{low} to {high}"
