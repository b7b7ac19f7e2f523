"""Small runs of the laboratory on the generated corpus: the same bytes on every machine."""

from dataclasses import replace

from studies.fault_lab.branches import take_step
from studies.fault_lab.spec import LabSpec, control_id
from studies.fault_lab.training import Training


def control(architecture: str = "llama", seed: int = 3, steps: int = 20, **more) -> LabSpec:
    return LabSpec(
        run_id=control_id(seed), seed=seed, architecture=architecture, total_steps=steps,
        text="generated", **more,
    )  # fmt: skip


def branch(of: LabSpec, name: str, severity=None, onset: int = 11, **more) -> LabSpec:
    run_id = f"{of.run_id}_{name}"
    return replace(of, run_id=run_id, fault=name, severity=severity, onset_step=onset, **more)


def trained(architecture: str = "llama", steps: int = 2) -> Training:
    training = Training(control(architecture))
    for _ in range(steps):
        take_step(training)
    return training
