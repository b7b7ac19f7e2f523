"""The specification of a simulated run, checked before anything is simulated."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rmetric._util.errors import require
from rmetric.simulation.architectures import CONSTANTS, SIMULATOR_VERSION, architecture
from rmetric.simulation.faults import Fault, fault
from rmetric.simulation.published import check_training


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Everything that fixes one simulated run.

    Attributes:
        experiment_id: unique in its study; names the log.
        architecture, fault: names as in the registries.
        severity: in the fault's unit; None for the fault's middle one.
        onset_step: first step under the fault, 1 to total_steps.
        duration_steps: steps that it acts; None for the fault's default.
        seed: of the study. The run's own numbers follow from it and the id.
        num_workers: data-parallel workers, at least 2.
        total_steps, evaluate_every: of the training.
        seconds_per_step: of an undisturbed step.
        recipe, repetition: where in a study the run stands.
    """

    experiment_id: str
    architecture: str
    fault: str = "NONE"
    severity: float | None = None
    onset_step: int = 2500
    duration_steps: int | None = None
    seed: int = 0
    num_workers: int = 8
    total_steps: int = 5000
    evaluate_every: int = 100
    seconds_per_step: float = 5.0
    recipe: str = "single"
    repetition: int = 0

    def __post_init__(self) -> None:
        architecture(self.architecture)
        kind = fault(self.fault)
        if self.severity is None:
            object.__setattr__(self, "severity", kind.severities[len(kind.severities) // 2])
        severity = self.severity
        assert severity is not None
        sort = "whole" if kind.whole else "finite"
        fits = kind.lowest <= severity <= kind.highest and severity < np.inf
        if not fits or (kind.whole and severity != int(severity)):
            most = f" and at most {kind.highest:g}" if kind.highest < np.inf else ""
            wanted = f"a {sort} number, at least {kind.lowest:g}{most} ({kind.unit})"
            raise ValueError(f"severity of {self.fault} is {severity}: it must be {wanted}")
        object.__setattr__(self, "severity", float(severity))
        require("seed", self.seed, self.seed >= 0, "at least 0")
        require("seed", self.seed, self.seed < 2**63, "below 2^63, which is what a log holds")
        seconds = self.seconds_per_step
        require("seconds_per_step", seconds, 0 < seconds < np.inf, "above 0")
        check_training(self)
        duration = kind.duration_steps if self.duration_steps is None else self.duration_steps
        require("duration_steps", duration, duration >= 0, "at least 0 (0: to the end)")
        rest = self.total_steps - self.onset_step + 1
        object.__setattr__(self, "duration_steps", min(duration or rest, rest))

    @property
    def kind(self) -> Fault:
        return fault(self.fault)

    @property
    def applicable(self) -> bool:
        return self.kind.applies_to(architecture(self.architecture))

    @property
    def acts(self) -> bool:
        """True if the training itself is disturbed, so that it needs a twin."""
        return self.kind.act is not None and self.applicable

    @property
    def end_step(self) -> int:
        """First step after the fault."""
        assert self.duration_steps is not None
        return self.onset_step + self.duration_steps

    def generators(self) -> list[np.random.Generator]:
        """Of the training, the fault, the hardware, and the workers' own shares."""
        root = np.random.SeedSequence([self.seed, *self.experiment_id.encode()])
        return [np.random.Generator(np.random.SFC64(s)) for s in root.spawn(4)]


def config_of(spec: RunSpec) -> dict[str, Any]:
    """The spec under the names of the log; see docs/log_format.md."""
    kind = spec.kind
    injected = spec.fault != "NONE"
    return {
        "model_type": spec.architecture,
        "num_workers": spec.num_workers,
        "total_training_steps": spec.total_steps,
        "eval_every_n_steps": spec.evaluate_every,
        "seconds_per_step": spec.seconds_per_step,
        "seed": spec.seed,
        "repetition": spec.repetition,
        "recipe": spec.recipe,
        "fault_injection": {
            "type": spec.fault,
            "trigger_step": spec.onset_step if injected else None,
            "params": {
                "severity": spec.severity,
                "severity_unit": kind.unit,
                "duration_steps": spec.duration_steps,
            }
            if injected
            else {},
        },
        "architecture": asdict(architecture(spec.architecture)),
        "simulator": {"version": SIMULATOR_VERSION, "constants": asdict(CONSTANTS)},
    }
