"""The second set: other sizes, contexts, texts, optimisers and schedules, in two parts.

`training2` is open; `sealed2` is not read by a detector before it is frozen. The list of runs is
fixed by its digest in `SEAL`, which is committed before the first of them is trained.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import numpy as np

from rmetric.readers.archive import run_from_line
from studies.fault_lab.campaign import CampaignError, by_seed, describe, run_path
from studies.fault_lab.design import DESIGN
from studies.fault_lab.faults import FAULTS, Fault, fault
from studies.fault_lab.models import ARCHITECTURES, SIZES
from studies.fault_lab.outcome import Definitions
from studies.fault_lab.spec import SECOND_SPLITS, LabSpec, control_id

SEAL = Path(__file__).resolve().parent / "results" / "second_seal.json"
FIRST_SEED = 1000  # the first set has 0 to 159, the rescue 160 to 259

#: Runs of each part: controls, and of every kind of fault and of benign change.
PARTS = {"training2": (22, 3, 2), "sealed2": (33, 5, 3)}

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
        num_controls, num_faults, num_benign = PARTS[split]
        rng = np.random.default_rng([first_seed, 4])
        controls = _controls(rng, first_seed, num_controls, split)
        dealt = [
            (kind, kind.severities[-1 - turn % len(kind.severities)])
            for kind in map(fault, DESIGN)
            for turn in range(num_benign if kind.benign else num_faults)
        ]
        specs += controls + _branches(rng, controls, dealt)
        first_seed += num_controls
    return sorted(specs, key=lambda spec: (spec.seed, spec.fault is not None))


def _controls(rng: np.random.Generator, first_seed: int, number: int, split: str) -> list[LabSpec]:
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


def _branches(
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
        specs.append(
            LabSpec(
                **asdict(control)
                | dict(
                    run_id=f"{control.run_id}_{kind.name}_s{severity:g}_b{place:03d}",
                    fault=kind.name,
                    severity=severity,
                    onset_step=int(rng.integers(begin, end + 1)),
                )
            )
        )
    return specs


# -- the seal


def check_seal(specs: Sequence[LabSpec], definitions: Definitions) -> None:
    """Raises CampaignError unless these are the runs and the definitions of the seal."""
    if not SEAL.exists():
        raise CampaignError(f"{SEAL} is missing: it has the digest of the second set")
    now, then = describe(specs, definitions), json.loads(SEAL.read_bytes())
    for key in ("specs_sha256", "definitions"):
        if now[key] != then[key]:
            raise CampaignError(f"{SEAL} is of another {key}: it has changed since the sealing")


# -- what has come out


def counts(out: Path, specs: Sequence[LabSpec]) -> dict[str, Counter[str]]:
    """Number of runs of each part by kind and outcome, from a finished campaign in `out`."""
    found: dict[str, Counter[str]] = {part: Counter() for part in SECOND_SPLITS}
    for control_spec, *branch_specs in by_seed(specs):
        control = run_from_line(run_path(out, control_spec.run_id).read_bytes())
        for spec in (control_spec, *branch_specs):
            run = run_from_line(run_path(out, spec.run_id).read_bytes(), control)
            assert run.truth is not None
            if spec.fault is None:
                kind = "control"
            else:
                kind = "benign" if FAULTS[spec.fault].benign else "fault"
            found[spec.split][f"{kind} {'failed' if run.truth.failed else 'not failed'}"] += 1
    return found
