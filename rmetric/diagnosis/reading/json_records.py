"""Logs that collectors keep as JSON: a record on each line, or one document with a list of them.

Cloud Logging, CloudWatch, Elastic and its shippers, fluentd, Loki, Datadog, Splunk, the journal and
docker wrap each line of a program in an object that states when and where it was written. A
program that writes JSON itself is left alone, as its fields are its text.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from itertools import chain, islice, pairwise
from operator import itemgetter
from typing import Any, AnyStr, NamedTuple

import orjson

#: Where the text, the time and the writer stand: ends of dotted keys in lower case; the first
#: that a record has counts.
_TEXTS = (
    "textpayload", "jsonpayload.message", "jsonpayload.log", "jsonpayload.msg", "_source.message",
    "_source.log", "result._raw", "attributes.message", "message", "log", "line", "logentry",
    "logmessage",
)  # fmt: skip
_TIMES = (
    "__realtime_timestamp", "timestamp", "@timestamp", "result._time", "time", "timegenerated",
    "ts", "date", "lasttimestamp", "eventtime", "firsttimestamp",
)  # fmt: skip
_WRITERS = (
    "pod_name", "pod.name", "podname", "pod", "compute.googleapis.com/resource_name", "task_name",
    "logstreamname", "log_stream", "kubernetes.host", "_hostname", "host.name", "hostname", "host",
    "node_name", "node_id", "instance_id", "container_name", "container.name",
)  # fmt: skip
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
#: Keys beside "log" that state which container wrote it.
_ORIGINS = frozenset(("stream", "container_id", "container_name"))
#: Bytes in which the list of a document begins, and its beginning.
_NEAR = 4096
_LIST = re.compile(r"\[\s*(?=\{)")
#: Records of which one must be a collector's, and those by which the order of all is known.
_FIRST, _SAMPLE = 5, 1000
#: Least number of times that fall, and largest share of such that rise, where the newest is first.
MIN_FALLS, MAX_RISES = 3, 0.02
#: Bytes of a record, of those given at a time.
_LONGEST, _BLOCK = 1 << 22, 1 << 20
_DEEPEST = 6
_FOREIGN = re.compile(r"[^\w.-]+")
_STAMP = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*")
#: A stream of SageMaker, of which prefixes.py knows the host.
_SAGEMAKER = re.compile(r"[\w.-]+(?:/[\w.-]+)*/algo-\d+-\d{10}")


#: Line of the file, time, lines of text.
_Entry = tuple[int, str, list[bytes]]


class _Places(NamedTuple):
    """Dotted keys of the parts of records that have the same keys; "" for none."""

    text: str
    time: str
    writer: str
    program: str
    process: str


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
        self._places: dict[tuple[str, ...], _Places] = {}
        #: records are streams with all their lines
        self._by_stream = False

    @classmethod
    def of(cls, head: bytes) -> JsonRecords | None:
        """The records of a file that begins so; None for any other log.

        >>> JsonRecords.of(b'{"textPayload": "step 3", "timestamp": "2025-05-06T17:39:56Z"}')
        JsonRecords(listed=False)
        >>> JsonRecords.of(b'{"events": [{"message": "step 3", "ingestionTime": 1}]}').listed
        True
        >>> JsonRecords.of(b'{"time": "2025-05-06T17:39:56Z", "message": "step", "loss": 2.5}')
        """
        if head.lstrip()[:1] not in (b"{", b"["):
            return None
        for line in islice(filter(None, map(bytes.strip, head.split(b"\n", 99))), _FIRST):
            record = _record(line)
            if record is not None and _of_collector(record):
                return cls(listed=False)
        text = head.decode("utf-8", "replace")
        found = _LIST.search(text, 0, _NEAR)
        if found is not None:
            try:
                record, _ = json.JSONDecoder().raw_decode(text, found.end())
            except (ValueError, RecursionError):
                return None
            if _of_collector(record):
                return cls(listed=True)
        return None

    def __repr__(self) -> str:
        return f"JsonRecords(listed={self.listed})"

    def blocks(self, blocks: Iterator[bytes], *, may_turn: bool = True) -> Iterator[bytes]:
        """Blocks of the lines that the records in blocks of the file hold.

        Args:
            blocks: UTF-8.
            may_turn: turn a file round whose newest record comes first; it is held in memory.
        """
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
        decoder, decode = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8")("replace")
        text, at, number, inside, counted = "", 0, 1, False, 0
        for block in chain(blocks, [b""]):
            text, at, counted = text[at:] + decode.decode(block, final=not block), 0, 0
            while True:
                if not inside:
                    found = _LIST.search(text, at)
                    if found is None:
                        break
                    at, inside = found.end(), True
                while text[at : at + 1] in {",", " ", "\n", "\r", "\t"}:
                    at += 1
                if text[at : at + 1] != "{":
                    inside = at >= len(text)
                    if inside:
                        break
                    continue
                try:
                    record, end = decoder.raw_decode(text, at)
                except (ValueError, RecursionError):
                    break  # it goes on in the next block
                number += text.count("\n", counted, at)
                yield from self._read(number, record, text[at:end].encode())
                counted, at = at, end
            number += text.count("\n", counted, at)
            if not inside:
                at = max(at, len(text) - _NEAR)
            elif len(text) - at > _LONGEST:  # no end of it is to be seen
                at, inside = len(text), False
        rest = text[at:].encode()
        if inside and rest.strip():  # cut off
            for line in rest.splitlines():
                yield number, "", [line]
                number += 1

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
        """Its time, and its lines as `kubectl logs --prefix --timestamps` prints them."""
        source = record.get("_source")
        record = source if isinstance(source, dict) else record
        flat = dict(_flat(record))
        keys = tuple(flat)
        places = self._places.get(keys)
        if places is None:
            if len(self._places) > 1000:
                self._places.clear()
            every = (_TEXTS, _TIMES, _WRITERS, _PROGRAMS, _PROCESSES)
            places = self._places[keys] = _Places(*(_place(keys, known) for known in every))
        text = _event(record) if _is_event(record) else _text(flat.get(places.text))
        for name in _PAYLOADS:
            payload = record.get(name)
            if isinstance(payload, dict) and (not places.text or _OF_TRAINING & payload.keys()):
                text = orjson.dumps(payload).decode("utf-8", "replace")
        if text is None:
            return "", [raw.replace(b"\n", b" ")]
        time, writer = _time(flat.get(places.time)), str(flat.get(places.writer, ""))
        if places.program and writer:
            process = flat.get(places.process)
            program = flat[places.program]
            ended = f"[{process}]" if process and program != "kernel" else ""
            before = f"{time} {_FOREIGN.sub('-', writer)} {program}{ended}: "
        elif _SAGEMAKER.fullmatch(writer):
            before = f"{time} {writer} "
        else:
            before = f"{time} " if time else ""
            if any(map(str.isdigit, writer)):  # a service of the platform has no number
                before = f"[pod/{_FOREIGN.sub('-', writer)}] {before}"
        said = text.rstrip("\n").split("\n")
        return time, [f"{before}{line}".encode("utf-8", "replace") for line in said]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None


def _of_collector(record: Any) -> bool:
    if not isinstance(record, dict):
        return False
    within = {key for key, value in record.items() if isinstance(value, dict)}
    keys = record.keys()
    return bool(
        _KEYS_OF_COLLECTORS & keys
        or "kubernetes" in within
        # docker and the runtimes of Kubernetes: a line with its origin, or with its time alone
        or ("log" in keys and (_ORIGINS & keys or keys <= {"log", "attrs", *_TIMES}))
        or ("labels" in within and "line" in keys)
        or ("stream" in within and isinstance(record.get("values"), list))
        or ("attributes" in within and "message" in record["attributes"])
        or ("result" in within and "_raw" in record["result"])
        or _is_event(record)
        or ({"@timestamp", "message"} <= keys and within & {"agent", "host", "ecs"})
    )


def _is_event(record: Mapping[str, Any]) -> bool:
    """True for an event of Kubernetes."""
    return {"reason", "message"} <= record.keys() and bool(
        {"lastTimestamp", "firstTimestamp", "eventTime"} & record.keys()
    )


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


def _place(keys: tuple[str, ...], known: tuple[str, ...]) -> str:
    for name in known:
        for key in keys:
            if key == name or key.endswith(f".{name}"):
                return key
    return ""


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
