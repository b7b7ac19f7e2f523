"""Replay many logs: per run a page, scores, plot and summary, and an index of them all."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import platform
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from rmetric._util import __version__
from rmetric._util.durable import write_atomically
from rmetric._util.errors import LogError
from rmetric._util.lazy import check_installed
from rmetric._util.printed import csv_cell, printable
from rmetric.detectors.calibrated import Thresholds
from rmetric.evaluation import PROTOCOLS, RunVerdict, judge
from rmetric.logs import encode_number
from rmetric.metric import Components
from rmetric.readers import ReadLog, UnknownFormat, read_log
from rmetric.records import Run
from rmetric.replay.restarts import Restart, Restarts
from rmetric.replay.scored_run import ScoredRun, score_run
from rmetric.reporting.page import (
    PAGE_NAME,
    SPARK,
    DetectorTrace,
    Origin,
    index_of,
    live_alarm,
    page_of,
    sparkline_of,
    trace_of_r_metric,
    trace_of_stated,
    trace_with_reasons,
    verdict_of,
)
from rmetric.reporting.page.sentences import decisions_of

#: Beside the R-Metric, what each run is shown to.
WATCHED_BY = ("calibrated",)
INDEX_NAMES = ("index.csv", "index.md", "index.html")
INDEX_COLUMNS = (
    "folder", "id", "verdict_kind", "verdict", "verdict_detail", "live_alarm", "source", "format",
    "outcome", "onset_step",
    "failure_step", "num_records",
    "first_alert_step", "num_alerts", "stated_first_alert_step", "stated_num_alerts",
    "calibrated_first_alarm_step", "calibrated_judged", "lead_published", "lead_causal", "max_r",
    "stated_max_r", "loss_used", "variance_source", "problem",
)  # fmt: skip
#: Notes of a run with these words say what was left out; the console has them too.
_LEFT_OUT_WORDS = ("left out", "could not be read", "damaged", "judged as one run")
#: One more column, after these, where the records of some run were thinned.
NOTE = "note"
_LONGEST_NAME = 100
_MOST_ALARMS = 1000
#: What a log can still do to a replay after it was read: none of it is worth the other logs.
_UNUSABLE = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip


@dataclass(kw_only=True)
class Replayed:
    """The result of a replay.

    Attributes:
        rows: one of the index for each run, and for each file that failed.
        failed: why files could not be read, or runs in them not be replayed.
        passed_over: files of a folder that are not logs.
        thinned: notes on the runs of which not every record was judged.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    passed_over: list[Path] = field(default_factory=list)
    num_plots: int = 0
    thinned: list[str] = field(default_factory=list)

    @property
    def num_runs(self) -> int:
        return sum(not row["problem"] for row in self.rows)


def replay_logs(
    paths: Iterable[Path],
    out: Path,
    *,
    preset: str | None = None,
    mapping: Mapping[str, str] | None = None,
    thresholds: Thresholds | None = None,
    most_plots: int | None = None,
    named: Callable[[Path], bool] = lambda path: True,
    most_records: int | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Replayed:
    """Read each log, score its runs and write what came out below `out`.

    A file that cannot be read and a run that cannot be replayed are in the index
    with the reason, and the others go on; an index is written even where it is
    interrupted. Raises OSError where `out` cannot be written, and ModuleNotFoundError where
    matplotlib is needed and not installed.

    Args:
        paths: of the logs.
        out: the folder of the index and of one folder a run.
        preset: settings of the metric, as `settings_of` takes them; None for the log's own.
        mapping: field of a record -> column of the logs; None for the known names.
        thresholds: of the calibrated detector; None for the shipped ones.
        most_plots: runs to draw with matplotlib, the first ones; None for all.
        named: whether a file was asked for by name; one that was not and is in
            no known format is passed over.
        most_records: bound of the records of a log, as `read_log` takes it; None for none.
        on_progress: called with ``"bytes"`` while a file is read and ``"records"`` while the
            detectors see its runs, the number so far, and the total.
    """
    if most_plots != 0:
        check_installed("matplotlib")  # before minutes of reading
    out.mkdir(parents=True, exist_ok=True)
    replay = _Replay(out, preset, mapping, thresholds, most_plots, most_records, on_progress)
    result = replay.result
    try:
        for path in paths:
            try:
                log = replay.read(path)
            except _UNUSABLE as error:
                if isinstance(error, UnknownFormat) and not named(path):
                    result.passed_over.append(path)
                else:
                    replay.fail(path, error)
                continue
            for run in log.runs:
                try:
                    replay.judge(run, log, path)
                except _UNUSABLE as error:
                    replay.fail(path, error, id=run.id, format=log.format)
    finally:
        write_index(result.rows, out)
    return result


@dataclass
class _Written:
    """A run that was written, with which a later log may go on."""

    logs: list[Path]
    folder: Path
    row: dict[str, Any]
    restarts: list[Restart]
    drawn: bool


@dataclass
class _Replay:
    """One replay of several logs; see `replay_logs`."""

    out: Path
    preset: str | None
    mapping: Mapping[str, str] | None
    thresholds: Thresholds | None
    most_plots: int | None
    most_records: int | None
    on_progress: Callable[[str, int, int], None] | None
    result: Replayed = field(default_factory=Replayed)
    restarts: Restarts = field(default_factory=Restarts)
    written: dict[Path | None, _Written] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folders = _Folders(self.out)

    def read(self, path: Path) -> ReadLog:
        on_bytes = None
        if self.on_progress is not None and path.is_file():
            on_progress, size = self.on_progress, path.stat().st_size
            on_bytes = lambda position: on_progress("bytes", position, size)  # noqa: E731
        return read_log(path, self.mapping, on_bytes=on_bytes, most_records=self.most_records)

    def judge(self, run: Run, log: ReadLog, path: Path) -> None:
        """Write what comes out of one run of a log, which may go on with an earlier one."""
        result, alone = self.result, len(log.runs) == 1
        found = self.restarts.of(run)
        before = self.written.get(self.restarts.continued) if alone else None
        logs, draw = [path], self.most_plots is None or result.num_plots < self.most_plots
        if before is not None:
            self._join(before, run)
            logs, draw, found = [*before.logs, path], before.drawn, before.restarts + found
        scored = score_run(run, self.preset)
        scored.restarts = found
        folder = self.folders.make(scored) if before is None else before.folder
        row = self._write(scored, folder, self._origin(logs, log.format), draw=draw)
        if note := log.thinned.get(run.id):
            row[NOTE] = note
            result.thinned.append(f"{path}{'' if alone else f', {run.id}'}: {note}")
        if before is None:
            result.rows.append(row)
            result.num_plots += draw
        else:
            result.rows[result.rows.index(before.row)] = row
        if alone:
            self.written[path] = _Written(logs, folder, row, found, drawn=draw)

    def _join(self, before: _Written, run: Run) -> None:
        """Set the records of an earlier run, which are read once more, before those of `run`."""
        logs = [read_log(x, self.mapping, most_records=self.most_records).run for x in before.logs]
        run.records = [record for log in logs for record in log.records] + run.records
        run.findings = [finding for log in logs for finding in log.findings] + run.findings
        names = " and ".join(log.name for log in before.logs)
        run.notes.append(f"{run.source} goes on with {names}: judged as one run")
        run.id = logs[0].id

    def _origin(self, logs: Sequence[Path], form: str) -> Origin:
        """Where the runs of a log, or of several, come from, and the command that replays it."""
        command = ["python", "-m", "rmetric", "replay", *map(str, logs)]
        command += ["--preset", self.preset] if self.preset else []
        for target, column in (self.mapping or {}).items():
            command += ["--map", f"{target}={column}"]
        thresholds = self.thresholds.path if self.thresholds else None
        command += ["--thresholds", str(thresholds)] if thresholds else []
        return Origin(format=form, command=shlex.join(command), sha256=_sha256(logs[-1]))

    def _write(
        self, scored: ScoredRun, folder: Path, origin: Origin, *, draw: bool
    ) -> dict[str, Any]:
        """Write one run's files into `folder`; return its row of the index."""
        run, on_records = scored.run, self.on_progress and partial(self.on_progress, "records")
        traces = [trace_of_r_metric(scored)]
        traces += [
            trace_with_reasons(name, run, self.thresholds, on_records) for name in WATCHED_BY
        ]
        folder.mkdir(parents=True, exist_ok=True)
        stated = trace_of_stated(scored)
        write_scores(scored, [*traces[1:], *([stated] if stated else [])], folder / "scores.csv")
        verdict = verdict_of(run, traces)
        report = summary(scored, traces, origin, verdict)
        text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)
        write_atomically(folder / "summary.json", [f"{text}\n".encode()])
        page = page_of(scored, traces, origin, report["versions"], verdict)
        write_atomically(folder / PAGE_NAME, [page.encode()])
        if draw:
            _draw(scored, folder / "case_study", verdict, traces)
        row = _index_row(report | {"folder": folder.name})
        return row | {
            "verdict": verdict.text,
            "verdict_kind": verdict.kind,
            "verdict_detail": verdict.numbers_and_advice,
            SPARK: sparkline_of(run.records, verdict),
            # For the console.
            "findings": [f"{x.kind} ({x.severity}) at step {x.step:,}" for x in run.findings],
            "restarts": [restart.words for restart in scored.restarts],
            "left_out": [n for n in run.notes if any(word in n for word in _LEFT_OUT_WORDS)],
        }

    def fail(self, path: Path, error: Exception, **known: str) -> None:
        problem = str(error)
        if not isinstance(error, LogError):
            problem = f"{path}: cannot be replayed ({type(error).__name__}: {problem})"
        problem = " ".join(problem.split())
        self.result.failed.append(problem)
        self.result.rows.append(_index_row({"source": str(path), "problem": problem, **known}))


def _sha256(path: Path) -> str | None:
    digest = hashlib.sha256()
    with suppress(OSError), open(path, "rb") as file:  # it may be gone by now
        while part := file.read(1 << 20):
            digest.update(part)
        return digest.hexdigest()
    return None


def summary(
    scored: ScoredRun, traces: Sequence[DetectorTrace], origin: Origin, verdict: RunVerdict
) -> dict[str, Any]:
    """The content of summary.json."""
    run, truth = scored.run, scored.run.truth
    alerts = traces[0].alarm_steps
    scores = [score.score for score in scored.scores if not isnan(score.score)]
    highest = max(scores, default=None)
    decisions = [
        {name: getattr(made, name) for name in ("step", "name", "reason", "to")}
        for made in decisions_of(run)
    ]
    return {
        "id": run.id,
        "verdict": asdict(verdict) | {"severity": verdict.severity},
        "live_alarm": live_alarm(verdict, traces),
        "source": str(run.source),
        "sha256": origin.sha256,
        "format": origin.format,
        "settings": scored.settings.name,
        "mode": scored.settings.mode,
        "config": asdict(scored.config) | {"weights": scored.config.weights._asdict()},
        "num_records": len(run.records),
        "first_step": run.records[0].step,
        "last_step": run.records[-1].step,
        "loss_used": scored.config.loss if scored.is_defined else None,
        "variance_source": scored.variance_source,
        "max_r": highest,
        "max_r_step": None if highest is None else scored.scores[scores.index(highest)].step,
        "first_alert_step": alerts[0] if alerts else None,
        "num_alerts": len(alerts) if scored.is_defined else None,
        "num_records_in_alert": sum(score.alarm for score in scored.scores),
        "stated": _stated(scored),
        "detectors": {trace.detector: _of_detector(trace) for trace in traces},
        **{
            name: getattr(truth, name, None)
            for name in ("fault", "onset_step", "outcome", "failure_kind", "failure_step")
        },
        "verdicts": verdicts(scored, traces[0]) if scored.is_defined else None,
        **({"decisions": decisions} if decisions else {}),
        "findings": [asdict(finding) for finding in run.findings],
        "restarts": [asdict(restart) for restart in scored.restarts],
        "notes": run.notes + scored.notes,
        "versions": {
            "rmetric": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
    }


def _of_detector(trace: DetectorTrace) -> dict[str, Any]:
    return {
        "title": trace.title,
        "judged": bool(np.isfinite(trace.scores).any() or trace.alarms.any()),
        "first_alarm_step": trace.first_alert,
        "num_records_in_alarm": int(trace.alarms.sum()),
        "num_alarms": len(trace.alarm_steps),
        "alarms": [
            {"step": alarm.step, "verdict": alarm.verdict, "reason": alarm.reason}
            for alarm in trace.began[:_MOST_ALARMS]
        ],
    }


def _stated(scored: ScoredRun) -> dict[str, Any] | None:
    """R as the log states it, beside the same of ours; None where it states none."""
    trace, stated = trace_of_stated(scored), scored.stated
    if trace is None or stated is None:
        return None
    return {
        "max_r": None if stated.highest is None else encode_number(stated.highest),
        "threshold": stated.threshold,
        "threshold_is_stated": stated.threshold_is_stated,
        "first_alert_step": trace.first_alert,
        "num_alerts": len(trace.began),
        "num_records": sum(score is not None for score in stated.scores),
        "num_records_in_alert": sum(stated.alarms),
        "equals_ours": not scored.stated_differs,
        "verdicts": verdicts(scored, trace),
    }


def verdicts(scored: ScoredRun, trace: DetectorTrace) -> dict[str, Any] | None:
    """Hit, false alarm and lead under each protocol; None where the truth is not known."""
    if scored.run.truth is None:
        return None
    found = {}
    for protocol in PROTOCOLS:
        outcome = judge([scored.run], [trace], protocol)
        lead = float(outcome.lead_steps[0])
        found[protocol] = {
            "hit": bool(outcome.hit[0]),
            "false_alarm": bool(outcome.false_alarm[0]),
            "lead_steps": None if isnan(lead) else int(lead),
        }
    return found


def write_scores(scored: ScoredRun, others: Sequence[DetectorTrace], path: Path) -> None:
    """One line a record: the three signals, raw and normalised, R and the alert.

    After them score and alarm of each of the other detectors (one or more), and of R as the log
    states it. What is not yet defined is blank; what is infinite is ``inf``.
    """
    names = Components._fields
    header = ["step", *names, *(f"{name}_normalised" for name in names), "r_metric", "alert"]
    columns: list[Iterable[Any]] = []
    for trace in others:
        header += [f"{trace.detector}_score", f"{trace.detector}_alarm"]
        columns += [map(_or_blank, trace.scores.tolist()), trace.alarms.astype(int).tolist()]
    rows = zip(*columns, strict=True)
    lines = (
        [
            str(score.step),
            *map(_or_blank, score.raw),
            *map(repr, score.normalised),
            _or_blank(score.score),
            "" if isnan(score.score) else str(int(score.alarm)),
            *map(str, more),
        ]
        for score, more in zip(scored.scores, rows, strict=True)
    )
    # No cell has a comma: they are numbers, and names of detectors.
    write_atomically(path, (f"{','.join(cells)}\n".encode() for cells in (header, *lines)))


def _or_blank(value: float) -> str:
    return "" if isnan(value) else repr(value)


def write_index(rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """The table of all runs and of the files that failed, as CSV, Markdown and a page.

    In the CSV, text that a spreadsheet would take for a formula has an apostrophe before it.
    """
    columns: tuple[str, ...] = INDEX_COLUMNS
    if any(row.get(NOTE) for row in rows):
        columns = (*INDEX_COLUMNS, NOTE)
        rows = [{NOTE: ""} | dict(row) for row in rows]
    sheet = io.StringIO()
    writer = csv.DictWriter(sheet, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_cell(row[name]) for name in columns} for row in rows)
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(_markdown(row[c]) for c in columns) + " |" for row in rows]
    forms = (sheet.getvalue(), "\n".join(lines) + "\n", index_of(rows))
    for name, text in zip(INDEX_NAMES, forms, strict=True):
        # A name that UTF-8 cannot hold may be why a run failed; the index holds it all the same.
        write_atomically(out / name, [text.encode("utf-8", "backslashreplace")])


class _Folders:
    """A folder below `out` for each run: never outside of it, never the same twice."""

    def __init__(self, out: Path) -> None:
        self._out, self._taken = out, set(INDEX_NAMES)
        self._ids: dict[str, tuple[Path | None, str]] = {}

    def make(self, scored: ScoredRun) -> Path:
        """The folder for this run; what is odd about its name goes into its notes."""
        id, own = scored.run.id, scored.run.source
        plain, number = safe_name(id), 1
        name = plain
        # Some file systems take Run and run for one name.
        while name.casefold() in self._taken:
            number += 1
            name = f"{plain}-{number}"
        self._taken.add(name.casefold())
        source, folder = self._ids.setdefault(id, (own, name))
        if folder != name:
            same = "an earlier log has the same run id"
            scored.notes.append(f"{same}: {source} is in {folder}, this one, {own}, in {name}")
        elif name != id:
            scored.notes.append(f"the run id is not safe as a folder name: the run is in {name}")
        return self._out / name


def safe_name(id: str) -> str:
    """`id` as the name of a folder that cannot lead out of its parent.

    >>> safe_name("../../etc/passwd"), safe_name("llama 3/lr=1e-3")
    ('etc_passwd', 'llama_3_lr=1e-3')
    """
    name = re.sub(r"[^\w.=+-]+", "_", id, flags=re.ASCII).strip("._-")
    return name[:_LONGEST_NAME].rstrip("._-") or "run"


def _draw(
    scored: ScoredRun, stem: Path, verdict: RunVerdict, traces: Sequence[DetectorTrace]
) -> None:
    # Imported here, as it takes a second that a replay without plots need not spend.
    from rmetric.reporting.run_plot import plot_run
    from rmetric.reporting.style import save, style

    with style():
        calibrated = next((trace for trace in traces if trace.detector == "calibrated"), None)
        save(plot_run(scored, verdict, calibrated), stem)


def _index_row(report: Mapping[str, Any]) -> dict[str, Any]:
    row = {name: report.get(name) for name in INDEX_COLUMNS}
    row["verdict"] = None  # of the summary, an object
    for name, value in (report.get("stated") or {}).items():
        if f"stated_{name}" in row:
            row[f"stated_{name}"] = value
    own = (report.get("detectors") or {}).get("calibrated") or {}
    row["calibrated_first_alarm_step"] = own.get("first_alarm_step")
    row["calibrated_judged"] = int(own["judged"]) if own else None
    for protocol, verdict in (report.get("verdicts") or {}).items():
        if f"lead_{protocol}" in row:
            row[f"lead_{protocol}"] = verdict["lead_steps"]
    return {name: "" if value is None else value for name, value in row.items()}


def _markdown(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else printable(str(value))
    for special in ("\\", "|", "<"):
        text = text.replace(special, f"\\{special}")
    return text
