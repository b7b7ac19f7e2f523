"""The paper's claims about real runs beside the results of the case studies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from rmetric.evaluation import Outcomes
from rmetric.evaluation.scores import Scores, score
from studies.common.table import Cell, Table, show

NOT_MEASURED = "not measured yet"
PAPER_COST = 1.8  # per cent of the training time
LONG_STEP = 0.5  # seconds
HEADS = "Claim:wide | Paper:wide | Measured here:wide | n | Verdict | Why:wide"
Summary = dict[str, Any]


def read_summaries(results: Path) -> list[Summary]:
    """Summaries of the case studies in `results`/case_study*/ that have a finished run."""
    paths = sorted(results.glob("case_study*/summary.json"))
    summaries = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return [summary for summary in summaries if _finished(summary)]


def real_runs_rows(summaries: Sequence[Summary]) -> list[tuple[Cell, ...]]:
    """Four rows; without any summary they say that nothing was measured."""
    if not summaries:
        why = "needs training real models; run_case_study.py does"
        return [(claim, paper, NOT_MEASURED, None, NOT_MEASURED, why) for claim, paper in CLAIMS]
    runs = [run for summary in summaries for run in _finished(summary)]
    f1, causal_f1, lead, cost = CLAIMS
    where = "; ".join(_described(summary) for summary in summaries)
    then, now = (score(_outcomes(runs, protocol)) for protocol in ("published", "causal"))
    return [
        (*f1, show(then.f1), len(runs), _verdict(1.0, then), f"{_counted(then)}; {where}"),
        (*causal_f1, show(now.f1), len(runs), "no claim", _counted(now)),
        (*lead, *_lead(now), "from the first alert inside the time from fault to failure"),
        (*cost, *_cost(summaries)),
    ]


def real_runs_table(summaries: Sequence[Summary]) -> Table:
    """The rows as a table of their own, for the output of one case study."""
    return Table(
        "claims",
        "The claims of the paper about real runs beside what was measured",
        HEADS,
        real_runs_rows(summaries),
        number=5,
    )


CLAIMS = (
    ("F1 on real runs", "1.00"),
    ("The same on real runs, causal rule", "not stated"),
    ("Lead time at production speed", "2-8 min"),
    ("Cost of monitoring", f"{PAPER_COST} % of training time"),
)


def _finished(summary: Summary) -> list[dict[str, Any]]:
    return [run for run in summary["runs"].values() if "r_metric" in run]


def _outcomes(runs: Sequence[dict[str, Any]], protocol: str) -> Outcomes:
    verdicts = [run["r_metric"][protocol] for run in runs]

    def lead(unit: str) -> Any:
        return np.array([nan if v[unit] is None else v[unit] for v in verdicts], dtype=float)

    return Outcomes(
        failed=np.array([run["outcome"] == "failed" for run in runs], dtype=bool),
        hit=np.array([verdict["hit"] for verdict in verdicts], dtype=bool),
        false_alarm=np.array([verdict["false_alarm"] for verdict in verdicts], dtype=bool),
        lead_steps=lead("lead_steps"),
        lead_minutes=lead("lead_minutes"),
    )


def _counted(scores: Scores) -> str:
    return (
        f"{scores.num_failed} of {scores.num_runs} runs fail: {scores.hits} hits, "
        f"{scores.misses} misses, {scores.false_alarms} false alarms"
    )


def _verdict(paper: float, scores: Scores) -> str:
    """A handful of runs can contradict a number and cannot confirm it."""
    if scores.num_failed == 0:
        return "nothing failed"
    return "undecided" if scores.f1.low <= paper <= scores.f1.high else "differs"


def _lead(scores: Scores) -> tuple[Cell, ...]:
    if scores.hits == 0:
        return "no hit", 0, "no claim"
    return f"{show(scores.lead_minutes, 1)} min", scores.hits, "no claim"


def _cost(summaries: Sequence[Summary]) -> tuple[Cell, ...]:
    """Every run's share; those of a model that takes milliseconds a step claim nothing."""
    shares = [
        (run["cost"]["monitoring_percent"], run["cost"]["seconds_per_step"])
        for summary in summaries
        for run in _finished(summary)
    ]
    large = [share for share, seconds in shares if seconds >= LONG_STEP]
    verdict = "no claim" if not large else "below" if max(large) < PAPER_COST else "above"
    why = (
        "median time of the last steps with the monitor over that of as many without; steps "
        f"shorter than {LONG_STEP:g} s are of models too small to compare"
    )
    return " / ".join(f"{share:.1f} %" for share, _ in shares), len(shares), verdict, why


def _described(summary: Summary) -> str:
    device, settings = summary["device"], summary["settings"]
    return f"{settings['model']} on {device['name']}, {settings['fault']}"
