"""The runs that detectors are judged on: what they are, who belongs together, where from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rmetric.evaluation.study import read_study
from rmetric.records import Run
from studies.detector_benchmark.cases import KINDS, Cases, weights_not_finite

#: The part of the laboratory that nobody looks at before everything is frozen.
SEALED_PART = "test"
SEALED_RESULTS = "lab_test"  # kept apart from those that anybody may make
LAB_PARTS = ("calibration", "development", SEALED_PART)
LAB_FOLDER = Path("studies/fault_lab/logs")
FITTED = (
    "The calibrated detector took its thresholds from the healthy and benign runs of both parts, "
    "and what it looks at was chosen on all of their runs: its rows flatter it here. What counts "
    "is the sealed part."
)


class Refused(ValueError):
    """What was asked for is not done, and why."""


@dataclass(kw_only=True)
class DataSet:
    """Runs whose end is known.

    Attributes:
        name: of its files.
        title: as tables print it.
        runs: in a fixed order.
        cases: their facts, in the same order.
        group: what the bootstrap draws, in words.
        inputs: what fixes the runs: digests, parts; goes into the provenance.
        notes: what a reader of its tables must know, in sentences.
        skipped: what could not be used, each with the reason.
        confidence: of the label, shape (R,); None where the truth is a fact.
        spacing: of the records in steps, shape (R,); None where steps are what counts.
    """

    name: str
    title: str
    runs: list[Run]
    cases: Cases
    group: str
    inputs: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    confidence: NDArray[np.str_] | None = None
    spacing: NDArray[np.float64] | None = None

    @property
    def num_groups(self) -> int:
        return len(set(self.cases.groups.tolist()))


def lab(
    parts: Sequence[str] = ("calibration", "development"),
    folder: Path = LAB_FOLDER,
    *,
    open_sealed: bool = False,
) -> DataSet:
    """The fault laboratory: real small models under real faults, branched from their twins.

    A branch holds its control's records before the onset, so whatever a detector says there it
    says in the control and in each branch. The groups are the seeds: a control and all its
    branches are drawn together. Raises Refused for the sealed part without `open_sealed`.
    """
    from rmetric.readers.archive import read_runs

    for part in parts:
        if part not in LAB_PARTS:
            raise ValueError(f"unknown part {part!r}: known are {', '.join(LAB_PARTS)}")
    if SEALED_PART in parts and not open_sealed:
        raise Refused(
            f"the {SEALED_PART} part of the laboratory is sealed: it is opened once, after every "
            "threshold is frozen, by --open-sealed"
        )
    runs: list[Run] = []
    digests = {}
    for part in parts:
        path = Path(folder) / f"{part}.tar.xz"
        runs += read_runs(path)
        digests[path.name] = sha256(path)
    cases = Cases.of(runs, [str(run.config["seed"]) for run in runs])
    return DataSet(
        name=SEALED_RESULTS if SEALED_PART in parts else "lab",
        title=f"fault laboratory ({', '.join(parts)})",
        runs=runs,
        cases=cases,
        group="seeds (a control and its branches)",
        inputs={"archives": digests, "parts": list(parts)},
        notes=[
            composition(runs, cases),
            *at_once(runs, cases),
            "A branch shares its control's steps before the onset: a detector that is wrong there "
            "is wrong in all of them. Intervals draw whole seeds, which allows for it.",
            *([FITTED] if SEALED_PART not in parts else []),
        ],
    )


def stress(folder: Path) -> DataSet:
    """The simulator's stress study: every fault and benign change, random onsets.

    Each run is drawn by itself, so each is a group. Raises UnusableStudy for a folder
    without its logs.
    """
    study = read_study(folder)
    runs = study.reference
    cases = Cases.of(runs, [run.id for run in runs])
    return DataSet(
        name="stress",
        title="simulated stress study",
        runs=runs,
        cases=cases,
        group="runs (each is simulated by itself)",
        inputs={"logs_sha256": study.digest, "num_logs": len(runs)},
        notes=[composition(runs, cases), *at_once(runs, cases)],
        skipped=study.skipped,
    )


def composition(runs: Sequence[Run], cases: Cases) -> str:
    """How many runs of which kind, and how many benign changes ended as failures."""
    counts = ", ".join(f"{int(cases.of_kind(kind).sum())} {kind}" for kind in KINDS)
    failed = sum(run.truth.benign for run in runs if run.truth and run.truth.failed)
    return (
        f"{len(runs)} runs: {counts}. Acute is not finite, diverged or without a worker; degraded "
        f"ends worse than its twin; absorbed is a real fault that the run survived. {failed} "
        "benign changes ended as failures and count as such, by fact."
    )


def at_once(runs: Sequence[Run], cases: Cases) -> list[str]:
    """The failures that no record announces, and what sees them instead."""
    instant = cases.windows.failed & ~cases.warned
    if not instant.any():
        return []
    seen = instant & cases.seen_before_step
    rest = [run for run, left in zip(runs, instant & ~seen, strict=True) if left]
    weights = sum(weights_not_finite(run) for run in rest)
    return [
        f"{int(instant.sum())} failures have no record from the onset up to the failure, so no "
        f"detector can announce them. In {int(seen.sum())} of them loss or gradient of that very "
        "step are not finite, which the check before the step sees; in "
        f"{weights} more only the weights are not."
    ]


def sha256(path: Path) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
