"""Small runs of the laboratory on the generated corpus: the same bytes on every machine."""

from __future__ import annotations

from dataclasses import asdict

from studies.fault_lab.branches import new_training, take_step
from studies.fault_lab.faults import fault
from studies.fault_lab.spec import LabSpec
from studies.fault_lab.training import Training


def control(architecture: str = "llama", seed: int = 3, steps: int = 20) -> LabSpec:
    return LabSpec(
        run_id=f"seed{seed:03d}",
        seed=seed,
        architecture=architecture,
        total_steps=steps,
        text="generated",
    )


def branch(of: LabSpec, name: str, severity: float | None = None, onset: int = 11) -> LabSpec:
    changes = dict(run_id=f"{of.run_id}_{name}", fault=name, severity=severity, onset_step=onset)
    return LabSpec(**asdict(of) | changes)


def architecture_for(name: str) -> str:
    return fault(name).only or "llama"


def trained(architecture: str = "llama", steps: int = 2) -> Training:
    training = new_training(control(architecture))
    for _ in range(steps):
        take_step(training)
    return training
