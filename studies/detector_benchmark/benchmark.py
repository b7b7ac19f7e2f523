"""Detectors on data sets, and the results as one JSON file per data set.

Tables, figures and page are made from these files alone (`studies.detector_benchmark.report`), so
a new detector can be added without running the others again.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from joblib import Parallel

from rmetric._util.strict_json import encode
from rmetric._util.workers import delayed
from rmetric.detectors import DETECTORS
from rmetric.evaluation.traces import SEED, Trace, trace
from rmetric.logs import write_atomically
from rmetric.records import Run
from studies.detector_benchmark.data_sets import DataSet
from studies.detector_benchmark.measure import (
    CEILINGS,
    REFERENCES,
    Judged,
    Row,
    ceilings,
    measure,
    measure_real,
)
from studies.detector_benchmark.verdicts import Costs

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
    """Traces of every detector on every run; `advance` gets the number of finished runs.

    They do not depend on the number of processes.
    """
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
    """These results with the existing rows, in the order of the registry.

    Raises ValueError if the existing rows have other inputs or costs.
    """
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
