"""Logs that collectors keep as JSON: a record on each line, or one document with a list of them.

Cloud Logging, CloudWatch, Elastic and its shippers, fluentd, Loki, Datadog, Splunk, the journal and
docker wrap each line of a program in an object that states when and where it was written. A
program that writes JSON itself is left alone, as its fields are its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from itertools import chain, islice, pairwise
from operator import itemgetter
from typing import Any, AnyStr

import orjson

from rmetric.diagnosis.reading.exported import TEXT_KEYS, TIME_KEYS, WRITER_KEYS, line_of, place
from rmetric.diagnosis.reading.timestamps import DATE_TIME

_PROGRAMS, _PROCESSES = ("syslog_identifier",), ("_pid", "syslog_pid")
#: Payloads that are the text themselves where they have no message.
_PAYLOADS = ("jsonPayload", "protoPayload")
#: Keys by which a payload is a program's own record, beside its message.
_OF_TRAINING = frozenset(("step", "global_step", "iteration", "loss", "rank"))
#: Keys that only collectors write.
_KEYS_OF_COLLECTORS = frozenset(
    (
        "textPayload", *_PAYLOADS, "_source", "logStreamName", "log_stream", "ingestionTime",
        "__REALTIME_TIMESTAMP", "LogEntry", "LogMessage",
    )
)  # fmt: skip
#: Keys beside "log" that state which container wrote it, and those that may stand there alone.
_ORIGINS = frozenset(("stream", "container_id", "container_name"))
_BESIDE_A_LINE = frozenset(("log", "attrs", *TIME_KEYS))
_TIMES_OF_EVENTS = {"lastTimestamp", "firstTimestamp", "eventTime"}
#: Bytes in which the list of a document begins, and those of it that are read; what stands
#: before the first item of a list, and before the next.
_NEAR, _MOST = 4096, 1 << 28
_LIST, _NEXT = re.compile(r"\[\s*(?=\{)"), re.compile(r"[,\s]*(?=\{)")
#: Records of which one must be a collector's, and those by which the order of all is known.
_FIRST, _SAMPLE = 5, 1000
#: Least number of times that fall, and largest share of such that rise, where the newest is first.
MIN_FALLS, MAX_RISES = 3, 0.02
#: Bytes of a record, of those given at a time; forms of records that are remembered.
_LONGEST, _BLOCK, _FORMS = 1 << 22, 1 << 20, 1000
_DEEPEST = 6
_FOREIGN = re.compile(r"[^\w.-]+")
_STAMP = re.compile(rf"{DATE_TIME}\S*")
#: A stream of SageMaker, of which prefixes.py knows the host.
_SAGEMAKER = re.compile(r"[\w.-]+(?:/[\w.-]+)*/algo-\d+-\d{10}")

#: Line of the file, time, lines of text.
_Entry = tuple[int, str, list[bytes]]


class JsonRecords:
    """Gives the lines that the records of a file hold, the oldest first.

    Attributes:
        listed: they are the items of a list in one document.
        pieces: (number of a line that was given, line of its record), both from 1, wherever the
            distance of the two changes.
    """

    def __init__(self, *, listed: bool) -> None:
        self.listed = listed
        self.pieces: list[tuple[int, int]] = []
        #: keys of a record -> those of its text, time, writer, program and process
        self._places: dict[tuple[str, ...], list[str]] = {}
        #: records are streams with all their lines
        self._by_stream = False

    @classmethod
    def of(cls, head: bytes) -> JsonRecords | None:
        """The records of a file that begins so; None for any other log.

        >>> JsonRecords.of(b'{"textPayload": "step 3"}').listed
        False
        >>> JsonRecords.of(b'{"events": [{"message": "step 3", "ingestionTime": 1}]}').listed
        True
        >>> JsonRecords.of(b'{"time": "2025-05-06T17:39:56Z", "message": "step", "loss": 2.5}')
        """
        if head.lstrip()[:1] not in (b"{", b"["):
            return None
        lines = islice(filter(None, map(bytes.strip, head.split(b"\n", 99))), _FIRST)
        if any(map(_of_collector, map(_record, lines))):
            return cls(listed=False)
        text = head.decode("utf-8", "replace")
        found = _LIST.search(text, 0, _NEAR)
        try:
            record = json.JSONDecoder().raw_decode(text, found.end())[0] if found else None
        except (ValueError, RecursionError):
            return None
        return cls(listed=True) if _of_collector(record) else None

    def blocks(self, blocks: Iterator[bytes], *, may_turn: bool = True) -> Iterator[bytes]:
        """Blocks of the lines that the records in blocks of the file hold."""
        records = self._listed(blocks) if self.listed else self._of_lines(blocks)
        first = list(islice(records, _SAMPLE))
        records = chain(first, records)
        if may_turn and self._by_stream:
            records = iter(sorted(records, key=itemgetter(1)))
        elif may_turn and newest_first([time for _, time, _ in first if time], MIN_FALLS):
            records = reversed([*records])
        number = apart = 0
        self.pieces, given = [], bytearray()
        for at, _, lines in records:
            for line in lines:
                number += 1
                if at - number != apart:
                    apart = at - number
                    self.pieces.append((number, at))
                given += line + b"\n"
            if len(given) >= _BLOCK:
                yield bytes(given)
                given.clear()
        if given:
            yield bytes(given)

    def _of_lines(self, blocks: Iterator[bytes]) -> Iterator[_Entry]:
        number, held = 0, b""
        for block in chain(blocks, [None]):
            *lines, held = [held] if block is None else (held + block).split(b"\n")
            for line in lines:
                number += 1
                record = _record(line) if line[:1] == b"{" else None
                if record is None:
                    yield number, "", [line]
                else:
                    yield from self._read(number, record, line)
            if len(held) > _LONGEST:
                yield number + 1, "", [held]
                held = b""

    def _listed(self, blocks: Iterator[bytes]) -> Iterator[_Entry]:
        data = bytearray()
        for block in blocks:
            data += block
            if len(data) > _MOST:
                break
        text = data.decode("utf-8", "replace")
        found, decoder, number, before = _LIST.search(text), json.JSONDecoder(), 1, 0
        while found:
            at = found.end()
            number, before = number + text.count("\n", before, at), at
            try:
                record, end = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):  # cut off
                rest = text[at:].encode().splitlines()
                yield from ((number + more, "", [line]) for more, line in enumerate(rest))
                return
            yield from self._read(number, record, text[at:end].encode())
            found = _NEXT.match(text, end) or _LIST.search(text, end)

    def _read(self, number: int, record: Mapping[str, Any], raw: bytes) -> Iterator[_Entry]:
        """The entries of the record that begins in a line."""
        values, labels = record.get("values"), record.get("stream")
        if not (isinstance(values, list) and isinstance(labels, dict)):
            yield number, *self._entry(record, raw)
            return
        self._by_stream = True  # as Loki answers
        said = [one for one in values if isinstance(one, list) and len(one) > 1]
        if said and said[0][0] > said[-1][0]:
            said.reverse()
        for time, line, *_ in said:
            yield number, *self._entry({"labels": labels, "timestamp": time, "line": line}, b"")

    def _entry(self, record: Mapping[str, Any], raw: bytes) -> tuple[str, list[bytes]]:
        """Its time, and its lines as the tools of the collectors print them."""
        source = record.get("_source")
        record = source if isinstance(source, dict) else record
        flat = dict(_flat(record))
        keys = tuple(flat)
        if keys not in self._places:
            if len(self._places) >= _FORMS:
                self._places.clear()
            every = (TEXT_KEYS, TIME_KEYS, WRITER_KEYS, _PROGRAMS, _PROCESSES)
            self._places[keys] = [place(keys, known) for known in every]
        of_text, of_time, of_writer, of_program, of_process = self._places[keys]
        text = _event(record) if _is_event(record) else _text(flat.get(of_text))
        for name in _PAYLOADS:
            payload = record.get(name)
            if isinstance(payload, dict) and (not of_text or _OF_TRAINING & payload.keys()):
                text = orjson.dumps(payload).decode("utf-8", "replace")
        if text is None:
            return "", [raw.replace(b"\n", b" ")]
        time, writer = _time(flat.get(of_time)), str(flat.get(of_writer, ""))
        said = text.rstrip("\n").split("\n")
        if of_program and writer:
            process, program = flat.get(of_process), flat[of_program]
            ended = f"[{process}]" if process and program != "kernel" else ""
            host = _FOREIGN.sub("-", writer)
            lines = [f"{time} {host} {program}{ended}: {line}" for line in said]
        elif _SAGEMAKER.fullmatch(writer):
            lines = [f"{time} {writer} {line}" for line in said]
        else:
            lines = [line_of(time, writer, line) for line in said]
        return time, [line.encode("utf-8", "replace") for line in lines]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None


def _of_collector(record: Any) -> bool:
    if not isinstance(record, dict):
        return False
    keys, objects = record.keys(), {key for key, one in record.items() if isinstance(one, dict)}
    return bool(
        _KEYS_OF_COLLECTORS & keys
        or "kubernetes" in objects
        # docker and the runtimes of Kubernetes
        or ("log" in keys and (_ORIGINS & keys or keys <= _BESIDE_A_LINE))
        or ("labels" in objects and "line" in keys)
        or ("stream" in objects and isinstance(record.get("values"), list))
        or ("attributes" in objects and "message" in record["attributes"])
        or ("result" in objects and "_raw" in record["result"])
        or _is_event(record)
        or ({"@timestamp", "message"} <= keys and objects & {"agent", "host", "ecs"})
    )


def _is_event(record: Mapping[str, Any]) -> bool:
    """True for an event of Kubernetes."""
    return {"reason", "message"} <= record.keys() and bool(_TIMES_OF_EVENTS & record.keys())


def _event(record: Mapping[str, Any]) -> str:
    """An event as `kubectl get events` prints it."""
    of = record.get("involvedObject", record.get("regarding", record))
    of = of if isinstance(of, dict) else {}
    name = f"{str(of.get('kind', '')).lower()}/{of.get('name', '')}"
    return f"{record.get('type', '')} {record['reason']} {name} {record['message']}"


def _flat(record: Mapping[str, Any], before: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        name = f"{before}{key.lower()}"
        if not isinstance(value, dict):
            yield name, value
        elif depth < _DEEPEST:
            yield from _flat(value, f"{name}.", depth + 1)


def _text(value: Any) -> str | None:
    if isinstance(value, list):  # as the journal writes what is no UTF-8
        try:
            return bytes(value).decode("utf-8", "replace")
        except (TypeError, ValueError):
            return None
    return value if isinstance(value, str) else None


def _time(value: Any) -> str:
    """A time in ISO 8601; "" for what is none.

    >>> _time(1746553196123), _time("1746553196123456789"), _time("yesterday")
    ('2025-05-06T17:39:56.123Z', '2025-05-06T17:39:56.123Z', '')
    """
    if isinstance(value, str) and _STAMP.match(value):
        return value.strip().replace(" ", "T", 1).replace(" ", "")
    try:
        seconds = float(value)
        while seconds > 1e11:  # milli-, micro- or nanoseconds
            seconds /= 1000
        date = datetime.fromtimestamp(seconds, timezone.utc) if seconds > 1e8 else None
    except (TypeError, ValueError, OverflowError, OSError):
        return ""
    return "" if date is None else f"{date.isoformat(timespec='milliseconds')[:-6]}Z"


def newest_first(times: Sequence[AnyStr], least: int) -> bool:
    """True for times that fall so often at least, and hardly ever rise."""
    rises = sum(before < after for before, after in pairwise(times))
    falls = sum(before > after for before, after in pairwise(times))
    return falls >= least and rises <= MAX_RISES * falls
