"""Exports of log collectors: JSON records on lines or in a list of one document, and tables.

Cloud Logging, CloudWatch, Elastic and its shippers, fluentd, Loki, Datadog, Splunk, the journal and
docker state of each line of a program when and where it was written. A program that writes JSON
itself is left alone, as its fields are its text.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from datetime import datetime, timezone
from functools import lru_cache, partial
from itertools import chain, islice, pairwise
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson
from msgspec import Struct, convert

from rmetric._util.lazy import read_yaml


class RecordForm(Struct, frozen=True):
    """Keys by which a record is a collector's: a row of collectors.yaml."""

    example: dict[str, Any]
    all: frozenset[str] = frozenset()
    any: frozenset[str] = frozenset()

    def fits(self, keys: Set[str]) -> bool:
        """True for a record with these `keys_of`."""
        return self.all <= keys and not (self.any and self.any.isdisjoint(keys))


_COLLECTORS = read_yaml(Path(__file__).with_name("collectors.yaml"))
#: Part of a record -> the names of its keys, of which the first counts.
_KEYS = convert(_COLLECTORS["parts"], dict[str, tuple[str, ...]])
#: Collector, or a kind of its records -> their form.
RECORD_FORMS = convert(_COLLECTORS["records"], dict[str, RecordForm])
_EVENT = RECORD_FORMS["event of Kubernetes"]
#: Columns of Kubernetes' events that stand before the text, as `kubectl get events` prints them.
_OF_EVENTS = ("type", "reason", "object")
#: Payloads that are the text themselves where they have no message, or one of training beside it.
_PAYLOADS = ("jsonPayload", "protoPayload")
_OF_TRAINING = frozenset(("step", "global_step", "iteration", "loss", "rank"))
#: Bytes in which the list of a document begins, and those of it that are read.
_NEAR, _MAX_DOCUMENT_BYTES = 4096, 1 << 28
_LIST, _NEXT = re.compile(r"\[\s*(?=\{)"), re.compile(r"[,\s]*(?=\{)")
#: Records of which one must be a collector's, and those by which the order of all is known.
_FIRST, _SAMPLE = 5, 1000
#: Bytes of a log without records in which its order is sought.
_SEEN = 1 << 16
#: Least number of times that fall, and largest share of such that rise, where the newest is first.
MIN_FALLS, MAX_RISES = 3, 0.02
#: Bytes of a record, and of those given at a time.
_LONGEST, _BLOCK = 1 << 22, 1 << 20
_MAX_NESTING = 6
_FOREIGN = re.compile(r"[^\w.-]+", re.ASCII)
_DATE_TIME = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?"
_STAMP, _TIME = re.compile(rf"{_DATE_TIME}\S*"), re.compile(_DATE_TIME.encode())
#: The zone or unit behind a column's name.
_UNIT = re.compile(r"\(\w+\)$")
#: A row of a table without names: a time, a level or none, who wrote the line, and the line.
_NAMELESS = re.compile(
    rf"{_DATE_TIME}(?:Z|[+-]\d\d:?\d\d)?\t(?:[A-Z]{{4,9}}\t)?(?=[^\t]*\d)[A-Za-z][\w.-]*\t[^\t]*"
)
#: Columns of a table; a line of a log may have a few of these words too.
MIN_COLUMNS = 3

#: Line of the file, time, lines of text.
_Entry = tuple[int, str, list[str]]


class Export:
    """Gives the lines that the records of a file hold, the oldest first.

    Attributes:
        pieces: (number of a line that was given, line of its record), both from 1, wherever the
            distance of the two changes.
    """

    def __init__(self, read: Callable[[Iterator[bytes]], Iterator[_Entry]]) -> None:
        self._read = read
        self.pieces: list[tuple[int, int]] = []

    @classmethod
    def of(cls, head: bytes) -> Export | None:
        """The export that begins so; None for any other log.

        >>> Export.of(b'{"textPayload": "step 3"}') is None
        False
        >>> Export.of(b'{"time": "2025-05-06T17:39:56Z", "message": "step", "loss": 2.5}')
        """
        if head.lstrip()[:1] not in (b"{", b"["):
            if table := _columns(head.partition(b"\n")[0].decode("utf-8", "replace")):
                return cls(partial(_rows, *table))
            times = [time for _, time, _ in _plain(iter([head[:_SEEN]])) if time]
            return cls(_plain) if _fall(times, 10) else None
        lines = islice(filter(None, map(bytes.strip, head.split(b"\n", 99))), _FIRST)
        if any(map(_of_collector, map(_record, lines))):
            return cls(_of_lines)
        text = head.decode("utf-8", "replace")
        found = _LIST.search(text, 0, _NEAR)
        try:
            record = json.JSONDecoder().raw_decode(text, found.end())[0] if found else None
        except (ValueError, RecursionError):
            return None
        return cls(_listed) if _of_collector(record) else None

    def blocks(self, blocks: Iterator[bytes], *, may_turn: bool = True) -> Iterator[bytes]:
        """Blocks of the lines that the records in blocks of the file hold."""
        records = self._read(blocks)
        first = list(islice(records, _SAMPLE))
        records = chain(first, records)
        if may_turn and _fall([time for _, time, _ in first if time], MIN_FALLS):
            records = reversed([*records])
        number = apart = 0
        self.pieces, given = [], bytearray()
        for at, _, lines in records:
            for line in lines:
                number += 1
                if at - number != apart:
                    apart = at - number
                    self.pieces.append((number, at))
                given += line.encode("utf-8", "surrogateescape") + b"\n"
            if len(given) >= _BLOCK:
                yield bytes(given)
                given.clear()
        if given:
            yield bytes(given)


def _fall(times: Sequence[str], least: int) -> bool:
    """True for times that fall so often at least, and hardly ever rise: the newest is first."""
    rises = sum(before < after for before, after in pairwise(times))
    falls = sum(before > after for before, after in pairwise(times))
    return falls >= least and rises <= MAX_RISES * falls


def _plain(blocks: Iterator[bytes]) -> Iterator[_Entry]:
    """Lines without records, which a console may give the newest first."""
    for number, line in _lines(blocks):
        found = _TIME.search(line, 0, 120)
        yield number, found[0].decode() if found else "", [line.decode("utf-8", "surrogateescape")]


def _of_lines(blocks: Iterator[bytes]) -> Iterator[_Entry]:
    for number, line in _lines(blocks):
        record = _record(line) if line[:1] == b"{" else None
        text = line.decode("utf-8", "surrogateescape")
        yield (number, "", [text]) if record is None else (number, *_entry(record, text))


def _lines(blocks: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers; an endless one in parts."""
    number, held = 0, b""
    for block in blocks:
        *lines, held = (held + block).split(b"\n")
        for line in lines:
            number += 1
            yield number, line
        if len(held) > _LONGEST:
            yield number + 1, held
            held = b""
    if held:
        yield number + 1, held


def _listed(blocks: Iterator[bytes]) -> Iterator[_Entry]:
    data = bytearray()
    for block in blocks:
        data += block
        if len(data) > _MAX_DOCUMENT_BYTES:
            break
    text, streams = data.decode("utf-8", "replace"), list[_Entry]()
    found, decoder, number, before = _LIST.search(text), json.JSONDecoder(), 1, 0
    while found:
        at = found.end()
        number, before = number + text.count("\n", before, at), at
        try:
            record, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):  # cut off
            rest = enumerate(text[at:].split("\n"), number)
            yield from ((place, "", [line]) for place, line in rest)
            break
        values, labels = record.get("values"), record.get("stream")
        if isinstance(values, list) and isinstance(labels, dict):  # a stream of Loki, all its lines
            pairs = [pair for pair in values if isinstance(pair, list) and len(pair) > 1]
            for time, line, *_ in pairs[:: -1 if pairs and pairs[0][0] > pairs[-1][0] else 1]:
                entry = {"labels": labels, "timestamp": time, "line": line}
                streams.append((number, *_entry(entry, "")))
        else:
            yield number, *_entry(record, text[at:end])
        found = _NEXT.match(text, end) or _LIST.search(text, end)
    yield from sorted(streams, key=itemgetter(1))


@lru_cache(maxsize=1000)
def _places(keys: tuple[str, ...]) -> list[str]:
    """Keys of a record's text, time, writer, program and process; "" for none."""
    return [
        next((key for name in known for key in keys if f".{key}".endswith(f".{name}")), "")
        for known in _KEYS.values()
    ]


def _entry(
    record: Mapping[str, Any], raw: str, time_of: Callable[[Any], str] | None = None
) -> tuple[str, list[str]]:
    """The time of a record or row, and its lines as collectors' tools print them.

    The level is left out: collectors give that of the stream, "ERROR" for all of stderr.
    """
    source = record.get("_source")
    record = source if isinstance(source, dict) else record
    flat = dict(_flat(record))
    of_text, of_time, of_writer, of_program, of_process = _places(tuple(flat))
    text = _event(record) if _EVENT.fits(record.keys()) else _text(flat.get(of_text))
    for name in _PAYLOADS:
        payload = record.get(name)
        if isinstance(payload, dict) and (not of_text or _OF_TRAINING & payload.keys()):
            text = orjson.dumps(payload).decode("utf-8", "replace")
    if text is None:
        return "", [raw.replace("\n", " ")]
    time = (time_of or _time)(flat.get(of_time))
    writer = _FOREIGN.sub("-", str(flat.get(of_writer, "")))
    if of_program and writer:
        process, program = flat.get(of_process), flat[of_program]
        ended = f"[{process}]" if process and program != "kernel" else ""
        before = f"{time} {writer} {program}{ended}: "
    else:  # a writer without a number is none: a service of the platform
        before = f"[pod/{writer}] " if re.search("[0-9]", writer) else ""
        before += f"{time} " if time else ""
    return time, [before + line for line in text.rstrip("\n").split("\n")]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None


def keys_of(record: Mapping[str, Any]) -> set[str]:
    """Keys of a record, and as collectors.yaml writes them those of objects and lists in it."""
    lists = {f"{key}[]" for key, value in record.items() if isinstance(value, list)}
    objects = [(key, value) for key, value in record.items() if isinstance(value, dict)]
    return {*record, *lists, *(f"{key}{{{of}}}" for key, value in objects for of in ("", *value))}


def _of_collector(record: Mapping[str, Any] | None) -> bool:
    keys = keys_of(record or {})
    # docker's records of a line may have nothing else
    alone = {"log"} <= keys and (record or {}).keys() <= {"log", "attrs", *_KEYS["time"]}
    return alone or any(form.fits(keys) for form in RECORD_FORMS.values())


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
        elif depth < _MAX_NESTING:
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
        while inf > seconds > 1e11:  # milli-, micro- or nanoseconds
            seconds /= 1000
        date = datetime.fromtimestamp(seconds, timezone.utc) if seconds > 1e8 else None
    except (TypeError, ValueError, OverflowError, OSError):
        return ""
    return "" if date is None else f"{date.isoformat(timespec='milliseconds')[:-6]}Z"


def _columns(row: str) -> tuple[str, list[str]] | None:
    """What parts the columns of a table that begins so, and their names; None for another log."""
    if _NAMELESS.fullmatch(row):
        return "\t", ["time", *["level"] * (row.count("\t") - 2), "host", "message"]
    for delimiter in "\t,;":
        if row.count(delimiter) < MIN_COLUMNS - 1:
            continue  # as nearly every log's
        names = [_UNIT.sub("", name.lower()) for name in _cells(row, delimiter)]
        if all(re.fullmatch(r"\S+", name) for name in names) and all(_places(tuple(names))[:2]):
            return delimiter, names
    return None


def _rows(delimiter: str, names: list[str], blocks: Iterator[bytes]) -> Iterator[_Entry]:
    """The lines of a table's rows; a line that is not a row continues the row before."""
    of_text, of_time = _places(tuple(names))[:2]
    plain = {name.rpartition(".")[2]: name for name in names}
    event = [plain[name] for name in _OF_EVENTS] if {*_OF_EVENTS} <= plain.keys() else []
    for number, raw in _lines(blocks):
        row = raw.rstrip(b"\r").decode("utf-8", "surrogateescape")
        cells = row.split(delimiter, len(names) - 1)
        if '"' in row and len(cells) == len(names):  # a quote may be open, over several rows
            cells = _cells(row, delimiter)
        if len(cells) < len(names):
            yield number, "", [row.removesuffix('"')]
            continue
        record = dict(zip(names, map(str.strip, cells), strict=False))
        if event:  # as `kubectl get events` prints it
            text = " ".join(record[name] for name in (*event, of_text))
            record = {of_time: record[of_time], of_text: text}
        yield number, *_entry(record, row, str)  # times stay as they are written


def _cells(row: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([row], delimiter=delimiter), [])
    except csv.Error:  # a carriage return, or a field that is too long
        return []
