"""From the JSON files of the benchmark to tables, figures and the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rmetric.evaluation.benchmark import read_results
from rmetric.logs import write_atomically
from rmetric.reporting.detection.tables import tables, wide
from rmetric.reporting.renderers import to_csv, to_markdown, to_text


def report(folder: Path, names: Sequence[str]) -> Iterator[str]:
    """Write what can be read of the results in `folder`; yields what a terminal shows."""
    for name in names:
        results = read_results(folder / f"{name}.json")
        found = tables(results)
        write_atomically(folder / f"{name}.csv", [to_csv(wide(results)).encode()])
        text = "\n".join(to_markdown(table) for table in found)
        write_atomically(folder / f"{name}.md", [text.encode()])
        yield to_text(found[0])
        yield to_text(found[1])
