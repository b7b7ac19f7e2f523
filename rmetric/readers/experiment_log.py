"""Reader of our own logs and of the authors', one JSON object a line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from rmetric._util.errors import LogError
from rmetric._util.strict_json import shown
from rmetric.log_entries import records_from_lines
from rmetric.logs import LogReader
from rmetric.metric_settings import comparison
from rmetric.readers.assembler import Batches
from rmetric.readers.json_lines import object_on
from rmetric.readers.rows import run_name
from rmetric.readers.source import Source
from rmetric.readers.stream import Reader, Stream
from rmetric.readers.thinning import collect
from rmetric.records import Record, Run

_EVENT = re.compile(r'"event"\s*:\s*"(EXPERIMENT_\w+|METRICS|FAULT_INJECTED)"')
_COMPUTED_FROM = {
    "failure_rate": "events",
    "gradient_variance": "worker_gradient_norms",
    "loss_drift": "validation_loss",
}
_NOT_COMPARED = (
    "the logged r_metric was not checked: the R computed here is of the records that were kept"
)
#: What the monitor calls a run that its user gave no name.
_UNNAMED = "run"


def stream(source: Source, mapping: Mapping[str, str]) -> Stream:
    """The record stream.

    A stated signal is dropped where its source has been seen before in the log and is
    absent here, see `_forget_repeated`; before its first nobody can know.
    """
    reader = LogReader(source.path)
    runs: dict[str, Run] = {}

    def batches() -> Batches:
        seen: set[str] = set()
        for records in _batches(source, reader):
            id = reader.run.id
            if records:
                runs[id] = reader.run
            for record in records:
                if (
                    record.failure_rate is not None
                    or record.gradient_variance is not None
                    or record.loss_drift is not None
                ):
                    for stated, of in _COMPUTED_FROM.items():
                        if getattr(record, of) is None and of in seen:
                            setattr(record, stated, None)
            if len(seen) < len(_COMPUTED_FROM):
                seen |= {
                    of
                    for of in _COMPUTED_FROM.values()
                    if any(getattr(record, of) is not None for record in records)
                }
            yield id, records
        _end(source, reader, mapping, any_record=bool(runs))

    return Stream(batches=batches(), runs=runs)


def read(
    source: Source, mapping: Mapping[str, str], most_records: int | None = None
) -> tuple[Run, str]:
    """The run, with R computed again and compared with what the log states.

    Returns:
        The run, and the note on the records that were dropped to keep no more than
        `most_records`, which the run has too; empty if there are none. R of some of the
        records is not compared.
    """
    reader = LogReader(source.path)
    run = reader.run
    # The id of the run may change with a line of the log.
    batches = (("", records) for records in _batches(source, reader))
    collected = collect(batches, {"": run}, most_records)
    run.records = collected.records("")
    _end(source, reader, mapping, any_record=bool(run.records))
    run.notes += _forget_repeated(run)
    note = collected.note("")
    if note:
        run.notes.append(note)
    if any(record.stated_score is not None for record in run.records):
        run.notes.append(_NOT_COMPARED if note else comparison(run))
    return run, note


def _end(source: Source, reader: LogReader, mapping: Mapping[str, str], any_record: bool) -> None:
    run = reader.finish()
    source.foreign_lines.check(source.path)
    if not any_record:
        raise LogError(source.path, None, "no METRICS line: there is nothing to score")
    if mapping:
        run.notes.append("--map is not needed for this format and was not used")


def _batches(source: Source, reader: LogReader) -> Iterator[list[Record]]:
    """Records, some at a time."""
    for number, chunk in source.chunks():
        alike = _decoded(chunk, reader)
        if alike is not None:
            source.foreign_lines.good += len(alike)
            yield alike
            continue
        # One a time: where a line is wrong, those before it have been read.
        for at, line in enumerate(chunk.splitlines(keepends=True), start=number):
            try:
                record = reader.take(at, source.decoded(at, line).encode())
            except LogError as error:
                is_object = object_on(line) is not None
                if (at == 1 or is_object) and not source.foreign_lines.forgiving:
                    raise
                problem = error.problem if is_object else f"no JSON object: {shown(line)}"
                of_record = line.lstrip().startswith(b"{")
                source.foreign_lines.add(at, problem, of_record=of_record)
                continue
            if reader.run.id == _UNNAMED:
                reader.run.id = run_name(source.path)
            source.foreign_lines.good += 1
            if record is not None:
                yield [record]


def _decoded(chunk: bytes, reader: LogReader) -> list[Record] | None:
    """The records, if all lines are METRICS and plain; None where one wants a closer look."""
    decoded = records_from_lines(chunk, ours=reader.ours)
    if decoded is None:
        return None
    records, reader.ours = decoded
    return records


def _forget_repeated(run: Run) -> list[str]:
    """Drop a stated signal from the lines that lack what the others compute it from.

    A program that logs ΔL on every line, and a validation loss on some, repeats the last ΔL on
    the others; taken as observations the copies would fill the window that it is normalised
    over. No such log was found: this is a precaution.
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


READER = Reader(
    "experiment log (JSONL)", lambda head: _EVENT.search(head) is not None, stream, follows=True
)
