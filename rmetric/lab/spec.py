"""What fixes a run of the laboratory, and the design of the campaign."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

import numpy as np

from rmetric.lab.corpus import CORPORA
from rmetric.lab.faults import FAULTS, Fault, fault
from rmetric.lab.models import ARCHITECTURES
from rmetric.lab.training import EVALUATE_EVERY, WARM_UP, WORKERS

SPLITS = ("calibration", "development", "test")
#: Seeds of one architecture, in turn: 3/10 calibrate, 3/10 develop, 4/10 are sealed.
SPLIT_TURNS = (2, 0, 1, 2, 0, 1, 2, 0, 1, 2)
SEEDS = 160
REPEATS = 4  # runs a fault and severity: one for each architecture
LOWEST_RATE, HIGHEST_RATE = 1e-3, 3e-3  # of the learning rates, spread evenly in their logarithm


@dataclass(frozen=True, kw_only=True)
class LabSpec:
    """Everything that fixes one run.

    Attributes:
        run_id: unique in its campaign; names the file.
        seed: of the weights and the data, shared by a control and its branches.
        architecture: one of `models.ARCHITECTURES`.
        fault: as in `faults.FAULTS`; None for a control.
        severity: in the fault's unit; None for its middle one.
        onset_step: first step under the fault; it is also where the run branches off.
        duration_steps: steps that it acts; None for the fault's own, 0 for the rest of the run.
        peak_rate: learning rate after the warm-up.
        total_steps: of the training.
        text: one of `corpus.CORPORA`.
        split: of `SPLITS`.
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

    def __post_init__(self) -> None:
        for name, value, known in (
            ("architecture", self.architecture, ARCHITECTURES),
            ("text", self.text, tuple(CORPORA)),
            ("split", self.split, SPLITS),
        ):
            if value not in known:
                raise ValueError(f"unknown {name} {value!r}: known are {', '.join(known)}")
        if self.total_steps < 1:
            raise ValueError(f"total_steps is {self.total_steps}: at least 1 is needed")
        if not 0 < self.peak_rate < inf:
            raise ValueError(f"peak_rate is {self.peak_rate}: it must be above 0")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}: it must be at least 0 and below 2^63")
        if self.fault is not None:
            self._check_fault(fault(self.fault))

    def _check_fault(self, kind: Fault) -> None:
        if kind.only not in (None, self.architecture):
            raise ValueError(f"{kind.name} acts on {kind.only} only, not on {self.architecture}")
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

    @property
    def control_id(self) -> str:
        return control_id(self.seed)


def control_id(seed: int) -> str:
    return f"seed{seed:03d}"


def config_of(spec: LabSpec, corpus_digest: str) -> dict[str, Any]:
    """The spec under the names of the log; see docs/log_format.md."""
    injected = fault(spec.fault) if spec.fault else None
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
        "branch_of": spec.control_id if injected else None,
        "fault_injection": {
            "type": spec.fault or "NONE",
            "trigger_step": spec.onset_step,
            "params": {
                "severity": spec.severity,
                "severity_unit": injected.unit,
                "duration_steps": spec.duration_steps,
            }
            if injected
            else {},
        },
    }


def campaign(
    seeds: int = SEEDS,
    first_seed: int = 0,
    total_steps: int = 400,
    text: str = "standard_library",
    faults: Sequence[str] | None = None,
) -> list[LabSpec]:
    """The runs of a campaign: a control a seed, and every fault and severity evenly over them.

    Every fault and severity is run once on each architecture (those of Mixtral alone
    four times on it), `seeds / 160` times over. Severities of a fault follow each
    other, so that they go to seeds of different splits.
    """
    if seeds < 1:
        raise ValueError(f"seeds is {seeds}: at least 1 is needed")
    kinds = [fault(name) for name in faults] if faults is not None else list(FAULTS.values())
    specs: list[LabSpec] = []
    for turn, architecture in enumerate(ARCHITECTURES):
        numbers = range(turn, seeds, len(ARCHITECTURES))
        controls = [
            _control(first_seed + n, architecture, i + turn, total_steps, text)
            for i, n in enumerate(numbers)
        ]
        specs += controls
        if controls:
            specs += _branches(controls, kinds, round(REPEATS * seeds / SEEDS) or 1, turn)
    return sorted(specs, key=lambda spec: (spec.seed, spec.fault is not None))


def _control(seed: int, architecture: str, turn: int, total_steps: int, text: str) -> LabSpec:
    rng = np.random.default_rng([seed, 1])
    rate = LOWEST_RATE * (HIGHEST_RATE / LOWEST_RATE) ** rng.random()
    return LabSpec(
        run_id=control_id(seed),
        seed=seed,
        architecture=architecture,
        peak_rate=float(f"{rate:.4g}"),
        total_steps=total_steps,
        text=text,
        split=SPLITS[SPLIT_TURNS[turn % len(SPLIT_TURNS)]],
    )


def _branches(
    controls: list[LabSpec], kinds: list[Fault], repeats: int, turn: int
) -> list[LabSpec]:
    """This architecture's share of the faults, dealt over its controls."""
    rng = np.random.default_rng([controls[0].seed, 2])
    architecture = controls[0].architecture
    dealt = []
    for index in rng.permutation(len(kinds)):
        kind = kinds[index]
        if kind.only in (None, architecture):
            times = repeats if kind.only else max(1, repeats // REPEATS)
            dealt += [(kind, severity) for severity in kind.severities * times]
    specs = []
    for place, (kind, severity) in enumerate(dealt):
        control = controls[(place + turn) % len(controls)]
        begin, end = round(0.3 * control.total_steps), round(0.6 * control.total_steps)
        specs.append(
            LabSpec(
                **asdict(control)
                | dict(
                    run_id=f"seed{control.seed:03d}_{kind.name}_s{severity:g}_b{place:03d}",
                    fault=kind.name,
                    severity=severity,
                    onset_step=int(rng.integers(max(begin, 1), max(end, 1) + 1)),
                )
            )
        )
    return specs
