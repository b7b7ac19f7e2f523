"""The settings that determine a run of the laboratory, checked before the training."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from rmetric._util.errors import require
from studies.fault_lab.corpus import CORPORA
from studies.fault_lab.faults import Fault, fault
from studies.fault_lab.models import ARCHITECTURES
from studies.fault_lab.training import CONTEXT, EVALUATE_EVERY, OPTIMIZERS, WARM_UP, WORKERS

SPLITS = ("calibration", "development", "test")
SECOND_SPLITS = ("training2", "sealed2")
#: Settings of the second set, and their values in the first one, whose logs and digests lack them.
AXES: dict[str, Any] = {"size": "tiny", "context": CONTEXT, "optimizer": "adamw", "restarts": 0}


@dataclass(frozen=True, kw_only=True)
class LabSpec:
    """Everything that determines one run.

    Attributes:
        run_id: unique in its campaign; names the file.
        seed: of the weights and the data, shared by a control and its branches.
        fault: as in `faults.FAULTS`; None for a control.
        severity: in the fault's unit; None for its middle one.
        onset_step: first step under the fault, at which the run branches off.
        duration_steps: None for the fault's default, 0 for the rest of the run.
        peak_rate: learning rate after the warm-up.
        context: planned bytes of a sequence.
    """

    run_id: str
    seed: int
    architecture: str
    fault: str | None = None
    severity: float | None = None
    onset_step: int | None = None
    duration_steps: int | None = None
    peak_rate: float = 2e-3
    total_steps: int = 400
    text: str = "standard_library"
    split: str = "development"
    size: str = AXES["size"]
    context: int = AXES["context"]
    optimizer: str = AXES["optimizer"]
    restarts: int = AXES["restarts"]

    def __post_init__(self) -> None:
        choices = {"architecture": ARCHITECTURES, "text": CORPORA, "optimizer": OPTIMIZERS}
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"unknown {name} {value!r}: known are {', '.join(known)}")
        require("total_steps", self.total_steps, self.total_steps >= 1, "at least 1")
        require("seed", self.seed, 0 <= self.seed < 2**63, "at least 0 and below 2^63")
        if self.fault is not None:
            self._check_fault(fault(self.fault))

    def _check_fault(self, kind: Fault) -> None:
        if kind.only not in (None, self.architecture):
            raise ValueError(f"{kind.name} acts on {kind.only} only, not on {self.architecture}")
        if kind.optimizer not in (None, self.optimizer):
            raise ValueError(
                f"{kind.name} acts on {kind.optimizer} only, not on {self.optimizer}: it needs the "
                "second moments of all weights"
            )
        if self.onset_step is None or not 1 <= self.onset_step <= self.total_steps:
            raise ValueError(
                f"onset_step is {self.onset_step}: it must be from 1 to total_steps "
                f"({self.total_steps})"
            )
        severity = self.severity
        if severity is None:
            severity = kind.severities[len(kind.severities) // 2]
        whole = not kind.whole or severity == int(severity)
        if not (kind.lowest <= severity <= kind.highest and severity < inf and whole):
            sort = "whole" if kind.whole else "finite"
            most = f" and at most {kind.highest:g}" if kind.highest < inf else ""
            raise ValueError(
                f"severity of {kind.name} is {severity}: it must be a {sort} number, at least "
                f"{kind.lowest:g}{most} ({kind.unit})"
            )
        duration = kind.duration_steps if self.duration_steps is None else self.duration_steps
        if duration < 0:
            raise ValueError(f"duration_steps is {duration}: it must be at least 0 (0: to the end)")
        rest = self.total_steps - self.onset_step + 1
        object.__setattr__(self, "severity", float(severity))
        object.__setattr__(self, "duration_steps", min(duration or rest, rest))


def entries_of(spec: LabSpec) -> dict[str, Any]:
    """The spec without the later settings where they are as in the first set: for digests."""
    entries = asdict(spec)
    return {k: v for k, v in entries.items() if k not in AXES or v != AXES[k]}


def control_id(seed: int) -> str:
    return f"seed{seed:03d}"


def config_of(spec: LabSpec, corpus_digest: str) -> dict[str, Any]:
    """The spec under the names of the log; see docs/log_format.md."""
    injected = fault(spec.fault) if spec.fault else None
    params = injected and {
        "severity": spec.severity,
        "severity_unit": injected.unit,
        "duration_steps": spec.duration_steps,
    }
    return {
        "model_type": spec.architecture,
        "num_workers": WORKERS,
        "total_training_steps": spec.total_steps,
        "eval_every_n_steps": EVALUATE_EVERY,
        "seconds_per_step": 1.0,
        "seed": spec.seed,
        "peak_learning_rate": spec.peak_rate,
        "warm_up_steps": WARM_UP,
        "split": spec.split,
        "corpus": {"name": spec.text, "sha256": corpus_digest},
        **{name: value for name, value in entries_of(spec).items() if name in AXES},
        "branch_of": control_id(spec.seed) if injected else None,
        "fault_injection": {
            "type": spec.fault or "NONE",
            "trigger_step": spec.onset_step,
            "params": params or {},
        },
    }
