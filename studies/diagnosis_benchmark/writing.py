"""Write tables, provenance and the documentation page from the scores."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import rmetric
from rmetric.evaluation import intervals
from rmetric.logs import write_atomically
from studies.common.markers import fill
from studies.common.provenance import commit, uncommitted_changes
from studies.common.renderers import to_csv, to_markdown
from studies.common.table import Table
from studies.diagnosis_benchmark.first_answers import FIRST_ANSWERS, read_first_answers
from studies.diagnosis_benchmark.goals import goals
from studies.diagnosis_benchmark.job_scores import VARIANTS
from studies.diagnosis_benchmark.paper import paper
from studies.diagnosis_benchmark.reliability import calibration_tables
from studies.diagnosis_benchmark.results import TITLES, read_results
from studies.diagnosis_benchmark.tables import tables
from studies.diagnosis_benchmark.written_jobs import TITLES as WRITTEN_TITLES
from studies.diagnosis_benchmark.written_jobs import read_written
from studies.diagnosis_benchmark.written_tables import written_tables

COMMAND = "python -m studies.diagnosis_benchmark"
PACKAGES = ("numpy", "scikit-learn", "drain3", "dtaidistance", "regex")
NOT_YET = "*Not measured yet.*\n"


def made(inputs: dict[str, Any]) -> dict[str, Any]:
    """Provenance: code and inputs; no times, so that a rerun writes the same bytes."""
    return {
        "inputs": inputs,
        "commit": commit(),
        "uncommitted_changes": uncommitted_changes(),
        "versions": {
            "rmetric": rmetric.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
        },
        "bootstrap": {"seed": intervals.SEED, "resamples": intervals.NUM_RESAMPLES},
        "variants": list(VARIANTS),
    }


def report(folder: Path, page: Path | None) -> list[Table]:
    """All tables of the results in `folder`, written there and into `page`."""
    found = {
        "_".join(name): read_results(path)
        for name in TITLES
        if (path := folder / f"{'_'.join(name)}.json").exists()
    }
    of_data = {name: tables(results) for name, results in found.items()}
    written = {
        f"written_{split}": read_written(path)
        for split in WRITTEN_TITLES
        if (path := folder / f"written_{split}.json").exists()
    }
    of_data |= {name: written_tables(results) for name, results in written.items()}
    kept = folder / FIRST_ANSWERS.name
    first = [one.stated() for one in read_first_answers(kept)] if kept.exists() else []
    confidence = calibration_tables(found.values(), written.values(), first)
    claims = goals(found)
    of_data |= {claims.name: [claims]}
    if confidence:
        of_data |= {"calibration": confidence}
    for name, made_of in of_data.items():
        _write(folder, name, made_of)
        _write_csv(folder, made_of)
    made_by = {name: results.made for name, results in found.items()}
    made_by |= {name: results.made for name, results in written.items()}
    sources = {"command": COMMAND, "data": made_by}
    text = json.dumps(sources, indent=2, allow_nan=False)
    write_atomically(folder / "provenance.json", [text.encode(), b"\n"])
    if page is not None and page.exists():
        refresh(page, [*paper(), *(table for some in of_data.values() for table in some)])
    headlines = [table for table in confidence if table.name == "calibration"]
    return [claims, *headlines, *(written_tables(one)[0] for one in written.values())]


def refresh(page: Path, known: Sequence[Table]) -> None:
    """Fill in `<!-- begin NAME -->` of a page; what is not measured yet says so.

    Raises ValueError for a name that no table of any data set has.
    """
    by_name = {table.name: table for table in known}
    starts = (
        *(f"{source}_{split}_" for source, split in TITLES),
        *(f"written_{split}_" for split in WRITTEN_TITLES),
        "calibration",
        "reliability",
    )

    def of(name: str) -> str | None:
        if name in by_name:
            return to_markdown(by_name[name])
        return NOT_YET if name.startswith(starts) else None

    fill(page, of, by_name)


def _write(folder: Path, name: str, of: Sequence[Table]) -> None:
    text = "\n".join(to_markdown(table) for table in of)
    write_atomically(folder / f"{name}.md", [text.encode()])


def _write_csv(folder: Path, of: Sequence[Table]) -> None:
    for table in of:
        write_atomically(folder / f"{table.name}.csv", [to_csv(table).encode()])
