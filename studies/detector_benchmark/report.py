"""From the JSON files of the benchmark to tables, figures, provenance and the page.

The generated parts of docs/benchmark.md are the text between two markers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rmetric.logs import write_atomically
from rmetric.reporting.style import save, style
from studies.common.markers import fill, relative_figure
from studies.common.renderers import to_csv, to_markdown, to_text
from studies.common.table import Table
from studies.detector_benchmark.benchmark import OF_OURS, Results, read_results
from studies.detector_benchmark.figures import build_figures
from studies.detector_benchmark.tables import short, tables, wide
from studies.detector_benchmark.views import table as view_table

#: In the order of the page; figures show those that are there.
DATA_SETS = ("stress", "lab", "real", "lab_test", "lab2", "lab2_test", "lab3_test", "lab3_slow")
IN_FIGURES = ("lab", "stress", "real")
NOT_YET = "*Not measured yet.*\n"


def report(
    folder: Path, shown: Sequence[str] = DATA_SETS, page: Path | None = None
) -> Iterator[str]:
    """Write tables, figures and provenance from the results in `folder`; yields messages.

    Args:
        folder: of the JSON files of results, and of the output.
        shown: data sets whose short table is yielded.
        page: a document whose generated parts are replaced; None for none.
    """
    found = {
        name: read_results(folder / f"{name}.json")
        for name in DATA_SETS
        if (folder / f"{name}.json").exists()
    }
    for name, results in found.items():
        write_tables(folder, results)
        if name in shown:
            yield to_text(short(results))
    captions = write_figures(folder, [found[name] for name in IN_FIGURES if name in found])
    sources = json.dumps(provenance(found), indent=2).encode()
    write_atomically(folder / "provenance.json", [sources, b"\n"])
    if page is not None:
        refresh(page, folder, found, captions)
        yield f"tables, figures and provenance.json: {folder}; page: {page}"
    else:
        yield f"tables, figures and provenance.json: {folder}"


def write_tables(folder: Path, results: Results) -> None:
    name = results["name"]
    text = "\n".join(to_markdown(table) for table in tables(results))
    write_atomically(folder / f"{name}.csv", [to_csv(wide(results)).encode()])
    write_atomically(folder / f"{name}.md", [text.encode()])


def write_figures(folder: Path, found: Sequence[Results]) -> dict[str, str]:
    """Both figures as PDF and PNG; name -> caption."""
    captions = {}
    with style():
        for name, caption, figure in build_figures(found) if found else ():
            save(figure, folder / name)
            captions[name] = caption
    return captions


def provenance(found: dict[str, Results]) -> dict[str, Any]:
    """Data and versions behind the tables; without times, so that a rerun writes the same."""
    return {
        "command": "python -m studies.detector_benchmark",
        "data": {
            name: {
                "inputs": results["inputs"],
                "costs_in_minutes": results["costs"],
                **results["made"],
                "detectors": list(results["rows"]),
                "measured_at_another_commit": {
                    row: about["commit"]
                    for row, about in results["rows"].items()
                    if about["commit"] != results["made"]["commit"]
                },
            }
            for name, results in found.items()
        },
        "versions": {
            package: there
            for results in found.values()
            for package, there in results["made"].get("versions", {}).items()
        },
    }


def refresh(page: Path, folder: Path, found: dict[str, Results], captions: dict[str, str]) -> None:
    """Fill in the parts of the page by the names in their markers.

    `<!-- begin table lab scores -->` is the table lab_scores, `<!-- begin figure NAME -->` a
    figure with its caption, `<!-- begin notes lab -->` a data set's notes. A part without
    results is marked as not measured. Raises ValueError for an unknown part.
    """
    known = {table.name: table for results in found.values() for table in tables(results)}
    for name in ("views", "views2"):
        if (views := folder / f"{name}.json").exists():
            known[name] = view_table(json.loads(views.read_bytes()))
    makers: dict[str, Callable[..., str]] = {
        "table": lambda name, *what: _table(
            known.get("_".join((name, *what))), found.get(name), "_".join(what)
        ),
        "figure": lambda name: (
            relative_figure(page, folder, name, captions[name]) if name in captions else NOT_YET
        ),
        "notes": lambda name: _notes(found.get(name)),
    }

    def made(name: str) -> str | None:
        kind, *words = name.split()
        return makers[kind](*words) if kind in makers else None

    fill(page, made, makers)


def _table(table: Table | None, results: Results | None, what: str) -> str:
    if table is None and (results is None or what in OF_OURS):
        return NOT_YET
    if table is None:
        assert results is not None
        raise ValueError(f"the results of {results['name']} have no such table")
    # The page has the notes of the tables once, in its text.
    heading, _, rest = to_markdown(table).partition("\n")
    body = rest.split("\n\n- ")[0].strip()
    return f"**{table.title}**\n\n{body}\n" if heading else ""


def _notes(results: Results | None) -> str:
    if results is None:
        return NOT_YET
    opened = results["made"].get("opened")
    first = (
        [f"Opened on {opened['date']} at commit {results['made']['commit']}, thresholds "
         f"{opened['thresholds']} (sha256 {opened['thresholds_sha256']})."]
        if opened
        else []
    )  # fmt: skip
    return "".join(f"- {note}\n" for note in [*first, *results["notes"]])
