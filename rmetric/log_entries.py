"""Serialise a Record and the state of the metric to one line of a log, and back.

docs/log_format.md describes every field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rmetric._util.strict_json import (
    encode,
    encode_number,
    field,
    flag,
    items,
    mapping,
    number,
    shown,
    text,
    whole_number,
)
from rmetric.metric import RMetric
from rmetric.records import HardwareEvent, Record, Truth

#: Fields of `Record` that hold one number -> their names in a METRICS line.
NUMBER_KEYS = {
    "time": "time_seconds",
    "training_loss": "training_loss",
    "validation_loss": "validation_loss",
    "gradient_norm": "gradient_norm",
    "learning_rate": "learning_rate",
    "update_norm": "update_norm",
    "parameter_norm": "parameter_norm",
    "activation_headroom": "activation_headroom",
    "attention_logit_max": "attention_logit_max",
    "router_load": "router_load",
    "probe_loss": "probe_loss",
    "loss_scale": "loss_scale",
}
#: Fields that hold one number a worker; the names are the log's too.
WORKER_KEYS = ("worker_gradient_norms", "worker_gradient_cosines")
#: The three signals, in the order of `metric.Components`, likewise.
SIGNAL_KEYS = {
    "failure_rate": "lambda",
    "gradient_variance": "sigma_sq",
    "loss_drift": "delta_l",
}
#: n of the three signals, likewise.
NORMALISED_KEYS = {f"{name}_normalised": f"{key}_norm" for name, key in SIGNAL_KEYS.items()}
#: Source of a signal of which a log states n alone.
LOGGED_NORMALISED = "logged_normalised"
OUTCOMES = ("healthy", "absorbed", "not_applicable", "failed")
TRUTH_READERS: dict[str, Callable[[Any], Any]] = {
    "fault": text,
    "severity": number,
    "benign": flag,
    "applicable": flag,
    "onset_step": whole_number,
    "duration_steps": whole_number,
    "outcome": text,
    "failure_kind": text,
    "failure_step": whole_number,
}


def record_to_json(record: Record) -> dict[str, Any]:
    """The measurements of `record` under the names of the log; absent where not logged."""
    entry: dict[str, Any] = {"step": record.step, "event": "METRICS"}
    for name, key in (NUMBER_KEYS | SIGNAL_KEYS | NORMALISED_KEYS).items():
        value = getattr(record, name)
        if value is not None:
            entry[key] = encode_number(value)
    for key in WORKER_KEYS:
        values = getattr(record, key)
        if values is not None:
            entry[key] = [encode_number(value) for value in values]
    if record.non_finite_gradients is not None:
        entry["non_finite_gradients"] = record.non_finite_gradients
    if record.skipped is not None:
        entry["skipped"] = record.skipped
    if record.layer_gradient_norms is not None:
        entry["layer_gradient_norms"] = encode(record.layer_gradient_norms)
    if record.planned_events is not None:
        entry["planned_events"] = list(record.planned_events)
    if record.events is not None:
        entry["hardware_events"] = [
            {"time_seconds": encode_number(e.time), "kind": e.kind, "worker": e.worker}
            for e in record.events
        ]
    return entry


def metric_to_json(metric: RMetric) -> dict[str, Any]:
    """The state of the metric after its last record, under the names of the log.

    A signal that this record does not hold is left out with its source, or a
    replay would take it for one more value. One that has a source but is not
    yet defined is left out too: nan would say that it was observed.
    """
    entry: dict[str, Any] = {}
    for key, value, source in zip(SIGNAL_KEYS.values(), metric.raw, metric.sources, strict=True):
        if source is not None:
            if value == value or source == "logged":
                entry[key] = encode_number(value)
            entry[f"{key}_source"] = source
    for key, value in zip(SIGNAL_KEYS.values(), metric.normalised, strict=True):
        entry[f"{key}_norm"] = encode_number(value)
    entry["r_metric"] = encode_number(metric.score)
    entry["alerts"] = {"r_metric": bool(metric.alarm)}
    return entry


def says_its_sources(entry: dict[str, Any]) -> bool:
    """True if a METRICS line names the sources of its signals, as only our own logs do."""
    return any(f"{key}_source" in entry for key in SIGNAL_KEYS.values())


def stated_alarm(entry: dict[str, Any]) -> bool | None:
    """Alarm of R that a METRICS line states; None if it states none.

    Our logs hold true or false. The authors' hold the step at which R first was in alarm, on
    that line and on all after it: of the line of that step it says that R was in alarm, of the
    others nothing. 0 is no step. Raises ValueError for anything else.
    """
    alerts = field(entry, "alerts", mapping) or {}
    stated = field(alerts, "r_metric", _flag_or_step)
    if stated is None or isinstance(stated, bool):
        return stated
    return True if stated and stated == field(entry, "step", whole_number) else None


def _flag_or_step(value: Any) -> bool | int:
    if isinstance(value, bool):
        return value
    try:
        step = whole_number(value)
    except ValueError:
        step = -1
    if step < 0:
        raise ValueError(f"found {shown(value)}; true, false or a step is accepted")
    return step


def record_from_json(entry: dict[str, Any], *, ours: bool = False) -> Record:
    """The record in a METRICS line. Raises ValueError naming the field that is wrong.

    Args:
        ours: whether the log is one of ours, which repeats the last n of each signal on every
            line. There n counts as a statement only where its source says so.
    """
    step = field(entry, "step", whole_number)
    if step is None:
        raise ValueError("'step' is missing")
    fields: dict[str, Any] = {name: field(entry, key, number) for name, key in NUMBER_KEYS.items()}
    for name, key in SIGNAL_KEYS.items():
        # A signal that was computed from the rest of the line is no statement of its own.
        if entry.get(f"{key}_source", "logged") == "logged":
            fields[name] = field(entry, key, number)
    for (name, key), signal in zip(NORMALISED_KEYS.items(), SIGNAL_KEYS.values(), strict=True):
        if not ours or entry.get(f"{signal}_source") == LOGGED_NORMALISED:
            fields[name] = field(entry, key, number)
    for key in WORKER_KEYS:
        fields[key] = field(entry, key, _numbers)
    return Record(
        step=step,
        non_finite_gradients=field(entry, "non_finite_gradients", whole_number),
        layer_gradient_norms=field(entry, "layer_gradient_norms", _numbers_by_name),
        planned_events=field(entry, "planned_events", _words),
        skipped=field(entry, "skipped", flag),
        events=field(entry, "hardware_events", _events),
        stated_score=field(entry, "r_metric", number),
        **fields,
    )


def _numbers(value: Any) -> tuple[float, ...]:
    return tuple(number(inner) for inner in items(value))


def _numbers_by_name(value: Any) -> dict[str, float]:
    return {name: number(inner) for name, inner in mapping(value).items()}


def _words(value: Any) -> tuple[str, ...]:
    return tuple(text(word) for word in items(value))


def _events(value: Any) -> tuple[HardwareEvent, ...]:
    return tuple(_event(mapping(event)) for event in items(value))


def _event(entry: dict[str, Any]) -> HardwareEvent:
    time, kind = field(entry, "time_seconds", number), field(entry, "kind", text)
    if time is None or kind is None:
        raise ValueError(f"found {shown(entry)}; an event has time_seconds and kind")
    return HardwareEvent(time, kind, field(entry, "worker", whole_number))


def truth_to_json(truth: Truth) -> dict[str, Any]:
    return {name: encode(getattr(truth, name)) for name in Truth.__slots__}


def truth_from_json(stated: dict[str, Any]) -> Truth:
    """The truth in a final line. Raises ValueError naming the field that is wrong."""
    fields: dict[str, Any] = {n: field(stated, n, read) for n, read in TRUTH_READERS.items()}
    truth = Truth(**{name: value for name, value in fields.items() if value is not None})
    if truth.outcome not in OUTCOMES:
        raise ValueError(f"'outcome': found {truth.outcome!r}; known are {', '.join(OUTCOMES)}")
    return truth
