"""The JSONL form of a run: written by the simulator and the monitor, read by all.

One object a line: EXPERIMENT_START, then METRICS and FAULT_INJECTED in the order
of their steps, then EXPERIMENT_SUCCESS or EXPERIMENT_FAILURE. The published names
are kept, so that existing logs and tools go on working; docs/log_format.md
describes every field. A line is strict JSON: nan and ±inf are the strings
"NaN", "Infinity" and "-Infinity", and what was not logged is absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rmetric._util.durable import write_atomically as write_atomically
from rmetric._util.errors import LogError as LogError
from rmetric._util.strict_json import (
    encode,
    field,
    flag,
    items,
    mapping,
    number,
    text,
    whole_number,
)
from rmetric._util.strict_json import encode_line as encode_line
from rmetric._util.strict_json import encode_number as encode_number
from rmetric._util.strict_json import parse_line as parse_line
from rmetric.log_entries import (
    NORMALISED_KEYS,
    SIGNAL_KEYS,
    metric_to_json,
    record_from_json,
    states_signal_sources,
    truth_from_json,
    truth_to_json,
)
from rmetric.log_entries import record_to_json as record_to_json
from rmetric.metric import RMetric, RMetricConfig
from rmetric.records import AuditFinding, LogEvent, Record, Run, Truth

FORMAT_VERSION = 1
#: Alerts and decisions of one run that a reader keeps, and findings of audits.
MOST_LOG_EVENTS = 1000
#: Lines that become a `LogEvent`: its kind, and the key of its name.
_LOG_EVENTS = {"ALERT": ("alert", "source"), "RESCUE": ("decision", "action")}


def start_line(run_config: dict[str, Any], run_id: str, config: RMetricConfig, mode: str) -> bytes:
    """The first line of a log, with its line end, which follows from the settings alone.

    `run_config`, the description of the run, becomes its ``config``; `mode` is of `metric.MODES`.
    """
    settings = asdict(config.with_mode(mode))
    if config.variant == "paper":
        del settings["variant"]  # logs before the variants had none
    config_of_run = run_config | {
        "experiment_id": run_id,
        "METRIC_MODE": mode,
        "metric_settings": settings,
        "alert_thresholds": {"r_metric": config.threshold},
    }
    first = {"event": "EXPERIMENT_START", "format_version": FORMAT_VERSION}
    return encode_line(first | {"config": encode(config_of_run)})


def log_path(folder: Path, run_id: str) -> Path:
    """The path of a run's log. Raises ValueError for an id that cannot be a file name."""
    if not run_id or run_id.startswith(".") or set(run_id) & set("/\\:\0"):
        raise ValueError(
            f"experiment id {run_id!r} cannot name a file: it must not be empty, "
            "begin with a dot or hold / \\ or :"
        )
    return folder / f"{run_id}.jsonl"


def metrics_line(
    record: Record, metric: RMetric, alarms: Mapping[str, bool] | None = None
) -> bytes:
    """One record and the metric's state after it as a METRICS line, with its line end.

    The metric, already updated with `record`, is read, not advanced. `alarms` are those of other
    detectors, by name, logged beside R's.
    """
    measured = record_to_json(record)
    for key in (*SIGNAL_KEYS.values(), *NORMALISED_KEYS.values()):
        measured.pop(key, None)  # the metric holds the values that it used
    judged = metric_to_json(metric)
    if alarms:
        judged["alerts"] |= alarms
    return encode_line(measured | judged)


def run_lines(run: Run, metric_config: RMetricConfig, mode: str = "FULL_METRIC") -> Iterator[bytes]:
    """The lines of a finished run's log, with the metric computed on the way.

    A run whose truth is not known gets no final line. `mode` is an ablation of `metric.MODES`.
    """
    metric = RMetric(metric_config.with_mode(mode))
    injected = fault_lines(run.truth)
    yield start_line(run.config, run.id, metric_config, mode)
    for record in run.records:
        if run.truth and run.truth.onset_step is not None and record.step >= run.truth.onset_step:
            yield from injected
        yield metrics_line(record, metric.update(record))
    yield from injected
    if run.truth is not None:
        yield final_line(run.truth, run.records)


def fault_lines(truth: Truth | None) -> Iterator[bytes]:
    """The FAULT_INJECTED line, once; none where nothing was injected before the end."""
    if truth is None or truth.onset_step is None:
        return
    if truth.failure_step is not None and truth.failure_step < truth.onset_step:
        return
    severity = "" if truth.severity is None else f", severity {truth.severity:g}"
    duration = "" if truth.duration_steps is None else f", {truth.duration_steps} steps"
    details = f"{'benign change' if truth.benign else 'fault'} {truth.fault}{severity}{duration}"
    if not truth.applicable:
        # A fault without a severity is the published simulator's, where no architecture matters.
        where = "simulator" if truth.severity is None else "architecture"
        details += f"; not applicable to this {where}, nothing changes"
    event = {"step": truth.onset_step, "event": "FAULT_INJECTED", "details": details}
    yield encode_line(event)


def final_line(truth: Truth, records: Sequence[Record]) -> bytes:
    """The final line: how the run ended, with its truth."""
    last: dict[str, Any] = {"step": records[-1].step if records else None}
    last |= {"event": "EXPERIMENT_SUCCESS"}
    if truth.failed:
        last = {"step": truth.failure_step, "event": "EXPERIMENT_FAILURE"}
        last |= {"reason": truth.failure_kind}
    return encode_line(last | {"ground_truth": truth_to_json(truth)})


class LogReader:
    """Takes the lines of one log in our form or the authors', one at a time.

    Attributes:
        run: what is known of it so far; its records are handed out, not kept.
        ours: True for a log of this package, known by the format version of its
            first line or by the sources of its signals.
        entry: the object on the last METRICS line; empty before the first.
    """

    def __init__(self, path: Path) -> None:
        self.run = Run(id=path.name.split(".jsonl")[0], records=[], source=path)
        self.ours = False
        self.entry: dict[str, Any] = {}
        self._path, self._begun, self._ended = path, False, False
        self._more_events = 0

    def take(self, number_of_line: int, line: bytes) -> Record | None:
        """The record in the line, if it holds one. Raises LogError.

        A last line without its end that is not JSON was cut off while written: it
        is left out, with a note on the run.
        """
        if not line.strip():
            return None
        try:
            entry = parse_line(line)
        except ValueError as error:
            if self._begun and not line.endswith(b"\n"):
                self.run.notes.append(f"line {number_of_line} is cut off and was left out")
                return None
            raise LogError(self._path, number_of_line, str(error)) from None
        try:
            self._take(mapping(entry))
        except (ValueError, RecursionError) as error:
            is_deep = isinstance(error, RecursionError)
            problem = "nested too deeply to be read" if is_deep else str(error)
            raise LogError(self._path, number_of_line, problem) from None
        self._begun = True
        return self.run.records.pop() if self.run.records else None

    def _take(self, entry: dict[str, Any]) -> None:
        """Add one line to the run, whose truth is what is known so far."""
        run, event = self.run, entry.get("event")
        if event == "EXPERIMENT_START":
            run.config = field(entry, "config", mapping) or {}
            field(run.config, "seconds_per_step", number)  # checked here, where the line is known
            run.id = str(run.config.get("experiment_id") or run.id)
            run.truth = _declared_truth(run.config)
            self.ours = self.ours or "format_version" in entry
        elif event == "METRICS":
            self.entry = entry
            self.ours = self.ours or states_signal_sources(entry)
            run.records.append(record_from_json(entry, ours=self.ours))
        elif event == "FAULT_INJECTED":
            run.truth = run.truth or Truth()
            run.truth.onset_step = field(entry, "step", whole_number) or run.truth.onset_step
        elif event in ("EXPERIMENT_SUCCESS", "EXPERIMENT_FAILURE"):
            run.truth = _final_truth(entry, run.truth or Truth())
            self._ended = True
        elif event in _LOG_EVENTS and self.ours:
            self._take_event(entry, *_LOG_EVENTS[event])
        elif event == "AUDIT" and self.ours and len(run.findings) < MOST_LOG_EVENTS:
            run.findings.append(_finding(entry))

    def _take_event(self, entry: dict[str, Any], kind: str, key: str) -> None:
        """Keep an alert or a decision; without a step it has no place and is left out."""
        step, name = field(entry, "step", whole_number), field(entry, key, text) or ""
        reason, to = field(entry, "reason", text) or "", field(entry, "to", whole_number)
        if step is not None and len(self.run.log_events) < MOST_LOG_EVENTS:
            event = LogEvent(step=step, kind=kind, name=name, reason=reason, to=to)
            self.run.log_events.append(event)
        else:
            self._more_events += step is not None

    def finish(self) -> Run:
        """The run, of which all that its log states is known now."""
        if self._more_events:
            more = f"{self._more_events} more alerts and decisions in the log were left out"
            self.run.notes.append(more)
        if not self._ended:
            self.run.truth = None
            self.run.notes.append("the log has no final line: how the run ended is unknown")
        return self.run


def read_lines(path: Path, lines: Iterable[bytes]) -> Run:
    """The run in the lines of one log in our form or the authors'.

    Keys may be missing. Raises LogError for what cannot be read; see `LogReader`.
    """
    reader = LogReader(path)
    taken = [reader.take(number, line) for number, line in enumerate(lines, start=1)]
    run = reader.finish()
    run.records = [record for record in taken if record is not None]
    return run


def _finding(entry: dict[str, Any]) -> AuditFinding:
    rows = [mapping(row) for row in field(entry, "rows", items) or ()]
    words, _, table = (field(entry, "words", text) or "").partition("\n")
    if table:  # of all rows; in a line those that differ
        lost = [r for r in rows if not field(r, "equal", flag)]
        words += " " + "; ".join(
            f"{r.get('part')}: {r.get('now')} (was {r.get('was')})" for r in lost
        )
    names = ("part", "was", "now", "outlook")
    return AuditFinding(
        step=field(entry, "step", whole_number) or 0,
        kind=field(entry, "kind", text) or "",
        severity=field(entry, "severity", text) or "",
        words=words,
        rows=[{name: field(row, name, text) or "" for name in names} for row in rows],
    )


def _declared_truth(config: dict[str, Any]) -> Truth:
    fault = field(config, "fault_injection", mapping) or {}
    name = field(fault, "type", text) or "NONE"
    onset = None if name == "NONE" else field(fault, "trigger_step", whole_number)
    return Truth(fault=name, onset_step=onset)


def _final_truth(entry: dict[str, Any], declared: Truth) -> Truth:
    stated = field(entry, "ground_truth", mapping)
    if stated is not None:
        return truth_from_json(stated)
    if entry["event"] == "EXPERIMENT_FAILURE":
        declared.outcome = "failed"
        declared.failure_kind = field(entry, "reason", text) or "not stated"
        declared.failure_step = field(entry, "step", whole_number)
    elif declared.fault != "NONE":
        declared.outcome = "absorbed"
    return declared


def read_log(path: Path) -> Run:
    """The run in one of our own logs; see `read_lines`."""
    with open(path, "rb") as file:
        return read_lines(path, file)
