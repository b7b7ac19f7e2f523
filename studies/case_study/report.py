"""What came out of a case study: everything here is computed from its logs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import inf, isnan
from pathlib import Path
from typing import Any

import numpy as np

from rmetric.detectors import DETECTORS, IN_PAPER
from rmetric.evaluation import PROTOCOLS, Trace, judge, trace
from rmetric.logs import log_path, read_log, write_atomically
from rmetric.records import Run
from rmetric.replay.scored_run import score_run
from rmetric.reporting.page import trace_of_r_metric
from rmetric.reporting.replay_report import replay_logs
from rmetric.reporting.style import save, style
from studies.case_study.plot import plot_twins
from studies.common.real_runs import real_runs_table
from studies.common.renderers import to_markdown

TRUTH = (
    "fault", "severity", "onset_step", "duration_steps", "outcome", "failure_kind", "failure_step",
)  # fmt: skip
CALIBRATED = "calibrated"
#: Both detectors by their title: the place of their verdicts in the summary.
TITLES = {"R-Metric (published)": "r_metric", "calibrated detector": CALIBRATED}
HEADINGS = ("run", "fault at", "outcome", *TITLES)


def write_report(summary: dict[str, Any], folder: Path) -> None:
    """The plot, claims.md, the replayed pages, and the summary with the judgements.

    `folder` has the logs. Raises OSError where it cannot be written.
    """
    done = summary["runs"]
    logs = {name: log_path(folder, run["id"]) for name, run in done.items()}
    scored = {name: score_run(read_log(log)) for name, log in logs.items()}
    for name, run in scored.items():
        truth = run.run.truth
        assert truth is not None
        done[name] |= {
            **{part: getattr(truth, part) for part in TRUTH},
            "max_r": max(score.score for score in run.scores),
            "r_metric": _judged(run.run, trace_of_r_metric(run)),
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
    with style():
        save(plot_twins(scored, others[CALIBRATED]), folder / "case_study")
    claims = to_markdown(real_runs_table([summary]))
    write_atomically(folder / "claims.md", [claims.encode()])
    replay_logs([*logs.values()], folder / "replayed", most_plots=0)
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(folder / "summary.json", [text.encode(), b"\n"])


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


def rows_of(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row of text for each run, under `HEADINGS`."""
    rows = []
    for name, run in summary["runs"].items():
        judged = {key: of[name] for key, of in summary["other_detectors"].items()}
        judged["r_metric"] = run["r_metric"]
        outcome = run["outcome"]
        if outcome == "failed":
            outcome = f"{run['failure_kind']} at {run['failure_step']}".replace("_", "-")
        verdicts = [verdict(run, judged[key]["first_alert_step"]) for key in TITLES.values()]
        rows.append((name, str(run["onset_step"] or "-"), outcome, *verdicts))
    return rows


def verdict(run: Mapping[str, Any], first: int | None) -> str:
    """The judgement on a detector's first alarm by the causal rule, with its step."""
    onset, failure = run["onset_step"], run["failure_step"]
    if first is None:
        return "no alarm" if failure is None else "missed"
    if onset is None or first < onset:
        return f"{first}: false alarm"
    if failure is None:
        return f"{first}: on a fault that was absorbed"
    ahead = failure - first
    return f"{first}: {ahead} step{'s' * (ahead > 1)} ahead" if ahead > 0 else f"{first}: too late"


def table_of(summary: Mapping[str, Any]) -> str:
    """The rows in columns, below their headings."""
    rows = [HEADINGS, *rows_of(summary)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)
