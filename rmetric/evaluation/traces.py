"""Scores and alarms of a detector on a run, kept once; every number is derived from them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import numpy as np
from numpy.typing import NDArray

from rmetric.detectors import DETECTORS
from rmetric.detectors.contract import Detector
from rmetric.metric import RMetric
from rmetric.records import Run

SEED = 0


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One detector on one run, shape (T,) with a row for each record.

    Attributes:
        detector: its name in `DETECTORS`.
        scores: after each record; nan where there was nothing to judge by.
        alarms: whether the detector was alarmed after each record.
    """

    detector: str
    run_id: str
    steps: NDArray[np.int64]
    scores: NDArray[np.float64]
    alarms: NDArray[np.bool_]

    @property
    def alert_steps(self) -> NDArray[np.int64]:
        """Every step with an alert."""
        return self.steps[self.alarms]

    @property
    def begins(self) -> NDArray[np.bool_]:
        """Whether an alarm began with each record, shape (T,)."""
        return np.asarray(self.alarms & ~np.concatenate([[False], self.alarms[:-1]]), dtype=bool)

    @property
    def first_alert(self) -> int | None:
        """The step of the first alert; None where there was none."""
        return int(self.steps[self.alarms.argmax()]) if self.alarms.any() else None


def trace(name: str, run: Run, seed: int = SEED) -> Trace:
    """Show `run` to a fresh detector by its name in `DETECTORS`; KeyError if it is unknown.

    The seed, with name and run id, fixes the random numbers that the detector draws.
    """
    return trace_by(DETECTORS[name].make(generator_for(seed, name, run.id)), run, name)


def trace_by(detector: Detector, run: Run, name: str) -> Trace:
    """Show `run` to a detector that has seen nothing yet."""
    fit = getattr(detector, "fit", None)
    if fit is not None:  # it sees the future
        fit(run)
    scores, alarms, idle = [], [], isinstance(detector, RMetric)
    for record in run.records:
        detector.update(record)
        idle = idle and not any(detector.sources)  # type: ignore[attr-defined]
        # Before any of its signals was logged R is undefined, not 0.
        scores.append(nan if idle else detector.score)
        alarms.append(detector.alarm)
    return Trace(
        detector=name,
        run_id=run.id,
        steps=np.array([record.step for record in run.records], dtype=np.int64),
        scores=np.array(scores, dtype=float),
        alarms=np.array(alarms, dtype=bool),
    )


def trace_all(name: str, runs: Sequence[Run], *, num_processes: int = 1) -> list[Trace]:
    """`trace` for each run, in their order; `num_processes` as joblib's n_jobs."""
    from joblib import Parallel  # slow to import, and a replay needs none

    from rmetric._util.workers import delayed

    # Only a forest costs more than sending a run to another process does.
    if num_processes == 1 or not DETECTORS[name].sees_future:
        return [trace(name, run) for run in runs]
    return list(Parallel(n_jobs=num_processes)(delayed(trace)(name, run) for run in runs))


def generator_for(seed: int, *names: str) -> np.random.Generator:
    """A Generator of its own for what `names` name."""
    digest = hashlib.sha256("\0".join(names).encode()).digest()
    return np.random.default_rng([seed, *np.frombuffer(digest, dtype="<u4").tolist()])
