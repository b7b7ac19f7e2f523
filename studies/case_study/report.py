"""What came out of a case study: everything here is computed from its logs."""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Mapping
from math import inf, isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined

from rmetric.detectors import DETECTORS, IN_PAPER
from rmetric.evaluation import PROTOCOLS, Trace, judge, trace
from rmetric.logs import log_path, read_log, write_atomically
from rmetric.metric import Components
from rmetric.records import Run
from rmetric.replay.scored_run import ScoredRun, score_run
from rmetric.reporting.page import PAGE_NAME, trace_of_r_metric
from rmetric.reporting.replay_report import replay_logs
from rmetric.reporting.style import save, style
from studies.case_study.plot import plot_twins
from studies.case_study.settings import CONTROL
from studies.case_study.summary_sentence import HEADINGS, results_of, rows_of, sentence, table
from studies.common.real_runs import real_runs_table
from studies.common.renderers import to_markdown

MEASURED = (
    "time", "learning_rate", "training_loss", "validation_loss", "gradient_norm", "update_norm",
    "parameter_norm",
)  # fmt: skip
TRUTH = (
    "fault", "severity", "onset_step", "duration_steps", "outcome", "failure_kind", "failure_step",
)  # fmt: skip
CALIBRATED = "calibrated"
TEMPLATE = Path(__file__).with_name("page.html")


def write_report(summary: dict[str, Any], folder: Path) -> None:
    """results.csv, the plot, the pages, claims.md, and the judgements in the summary."""
    done = summary["runs"]
    scored = {name: score_run(read_log(log_path(folder, run["id"]))) for name, run in done.items()}
    for name, run in scored.items():
        truth = run.run.truth
        assert truth is not None
        done[name] |= {
            **{part: getattr(truth, part) for part in TRUTH},
            "max_r": max(score.score for score in run.scores),
            "r_metric": _judged(run.run, trace_of_r_metric(run).as_trace(run.run.id)),
        }
    others = {
        name: {of: trace(name, run.run) for of, run in scored.items()}
        for name, entry in (IN_PAPER | {CALIBRATED: DETECTORS[CALIBRATED]}).items()
        if entry.kind in ("baseline", "ours") and not entry.sees_future
    }
    summary["other_detectors"] = {
        name: {of: _judged(scored[of].run, found) for of, found in traces.items()}
        for name, traces in others.items()
    }
    summary["sentence"] = sentence(results_of(summary))
    write_results(folder / "results.csv", scored, others[CALIBRATED])
    with style():
        save(plot_twins(scored, others[CALIBRATED]), folder / "case_study")
    claims = to_markdown(real_runs_table([summary]))
    write_atomically(folder / "claims.md", [claims.encode()])
    write_pages(summary, folder)


def _judged(run: Run, found: Trace) -> dict[str, Any]:
    """A detector's alarms by phase, the first ones, and the verdict under each protocol."""
    begins = found.alarms & ~np.concatenate([[False], found.alarms[:-1]])
    began, in_alarm = found.steps[begins], found.steps[found.alarms]
    onset = run.truth.onset_step if run.truth else None
    failure = run.truth.failure_step if run.truth else None
    later = [] if onset is None else began[began >= onset].tolist()
    phases: dict[str, tuple[float, float]] = {"whole_run": (-inf, inf)}
    if onset is not None:
        after = "after_onset" if failure is None else "onset_to_failure"
        phases = {"before_onset": (-inf, onset), after: (onset, failure or inf)}
        phases |= {"after_failure": (failure, inf)} if failure is not None else {}
    verdicts: dict[str, Any] = {
        "first_alert_step": found.first_alert,
        "first_alert_since_onset": later[0] if later else None,
        "alerts": {
            phase: {
                "alerts": int(((low <= began) & (began < high)).sum()),
                "steps_in_alert": int(((low <= in_alarm) & (in_alarm < high)).sum()),
            }
            for phase, (low, high) in phases.items()
        },
    }
    for protocol in PROTOCOLS:
        outcome = judge([run], [found], protocol)
        steps, minutes = float(outcome.lead_steps[0]), float(outcome.lead_minutes[0])
        verdicts[protocol] = {
            "hit": bool(outcome.hit[0]),
            "false_alarm": bool(outcome.false_alarm[0]),
            "lead_steps": None if isnan(steps) else int(steps),
            "lead_minutes": None if isnan(minutes) else minutes,
        }
    return verdicts


def write_results(
    path: Path, runs: Mapping[str, ScoredRun], calibrated: Mapping[str, Trace]
) -> None:
    """One row a step and run: what was measured, R, and the calibrated detector's score.

    Both with their alarm, 1 or 0. Blank: not logged, or not yet defined.
    """
    names = [*Components._fields, *(f"{name}_normalised" for name in Components._fields)]
    head = ["run", "step", *MEASURED, *names, "r_metric", "alert", "calibrated_score"]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*head, "calibrated_alarm"])
        for name, scored in runs.items():
            found = calibrated[name]
            rows = zip(scored.run.records, scored.scores, found.scores, found.alarms, strict=True)
            for record, score, strength, alarm in rows:
                values = [getattr(record, field) for field in MEASURED]
                values += [*score.raw, *score.normalised, score.score]
                row = [name, record.step, *map(_shown, values), int(score.alarm)]
                writer.writerow([*row, _shown(strength), int(alarm)])


def _shown(value: float | None) -> str:
    return "" if value is None or value != value else f"{value:.6g}"


def write_pages(summary: Mapping[str, Any], folder: Path) -> None:
    """Write the page of the case study, and the interactive one of each run, into `folder`.

    `folder` has the logs and case_study.png. Raises OSError where it cannot be written.
    """
    links = {}
    with TemporaryDirectory(prefix="rmetric-") as scratch:
        for name, run in summary["runs"].items():
            rows = replay_logs([log_path(folder, run["id"])], Path(scratch), most_plots=0).rows
            page = Path(scratch) / str(rows[0]["folder"]) / PAGE_NAME
            if rows[0]["folder"] and page.is_file():
                links[name] = f"{run['id']}.html"
                write_atomically(folder / links[name], [page.read_bytes()])
    results, settings = results_of(summary), summary["settings"]
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    html = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        model=settings["model"],
        method=summary["method"]["chosen"],
        device=summary["device"]["name"],
        sentence=summary["sentence"],
        headings=HEADINGS,
        rows=[
            (row, links.get(result.name), result.outcome == "failed")
            for row, result in zip(rows_of(results), results, strict=True)
        ],
        picture=base64.b64encode((folder / "case_study.png").read_bytes()).decode(),
        every=settings["eval_every"],
        steps=settings["max_steps"],
        twins=CONTROL in summary["runs"],
        seed=settings["seed"],
    )
    write_atomically(folder / "case_study.html", [html.encode("utf-8", "backslashreplace")])


def finish_report(summary: dict[str, Any], folder: Path) -> None:
    """Write summary.json; print the time, the judgements side by side, and the sentence."""
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(folder / "summary.json", [text.encode(), b"\n"])
    seconds = summary["seconds"]
    print(
        f"\ntime  set-up {seconds['set_up']:.0f} s, training {seconds['training']:.0f} s, "
        f"report {seconds['report']:.0f} s; {seconds['of_processor']:.0f} s of processor time"
    )
    for name, run in summary["runs"].items():
        cost = run["cost"]
        print(
            f"cost  {name}: {cost['seconds_per_step']:.3f} s a step with the monitor, "
            f"{cost['seconds_per_step_without_monitor']:.3f} s without"
        )
    print(f"\n{table(results_of(summary))}")
    print(f"\n{folder}: case_study.html, case_study.png and .pdf, results.csv, summary.json,")
    print("claims.md, and for each run its log (.jsonl) and its interactive page (.html)")
    print(f"\n{summary['sentence']}")
