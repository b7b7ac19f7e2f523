"""Tables of log lines, as consoles and collectors of logs export them: a column for each part."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rmetric.diagnosis.reading.timestamps import DATE_TIME, ZONE

#: Names of columns, and ends of the dotted keys of records (json_records.py), in lower case; of
#: several the first here counts.
TIME_KEYS = (
    "__realtime_timestamp", "timestamp", "@timestamp", "_time", "time", "timegenerated", "ts",
    "datetime", "date", "last_timestamp", "lasttimestamp", "eventtime", "firsttimestamp",
)  # fmt: skip
TEXT_KEYS = (
    "textpayload", "text_payload", "jsonpayload.message", "jsonpayload.log", "jsonpayload.msg",
    "result._raw", "attributes.message", "message", "msg", "_raw", "log", "line", "body", "content",
    "logentry", "logmessage",
)  # fmt: skip
WRITER_KEYS = (
    "pod_name", "pod.name", "podname", "pod", "compute.googleapis.com/resource_name", "task_name",
    "replica", "logstreamname", "log_stream", "kubernetes.host", "_hostname", "host.name",
    "hostname", "host", "node", "node_name", "node_id", "instance", "instance_id",
    "container_name", "container.name", "container",
)  # fmt: skip
#: Those of Kubernetes' events that stand before the text, as `kubectl get events` prints them.
_OF_EVENTS = ("type", "reason", "object")
#: The zone or unit behind a column's name.
_UNIT = re.compile(r"\(\w+\)$")
_DELIMITERS = "\t,;"
_FOREIGN = re.compile(r"[^\w.-]+", re.ASCII)
#: The cells of a table without names: a time, a level or none, who wrote the line, and the line.
_NAMELESS = re.compile(
    rf"{DATE_TIME}{ZONE}?\t(?P<level>[A-Z]{{4,9}}\t)?(?=[^\t]*\d)[A-Za-z][\w.-]*\t[^\t]*"
)
#: Columns of a table; a line of a log may have a few of these words too.
MIN_COLUMNS = 3


def place(keys: Iterable[str], known: Sequence[str]) -> str:
    """The key that is known, or ends in a known one behind a dot; "" for none.

    >>> place(["a.pod_name", "host"], WRITER_KEYS)
    'a.pod_name'
    """
    keys = list(keys)
    ways = (key for name in known for key in keys if key == name or key.endswith(f".{name}"))
    return next(ways, "")


def line_of(time: str, writer: str, text: str) -> str:
    """A line as `kubectl logs --prefix --timestamps` prints it.

    A writer without a number is none: a service of the platform.
    """
    said = f"{time} {text}" if time else text
    return f"[pod/{_FOREIGN.sub('-', writer)}] {said}" if re.search("[0-9]", writer) else said


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Makes a line of each row.

    The level is left out: collectors give that of the stream, "ERROR" for all of stderr.

    Attributes:
        delimiter: one character.
        columns: their number.
        time, text: places of these columns.
        writer: that of who wrote the line; None without one.
        event: those of an event's kind and object, which its line begins with.
    """

    delimiter: str
    columns: int
    time: int
    text: int
    writer: int | None
    event: tuple[int, ...] = ()

    @classmethod
    def of(cls, first: bytes) -> Exported | None:
        r"""The table that begins with such a line; None for any other log.

        >>> Exported.of(b"TIMESTAMP,SEVERITY,POD,MESSAGE").text
        3
        >>> Exported.of(b"2025-05-06T17:39:56Z\tERROR\tfit-0-1\tstep 3").writer
        2
        >>> Exported.of(b"time, host, message: each of them")
        """
        row = first.decode("utf-8", "replace")
        if found := _NAMELESS.fullmatch(row):
            last = 3 if found["level"] else 2
            return cls(delimiter="\t", columns=last + 1, time=0, text=last, writer=last - 1)
        for delimiter in _DELIMITERS:
            if row.count(delimiter) < MIN_COLUMNS - 1:
                continue  # as nearly every log's
            names = [_UNIT.sub("", name.lower()) for name in _cells(row, delimiter)]
            every = (TIME_KEYS, TEXT_KEYS, WRITER_KEYS)
            time, text, writer = (place(names, known) for known in every)
            if len(names) >= MIN_COLUMNS and all(map(_is_name, names)) and time and text:
                plain = [name.rpartition(".")[2] for name in names]
                of_event = set(_OF_EVENTS) <= set(plain)
                return cls(
                    delimiter=delimiter, columns=len(names),
                    time=names.index(time), text=names.index(text),
                    writer=None if of_event or not writer else names.index(writer),
                    event=tuple(map(plain.index, _OF_EVENTS)) if of_event else (),
                )  # fmt: skip
        return None

    def lines(self, rows: Sequence[bytes]) -> list[bytes]:
        r"""The lines of the rows; one that is none stays: the text of the row before goes on.

        >>> table = Exported.of(b"TIMESTAMP\tSEVERITY\tTASK_NAME\tMESSAGE")
        >>> table.lines([b"2025-05-06T17:39:56Z\tERROR\tworker-1\tstep 3", b"of 9"])
        [b'[pod/worker-1] 2025-05-06T17:39:56Z step 3', b'of 9']
        """
        return [self._line(row) for row in rows]

    def _line(self, raw: bytes) -> bytes:
        row = raw.decode("utf-8", "surrogateescape")
        if row.count(self.delimiter) < self.columns - 1:
            return raw.removesuffix(b'"')
        if '"' not in row and (self.event or self.text == self.columns - 1):
            cells = row.split(self.delimiter, self.columns - 1)
        else:  # the text may go on in the next row, so its quote may be open
            cells = _cells(row, self.delimiter)
        if len(cells) < self.columns:
            return raw
        said = " ".join(cells[at].strip() for at in (*self.event, self.text))
        writer = "" if self.writer is None else cells[self.writer]
        line = line_of(cells[self.time].strip(), writer, said)
        return line.encode("utf-8", "surrogateescape")


def _is_name(name: str) -> bool:
    return bool(name) and " " not in name and name == name.strip()


def _cells(row: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([row], delimiter=delimiter), [])
    except csv.Error:  # a carriage return, or a field that is too long
        return []
