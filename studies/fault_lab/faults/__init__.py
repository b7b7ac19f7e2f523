"""Faults of a real run, and benign changes that resemble them.

Each is one function that changes one thing at one place of the step: the planned
`settings`, the `weights` (and moments) before the forward pass, the `batch`, or the
workers' `gradients` before they are averaged. There is a file for each place; to add
a fault, write its function there and a line in the file's `FAULTS`. The outcome of the run is
not scripted.
"""

from dataclasses import replace

from studies.fault_lab.faults import batch, gradients, settings, weights
from studies.fault_lab.faults.contract import Fault, Turn

__all__ = ["FAULTS", "Fault", "Turn", "fault"]

FAULTS: dict[str, Fault] = {
    entry.name: replace(entry, place=module.__name__.rpartition(".")[2])
    for module in (settings, weights, batch, gradients)
    for entry in module.FAULTS
}


def fault(name: str) -> Fault:
    """The fault or benign change called `name`; ValueError names the known ones."""
    if name not in FAULTS:
        raise ValueError(f"unknown fault {name!r}: known are {', '.join(FAULTS)}")
    return FAULTS[name]
