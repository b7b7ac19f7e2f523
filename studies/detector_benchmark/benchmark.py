"""Detectors on data sets, and the results as one JSON file per data set.

Tables, figures and page are made from these files alone (`studies.detector_benchmark.report`), so
a new detector can be added without running the others again.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
from joblib import Parallel

from rmetric._util.strict_json import encode
from rmetric._util.workers import delayed
from rmetric.detectors import DETECTORS
from rmetric.detectors.calibrated import CalibratedDetector, Thresholds
from rmetric.detectors.calibrated.calibration import Shown, thresholds_from, watch
from rmetric.evaluation.intervals import wilson
from rmetric.evaluation.traces import SEED, Trace, trace
from rmetric.logs import write_atomically
from rmetric.records import Run
from studies.detector_benchmark.cases import Costs
from studies.detector_benchmark.data_sets import DataSet
from studies.detector_benchmark.measure import (
    CEILINGS,
    REFERENCES,
    Judged,
    Row,
    ceilings,
    measure,
    measure_real,
    quartiles,
)

CEILING_TITLES = {
    "ceiling": "Ceiling (knows the truth)",
    "ceiling_after_onset": "Ceiling, after the onset step",
}
#: Runs per task: a balance of transfer cost and progress updates.
CHUNK = 8
#: Packages that may affect the numbers, beside those of the peers.
PACKAGES = ("numpy", "scikit-learn", "joblib")

Results = dict[str, Any]
#: Keys of results that exist for the calibrated detector alone.
OF_OURS = ("left_out", "missed", "absorbed")


def chosen_detectors(names: Sequence[str] | None) -> list[str]:
    """All registered detectors, or those named. Raises ValueError for an unknown name."""
    for name in names or ():
        if name not in DETECTORS:
            raise ValueError(f"unknown detector {name!r}: known are {', '.join(DETECTORS)}")
    return list(dict.fromkeys(names)) if names else list(DETECTORS)


def with_references(names: Sequence[str]) -> list[str]:
    """The detectors to run: the requested ones and the references of the comparison."""
    return [*names, *(name for name in REFERENCES if name in DETECTORS and name not in names)]


def trace_detectors(
    names: Sequence[str],
    runs: Sequence[Run],
    *,
    num_processes: int = 1,
    advance: Callable[[int], Any] = lambda number: None,
) -> dict[str, list[Trace]]:
    """Traces of every detector on every run; `advance` gets the number of finished runs."""
    chunks = [runs[i : i + CHUNK] for i in range(0, len(runs), CHUNK)]
    tasks = (delayed(_trace_chunk)(names, chunk) for chunk in chunks)
    found: dict[str, list[Trace]] = {name: [] for name in names}
    with warnings.catch_warnings():
        # joblib warns when it replaces a worker that a peer has made large.
        warnings.filterwarnings("ignore", message="A worker stopped", category=UserWarning)
        for part in Parallel(n_jobs=num_processes, return_as="generator")(tasks):
            for name, traces in part.items():
                found[name] += traces
            advance(len(part[names[0]]) if names else 0)
    return found


def _trace_chunk(names: Sequence[str], runs: Sequence[Run]) -> dict[str, list[Trace]]:
    return {name: [trace(name, run, SEED) for run in runs] for name in names}


def results_of(
    data: DataSet,
    traces: dict[str, list[Trace]],
    names: Iterable[str],
    costs: Costs,
    commit: str | None = None,
) -> dict[str, Row]:
    """A row for each of `names`, and for the ceilings if the truth is known."""
    seen = {name: Judged.of(data.cases, found) for name, found in traces.items()}
    best = ceilings(data)
    references = {name: seen[name] for name in REFERENCES if name in seen}

    def measured(judged: Judged) -> Row:
        if data.confidence is not None:
            return measure_real(data, judged, references=references)
        return measure(data, judged, oracle=best["ceiling"], references=references, costs=costs)

    rows = {}
    for name, judged in {**{name: seen[name] for name in names}, **best}.items():
        rows[name] = {
            "title": CEILING_TITLES[name] if name in CEILINGS else DETECTORS[name].title,
            "kind": "ceiling" if name in CEILINGS else DETECTORS[name].kind,
            "commit": commit,
            **measured(judged),
        }
    return rows


def merged(path: Path, results: Results) -> Results:
    """These results and the existing rows in the registry's order; ValueError for other inputs."""
    if not path.exists():
        return results
    try:
        there = json.loads(path.read_bytes())
        same = all(there[key] == encode(results[key]) for key in ("inputs", "costs"))
        rows = there["rows"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: not results of the benchmark; remove it, or change --out") from (
            None
        )
    if not same:
        raise ValueError(
            f"{path} was made of other runs or costs: leave out --detectors to make it anew, or "
            "change --out"
        )
    rows = rows | results["rows"]
    # Peers that are not installed here keep their rows and places.
    places = {name: i for i, name in enumerate([*DETECTORS, *CEILINGS])}
    there_before: dict[str, int] = {}
    last = -1
    for name in there["rows"]:
        last = there_before[name] = max(last, places.get(name, last))
    known = {n: rows[n] for n in sorted(rows, key=lambda n: places.get(n, there_before.get(n, 0)))}
    # Results of one detector are kept if it was not judged again.
    kept = {key: there[key] for key in OF_OURS if key in there}
    made = results["made"]
    made["versions"] = there["made"].get("versions", {}) | made["versions"]
    return kept | results | {"rows": known}


def write_results(path: Path, results: Results) -> None:
    """One line per detector, so that a change of one changes one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {key: value for key, value in results.items() if key != "rows"}
    lines = [f"{json.dumps(k)}: {_json(v)}" for k, v in head.items()]
    rows = ",\n".join(f"{json.dumps(k)}: {_json(row)}" for k, row in results["rows"].items())
    content = "{\n" + ",\n".join([*lines, f'"rows": {{\n{rows}\n}}']) + "\n}\n"
    write_atomically(path, [content.encode()])


def _json(value: Any) -> str:
    return json.dumps(encode(value), ensure_ascii=False)


def read_results(path: Path) -> Results:
    return json.loads(path.read_bytes())


# -- questions about the calibrated detector that a score leaves open

BUDGET = 0.01  # as the shipped thresholds were made


def missed_and_absorbed(data: DataSet, seen: Judged) -> dict[str, Any]:
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
    """Nats of validation loss above the twin's under absorbed faults: the most, and at the end."""
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
    """Kind of benign change -> runs and alarms, calibrated on `healthy` without that kind."""
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
