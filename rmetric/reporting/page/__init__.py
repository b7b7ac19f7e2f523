"""One HTML page a run, and an index over many, that need no network and open from disk.

traces.py: scores and alarms; columns.py: the panels, of series.py; sentences.py: the text at the
top; render.py: the file. What the browser does is chart.js and index.js, with uPlot (vendor/)
under the charts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from rmetric._util import __version__
from rmetric.evaluation import RunVerdict, judge_run
from rmetric.evaluation.verdict_words import SEVERITY, alarm_words, counted_runs
from rmetric.records import LogEvent, Record, Run
from rmetric.replay.scored_run import ScoredRun
from rmetric.reporting.page.columns import OURS, charts_of
from rmetric.reporting.page.render import (
    LONGEST_TEXT,
    MOST_ALARMS,
    listed,
    render_index,
    render_run,
)
from rmetric.reporting.page.sentences import (
    DetectorSummary,
    decisions_of,
    short_words,
    summarise,
    summed_up,
    truth_sentences,
)
from rmetric.reporting.page.series import WIDE
from rmetric.reporting.page.traces import (
    DetectorTrace,
    trace_of_r_metric,
    trace_of_stated,
    trace_with_reasons,
)

__all__ = [
    "DetectorTrace",
    "Origin",
    "index_of",
    "monitor_events",
    "page_of",
    "trace_of_r_metric",
    "trace_of_stated",
    "trace_with_reasons",
]

#: The file in a run's folder.
PAGE_NAME = "report.html"
_MOST_NOTES = 100


class Origin(NamedTuple):
    """Where a run comes from, and how to make its page again.

    Attributes:
        format: of the log, by the name of its reader.
        command: makes the page again.
        sha256: of the log's bytes on disk; None where they cannot be read any more.
    """

    format: str
    command: str
    sha256: str | None


def page_of(
    scored: ScoredRun,
    traces: Sequence[DetectorTrace],
    origin: Origin,
    versions: Mapping[str, str],
    verdict: RunVerdict | None = None,
) -> str:
    """The page of a run; `traces` begin with the R-Metric's, see `trace_of_r_metric`.

    `verdict` is that of `verdict_of`, which is called where None is given. R as the log states it
    has a card and a chart where it differs from ours anywhere; else a sentence states that it does
    not. The same input gives the same text. Whatever stands in the log is shown as text.
    """
    run = scored.run
    verdict = verdict_of(run, traces) if verdict is None else verdict
    notes, more_notes = listed(run.notes + scored.notes, _MOST_NOTES)
    # As published it stands last but for what the log states, as in the charts.
    ordered = [*traces[1:], traces[0]]
    stated = trace_of_stated(scored)
    if stated is not None and scored.stated_differs:
        ordered.append(stated)
        traces = [*traces, stated]
    return render_run(
        charts_of(scored, traces, verdict),
        run=run,
        verdict=verdict,
        live_alarm=live_alarm(verdict, traces),
        truth_words=truth_sentences(run),
        sayings=[_summary(scored, trace) for trace in ordered],
        alarms=[(trace, *listed(trace.began, MOST_ALARMS)) for trace in ordered],
        notes=notes,
        more_notes=more_notes,
        origin=origin,
        versions=versions,
        settings=_settings(scored),
        config=_as_text(run.config) if run.config else "",
        restarts=scored.restarts,
        **monitor_events(run),
    )


def verdict_of(run: Run, traces: Sequence[DetectorTrace]) -> RunVerdict:
    """The verdict on a run, with the alarms of the calibrated detector among its traces."""
    alarms = next((trace.alarm_steps for trace in traces if trace.detector == OURS), [])
    return judge_run(run.records, alarms, truth=run.truth, unread=run.unread, findings=run.findings)


def live_alarm(verdict: RunVerdict, traces: Sequence[DetectorTrace]) -> str:
    """The calibrated detector's live alarm, or why there was none; empty if it did not watch."""
    trace = next((trace for trace in traces if trace.detector == OURS), None)
    if trace is None:
        return ""
    judged = bool(trace.began) or bool(np.isfinite(trace.scores).any())
    return alarm_words(verdict, trace.first_alert, len(trace.alarm_steps), judged=judged)


def monitor_events(run: Run) -> dict[str, Any]:
    """Content of templates/monitor_events.html, for a run that has decisions."""
    steps = np.array([record.step for record in run.records])
    shown, more = listed(run.log_events, MOST_ALARMS)
    decisions = decisions_of(run)

    def record_of(event: LogEvent) -> int:
        reached = steps >= event.step
        return int(reached.argmax()) + 1 if reached.any() else len(steps)

    return {
        "decisions": decisions,
        "rescue_words": summed_up(decisions),
        "events": [(event, record_of(event)) for event in shown] if decisions else [],
        "more_events": more,
        "event_words": short_words,
    }


def _summary(scored: ScoredRun, trace: DetectorTrace) -> DetectorSummary:
    summary = summarise(scored.run, trace)
    if trace.detector == "r_metric" and scored.stated is not None and not scored.stated_differs:
        summary.details.append("The log states the same R.")
    return summary


def _settings(scored: ScoredRun) -> dict[str, Any]:
    config = scored.config
    return {
        "settings": f"{scored.settings.name}, mode {scored.settings.mode}",
        "weights of λ, σ², ΔL": ", ".join(f"{weight:g}" for weight in config.weights),
        "threshold": f"{config.threshold:g}",
        "window of the normalisation": f"{config.component_window} values",
        "window of λ": f"{config.event_window} events",
        "window of ΔL": f"{config.loss_window} losses",
        "window of σ² over one norm": f"{config.norm_window} values",
        "ΔL follows": ("|ΔL| of " if config.absolute_loss_drift else "")
        + config.loss.replace("_", " "),
        "σ² from": (scored.variance_source or "nothing: not logged").replace("_", ", "),
    }


def _as_text(config: Mapping[str, Any]) -> str:
    text = json.dumps(config, indent=2, ensure_ascii=False, default=str)
    return text if len(text) <= 10 * LONGEST_TEXT else f"{text[: 10 * LONGEST_TEXT]}\n…"


#: Key of a row of the index that holds its `Sparkline`.
SPARK = "sparkline"
_SPARK_BYTES = 600_000  # of all sparklines of an index
#: Points of a sparkline, and its height in units of its drawing.
MOST_POINTS, HEIGHT = 60, 24
#: Columns of the index: the row's name for it, and the heading.
_INDEX = {
    "id": "Run",
    "verdict": "Verdict",
    "live_alarm": "Live alarm",
    "outcome": "Stated outcome",
    "calibrated_first_alarm_step": "First live alarm",
    "first_alert_step": "First alarm, R\u2011Metric",
    "stated_first_alert_step": "First alarm, R as stated",
    "onset_step": "Fault from",
    "failure_step": "Failed at",
    "num_records": "Records",
    "max_r": "Highest R",
    "stated_max_r": "Highest R as stated",
    "format": "Format",
    "source": "Log",
    "note": "Note",
}
_TEXTS = ("id", "verdict", "live_alarm", "outcome", "format", "source", "note")
_NEEDED = ("id", "first_alert_step", "num_records", "max_r", "format", "source")


def index_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page over the rows of a replay's index, those of failed files included.

    Each row has the columns of `replay_report.INDEX_COLUMNS`, blank where unknown, and all
    or none have a ``note``; of a run, ``folder`` holds its report.html. Columns that no run
    fills are left out.
    """
    times = Counter(row["id"] for row in rows if not row["problem"])
    points = min(MOST_POINTS, _SPARK_BYTES // (7 * max(1, len(rows))))
    kinds = Counter(row.get("verdict_kind") for row in rows)
    runs = [
        # Two runs with one id are distinguished by their files.
        _run_of_index(row, points) | {"file": row["source"] if times[row["id"]] > 1 else ""}
        for row in sorted((row for row in rows if not row["problem"]), key=_worst_first)
    ]
    return render_index(
        runs=runs,
        failed=[row for row in rows if row["problem"]],
        outcomes=sorted({row["outcome"] for row in runs if row["outcome"]}),
        kinds=[
            (kind, level, counted_runs(kind, kinds[kind]))
            for kind, level in SEVERITY.items()
            if kinds[kind]
        ],
        columns=[
            (name, label)
            for name, label in _INDEX.items()
            if name in _NEEDED or any(row.get(name, "") != "" for row in runs)
        ],
        numbers=[name for name in _INDEX if name not in _TEXTS],
        version=__version__,
    )


def _run_of_index(row: Mapping[str, Any], points: int) -> dict[str, Any]:
    spark = row.get(SPARK)
    return dict(row) | {
        "page": f"{quote(str(row['folder']))}/{PAGE_NAME}",
        "severity": SEVERITY.get(row.get("verdict_kind", ""), ""),
        "path": path_of(spark, points) if spark and points >= 8 else "",
        "event": spark.event if spark else None,
    }


def _worst_first(row: Mapping[str, Any]) -> tuple[int, list[str | int]]:
    """Order of the index: by verdict, the worst first, and by name, numbers in it by size."""
    kinds, kind = list(SEVERITY), row.get("verdict_kind", "")
    parts = re.split(r"([0-9]+)", str(row["id"]).casefold())
    name = [int(part) if i % 2 else part for i, part in enumerate(parts)]
    return kinds.index(kind) if kind in kinds else len(kinds), name


class Sparkline(NamedTuple):
    """The course of a loss in equal stretches of a run, as a small picture.

    Attributes:
        heights: the highest loss of each stretch as a place from 0 (lowest) to `HEIGHT`; None
            where none was logged or none was finite.
        event: place of the verdict's event from 0 to 1; None without one.
    """

    heights: list[int | None]
    event: float | None


def sparkline_of(records: Sequence[Record], verdict: RunVerdict) -> Sparkline | None:
    """The judged loss of a run; None where fewer than two values are finite."""
    losses = [_loss_of(record, verdict) for record in records]
    places = np.array([i for i, loss in enumerate(losses) if loss is not None], dtype=int)
    values = np.array([losses[i] for i in places.tolist()], dtype=float)
    finite = np.isfinite(values)
    if finite.sum() < 2:
        return None
    count = min(MOST_POINTS, len(values))
    stretches = np.minimum(count - 1, places * count // len(records))[finite]
    values = values[finite]
    if values.min() > 0 and values.max() > WIDE * np.sort(values)[len(values) // 2]:
        values = np.log(values)
    highest = np.full(count, -np.inf)
    np.maximum.at(highest, stretches, values)
    # Halved, so that no difference overflows.
    low, width = values.min() / 2, values.max() / 2 - values.min() / 2
    shares = (highest / 2 - low) / width if width else np.full(count, 0.5)
    heights = [
        None if x == -np.inf else round(HEIGHT * share)
        for x, share in zip(highest.tolist(), shares.tolist(), strict=True)
    ]
    event = None
    if verdict.onset_step is not None:
        reached = np.array([record.step for record in records]) >= verdict.onset_step
        event = float(reached.argmax()) / len(records) if reached.any() else 1.0
    return Sparkline(heights, event)


def _loss_of(record: Record, verdict: RunVerdict) -> float | None:
    name, part = verdict.loss, verdict.part
    if name is None or name == "reward":
        return (record.policy or {}).get("reward") if name else None
    if part:
        logged = part if name == "training_loss" else f"validation {part}"
        return (record.loss_parts or {}).get(logged)
    value: float | None = getattr(record, name)
    return value


def path_of(line: Sparkline, most: int = MOST_POINTS) -> str:
    """The `d` of an SVG path, 100 wide and `HEIGHT` high, through at most `most` points.

    >>> path_of(Sparkline([24, 12, None, 0, 6], None))
    'M0 0L25 12M75 24L100 18'
    """
    stride = -(-len(line.heights) // max(1, most))
    groups = [line.heights[i : i + stride] for i in range(0, len(line.heights), stride)]
    parts, drawn = [], False
    for i, group in enumerate(groups):
        known = [height for height in group if height is not None]
        if known:
            x = round(100 * i / max(1, len(groups) - 1))
            parts.append(f"{'L' if drawn else 'M'}{x} {HEIGHT - max(known)}")
        drawn = bool(known)
    return "".join(parts)
