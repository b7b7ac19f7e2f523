"""Output of `rmetric compare`: a page with its plot, Markdown, and JUnit XML for a CI."""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

from rmetric._util.durable import write_atomically
from rmetric.evaluation.comparison import Comparison, note

_HEAD = ("candidate", "verdict", "end of reference", "end of candidate", "difference [95 %]",
         "part at step", "speed", "memory", "alarms", "bad runs")  # fmt: skip
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
table{{border-collapse:collapse}}td,th{{padding:.3rem .6rem;border:1px solid #bbb;text-align:left}}
svg{{max-width:100%;height:auto}}</style>
<h1>{title}</h1>{verdicts}<table>{table}</table>{plot}</html>
"""


def _cells(name: str, found: Comparison) -> tuple[str, ...]:
    bad = [run for run, verdict in found.verdicts.items() if verdict.severity == "bad"]
    reference, candidate, difference = "-", "-", "-"
    if found.reference and found.candidate and found.difference:
        reference, candidate = f"{found.reference.end:.4g}", f"{found.candidate.end:.4g}"
        difference = "{:+.3g} [{:+.3g}, {:+.3g}]".format(*found.difference)
    return (
        name, found.kind.replace("_", " "), reference, candidate, difference,
        "-" if found.parted is None else f"{found.parted:,}",
        ", ".join(f"{ratio:.3g} ({name})" for name, ratio in found.speeds.items()) or "-",
        "-" if found.memory is None else f"{found.memory:.3g}",
        "{} → {}".format(*found.alarms),
        f"{len(bad)} of {len(found.verdicts)}",
    )  # fmt: skip


def as_markdown(reference: str, found: Mapping[str, Comparison]) -> str:
    """A heading, the table and the verdicts: for the summary of a job."""
    rows = [_HEAD, ["---"] * len(_HEAD), *(_cells(name, result) for name, result in found.items())]
    table = "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in rows)
    lines = "\n".join(f"- {name}: {result.text}" for name, result in found.items())
    parts = filter(None, [f"## Compared with {reference}", table, lines, note(found)])
    return "\n\n".join(parts) + "\n"


def _junit(reference: str, found: Mapping[str, Comparison]) -> bytes:
    """A test case for each candidate: a worse one is a failure, an undecided one an error."""
    kinds = [result.kind for result in found.values()]
    suite = ElementTree.Element(
        "testsuite", name=f"rmetric compare {reference}", tests=str(len(kinds)),
        failures=str(kinds.count("worse")), errors=str(kinds.count("cannot_tell")),
    )  # fmt: skip
    for name, result in found.items():
        case = ElementTree.SubElement(suite, "testcase", classname="rmetric.compare", name=name)
        tag = {"worse": "failure", "cannot_tell": "error"}.get(result.kind)
        if tag:
            ElementTree.SubElement(case, tag, message=result.text)
        ElementTree.SubElement(case, "system-out").text = result.text
    return bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)) + b"\n"


def _plot(reference: str, found: Mapping[str, Comparison]) -> str:
    """The judged losses as an SVG element; the step where two part is marked."""
    from matplotlib.figure import Figure

    from rmetric.reporting.style import CYCLE, GREY, TEXT_WIDTH, style

    judged = [result for result in found.values() if result.candidate and result.reference]
    if not judged:
        return ""
    courses = {reference: judged[0].reference} | {n: side.candidate for n, side in found.items()}
    with style():
        figure = Figure(figsize=(TEXT_WIDTH, 3.2), layout="constrained")
        axes, colours = figure.subplots(), iter([GREY, *CYCLE * len(found)])
        for name, course in courses.items():
            if course is None:
                continue
            colour = next(colours)
            axes.plot(course.steps, course.means, color=colour, label=name)
            if name in found and (parted := found[name].parted) is not None:
                axes.axvline(parted, color=colour, linestyle=":", label=f"parts at {parted:,}")
        axes.set_xlabel("step")
        axes.set_ylabel((judged[0].loss or "").replace("_", " "))
        axes.legend(frameon=False)
        target = BytesIO()
        figure.savefig(target, format="svg", metadata={"Date": None})
    return "<svg" + target.getvalue().decode().partition("<svg")[2]


def as_page(reference: str, found: Mapping[str, Comparison]) -> str:
    """One HTML file with the verdicts, the table and the plot."""
    rows = [_HEAD, *(_cells(name, result) for name, result in found.items())]
    table = "".join(
        "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in zip(["th", *["td"] * len(found)], rows, strict=True)
    )
    verdicts = "".join(
        f"<p><b>{escape(name)}</b>: {escape(result.text)}</p>" for name, result in found.items()
    )
    return _PAGE.format(
        title=f"Compared with {escape(reference)}", verdicts=f"{verdicts}<p>{note(found)}</p>",
        table=table, plot=_plot(reference, found),
    )  # fmt: skip


def write_gate(path: Path, reference: str, found: Mapping[str, Comparison]) -> None:
    """JUnit XML to a path that ends in .xml, else Markdown.

    The file that GITHUB_STEP_SUMMARY names, which has what the step wrote before, is appended to.
    """
    junit = path.suffix.lower() == ".xml"
    content = _junit(reference, found) if junit else as_markdown(reference, found).encode()
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary and path.resolve() == Path(summary).resolve():
        with open(path, "ab") as file:
            file.write(b"\n" + content)
    else:
        write_atomically(path, [content])
