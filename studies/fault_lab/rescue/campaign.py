"""Run the policies on the branches of a campaign, seed by seed.

A seed's file gets its name only when it is complete, so an interrupted campaign that is started
again ends with the bytes of an uninterrupted one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import torch

from rmetric._util.workers import delayed
from rmetric.logs import write_atomically
from rmetric.readers.archive import read_runs
from studies.fault_lab import DATA
from studies.fault_lab.branches import injected, judge
from studies.fault_lab.campaign import by_seed, digest
from studies.fault_lab.design import campaign
from studies.fault_lab.faults import fault
from studies.fault_lab.rescue.policies import KNOWN, NOTHING
from studies.fault_lab.rescue.runner import (
    Control,
    Outcome,
    Seen,
    Treated,
    Treatment,
    train_control,
    train_untreated,
)
from studies.fault_lab.spec import LabSpec, entries_of

FIRST_SEALED, NUM_SEALED = 160, 100
#: Of the sealed seeds, one in so many has a benign change beside its fault.
BENIGN_TURN = 3
#: Policies that change every step are trained on one in so many of the runs that do not fail.
EVERY_STEP_TURN = 4
ONSET_OF_CONTROLS = 120


def development() -> list[list[LabSpec]]:
    """The calibration and development seeds of the laboratory with all their branches."""
    return by_seed([spec for spec in campaign() if spec.split != "test"])


def old_seeds() -> list[list[LabSpec]]:
    """All 160 seeds of the laboratory; those of its old test split are known by now."""
    return by_seed(campaign())


def development_failures() -> list[list[LabSpec]]:
    """Seeds with a failing fault by the archives, with their failing branches alone."""
    failing = {
        run.id
        for split in ("calibration", "development")
        for run in read_runs(DATA / f"{split}.tar.xz")
        if run.truth is not None and run.truth.failed and not run.truth.benign
    }
    groups = [
        [s for s in group if s.fault is None or s.run_id in failing] for group in development()
    ]
    return [group for group in groups if len(group) > 1]


def sealed() -> list[list[LabSpec]]:
    """100 new seeds, each with one fault, and one in three with a benign change, too."""
    groups = []
    for control, *branches in by_seed(campaign(NUM_SEALED, FIRST_SEALED)):
        rng = np.random.default_rng([control.seed, 3])
        faults = [spec for spec in branches if not fault(spec.fault or "").benign]
        benign = [spec for spec in branches if fault(spec.fault or "").benign]
        chosen = [faults[rng.integers(len(faults))]] if faults else []
        if benign and control.seed % BENIGN_TURN == 0:
            chosen.append(benign[rng.integers(len(benign))])
        groups.append([replace(spec, split="test") for spec in (control, *chosen)])
    return groups


def digest_of(groups: Sequence[Sequence[LabSpec]]) -> str:
    return digest([[entries_of(spec) for spec in group] for group in groups])


def run(
    groups: Sequence[Sequence[LabSpec]], out: Path, *, policies: Sequence[str], num_processes: int
) -> Iterator[None]:
    """Run every seed (a control and its branches) that has no file of rows in `out` yet."""
    out.mkdir(parents=True, exist_ok=True)
    missing = [group for group in groups if not row_path(out, group[0].seed).exists()]
    parallel = joblib.Parallel(n_jobs=num_processes, return_as="generator_unordered")
    yield from parallel(delayed(_run_seed)(group, out, policies) for group in missing)


def row_path(out: Path, seed: int) -> Path:
    return out / f"seed{seed:03d}.jsonl"


def read_rows(groups: Sequence[Sequence[LabSpec]], out: Path) -> list[dict[str, Any]]:
    """Rows of all seeds. Raises FileNotFoundError for a seed that was not run."""
    return [
        json.loads(line)
        for group in groups
        for line in row_path(out, group[0].seed).read_text().splitlines()
    ]


def _run_seed(group: Sequence[LabSpec], out: Path, policies: Sequence[str]) -> None:
    torch.set_num_threads(1)  # the bytes depend on it, and seeds go side by side
    control_spec, *branches = group
    onsets = {spec.onset_step for spec in branches if spec.onset_step is not None}
    control = train_control(control_spec, onsets | {ONSET_OF_CONTROLS + 1})
    rows = [_control_row(control, policies)]
    for place, spec in enumerate(branches):
        rows += _rows(control, spec, policies, turn=control_spec.seed + place)
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    write_atomically(row_path(out, control_spec.seed), lines)


def _rows(
    control: Control, spec: LabSpec, policies: Sequence[str], *, turn: int
) -> Iterator[dict[str, Any]]:
    """Rows of one branch: one for each policy."""
    untreated = train_untreated(control, spec)
    truth = judge(injected(spec), untreated.lineage.records, control.lineage.records)
    about = {
        "run": spec.run_id,
        "seed": spec.seed,
        "fault": spec.fault,
        "severity": spec.severity,
        "onset": spec.onset_step,
        "duration": spec.duration_steps,
        "benign": truth.benign,
        "failed": truth.failed,
    }
    for name in policies:
        make, outcome = KNOWN[name].make, untreated.outcome
        if make is not None:
            treatment = make()
            if treatment.every_step and not truth.failed and turn % EVERY_STEP_TURN:
                continue
            outcome = Treated(control, spec, untreated, treatment).run()
        yield about | {"policy": name} | _entries(outcome)


def _control_row(control: Control, policies: Sequence[str]) -> dict[str, Any]:
    """Number of actions of each policy on the control, from its first step on."""
    spec = control.spec
    acted = {}
    for name in policies:
        make = KNOWN[name].make
        if make is not None and not (treatment := make()).every_step:
            acted[name] = first_action(control, treatment)
    return {"run": spec.run_id, "seed": spec.seed, "policy": NOTHING, "control": acted}


def first_action(control: Control, treatment: Treatment) -> int | None:
    """Step of the first action on a control; None if there is none, so the run is bit-equal."""
    for record in control.lineage.records:
        if treatment.before(Seen.of(record)).action != "go_on":
            return record.step
        if treatment.after(record).action != "go_on" or treatment.changes_steps:
            return record.step
        if treatment.snapshot_due(record.step):
            treatment.snapshot_taken(record.step)
    return None


def _entries(outcome: Outcome) -> dict[str, Any]:
    return asdict(outcome) | {
        "above": round(outcome.above, 5) if isfinite(outcome.above) else None,
        "actions": len(outcome.actions),
        "first": list(outcome.actions[0]) if outcome.actions else None,
        "last": list(outcome.actions[-1]) if outcome.actions else None,
    }
