"""Reader of our own logs and of the authors', one JSON object a line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from rmetric.logs import LogError, LogReader, decode_number, parse_line
from rmetric.metric import RMetric
from rmetric.records import HardwareEvent, Record, Run
from rmetric.replay.assembler import Batches
from rmetric.replay.rows import run_name
from rmetric.replay.settings import settings_of
from rmetric.replay.source import Source
from rmetric.replay.stream import Stream
from rmetric.strict_json import shown

NAME = "experiment log (JSONL)"
FOLLOWS = True
_EVENT = re.compile(r'"event"\s*:\s*"(EXPERIMENT_\w+|METRICS|FAULT_INJECTED)"')
_COMPUTED_FROM = {
    "failure_rate": "events",
    "gradient_variance": "worker_gradient_norms",
    "loss_drift": "validation_loss",
}
_TOLERANCE = 1e-9
_FAR = 2**63
#: What the monitor calls a run that its user gave no name.
_UNNAMED = "run"


def matches(head: str) -> bool:
    return '"event"' in head and _EVENT.search(head) is not None


def stream(source: Source, mapping: Mapping[str, str]) -> Stream:
    """The record stream.

    A stated signal is dropped where its source has been seen before in the log and is
    absent here, see `_forget_repeated`; before its first nobody can know.
    """
    reader = LogReader(source.path)
    runs: dict[str, Run] = {}

    def batches() -> Batches:
        seen: set[str] = set()
        for records, _ in _batches(source, reader):
            id = reader.run.id
            if records:
                runs[id] = reader.run
            for record in records:
                if (
                    record.failure_rate is not None
                    or record.gradient_variance is not None
                    or record.loss_drift is not None
                ):
                    _drop_repeated(record, seen)
            if len(seen) < len(_COMPUTED_FROM):
                seen |= {
                    of
                    for of in _COMPUTED_FROM.values()
                    if any(getattr(record, of) is not None for record in records)
                }
            yield id, records
        _end(source, reader, mapping, any_record=bool(runs))

    return Stream(batches=batches(), runs=runs)


def _drop_repeated(record: Record, seen: set[str]) -> None:
    for stated, of in _COMPUTED_FROM.items():
        if getattr(record, of) is None and of in seen:
            setattr(record, stated, None)


def read(source: Source, mapping: Mapping[str, str]) -> list[Run]:
    """The whole run, with R computed again and compared with what the log states."""
    reader = LogReader(source.path)
    run, logged = reader.run, []
    records: list[Record] = []
    for batch, scores in _batches(source, reader):
        records += batch
        logged += scores
    run.records = records
    _end(source, reader, mapping, any_record=bool(records))
    run.notes += _forget_repeated(run)
    if any(score is not None for score in logged):
        run.notes.append(comparison(run, logged))
    return [run]


def _end(source: Source, reader: LogReader, mapping: Mapping[str, str], any_record: bool) -> None:
    run = reader.finish()
    source.left_out.check(source.path)
    if not any_record:
        raise LogError(source.path, None, "no METRICS line: there is nothing to score")
    if mapping:
        run.notes.append("--map is not needed for this format and was not used")


class _Event(msgspec.Struct):
    time_seconds: float
    kind: str
    worker: int | None = None


class _Line(msgspec.Struct, gc=False):
    """What `log_entries.record_from_json` reads, of a line without nan or anything odd.

    In the order of our lines: the decoder looks for the next key first.
    """

    step: int
    event: str
    time_seconds: float | None = None
    training_loss: float | None = None
    validation_loss: float | None = None
    gradient_norm: float | None = None
    learning_rate: float | None = None
    update_norm: float | None = None
    parameter_norm: float | None = None
    activation_headroom: float | None = None
    attention_logit_max: float | None = None
    router_load: float | None = None
    probe_loss: float | None = None
    loss_scale: float | None = None
    worker_gradient_norms: tuple[float, ...] | None = None
    worker_gradient_cosines: tuple[float, ...] | None = None
    non_finite_gradients: int | None = None
    skipped: bool | None = None
    layer_gradient_norms: dict[str, float] | None = None
    planned_events: tuple[str, ...] | None = None
    hardware_events: list[_Event] | None = None
    failure_rate: float | None = msgspec.field(name="lambda", default=None)
    lambda_source: str | None = "logged"
    sigma_sq: float | None = None
    sigma_sq_source: str | None = "logged"
    delta_l: float | None = None
    delta_l_source: str | None = "logged"
    r_metric: float | None = None


_DECODER = msgspec.json.Decoder(_Line)


def _batches(
    source: Source, reader: LogReader
) -> Iterator[tuple[list[Record], list[float | None]]]:
    """Records, some at a time, and the R that the line of each states."""
    for number, chunk in source.chunks():
        alike = _decoded(chunk)
        if alike is not None:
            source.left_out.good += len(alike)
            yield [_record(s) for s in alike], [s.r_metric for s in alike]
            continue
        # One a time: where a line is wrong, those before it have been read.
        for at, line in enumerate(chunk.splitlines(keepends=True), start=number):
            alike = _decoded(line)
            if alike is not None:
                source.left_out.good += len(alike)
                yield [_record(s) for s in alike], [s.r_metric for s in alike]
                continue
            try:
                record = reader.take(at, _in_utf8(source, at, line))
            except LogError:
                if at == 1 or _is_object(line):
                    raise
                source.left_out.add(at, f"no JSON object: {shown(line)}")
                continue
            if reader.run.id == _UNNAMED:
                reader.run.id = run_name(source.path)
            source.left_out.good += 1
            if record is not None:
                yield [record], [_score(line)]


def _decoded(chunk: bytes) -> list[_Line] | None:
    """The lines, if all are METRICS and plain; None where something wants a closer look."""
    try:
        lines = _DECODER.decode_lines(chunk)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    for line in lines:
        if line.event != "METRICS" or not -_FAR < line.step < _FAR:
            return None
    return lines


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse_line(line), dict)
    except ValueError:
        return False


def _in_utf8(source: Source, number: int, line: bytes) -> bytes:
    try:
        line.decode()
    except UnicodeDecodeError:
        return source.decoded(number, line).encode()
    return line


def _record(s: _Line) -> Record:
    events = s.hardware_events
    return Record(
        s.step,
        s.time_seconds,
        s.training_loss,
        s.validation_loss,
        s.gradient_norm,
        s.worker_gradient_norms,
        s.learning_rate,
        s.update_norm,
        s.parameter_norm,
        s.worker_gradient_cosines,
        s.non_finite_gradients,
        s.layer_gradient_norms,
        s.activation_headroom,
        s.attention_logit_max,
        s.router_load,
        s.probe_loss,
        s.planned_events,
        s.loss_scale,
        s.skipped,
        tuple(HardwareEvent(e.time_seconds, e.kind, e.worker) for e in events)
        if events
        else None
        if events is None
        else (),
        s.failure_rate if s.lambda_source == "logged" else None,
        s.sigma_sq if s.sigma_sq_source == "logged" else None,
        s.delta_l if s.delta_l_source == "logged" else None,
    )


def _forget_repeated(run: Run) -> list[str]:
    """Drop a stated signal from the lines that lack what the others compute it from.

    The authors' logs may repeat the last ΔL on lines without an evaluation; taken
    as observations the copies would fill the window that it is normalised over.
    """
    notes = []
    for stated, source in _COMPUTED_FROM.items():
        sourced = sum(getattr(record, source) is not None for record in run.records)
        repeated = [
            record
            for record in run.records
            if getattr(record, source) is None and getattr(record, stated) is not None
        ]
        if sourced >= 2 and repeated:
            for record in repeated:
                setattr(record, stated, None)
            notes.append(
                f"{stated} is stated on {len(repeated)} lines without {source}: left out there, "
                f"and computed from {source} elsewhere"
            )
    return notes


def comparison(run: Run, logged: list[float | None]) -> str:
    """Whether R, recomputed from the records, is what the log states, in a sentence."""
    settings = settings_of(run)
    metric = RMetric(settings.config)
    scores = [metric.update(record).score for record in run.records]
    stated = [
        (record.step, score, log)
        for record, score, log in zip(run.records, scores, logged, strict=True)
        if log is not None
    ]
    differing = [row for row in stated if not abs(row[1] - row[2]) <= _TOLERANCE]
    if not differing:
        return f"R recomputed equals the logged r_metric at all {len(stated)} records that state it"
    step, score, log = differing[0]
    return (
        f"R recomputed (settings: {settings.name}) differs from the logged r_metric at "
        f"{len(differing)} of {len(stated)} records, first at step {step}: {score:.4f}, "
        f"logged {log:.4f}"
    )


def _score(line: bytes) -> float | None:
    """What a line that was read states as its R; None for what is no number."""
    stated: Any = None
    with suppress(ValueError, AttributeError):
        stated = decode_number(parse_line(line).get("r_metric"))
    return stated
