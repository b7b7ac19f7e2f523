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
from rmetric.records import Record, Run

_EVENT = re.compile(r'"event"\s*:\s*"(EXPERIMENT_\w+|METRICS|FAULT_INJECTED)"')
_NOT_COMPARED = (
    "the logged r_metric was not checked: the R computed here is of the records that were kept"
)
#: What the monitor calls a run that its user gave no name.
_UNNAMED = "run"


def stream(source: Source, mapping: Mapping[str, str]) -> Stream:
    reader = LogReader(source.path)
    runs: dict[str, Run] = {}

    def batches() -> Batches:
        for records in _batches(source, reader):
            if records:
                runs[reader.run.id] = reader.run  # its id may change with a line of the log
            yield reader.run.id, records
        _end(source, reader, mapping, any_record=bool(runs))

    return Stream(batches=batches(), runs=runs)


def compare(run: Run, *, thinned: bool) -> None:
    """Note whether R, computed again, is the one that the log states.

    That of a run of which some records were dropped is not compared.
    """
    if any(record.stated_score is not None for record in run.records):
        run.notes.append(_NOT_COMPARED if thinned else comparison(run))


def _end(source: Source, reader: LogReader, mapping: Mapping[str, str], any_record: bool) -> None:
    run = reader.finish()
    source.foreign_lines.check(source.path)
    if not any_record:
        raise LogError(source.path, None, "no METRICS line: there is nothing to score")
    if mapping:
        run.notes.append("--map is not needed for this format and was not used")


def _batches(source: Source, reader: LogReader) -> Iterator[list[Record]]:
    for number, chunk in source.chunks():
        decoded = records_from_lines(chunk, ours=reader.ours)
        if decoded is not None:  # all lines are METRICS and plain
            alike, reader.ours = decoded
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


READER = Reader(
    "experiment log (JSONL)", lambda head: _EVENT.search(head) is not None, stream, follows=True
)
