"""The METRICS line of a log: a `Record` and the state of the metric as JSON, and back.

msgspec decodes lines of plain numbers, many at a time (`records_from_lines`). A line with a nan or
an infinity, which are strings, or with an error is read field by field (`record_from_json`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Annotated, Any, Literal, get_type_hints

import msgspec

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

#: The three signals as fields of `Record`, in the order of `metric.Components` -> their keys.
SIGNAL_KEYS = {"failure_rate": "lambda", "gradient_variance": "sigma_sq", "loss_drift": "delta_l"}
#: n of the three signals, likewise.
NORMALISED_KEYS = {f"{name}_normalised": f"{key}_norm" for name, key in SIGNAL_KEYS.items()}
#: Source of a signal of which a log states n alone.
LOGGED_NORMALISED = "logged_normalised"
OUTCOMES = ("healthy", "absorbed", "not_applicable", "failed")
_READERS = {"str": text, "float": number, "bool": flag, "int": whole_number}
#: Field of `Truth` -> how it is read from JSON.
TRUTH_READERS: dict[str, Callable[[Any], Any]] = {
    each.name: _READERS[str(each.type).removesuffix(" | None")] for each in fields(Truth)
}


#: A whole number within 64 bits; the decoder leaves the outermost to `whole_number`.
WholeNumber = Annotated[int, msgspec.Meta(gt=-(2**63) + 1, lt=2**63 - 1)]
#: A source that is not `LOGGED_NORMALISED`, which is longer than all others: of lines with that one
#: n counts too, and they are read field by field. To search for the word would cost more.
_Source = Annotated[str, msgspec.Meta(max_length=len(LOGGED_NORMALISED) - 1)]


class _Event(msgspec.Struct):
    time_seconds: float
    kind: str
    worker: WholeNumber | None = None


#: What a line holds, in the order of our lines: fields of `Record`, and the sources of its signals.
#: n of the signals, which our own logs repeat on every line, stand last.
_ORDER = (
    "step", "event", "time", "training_loss", "validation_loss", "gradient_norm", "learning_rate",
    "update_norm", "parameter_norm", "activation_headroom", "attention_logit_max", "router_load",
    "probe_loss", "loss_scale", "worker_gradient_norms", "worker_gradient_cosines",
    "non_finite_gradients", "skipped", "layer_gradient_norms", "planned_events", "actions",
    "events", "step_seconds", "data_wait_seconds", "forward_backward_seconds", "exchange_seconds",
    "optimizer_seconds", "policy", "loss_parts", "memory", "throughput", "failure_rate",
    "lambda_source", "gradient_variance", "sigma_sq_source", "loss_drift", "delta_l_source",
    "stated_score",
    *NORMALISED_KEYS,
)  # fmt: skip
_TYPES = get_type_hints(Record) | {
    "step": WholeNumber,
    "event": Literal["METRICS"],
    "non_finite_gradients": WholeNumber | None,
    "events": tuple[_Event, ...] | None,
}


def _line_of(names: Sequence[str]) -> Any:
    """The type of a line of plain numbers that holds `names`; the decoder looks for these first."""
    optional: list[Any] = [
        (name, _Source | None, "logged") if name.endswith("_source") else (name, _TYPES[name], None)
        for name in names[2:]
    ]
    keys = {"time": "time_seconds", "events": "hardware_events", "stated_score": "r_metric"}
    return msgspec.defstruct(
        "MetricsLine",
        [(name, _TYPES[name]) for name in names[:2]] + optional,
        namespace=dict.fromkeys(set(_ORDER).difference(names)),
        gc=False,
        rename=keys | SIGNAL_KEYS | NORMALISED_KEYS,
    )


#: What the decoder raises for a line that is another, is no JSON or is nested too deeply.
NOT_DECODED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_FULL = _line_of(_ORDER)
_FULL_DECODER = msgspec.json.Decoder(_FULL)
_DECODER = msgspec.json.Decoder(_line_of(_ORDER[: -len(NORMALISED_KEYS)]))


def records_from_lines(lines: bytes, *, ours: bool) -> tuple[list[Record], bool] | None:
    """The records in whole METRICS lines of plain numbers, and whether the log is ours.

    None if any line is of another kind, holds a nan or an infinity, or is wrong. For `ours` see
    `record_from_json`.
    """
    try:
        decoded: Any = (_DECODER if ours else _FULL_DECODER).decode_lines(lines)
    except NOT_DECODED:
        return None
    if not ours and any(
        not line.lambda_source == line.sigma_sq_source == line.delta_l_source == "logged"
        for line in decoded
    ):
        return records_from_lines(lines, ours=True)
    return [_record(line) for line in decoded], ours


#: The fields of a line in the order of those of `Record`.
_FIELDS = attrgetter(*(each.name for each in fields(Record)))


def _record(line: Any) -> Record:
    record = Record(*_FIELDS(line))
    # A signal that was computed from the rest of the line is no statement of its own.
    if line.lambda_source != "logged":
        record.failure_rate = None
    if line.sigma_sq_source != "logged":
        record.gradient_variance = None
    if line.delta_l_source != "logged":
        record.loss_drift = None
    if line.events:
        record.events = tuple(HardwareEvent(e.time_seconds, e.kind, e.worker) for e in line.events)
    return record


def _event(entry: dict[str, Any]) -> HardwareEvent:
    time, kind = field(entry, "time_seconds", number), field(entry, "kind", text)
    if time is None or kind is None:
        raise ValueError(f"found {shown(entry)}; an event has time_seconds and kind")
    return HardwareEvent(time, kind, field(entry, "worker", whole_number))


#: Type of a field -> how its value is read from JSON, and how it is written.
_READ_AND_WRITE: dict[Any, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    WholeNumber: (whole_number, int),
    WholeNumber | None: (whole_number, int),
    float | None: (number, encode_number),
    bool | None: (flag, bool),
    tuple[float, ...] | None: (
        lambda value: tuple(map(number, items(value))),
        lambda values: list(map(encode_number, values)),
    ),
    tuple[str, ...] | None: (lambda value: tuple(map(text, items(value))), list),
    tuple[_Event, ...] | None: (
        lambda value: tuple(_event(mapping(entry)) for entry in items(value)),
        lambda events: [
            {"time_seconds": encode_number(e.time), "kind": e.kind, "worker": e.worker}
            for e in events
        ],
    ),
    dict[str, float] | None: (
        lambda value: {name: number(inner) for name, inner in mapping(value).items()},
        encode,
    ),
}
#: (field of `Record`, key, how it is read, how it is written), in the order of our lines.
_CODECS = [
    (each.name, each.encode_name, *_READ_AND_WRITE[each.type])
    for each in msgspec.structs.fields(_FULL)
    if each.name in Record.__slots__
]


def record_from_json(entry: dict[str, Any], *, ours: bool = False) -> Record:
    """The record in a METRICS line. Raises ValueError naming the field that is wrong.

    Args:
        entry: the object on the line.
        ours: whether the log is one of ours, which repeats the last n of each signal on every
            line. There n counts as a statement only where its source marks it.
    """
    if entry.get("step") is None:
        raise ValueError("'step' is missing")
    unread = set()
    for name, key in SIGNAL_KEYS.items():
        source = entry.get(f"{key}_source", "logged")
        if source != "logged":
            unread.add(name)
        if ours and source != LOGGED_NORMALISED:
            unread.add(f"{name}_normalised")
    values: dict[str, Any] = {
        name: field(entry, key, read)
        for name, key, read, _ in _CODECS
        if key in entry and name not in unread
    }
    return Record(**values)


def record_to_json(record: Record) -> dict[str, Any]:
    """The measurements of `record` under the names of the log; absent where not logged."""
    entry: dict[str, Any] = {"step": record.step, "event": "METRICS"}
    for name, key, _, write in _CODECS:
        value = getattr(record, name)
        if value is not None and name != "stated_score":
            entry[key] = write(value)
    return entry


def metric_to_json(metric: RMetric) -> dict[str, Any]:
    """The state of the metric after its last record, under the names of the log.

    A signal that this record does not hold is left out with its source, or a replay would take it
    for one more value; so is one that is not yet defined: nan would mean that it was observed.
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


def states_signal_sources(entry: dict[str, Any]) -> bool:
    """True if a METRICS line names the sources of its signals, as only our own logs do."""
    return any(f"{key}_source" in entry for key in SIGNAL_KEYS.values())


def stated_alarm(entry: dict[str, Any]) -> bool | None:
    """Alarm of R that a METRICS line states; None if it states none.

    Our logs hold true or false. The authors' hold the step at which R first was in alarm, on
    that line and on all after it: of the line of that step it states that R was in alarm, of the
    others nothing. 0 is no step. Raises ValueError for anything else.
    """
    alerts = field(entry, "alerts", mapping) or {}
    stated = field(alerts, "r_metric", _flag_or_step)
    if stated is None or isinstance(stated, bool):
        return stated
    return True if stated and stated == field(entry, "step", whole_number) else None


def _flag_or_step(value: Any) -> bool | int:
    try:
        step = value if isinstance(value, bool) else whole_number(value)
    except ValueError:
        step = -1
    if step < 0:
        raise ValueError(f"found {shown(value)}; true, false or a step is accepted")
    return step


def truth_to_json(truth: Truth) -> dict[str, Any]:
    return {name: encode(getattr(truth, name)) for name in Truth.__slots__}


def truth_from_json(stated: dict[str, Any]) -> Truth:
    """The truth in a final line. Raises ValueError naming the field that is wrong."""
    fields: dict[str, Any] = {n: field(stated, n, read) for n, read in TRUTH_READERS.items()}
    truth = Truth(**{name: value for name, value in fields.items() if value is not None})
    if truth.outcome not in OUTCOMES:
        raise ValueError(f"'outcome': found {truth.outcome!r}; known are {', '.join(OUTCOMES)}")
    return truth
