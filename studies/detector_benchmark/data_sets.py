"""The data sets of the benchmark: runs, facts, groups of dependent runs, sources."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rmetric.evaluation.study import read_study
from rmetric.readers.archive import read_runs
from rmetric.records import Run
from studies.detector_benchmark.cases import KINDS, Cases, weights_not_finite

LAB_PARTS = ("calibration", "development", "test")
#: Trainings whose optimiser, schedule, size and length vary: the laboratory's second set.
VARIED_PARTS = ("training2", "sealed2")
#: Short fine-tunings by an author who had read no detector; without the failures that come at once.
FINE_TUNING_PARTS = ("sealed3", "sealed3_slow")
#: Part of the laboratory -> name of its results.
RESULTS_OF = {
    "calibration": "lab", "development": "lab", "test": "lab_test", "training2": "lab2",
    "sealed2": "lab2_test", "sealed3": "lab3_test", "sealed3_slow": "lab3_slow",
}  # fmt: skip
#: Of parts that are not read before all thresholds are frozen.
SEALED_RESULTS = ("lab_test", "lab2_test", "lab3_test", "lab3_slow")
LAB_FOLDER = Path("studies/fault_lab/data")
FITTED = (
    "The calibrated detector's thresholds come from the healthy and benign runs of both parts, and "
    "its statistics were chosen on all of their runs, so its rows are too favourable here. The "
    "sealed part is the valid test."
)


class Refused(ValueError):
    """A request that is refused; the message has the reason."""


@dataclass(kw_only=True)
class DataSet:
    """Runs with known outcomes.

    Attributes:
        group: the resampling unit of the bootstrap, in words.
        inputs: digests and parts that determine the runs.
        skipped: inputs that could not be used, each with the reason.
        confidence: of the label, shape (R,); None if the truth is known exactly.
        spacing: of the records in steps, shape (R,); None if times are in steps.
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
    """The fault laboratory; the seeds are the groups, as a branch holds its control's records."""
    sets = (LAB_PARTS, VARIED_PARTS, FINE_TUNING_PARTS)
    if not any(set(parts) <= set(known) for known in sets):
        known = "; ".join(", ".join(parts) for parts in sets)
        raise ValueError(f"parts of different sets: {', '.join(parts)}; known are {known}")
    sealed = [part for part in parts if RESULTS_OF[part] in SEALED_RESULTS]
    if sealed and not open_sealed:
        raise Refused(f"the {sealed[0]} part is sealed: opened once, by --open-sealed")
    first = set(parts) <= set(LAB_PARTS)
    paths = [Path(folder) / f"{part.removesuffix('_slow')}.tar.xz" for part in parts]
    runs = [run for path in paths for run in read_runs(path)]
    if "sealed3_slow" in parts:
        runs = [run for run in runs if run.config["lost"] != "suddenly"]
    digests = {path.name: sha256(path) for path in paths}
    cases = Cases.of(runs, [str(run.config["seed"]) for run in runs])
    return DataSet(
        name=RESULTS_OF[[*sealed, *parts][0]],
        title=f"fault laboratory ({', '.join(parts)})",
        runs=runs,
        cases=cases,
        group="seeds (a control and its branches)",
        inputs={"archives": digests, "parts": list(parts)},
        notes=[
            composition(runs, cases),
            *at_once(runs, cases),
            "A branch shares its control's steps before the onset, so an error of a detector there "
            "occurs in all of them. The intervals therefore resample whole seeds.",
            *([FITTED] if first and not sealed else []),
        ],
    )


def stress(folder: Path) -> DataSet:
    """The simulator's stress study, each run a group. Raises UnusableStudy, as `read_study`."""
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
    """Number of runs of each kind, and of benign changes that ended as failures."""
    counts = ", ".join(f"{int(cases.of_kind(kind).sum())} {kind}" for kind in KINDS)
    failed = sum(run.truth.benign for run in runs if run.truth and run.truth.failed)
    return (
        f"{len(runs)} runs: {counts}. Acute: not finite, diverged or a lost worker; degraded: ends "
        f"worse than its twin; absorbed: a real fault that the run survived. {failed} "
        "benign changes ended as failures and count as failures."
    )


def at_once(runs: Sequence[Run], cases: Cases) -> list[str]:
    """The failures without a record before them, and the checks that detect them."""
    instant = cases.windows.failed & ~cases.warned
    if not instant.any():
        return []
    seen = instant & cases.seen_before_step
    rest = [run for run, left in zip(runs, instant & ~seen, strict=True) if left]
    weights = sum(weights_not_finite(run) for run in rest)
    return [
        f"{int(instant.sum())} failures have no record from the onset up to the failure, so no "
        f"detector can predict them. In {int(seen.sum())} of them the loss or the gradient of the "
        "failure's step is not finite, which the check before the step detects; in "
        f"{weights} more only the weights are not finite."
    ]


def sha256(path: Path) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
