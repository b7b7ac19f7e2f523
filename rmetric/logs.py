"""The JSONL form of a run: written by the simulator and the monitor, read by all.

One object a line: EXPERIMENT_START, then METRICS and FAULT_INJECTED in the order
of their steps, then EXPERIMENT_SUCCESS or EXPERIMENT_FAILURE. The published names
are kept, so that existing logs and tools go on working; docs/log_format.md
describes every field. A line is strict JSON: nan and ±inf are the strings
"NaN", "Infinity" and "-Infinity", and what was not logged is absent.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

import orjson

from rmetric.metric import RMetric, RMetricConfig
from rmetric.records import HardwareEvent, Record, Run, Truth

FORMAT_VERSION = 1

#: Field of `Record` -> its name in a METRICS line.
RECORD_KEYS = {
    "time": "time_seconds",
    "training_loss": "training_loss",
    "validation_loss": "validation_loss",
    "gradient_norm": "gradient_norm",
    "worker_gradient_norms": "worker_gradient_norms",
    "learning_rate": "learning_rate",
    "update_norm": "update_norm",
    "parameter_norm": "parameter_norm",
    "failure_rate": "lambda",
    "gradient_variance": "sigma_sq",
    "loss_drift": "delta_l",
}
_NON_FINITE = {"NaN": nan, "Infinity": inf, "-Infinity": -inf}


class LogError(ValueError):
    """A log that cannot be read; says which file, which line and what was found."""

    def __init__(self, path: Path | str, line: int | None, problem: str) -> None:
        self.path, self.line, self.problem = Path(path), line, problem
        where = f"{path}, line {line}" if line else f"{path}"
        super().__init__(f"{where}: {problem}")


def encode_number(value: float) -> float | str:
    """A float as strict JSON can hold it."""
    if isfinite(value):
        return value
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def decode_number(value: Any) -> float | None:
    """The float that a log holds; None for not logged. Raises ValueError for others."""
    if value is None:
        return None
    if isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"found {value!r}; a number, null, 'NaN' or '±Infinity' is accepted")


def encode_line(entry: dict[str, Any]) -> bytes:
    """One line of a log, with its line end."""
    return orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)


def record_to_json(record: Record) -> dict[str, Any]:
    """What `record` measured, under the names of the log; absent where not logged."""
    entry: dict[str, Any] = {"step": record.step, "event": "METRICS"}
    for name, key in RECORD_KEYS.items():
        value = getattr(record, name)
        if value is None:
            continue
        if name == "worker_gradient_norms":
            entry[key] = [encode_number(norm) for norm in value]
        else:
            entry[key] = encode_number(value)
    if record.events is not None:
        entry["hardware_events"] = [
            {"time_seconds": e.time, "kind": e.kind, "worker": e.worker} for e in record.events
        ]
    return entry


def metric_to_json(metric: RMetric) -> dict[str, Any]:
    """What the metric makes of the record that it has just taken."""
    raw, scaled = metric.raw, metric.normalised
    entry: dict[str, Any] = {}
    # A signal that is not yet defined is left out: nan would say that it was observed.
    for key, value in zip(("lambda", "sigma_sq", "delta_l"), raw, strict=True):
        if value == value:
            entry[key] = encode_number(value)
    if metric.variance_source is not None:
        entry["sigma_sq_source"] = metric.variance_source
    entry |= {
        "lambda_norm": scaled.failure_rate,
        "sigma_sq_norm": scaled.gradient_variance,
        "delta_l_norm": scaled.loss_drift,
        "r_metric": metric.score,
        "alerts": {"r_metric": metric.alarm},
    }
    return entry


def record_from_json(entry: dict[str, Any]) -> Record:
    """The record in a METRICS line. Raises ValueError naming the field that is wrong."""
    step = entry.get("step")
    if isinstance(step, bool) or not isinstance(step, int):
        raise ValueError(f"'step' is {step!r}: a whole number is accepted")
    fields: dict[str, Any] = {}
    for name, key in RECORD_KEYS.items():
        value = entry.get(key)
        if value is None:
            continue
        try:
            if name == "worker_gradient_norms":
                fields[name] = tuple(_norm(norm) for norm in value)
            else:
                fields[name] = decode_number(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{key!r}: {error}") from None
    events = entry.get("hardware_events")
    if events is not None:
        try:
            fields["events"] = tuple(
                HardwareEvent(float(e["time_seconds"]), str(e["kind"]), e.get("worker"))
                for e in events
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(
                "'hardware_events' must be a list of objects with time_seconds and kind"
            ) from None
    return Record(step=step, **fields)


def _norm(value: Any) -> float:
    norm = decode_number(value)
    if norm is None:
        raise ValueError("null among the norms; every worker's norm is needed")
    return norm


def truth_to_json(truth: Truth) -> dict[str, Any]:
    return {name: getattr(truth, name) for name in Truth.__slots__}


def start_line(run_config: dict[str, Any], run_id: str, config: RMetricConfig, mode: str) -> bytes:
    """The first line of a log, which follows from what was asked for alone."""
    config_of_run = run_config | {
        "experiment_id": run_id,
        "METRIC_MODE": mode,
        "alert_thresholds": {"r_metric": config.threshold},
    }
    return encode_line(
        {"event": "EXPERIMENT_START", "format_version": FORMAT_VERSION, "config": config_of_run}
    )


def log_path(folder: Path, run_id: str) -> Path:
    """Where a run's log goes. Raises ValueError for an id that is no plain file name."""
    if not run_id or run_id.startswith(".") or set(run_id) & set('/\\:\0'):
        raise ValueError(
            f"experiment id {run_id!r} cannot name a file: it must not be empty, "
            "begin with a dot or hold / \\ or :"
        )
    return folder / f"{run_id}.jsonl"


def run_lines(run: Run, metric_config: RMetricConfig, mode: str = "FULL_METRIC") -> Iterator[bytes]:
    """A finished run as the lines of its log, the metric computed on the way."""
    truth = run.truth or Truth()
    metric = RMetric(metric_config.with_mode(mode))
    yield start_line(run.config, run.id, metric_config, mode)
    onset = truth.onset_step
    for record in run.records:
        if onset is not None and record.step >= onset:
            yield _fault_line(truth)
            onset = None
        yield encode_line(record_to_json(record) | metric_to_json(metric.update(record)))
    if onset is not None:
        yield _fault_line(truth)
    if truth.failed:
        last = {
            "step": truth.failure_step,
            "event": "EXPERIMENT_FAILURE",
            "reason": truth.failure_kind,
        }
    else:
        last = {"step": run.records[-1].step, "event": "EXPERIMENT_SUCCESS"}
    yield encode_line(last | {"ground_truth": truth_to_json(truth)})


def _fault_line(truth: Truth) -> bytes:
    severity = "" if truth.severity is None else f", severity {truth.severity:g}"
    what = "benign change" if truth.benign else "fault"
    acts = "" if truth.applicable else "; not applicable to this architecture, nothing changes"
    return encode_line(
        {
            "step": truth.onset_step,
            "event": "FAULT_INJECTED",
            "details": f"{what} {truth.fault}{severity}, {truth.duration_steps} steps{acts}",
        }
    )


def write_atomically(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file that is either whole or absent.

    The lines go to a hidden file beside it, which then takes the name; what a
    killed process leaves behind never carries the final name.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(lines)
        part.chmod(0o644)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def parse_line(line: bytes) -> Any:
    """One line as JSON; bare NaN and Infinity, which many loggers write, are accepted."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return json.loads(line.decode("utf-8", "strict"))


def read_lines(path: Path, lines: Iterable[bytes]) -> Run:
    """The run in the lines of one log in our form or the authors'.

    Keys may be missing. A last line without its end that is no JSON was cut off
    while it was written: it is left out, and the run's notes say so. Raises
    LogError for anything else that cannot be read.
    """
    run = Run(id=path.name.split(".jsonl")[0], records=[], source=path)
    truth: Truth | None = None
    ended = False
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = parse_line(line)
        except ValueError:
            if not line.endswith(b"\n"):
                run.notes.append(f"line {number} is cut off and was left out")
                break
            raise LogError(path, number, f"not JSON: {_shown(line)}") from None
        if not isinstance(entry, dict):
            raise LogError(path, number, f"a JSON object is accepted, found {_shown(line)}")
        event = entry.get("event")
        if event == "EXPERIMENT_START":
            run.config = entry.get("config") or {}
            run.id = str(run.config.get("experiment_id") or run.id)
        elif event == "METRICS":
            try:
                run.records.append(record_from_json(entry))
            except ValueError as error:
                raise LogError(path, number, str(error)) from None
        elif event == "FAULT_INJECTED":
            truth = truth or _declared_truth(run.config)
            truth.onset_step = entry.get("step", truth.onset_step)
        elif event in ("EXPERIMENT_SUCCESS", "EXPERIMENT_FAILURE"):
            truth = _final_truth(entry, truth or _declared_truth(run.config))
            ended = True
    run.truth = truth if ended else None
    if not ended:
        run.notes.append("the log has no final line: how the run ended is unknown")
    return run


def _declared_truth(config: dict[str, Any]) -> Truth:
    fault = config.get("fault_injection") or {}
    name = str(fault.get("type") or "NONE")
    return Truth(fault=name, onset_step=None if name == "NONE" else fault.get("trigger_step"))


def _final_truth(entry: dict[str, Any], declared: Truth) -> Truth:
    stated = entry.get("ground_truth")
    if isinstance(stated, dict):
        return Truth(**{name: stated[name] for name in Truth.__slots__ if name in stated})
    if entry["event"] == "EXPERIMENT_FAILURE":
        declared.outcome = "failed"
        declared.failure_kind = str(entry.get("reason", "not stated"))
        declared.failure_step = entry.get("step")
    elif declared.fault != "NONE":
        declared.outcome = "absorbed"
    return declared


def read_log(path: Path) -> Run:
    """The run in one of our own logs; see `read_lines`."""
    with open(path, "rb") as file:
        return read_lines(path, file)


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")
