"""The designs of the two campaigns: which runs, on which seeds, in which part.

The second set has other sizes, contexts, texts, optimisers and schedules. `training2` is open;
`sealed2` was not read by a detector before it was frozen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from studies.fault_lab.faults import Fault, fault
from studies.fault_lab.models import ARCHITECTURES, SIZES
from studies.fault_lab.spec import SECOND_SPLITS, SPLITS, LabSpec, control_id

#: Seeds of one architecture, in turn: 3/10 calibrate, 3/10 develop, 4/10 are sealed.
SPLIT_TURNS = (2, 0, 1, 2, 0, 1, 2, 0, 1, 2)
SEEDS = 160
REPEATS = 4  # runs a fault and severity: one for each architecture
LOWEST_RATE, HIGHEST_RATE = 1e-3, 3e-3  # of the learning rates, spread evenly in their logarithm

#: What the campaign injects, in the order in which it is dealt: both are part of the design.
#: A fault that is registered later is trained with `--only`, or starts another campaign.
DESIGN = (
    "LR_SPIKE", "LR_RUNAWAY", "GRADIENT_EXPLOSION", "GRADIENT_SCALE", "GRADIENT_SCALE_ALL",
    "SIGN_FLIP", "SIGN_FLIP_ALL", "GRADIENT_NOISE", "GRADIENT_NOISE_ALL", "INFINITE_GRADIENT",
    "STALE_WORKER", "STALE_ALL", "DATA_CORRUPTION", "LABEL_SHUFFLE", "EXPERT_FAILURE",
    "ROUTER_IMBALANCE", "ATTENTION_SCALE", "ATTENTION_GROWTH", "HALF_OVERFLOW", "WEIGHT_BIT_FLIP",
    "SECOND_MOMENT_ZEROED", "FIRST_MOMENT_CORRUPTED", "BETA_FAULT", "DEAD_WORKER", "DOMAIN_SHIFT",
    "NOISY_EVALUATION", "RATE_REWARMUP", "RATE_CUT", "BATCH_SIZE_UP", "BATCH_SIZE_DOWN",
    "BAD_BATCH", "GRADIENT_SPIKE", "SEQUENCE_LENGTH", "REPEATED_BATCH",
)  # fmt: skip


def campaign(
    seeds: int = SEEDS,
    first_seed: int = 0,
    total_steps: int = 400,
    text: str = "standard_library",
    faults: Sequence[str] | None = None,
) -> list[LabSpec]:
    """The runs of a campaign: one control per seed, with faults and severities spread evenly.

    Each once on each architecture (faults of Mixtral alone four times on it), `seeds / 160` times
    over. Severities of a fault are consecutive, so that they belong to seeds of different splits.
    """
    if seeds < 1:
        raise ValueError(f"seeds is {seeds}: at least 1 is needed")
    kinds = [fault(name) for name in (DESIGN if faults is None else faults)]
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
    return _in_order(specs)


def _in_order(specs: Sequence[LabSpec]) -> list[LabSpec]:
    return sorted(specs, key=lambda spec: (spec.seed, spec.fault is not None))


def _branch(control: LabSpec, kind: Fault, severity: float, place: int, onset: int) -> LabSpec:
    return replace(
        control,
        run_id=f"{control.run_id}_{kind.name}_s{severity:g}_b{place:03d}",
        fault=kind.name,
        severity=severity,
        onset_step=onset,
    )


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
        onset = int(rng.integers(max(begin, 1), max(end, 1) + 1))
        specs.append(_branch(control, kind, severity, place, onset))
    return specs


# -- the second set

FIRST_SEED = 1000  # the first set has 0 to 159, the rescue 160 to 259
#: Runs of each part: controls, and of every kind of fault and of benign change.
NUMBERS_OF_SPLIT = {"training2": (22, 3, 2), "sealed2": (33, 5, 3)}

# Shares of the controls. What takes long is rare: the whole set must take less than an hour.
SHAPES = {  # (size, context, steps)
    ("tiny", 48, 400): 0.40,
    ("tiny", 96, 400): 0.17,
    ("tiny", 128, 400): 0.08,
    ("small", 48, 400): 0.13,
    ("small", 96, 400): 0.04,
    ("large", 48, 400): 0.04,
    ("tiny", 48, 800): 0.07,
    ("tiny", 96, 800): 0.03,
    ("tiny", 48, 1500): 0.04,
}
SHARES_OF_OPTIMIZERS = {"adamw": 0.4, "muon": 0.3, "sgd": 0.3}
SHARES_OF_RESTARTS = {0: 0.64, 1: 0.12, 2: 0.12, 3: 0.12}
SHARES_OF_TEXTS = {"documentation": 0.7, "generated": 0.3}
#: Lowest and highest peak rate at the tiny size, spread evenly in the logarithm.
RATES = {"adamw": (1e-3, 3e-3), "muon": (2e-3, 8e-3), "sgd": (0.05, 0.2)}
EARLIEST, LATEST = 0.4, 0.7  # onset, as a share of the run

Choice = TypeVar("Choice", bound=Hashable)


def second_campaign() -> list[LabSpec]:
    """The runs of both parts: each control, then its branches."""
    specs, first_seed = [], FIRST_SEED
    for split in SECOND_SPLITS:
        num_controls, num_faults, num_benign = NUMBERS_OF_SPLIT[split]
        rng = np.random.default_rng([first_seed, 4])
        controls = _second_controls(rng, first_seed, num_controls, split)
        dealt = [
            (kind, kind.severities[-1 - turn % len(kind.severities)])
            for kind in map(fault, DESIGN)
            for turn in range(num_benign if kind.benign else num_faults)
        ]
        specs += controls + _second_branches(rng, controls, dealt)
        first_seed += num_controls
    return _in_order(specs)


def _second_controls(
    rng: np.random.Generator, first_seed: int, number: int, split: str
) -> list[LabSpec]:
    shapes = _spread(rng, number, SHAPES)
    optimizers = _spread(rng, number, SHARES_OF_OPTIMIZERS)
    restarts = _spread(rng, number, SHARES_OF_RESTARTS)
    texts = _spread(rng, number, SHARES_OF_TEXTS)
    controls = []
    for i, (size, context, total_steps) in enumerate(shapes):
        lowest, highest = RATES[optimizers[i]]
        # Wider models take lower rates.
        rate = lowest * (highest / lowest) ** rng.random() * SIZES["tiny"][0] / SIZES[size][0]
        controls.append(
            LabSpec(
                run_id=control_id(first_seed + i),
                seed=first_seed + i,
                architecture=ARCHITECTURES[i % len(ARCHITECTURES)],
                peak_rate=float(f"{rate:.4g}"),
                total_steps=total_steps,
                text=texts[i],
                split=split,
                size=size,
                context=context,
                optimizer=optimizers[i],
                restarts=restarts[i],
            )
        )
    return controls


def _spread(rng: np.random.Generator, number: int, shares: Mapping[Choice, float]) -> list[Choice]:
    """Each choice its share of `number` times, to rounding, in a drawn order."""
    ends = np.round(np.cumsum(list(shares.values())) * number).astype(int)
    counts = np.diff(ends, prepend=0)
    every = [choice for choice, n in zip(shares, counts, strict=True) for _ in range(n)]
    return [every[i] for i in rng.permutation(number)]


def _second_branches(
    rng: np.random.Generator, controls: list[LabSpec], dealt: list[tuple[Fault, float]]
) -> list[LabSpec]:
    """Each fault goes to the control whose turn it is, of those on which it can act."""
    # Long runs and larger models get a third as many branches.
    cheap = [c for c in controls if c.total_steps == 400 and c.size == "tiny"]
    turns = controls + 2 * cheap
    queue = deque(turns[i] for i in rng.permutation(len(turns)))
    specs = []
    for place, index in enumerate(rng.permutation(len(dealt))):
        kind, severity = dealt[index]
        control = next(
            c
            for c in queue
            if kind.only in (None, c.architecture) and kind.optimizer in (None, c.optimizer)
        )
        queue.remove(control)
        queue.append(control)
        begin, end = (round(share * control.total_steps) for share in (EARLIEST, LATEST))
        onset = int(rng.integers(begin, end + 1))
        specs.append(_branch(control, kind, severity, place, onset))
    return specs
