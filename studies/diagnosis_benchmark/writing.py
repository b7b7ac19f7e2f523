"""Write the tables of the page and the provenance from the scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from rmetric.evaluation import intervals
from rmetric.logs import write_atomically
from studies.common.markers import fill
from studies.common.provenance import commit, uncommitted_changes, versions
from studies.common.renderers import to_markdown
from studies.common.table import Table
from studies.diagnosis_benchmark import gpualert
from studies.diagnosis_benchmark.csv_rows import read_rows
from studies.diagnosis_benchmark.reliability import calibration_tables
from studies.diagnosis_benchmark.results import TITLES, read_results
from studies.diagnosis_benchmark.tables import tables
from studies.diagnosis_benchmark.written_jobs import WrittenScores
from studies.diagnosis_benchmark.written_tables import written_tables

COMMAND = "python -m studies.diagnosis_benchmark"
PACKAGES = ("numpy", "scikit-learn", "drain3", "dtaidistance", "regex")
WRITTEN, FIRST_LOOKS, GPUALERT = "written.csv", "first_looks.csv", "gpualert.csv"
#: Tables that are stored as they are shown.
STORED = {
    "held_out": "First looks at held-out real and injected jobs",
    "injected": "Injected jobs: the code before the rebuilding → that without rules",
    "cut": "Written jobs of which a part was cut away",
}


def note(folder: Path, name: str, inputs: dict[str, Any]) -> None:
    """Add to provenance.json: code and inputs; no times, so that a rerun writes the same bytes."""
    path = folder / "provenance.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known[name] = {
        "command": COMMAND,
        "inputs": inputs,
        "commit": commit(),
        "uncommitted_changes": uncommitted_changes(),
        "versions": versions(PACKAGES),
        "bootstrap": {"seed": intervals.SEED, "resamples": intervals.NUM_RESAMPLES},
    }
    text = json.dumps(dict(sorted(known.items())), indent=1, allow_nan=False)
    write_atomically(path, [text.encode(), b"\n"])


def report(folder: Path, page: Path | None) -> list[Table]:
    """All tables of the results in `folder`, put into `page`.

    Those of written jobs are also in written.md, that of the methods in methods.md.

    Raises:
        ValueError: a file of results cannot be used, or the page asks for a table not made.
    """
    found = [
        read_results(path)
        for name in TITLES
        if (path := folder / f"{'_'.join(name)}.json").exists()
    ]
    first, today = (read_rows(folder / name, WrittenScores) for name in (FIRST_LOOKS, WRITTEN))
    written = written_tables(first, today)
    if written:
        text = "\n".join(to_markdown(table) for table in written)
        write_atomically(folder / "written.md", [text.encode()])
    compared = tables(found)
    if methods := [table for table in compared if table.name == "methods"]:
        text = "\n".join(to_markdown(table) for table in methods)
        write_atomically(folder / "methods.md", [text.encode()])
    made = [*written, *calibration_tables(found, first, today), *compared]
    if logs := read_rows(folder / GPUALERT, gpualert.Classified):
        made.append(gpualert.table(logs))
    made += [stored(path) for name in STORED if (path := folder / f"{name}.csv").exists()]
    if page is not None:
        # The page has headings of its own.
        by_name = {table.name: to_markdown(table).partition("\n\n")[2] for table in made}
        fill(page, by_name.get, by_name)
    return made


def stored(path: Path) -> Table:
    frame = pd.read_csv(path, keep_default_na=False)
    return Table(
        path.stem,
        STORED[path.stem],
        tuple(map(str, frame)),
        list(frame.itertuples(index=False, name=None)),
    )
