"""Tables of log lines, as consoles and collectors of logs export them: a column for each part."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass

#: Names of columns, in lower case and behind their last dot; of several the first here counts.
_TIMES = (
    "timestamp", "@timestamp", "_time", "time", "datetime", "date", "last_timestamp",
    "lasttimestamp", "eventtime",
)  # fmt: skip
_TEXTS = ("message", "textpayload", "text_payload", "msg", "_raw", "log", "line", "body", "content")
_WRITERS = (
    "pod_name", "pod", "task_name", "replica", "hostname", "host", "node", "instance", "log_stream",
    "logstreamname", "source", "container_name", "container",
)  # fmt: skip
#: Those of Kubernetes' events that stand before the text, as `kubectl get events` prints them.
_OF_EVENTS = ("type", "reason", "object")
#: The zone or unit behind a column's name.
_UNIT = re.compile(r"\(\w+\)$")
_DELIMITERS = "\t,;"
_FOREIGN = re.compile(rb"[^\w.-]+")
_NUMBERED = re.compile(rb"[0-9]")
#: The cells of a table without names: a time, a level, and the name of who wrote the line.
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?")
_LEVEL = re.compile(r"[A-Z]{4,9}")
_WRITER = re.compile(r"(?=.*\d)[A-Za-z][\w.-]*")
#: Columns of a table; a line of a log may have a few of these words too.
MIN_COLUMNS = 3


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Makes a line of each row, as `kubectl logs --prefix --timestamps` prints it.

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
        if found := cls._without_names(first):
            return found
        for delimiter in _DELIMITERS:
            if first.count(delimiter.encode()) < MIN_COLUMNS - 1:
                continue  # as nearly every log's
            names = _cells(first.decode("utf-8", "replace"), delimiter)
            plain = [_UNIT.sub("", name.lower().rpartition(".")[2]) for name in names]
            whole = all(name and name == name.strip() and " " not in name for name in names)
            time, text, writer = (_place(plain, known) for known in (_TIMES, _TEXTS, _WRITERS))
            if len(names) >= MIN_COLUMNS and whole and time is not None and text is not None:
                of_event = set(_OF_EVENTS) <= set(plain)
                return cls(
                    delimiter=delimiter, columns=len(names), time=time, text=text,
                    writer=None if of_event else writer,
                    event=tuple(map(plain.index, _OF_EVENTS)) if of_event else (),
                )  # fmt: skip
        return None

    @classmethod
    def _without_names(cls, first: bytes) -> Exported | None:
        """The table whose first row is a time, the level or none, the writer, and the text."""
        cells = first.decode("utf-8", "replace").split("\t")
        levels = cells[1:-2]
        if (
            not MIN_COLUMNS <= len(cells) <= MIN_COLUMNS + 1
            or not (_TIME.fullmatch(cells[0]) and _WRITER.fullmatch(cells[-2]))
            or not all(map(_LEVEL.fullmatch, levels))
        ):
            return None
        last = len(cells) - 1
        return cls(delimiter="\t", columns=len(cells), time=0, text=last, writer=last - 1)

    def lines(self, rows: Sequence[bytes]) -> list[bytes]:
        r"""The lines of the rows; one that is none stays: the text of the row before goes on.

        >>> table = Exported.of(b"TIMESTAMP\tSEVERITY\tTASK_NAME\tMESSAGE")
        >>> table.lines([b"2025-05-06T17:39:56Z\tERROR\tworker-1\tstep 3", b"of 9"])
        [b'[pod/worker-1] 2025-05-06T17:39:56Z step 3', b'of 9']
        """
        return [self._line(row) for row in rows]

    def _line(self, row: bytes) -> bytes:
        delimiter = self.delimiter.encode()
        if row.count(delimiter) < self.columns - 1:
            return row.removesuffix(b'"')
        if b'"' not in row and (self.event or self.text == self.columns - 1):
            cells = row.split(delimiter, self.columns - 1)
        else:
            # The text may go on in the next row, so its quote may be open.
            cells = [
                cell.encode() for cell in _cells(row.decode("utf-8", "replace"), self.delimiter)
            ]
        if len(cells) < self.columns:
            return row
        places = (self.time, *self.event, self.text)
        line = b" ".join(cells[place].strip() for place in places)
        writer = b"" if self.writer is None else _FOREIGN.sub(b"-", cells[self.writer])
        # A service of the platform has no number.
        return b"[pod/%s] %s" % (writer, line) if _NUMBERED.search(writer) else line


def _place(names: Sequence[str], known: Sequence[str]) -> int | None:
    return next((names.index(name) for name in known if name in names), None)


def _cells(row: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([row], delimiter=delimiter), [])
    except csv.Error:  # a carriage return, or a field that is too long
        return []
