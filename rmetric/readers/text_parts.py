"""What the text formats share: `TextFormat`, pieces of lines, numbers, clocks, ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from rmetric._util.strict_json import plain_non_finite
from rmetric.readers.rows import Row

Lines = Iterable[tuple[int, str]]
Cells = dict[str, float | bool]

LONGEST = 1 << 16
FAR = 2**63
_LONGEST_STEP = 24
_LEADING = re.compile(
    r"\s*([-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf(?:inity)?))(?=\s|$|[,;|)\]}/%]|ms\b|[sm]\b)",
    re.IGNORECASE,
)
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_])")
DATE = re.compile(r"\d{4}[-/]\d\d[-/]\d\d[T ]+\d\d:\d\d:\d\d(?:[.,]\d+)?")
_RANK = re.compile(r"\s*\[?(?:rank|default|trainer|worker)[ _]?(\d+)[^\]:]*\]?:?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """The lines that a program prints, such as ``iter 5: loss 2.31``.

    A row's cells stand under the names of `TARGETS`, so nothing about them is guessed: a number, a
    bool for ``skipped``, or text that `rows.number` understands; absent where not logged. Lines
    without values are passed over. A line that must not be passed over is `rows.BadRow`.

    Attributes:
        name: in messages and in the index.
        mark: a pattern that the beginning of a file (up to 64 KiB), without colours, has.
        rows: makes rows of numbered lines, a generator: a file may be larger than the memory;
            `rows_of` selects another for the beginning of a file.
        notes: makes sentences for the run of the beginning of a file.
        other_names: of cells that count only where ``--map`` names them.
    """

    name: str
    mark: re.Pattern[str]
    rows: Callable[[Lines], Iterator[Row]]
    notes: Callable[[str], list[str]] = lambda head: []
    other_names: tuple[str, ...] = ()
    rows_of: Callable[[str], Callable[[Lines], Iterator[Row]]] | None = None


def pieces(lines: Lines) -> Iterator[tuple[int, str]]:
    """The lines without colours, cut where a progress bar went back to the line's beginning.

    Numbers that are not finite are those that `float` takes.
    No program prints a step in `LONGEST` characters: longer ones are passed over.
    """
    for number, text in lines:
        for piece in text.split("\r") if "\r" in text else (text,):
            if piece and len(piece) <= LONGEST:
                yield number, plain_non_finite(without_colours(piece))


def without_colours(text: str) -> str:
    r"""`text` without the codes of colours and of the cursor.

    >>> without_colours("\x1b[31mstep:  1  \x1b[32mloss:  2.5\x1b[0m")
    'step:  1  loss:  2.5'
    """
    return _ESCAPE.sub("", text) if "\x1b" in text else text


def number_in(text: str | None) -> float | None:
    """The number at the beginning of `text`; None where there is none.

    >>> number_in(" 1.5E+01 "), number_in("NaN"), number_in("12ms"), number_in("n/a")
    (15.0, nan, 12.0, None)
    """
    found = _LEADING.match(text) if text else None
    return float(found[1]) if found else None


def whole(text: str | None) -> int | None:
    """The whole number at the beginning of `text`, 0 and above; None where there is none."""
    value = number_in(text)
    return int(value) if value is not None and 0 <= value < FAR else None


def put(cells: Cells, **found: str | float | None) -> None:
    """Each number, or a text's number, under its name; what holds no number is not logged."""
    for name, given in found.items():
        value = number_in(given) if isinstance(given, str) else given
        if value is not None:
            cells[name] = value


def row(line: int, step: int | str, cells: Cells) -> Row:
    """A row; a step in more digits than a step can have stays a text, which no step is read of."""
    is_step = isinstance(step, int) or len(step) <= _LONGEST_STEP
    return Row(line, {"step": int(step) if is_step else step, **cells})


def fields(text: str) -> dict[str, str]:
    """``a: 1 | b c: 2`` as a mapping; names in lower case.

    >>> fields("lm loss: 2.5 | grad norm: 1 |")
    {'lm loss': '2.5', 'grad norm': '1'}
    """
    found: dict[str, str] = {}
    for field in text.split("|"):
        name, colon, value = field.rpartition(":")
        if colon:
            found.setdefault(name.strip().lower(), value.strip())
    return found


class Clock:
    """Seconds since the first date and time that was read; None for a line without."""

    def __init__(self) -> None:
        self._first: datetime | None = None

    def read(self, text: str) -> float | None:
        found = DATE.search(text)
        if found is None:
            return None
        plain = found[0].replace("/", "-").replace(",", ".").replace("T", " ")
        main, _, part = " ".join(plain.split()).partition(".")
        try:
            now = datetime.fromisoformat(f"{main}.{part[:6]:0<6}" if part else main)
        except ValueError:
            return None
        self._first = self._first or now
        return (now - self._first).total_seconds()


def rank_of(text: str) -> str | None:
    """The rank that a launcher wrote before the line; None where it wrote none.

    >>> rank_of("[rank3]: step: 1"), rank_of("[default2]:step: 1"), rank_of("step: 1")
    ('3', '2', None)
    """
    found = _RANK.match(text)
    return found[1] if found else None


class FirstRank:
    """Keeps one copy of a line printed by all ranks: the first rank's; without ranks, the first."""

    def __init__(self) -> None:
        self._rank: str | None = None
        self._last = ""

    def accepts(self, rank: str | None, cells: Cells) -> bool:
        content = repr(cells)
        if not self._last:
            self._rank = rank
        if rank != self._rank or (rank is None and content == self._last):
            return False
        self._last = content
        return True


class Overflows:
    """The steps that the loss scaler left out since the last row: they belong to the next.

    Args:
        pattern: of the lines that report one; its groups are the loss scales, the last one counts.
    """

    def __init__(self, pattern: re.Pattern[str] | None) -> None:
        self._pattern = pattern
        self._cells: Cells = {}

    def take_overflow(self, text: str) -> bool:
        """True if `text` reports a skipped step; several ranks may report the same one."""
        if self._pattern is None or not ("verflow" in text or "VERFLOW" in text):
            return False
        if (found := self._pattern.search(text)) is None:
            return False
        self._cells["skipped"] = True
        for scale in found.groups():
            put(self._cells, loss_scale=scale)
        return True

    def take(self) -> Cells:
        cells, self._cells = self._cells, {}
        return cells
