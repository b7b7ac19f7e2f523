"""Questions about the calibrated detector that a score leaves open.

Were the missed failures detectable, and were the absorbed faults harmless while they acted? What
about kinds of benign changes that its calibration did not include? Faults need no such split: no
faulty run enters a calibration, so the recall of each kind of fault is that of an unseen kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, nan
from typing import Any

import numpy as np

from rmetric.detectors.calibrated import CalibratedDetector, Thresholds
from rmetric.detectors.calibrated.calibration import Shown, thresholds_from, watch
from rmetric.evaluation.intervals import wilson
from rmetric.evaluation.traces import Trace
from rmetric.records import Run
from studies.detector_benchmark.data_sets import DataSet
from studies.detector_benchmark.measure import Judged, quartiles

BUDGET = 0.01  # as the shipped thresholds were made


def hindsight(data: DataSet, seen: Judged) -> dict[str, Any]:
    """Missed failures, and absorbed faults with and without an alarm, as plain values."""
    return {"missed": missed(data, seen), "absorbed": absorbed(data, seen)}


def missed(data: DataSet, seen: Judged) -> list[dict[str, Any]]:
    """Each missed failure with a warning, and the highest score before it."""
    cases = data.cases
    chosen = np.flatnonzero(cases.windows.failed & cases.warned & ~seen.neutral.hit)
    return [
        {
            "run": data.runs[i].id,
            "kind": str(cases.kinds[i]),
            "steps": int(cases.windows.failure[i] - cases.windows.onset[i]),
            "highest": _highest(seen.traces[i], cases.windows.onset[i], cases.windows.failure[i]),
        }
        for i in chosen.tolist()
    ]


def absorbed(data: DataSet, seen: Judged) -> dict[str, Any]:
    """Validation loss of runs above their twins, under faults that they absorbed.

    In nats: the maximum from the onset on, and the mean of the last three
    evaluations, with quartiles over the runs.
    """
    controls = {run.id: run for run in data.runs}
    alarmed = seen.alerts.first < inf
    groups: dict[str, list[tuple[float, float]]] = {"alarmed": [], "silent": []}
    for i in np.flatnonzero(data.cases.of_kind("absorbed")).tolist():
        run = data.runs[i]
        control = controls.get(run.config.get("branch_of") or "")
        if control is not None:
            groups["alarmed" if alarmed[i] else "silent"].append(harm(run, control))
    return {
        name: {"runs": len(found), "most": quartiles(most), "end": quartiles(end)}
        for name, found in groups.items()
        for most, end in [np.reshape(found, (-1, 2)).T]
    }


def harm(run: Run, control: Run) -> tuple[float, float]:
    """Validation loss above the twin's from the onset on: the maximum, and at the end (nats)."""
    onset = run.truth.onset_step if run.truth is not None else None
    twin = {r.step: r.validation_loss for r in control.records if r.validation_loss is not None}
    above = [
        r.validation_loss - twin[r.step]
        for r in run.records
        if r.validation_loss is not None and r.step in twin and r.step >= (onset or 0)
    ]
    return (max(above), float(np.mean(above[-3:]))) if above else (nan, nan)


def _highest(trace: Trace, onset: float, failure: float) -> float:
    inside = trace.scores[(onset <= trace.steps) & (trace.steps < failure)]
    known = inside[np.isfinite(inside)]
    return float(known.max()) if len(known) else nan


def left_out(healthy: Iterable[Run], judged: Sequence[Run]) -> dict[str, Any]:
    """Kind of benign change -> runs and alarms, calibrated on `healthy` without that kind.

    Args:
        healthy: runs for the thresholds: controls and benign changes that did not fail.
        judged: the detector runs on those of them that are benign and did not fail.
    """
    shown: list[tuple[str, Shown]] = [(_fault(run), watch(run)) for run in healthy if _quiet(run)]
    kinds = sorted({_fault(run) for run in judged if _quiet(run)} - {"NONE"})
    rows: dict[str, Any] = {}
    for kind in kinds:
        thresholds = thresholds_from([s for fault, s in shown if fault != kind], BUDGET)
        runs = [run for run in judged if _quiet(run) and _fault(run) == kind]
        alarmed = sum(_alarms(run, thresholds) for run in runs)
        rows[kind] = {"runs": len(runs), "alarmed": alarmed}
    total = sum(row["runs"] for row in rows.values())
    return {
        "kinds": rows,
        "share": wilson(sum(row["alarmed"] for row in rows.values()), total),
        "calibrated_on": len(shown),
    }


def _alarms(run: Run, thresholds: Thresholds) -> bool:
    detector = CalibratedDetector(thresholds)
    return any(detector.update(record).alarm for record in run.records)


def _quiet(run: Run) -> bool:
    truth = run.truth
    return truth is not None and not truth.failed and (truth.benign or truth.fault == "NONE")


def _fault(run: Run) -> str:
    return run.truth.fault if run.truth is not None else "NONE"
