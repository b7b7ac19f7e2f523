"""From the JSON files of the benchmark to tables, figures, provenance and the page.

The generated parts of docs/benchmark.md are the text between two markers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from rmetric._util.strict_json import number
from rmetric.logs import write_atomically
from rmetric.reporting.style import CYCLE, GREY, TEXT_WIDTH, save, style
from studies.common.markers import fill, relative_figure
from studies.common.renderers import to_csv, to_markdown, to_text
from studies.common.table import Table
from studies.detector_benchmark.benchmark import OF_OURS, Results, read_results
from studies.detector_benchmark.measure import CEILINGS
from studies.detector_benchmark.tables import FEATURED, short, tables, wide
from studies.detector_benchmark.views import table as view_table

#: In the order of the page; figures show those that are there.
ALL_DATA_SETS = ("stress", "lab", "real", "lab_test", "lab2", "lab2_test", "lab3_test", "lab3_slow")
IN_FIGURES = ("lab", "stress", "real")
NOT_YET = "*Not measured yet.*\n"


def report(
    folder: Path, shown: Sequence[str] = ALL_DATA_SETS, page: Path | None = None
) -> Iterator[str]:
    """Write tables, figures and provenance of the JSON files, fill `page`; yields messages."""
    found = {
        name: read_results(folder / f"{name}.json")
        for name in ALL_DATA_SETS
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
    """Fill in the parts of the page by the names in their markers, such as `table lab scores`."""
    known = {table.name: table for results in found.values() for table in tables(results)}
    for name in ("views", "views_sealed2"):
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


# -- figures

COLOURS = dict(zip(FEATURED, CYCLE, strict=True))
MARKS = dict(zip(FEATURED, "osD^vPX", strict=True))
#: Below this share the axis of false alarms is linear, so that 0 has a place.
LINEAR_BELOW = 0.01


def build_figures(found: Sequence[Results]) -> Iterator[tuple[str, str, Figure]]:
    """Name, caption, figure of both, a panel a data set; draw and save them inside `style()`."""
    yield (
        "figure1_precision_recall",
        "Precision against recall of runs, causal rule, first alarm latched, alarms in absorbed "
        "faults counted separately. Symbols are the detectors at their thresholds, lines are all "
        "thresholds on their score; where a line turns back, a lower threshold alarms before "
        "the onset and the run is missed. Small dots: all other detectors.",
        _figure(found, _precision_recall),
    )
    yield (
        "figure2_delay",
        "Detection delay against false alarms. Vertical: the share of the time from onset to "
        "failure that has passed at the first alarm, mean over the detectable failures; a missed "
        "failure counts as 1. Horizontal: the share of controls and benign runs with an alarm. "
        "For the public logs: the share of the time to two logging intervals after the labelled "
        "onset, and of healthy runs. Lower and further left is better. Symbols and lines as "
        "before.",
        _figure(found, _delay),
    )


def _figure(found: Sequence[Results], draw: Callable[[Axes, Results], None]) -> Figure:
    figure = Figure(figsize=(TEXT_WIDTH, 3.1))
    panels = np.atleast_1d(figure.subplots(1, len(found)))
    figure.subplots_adjust(left=0.09, right=0.975, bottom=0.135, top=0.79, wspace=0.25)
    for letter, axes, results in zip("abcdef", panels, found, strict=False):
        draw(axes, results)
        if axes is not panels[0]:
            axes.set_ylabel("")
        axes.set_title(f"({letter}) {results['title'].split(' (')[0]}", loc="left", fontsize=7.5)
    names = {name for results in found for name in results["rows"]}
    figure.legend(handles=_legend(found, names), loc="upper center", ncols=4)
    return figure


def _precision_recall(axes: Axes, results: Results) -> None:
    recall = np.linspace(0.01, 1, 200)
    for f1 in (0.2, 0.4, 0.6, 0.8):
        possible = recall > f1 / (2 - f1)
        precision = f1 * recall[possible] / (2 * recall[possible] - f1)
        axes.plot(recall[possible], precision, color="#d0d0d0", linewidth=0.6, zorder=0.5)
        axes.text(1.0, f1 / (2 - f1), f" F1 {f1}", color=GREY, fontsize=5, va="bottom", ha="right")
    _draw(axes, results, "recall", "precision")
    axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), xlabel="recall", ylabel="precision")


def _delay(axes: Axes, results: Results) -> None:
    _draw(axes, results, "false_alarm_share", "time_used")
    axes.set_xscale("symlog", linthresh=LINEAR_BELOW, linscale=0.5)
    axes.set(xlim=(-0.002, 1.3), ylim=(-0.03, 1.03), xlabel="healthy runs alarmed")
    axes.set_ylabel("time passed at the first alarm")
    axes.set_xticks([0, 0.01, 0.1, 1])
    axes.xaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))


def _draw(axes: Axes, results: Results, x: str, y: str) -> None:
    """The point of every detector, and the lines of the featured ones."""
    for name, row in results["rows"].items():
        own = [number(row["curve"]["own"][key]) for key in (x, y)]
        if all(map(isfinite, own)):
            axes.plot(*own, **_point(name), clip_on=False)
        if name in COLOURS:
            along, up = (_numbers(row["curve"][key]) for key in (x, y))
            shown = np.isfinite(along) & np.isfinite(up)
            axes.plot(along[shown], up[shown], color=COLOURS[name], linewidth=0.8, alpha=0.7)


def _point(name: str) -> dict[str, Any]:
    if name in COLOURS:
        return {
            "marker": MARKS[name], "color": COLOURS[name], "linestyle": "", "markersize": 5,
            "markeredgecolor": "white", "markeredgewidth": 0.4, "zorder": 5,
        }  # fmt: skip
    if name in CEILINGS:
        return {"marker": "*", "color": GREY, "linestyle": "", "markersize": 7, "zorder": 3}
    return {"marker": ".", "color": GREY, "linestyle": "", "markersize": 3, "zorder": 2}


def _legend(found: Sequence[Results], names: set[str]) -> list[Artist]:
    titles = {name: row["title"] for results in found for name, row in results["rows"].items()}
    return [
        *(Line2D([], [], **_point(name), label=titles[name]) for name in FEATURED if name in names),
        Line2D([], [], **_point(""), label="other detectors"),
        Line2D([], [], **_point("ceiling"), label="ceiling (knows the truth)"),
    ]


def _numbers(values: Sequence[Any]) -> np.ndarray:
    return np.array([number(value) for value in values], dtype=float)
