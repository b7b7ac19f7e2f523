"""From the JSON files of the benchmark to tables, figures, provenance and the page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rmetric.logs import write_atomically
from rmetric.reporting.style import save, style
from studies.common.renderers import to_csv, to_markdown, to_text
from studies.detector_benchmark.benchmark import Results, read_results
from studies.detector_benchmark.figures import build_figures
from studies.detector_benchmark.page import refresh
from studies.detector_benchmark.tables import short, tables, wide

#: In the order of the page; figures show those that are there.
DATA_SETS = ("stress", "lab", "real", "lab_test", "lab2", "lab2_test", "lab3_test", "lab3_slow")
IN_FIGURES = ("lab", "stress", "real")


def report(folder: Path, shown: Sequence[str], page: Path | None = None) -> Iterator[str]:
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
