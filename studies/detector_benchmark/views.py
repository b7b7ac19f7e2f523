"""Detectors on the laboratory's runs as other people would have logged them.

    python -m studies.detector_benchmark.views             # writes views.json and views.md
    python -m studies.detector_benchmark.views --sealed2   # writes views_sealed2.json and .md

A view leaves out signals, keeps every nth step, or multiplies the losses. All three parts of the
laboratory's first set are used, and all are known by now: this is not a sealed measurement. Of the
second set it is the part that was sealed until its first look.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rmetric._util.errors import exit_code_of, exit_with, fail
from rmetric._util.options import add_jobs
from rmetric._util.strict_json import encode
from rmetric.detectors import DETECTORS as REGISTERED
from rmetric.evaluation.intervals import Estimate, estimate
from rmetric.evaluation.scores import f1
from rmetric.logs import write_atomically
from rmetric.records import Record, Run
from studies.common.command import command_parser
from studies.common.provenance import commit
from studies.common.renderers import to_markdown, to_text
from studies.common.table import Cell, Table
from studies.detector_benchmark.benchmark import trace_detectors
from studies.detector_benchmark.data_sets import LAB_FOLDER, LAB_PARTS, DataSet, lab
from studies.detector_benchmark.measure import Judged

DETECTORS = ("calibrated", "loss_ewma", "loss_cusum")
REFERENCE = "loss_ewma"
LOSSES = ("training_loss", "validation_loss", "probe_loss")
#: Parts by the title of the table, and what was known of them.
ALL, SEALED2 = "all parts", "sealed part of the second set"
PARTS = {ALL: LAB_PARTS, SEALED2: ("sealed2",)}
KNOWN = {
    ALL: "All parts were known when the statistics of the loss were chosen, the old sealed part "
    "included.",
    SEALED2: "Sealed until its first look, at commit ef6f919; later detectors are no blind ones.",
}
OUT = Path("studies", "detector_benchmark", "results")


def only(record: Record, names: tuple[str, ...]) -> Record:
    return Record(step=record.step, **{name: getattr(record, name) for name in names})


def scaled(record: Record, factor: float) -> Record:
    found = {name: getattr(record, name) for name in LOSSES}
    return replace(record, **{n: x * factor for n, x in found.items() if x is not None})


def every_signal(record: Record) -> Record:
    return record


LOSS = partial(only, names=("training_loss",))
LOSS_AND_NORM = partial(only, names=("training_loss", "gradient_norm"))
LOSSES_AND_NORM = partial(only, names=("training_loss", "validation_loss", "gradient_norm"))
#: Title -> what is kept of a record, and every how many steps.
VIEWS: dict[str, tuple[Callable[[Record], Record], int]] = {
    "all signals": (every_signal, 1),
    "training and validation loss, gradient norm": (LOSSES_AND_NORM, 1),
    "training loss and gradient norm": (LOSS_AND_NORM, 1),
    "training loss": (LOSS, 1),
    "training loss, times 0.03": (lambda record: scaled(LOSS(record), 0.03), 1),
    "all signals, every 5th step": (every_signal, 5),
    "all signals, every 10th step": (every_signal, 10),
    "all signals, every 100th step": (every_signal, 100),
    "training loss, every 5th step": (LOSS, 5),
    "training loss, every 10th step": (LOSS, 10),
    "training loss, every 100th step": (LOSS, 100),
}


def seen_as(run: Run, keep: Callable[[Record], Record], every: int) -> Run:
    """The run as a log of that kind would hold it."""
    return replace(run, records=[keep(r) for r in run.records if r.step % every == 0])


def measured(data: DataSet, *, num_processes: int = 1) -> dict[str, dict[str, Any]]:
    """View -> detector -> F1, strict F1, F1 minus that of the reference, alarms in healthy runs."""
    cases = data.cases
    grouped = partial(estimate, num_runs=len(cases), groups_R=cases.groups)

    def row(judged: Judged, reference: Judged) -> dict[str, Any]:
        alarmed = np.isfinite(judged.alerts.first)
        return {
            "f1": grouped(partial(f1, judged.neutral)),
            "f1_strict": grouped(partial(f1, judged.strict)),
            "minus_reference": None
            if judged is reference
            else grouped(lambda counts: f1(judged.neutral, counts) - f1(reference.neutral, counts)),
            **{kind: int((cases.of_kind(kind) & alarmed).sum()) for kind in ("benign", "control")},
            "hits": int(judged.neutral.hit.sum()),
        }

    rows: dict[str, dict[str, Any]] = {}
    for title, (keep, every) in VIEWS.items():
        runs = [seen_as(run, keep, every) for run in data.runs]
        traces = trace_detectors(DETECTORS, runs, num_processes=num_processes)
        seen = {name: Judged.of(cases, found) for name, found in traces.items()}
        rows[title] = {name: row(judged, seen[REFERENCE]) for name, judged in seen.items()}
    return rows


def results_of(data: DataSet, rows: dict[str, dict[str, Any]], title: str) -> dict[str, Any]:
    cases = data.cases
    return {
        "title": f"fault laboratory, {title}: as other people log",
        "note": KNOWN[title],
        "inputs": data.inputs,
        "commit": commit(),
        "runs": {
            "all": len(cases),
            "failed": int(cases.windows.failed.sum()),
            **{kind: int(cases.of_kind(kind).sum()) for kind in ("benign", "control")},
        },
        "views": rows,
    }


def table(results: dict[str, Any]) -> Table:
    runs = results["runs"]
    rows: list[tuple[Cell, ...]] = [
        (
            title if number == 0 else "",
            REGISTERED[name].title,
            *(
                None if row[key] is None else Estimate(*row[key])
                for key in ("f1", "f1_strict", "minus_reference")
            ),
            row["hits"],
            row["benign"],
            row["control"],
        )
        for title, found in results["views"].items()
        for number, (name, row) in enumerate(found.items())
    ]
    return Table(
        "views",
        results["title"],
        f"Logged | Detector | F1 | F1, strict | F1 minus EWMA's | Hits of {runs['failed']} | "
        f"Benign changes alarmed, of {runs['benign']} | Controls alarmed, of {runs['control']}",
        rows,
        notes=["Causal rule, first alarm latched; 95 % intervals over seeds.", results["note"]],
    )


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("detector_benchmark.views", __doc__)
    parser.add_argument("--lab", type=Path, default=LAB_FOLDER, help="archives of the laboratory")
    parser.add_argument("--sealed2", action="store_true", help="sealed part of the second set")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR")
    add_jobs(parser)
    options = parser.parse_args(arguments)
    try:
        title, name = (SEALED2, "views_sealed2") if options.sealed2 else (ALL, "views")
        data = lab(PARTS[title], options.lab, open_sealed=True)
        results = results_of(data, measured(data, num_processes=options.jobs), title)
        results = json.loads(json.dumps(encode(results)))
        text = json.dumps(results, indent=1) + "\n"
        options.out.mkdir(parents=True, exist_ok=True)
        write_atomically(options.out / f"{name}.json", [text.encode()])
        write_atomically(options.out / f"{name}.md", [to_markdown(table(results)).encode()])
    except (OSError, ValueError) as error:
        return fail(error, exit_code_of(error))
    print(to_text(table(results)))
    return 0


if __name__ == "__main__":
    exit_with(main)
