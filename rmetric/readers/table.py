"""Readers of tables with a header line: CSV, printed columns, AlgoPerf's measurements, W&B."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator, Mapping

from rmetric._util.strict_json import shown
from rmetric.readers.names import is_loss
from rmetric.readers.rows import Row
from rmetric.readers.source import Source
from rmetric.readers.stream import RUN, Reader, Stream, columns_of_table, stream_rows

_DELIMITERS = ",;\t"
#: Delimiters of tables printed for people: bars, as in Markdown, or blanks.
_BARS, _BLANKS = "|", " "
_GAP = re.compile(r"\s{2,}")
_RULE = re.compile(r"[\s|:+=-]*")
_DECIMAL_COMMA = re.compile(r"[-+]?\d*,\d+(?:[eE][-+]?\d+)?")
_DECIMAL_POINT = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?")
#: Points part the thousands: 1.234,5 and perhaps 1.000.
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:\.\d{3})+,\d+")
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}\.\d{3}")


class Table:
    """A CSV as rows of cells, blank ones left out, read line by line.

    Attributes:
        names: the columns; one that comes twice counts where it comes first.
        notes: what was dropped; whole when the rows have been read.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.notes: list[str] = []
        # Lists in cells outgrow the module's limit, which is set for all of its users.
        csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
        self._lines = source.lines()
        _, header = next((line for line in self._lines if line[1].strip()), (1, ""))
        self._delimiter = _delimiter(header)
        self._header = header_of(header)
        self._decimal: dict[str, str] = {}  # column -> comma or point, once it was seen
        self._places = {name: self._header.index(name) for name in self._header}
        self.names = list(self._places)
        if doubled := sorted({n for n in self._header if self._header.count(n) > 1}):
            self.notes.append(f"columns named twice, the first was read: {', '.join(doubled)}")

    def rows(self) -> Iterator[Row]:
        size = len(self._header)
        for line, cells in self._cells():
            if not any(cells):
                continue
            if len(cells) < size and self.source.cut:
                self.notes.append(f"line {line} is cut off and was left out")
                continue
            if len(cells) < size or any(cell.strip() for cell in cells[size:]):
                problem = f"{len(cells)} cells, the header has {size}"
                problem = f"{problem}: {shown(self._delimiter.join(cells))}"
                self.source.foreign_lines.add(line, problem, of_record=_is_number(cells[0]))
                continue
            filled = {}
            for name, place in self._places.items():
                cell = cells[place]
                if cell and (cell := cell.strip()):
                    filled[name] = cell
            yield Row(line, filled if self._delimiter == "," else self._with_points(filled))

    def _with_points(self, cells: dict[str, str]) -> dict[str, str]:
        """Cells with a decimal point, where the first decimals of their column have a comma.

        Where commas part the cells, a comma in quotes may as well part thousands.
        """
        if "," not in self._decimal.values():
            if not any(map(_DECIMAL_COMMA.fullmatch, cells.values())):
                self._decimal |= {n: "." for n, c in cells.items() if _DECIMAL_POINT.fullmatch(c)}
                return cells
            self.notes.append("numbers were read with decimal commas")
        return {name: self._with_point(name, cell) for name, cell in cells.items()}

    def _with_point(self, name: str, cell: str) -> str:
        if _DECIMAL_COMMA.fullmatch(cell) or _GROUPED.fullmatch(cell):
            if self._decimal.setdefault(name, ",") == ",":
                return cell.replace(".", "").replace(",", ".")
        elif _DECIMAL_POINT.fullmatch(cell):
            # 1.000 may be one or a thousand: an error, but only in a column that is used.
            decimal = self._decimal.get(name, "")
            if decimal == "," or (not decimal and _THOUSANDS.fullmatch(cell)):
                return f"{cell} (beside decimal commas)"
            self._decimal[name] = "."
        return cell

    def _cells(self) -> Iterator[tuple[int, list[str]]]:
        """Number of the last line and cells of each row below the header.

        A quoted cell may go on on the next lines. A quote that is never closed is a letter of its
        cell: one is taken for such where a line after it is a record by itself.
        """
        delimiter, printed = self._delimiter, self._delimiter in (_BARS, _BLANKS)
        held: list[tuple[int, str]] = []
        numbers: list[int] = []
        for number, line in self._lines:
            if printed:
                if not _RULE.fullmatch(line):
                    yield number, _split(line, delimiter)
                continue
            if held and self._is_record(line, numbers):
                yield from self._by_themselves(held)
                held = []
            if not held and '"' not in line:
                yield number, line.split(delimiter)
                continue
            # The module joins lines within quotes by the ends that they have.
            cells = _split(f'"{line}\n' if held else f"{line}\n", delimiter)
            is_open = cells[-1].endswith("\n")
            if is_open and not held:
                numbers = [place for place, cell in enumerate(cells[:-1]) if _is_number(cell)]
            held.append((number, line))
            if not is_open:
                yield number, _split("\n".join(text for _, text in held), delimiter)
                held = []
        yield from self._by_themselves(held)

    def _is_record(self, line: str, numbers: list[int]) -> bool:
        """True for a whole row, with numbers where the line with the quote has them."""
        if re.match(rf'[^"]*(?:""[^"]*)*"(?:{re.escape(self._delimiter)}|$)', line):
            return False  # it closes the quote
        cells = _split(line, self._delimiter)
        if len(cells) != len(self._header):
            return False
        found = [_is_number(cells[i]) for i in numbers or range(len(cells)) if cells[i].strip()]
        return any(found) and (not numbers or all(found))

    def _by_themselves(self, held: list[tuple[int, str]]) -> Iterator[tuple[int, list[str]]]:
        for number, line in held:
            cells = _split(f"{line}\n", self._delimiter)
            if cells[-1].endswith("\n"):  # a quote is open
                last = f'"{cells.pop()[:-1]}'
                is_last = len(cells) + 1 == len(self._header)
                cells += [last] if is_last else last.split(self._delimiter)
            yield number, cells


_LONGEST_CELL = min(sys.maxsize, 2**31 - 1)


def matches(head: str) -> bool:
    names = header_of(head)
    delimiter = _delimiter(head.lstrip("\r\n").split("\n", 1)[0])
    below = [line for line in head.lstrip("\r\n").split("\n", 3)[1:3] if not _RULE.fullmatch(line)]
    # Prose has commas too; below a header at least one cell is a number.
    cells = _split(below[0].replace('"', ""), delimiter) if below else ["0"]
    # It has blanks and bars more often still.
    if delimiter in (_BARS, _BLANKS) and (len(cells) != len(names) or not any(map(is_loss, names))):
        return False
    return (
        len(names) > 1
        and all(names)
        and not any(_is_number(name) for name in names)
        and any(_is_number(cell) for cell in cells)
    )


def stream(source: Source, mapping: Mapping[str, str]) -> Stream:
    return stream_table(source, Table(source), mapping)


def stream_table(
    source: Source, table: Table, mapping: Mapping[str, str], rows: Iterator[Row] | None = None
) -> Stream:
    """The stream of a table, or of `rows` with its columns."""
    columns = columns_of_table(source, table.names, mapping)
    columns.of_header = True
    return stream_rows(source, columns, table.rows() if rows is None else rows, table.notes)


def header_of(head: str) -> list[str]:
    """The column names in the first line of a file."""
    header = head.lstrip("\r\n").split("\n", 1)[0]
    names = [name.strip() for name in _split(header, _delimiter(header))]
    # Saved data frames carry their row numbers in a first column without a name.
    return ["(index)", *names[1:]] if len(names) > 1 and not names[0] else names


def _split(line: str, delimiter: str) -> list[str]:
    if delimiter == _BARS:
        return [cell.strip() for cell in line.strip().strip(_BARS).split(_BARS)]
    if delimiter == _BLANKS:
        # Names are of several words, numbers are not.
        cells = line.split()
        return cells if any(map(_is_number, cells)) else _GAP.split(line.strip())
    return next(csv.reader([line], delimiter=delimiter), [])


def _delimiter(header: str) -> str:
    found = max(_DELIMITERS, key=header.count)
    if found in header:
        return found
    return _BARS if header.count(_BARS) > 1 else _BLANKS if _GAP.search(header.strip()) else found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return bool(_DECIMAL_COMMA.fullmatch(text.strip()))
    return True


_OF_ALGOPERF = {"global_step", "score", "accumulated_submission_time"}
_TRAINING = ("loss", "grad_norm")


def _stream_algoperf(source: Source, mapping: Mapping[str, str]) -> Stream:
    table = Table(source)

    def rows() -> Iterator[Row]:
        """A blank loss means nan, except on the closing line with the score."""
        blanks = 0
        for row in table.rows():
            if any(name.startswith("validation/") for name in row.cells):
                own = [n for n in table.names if re.match(r"validation/.*loss$", n)]
            elif "score" in row.cells:
                continue
            else:
                own = [n for n in table.names if n in _TRAINING]
            missing = [name for name in own if name not in row.cells]
            blanks += len(missing)
            yield Row(row.line, {**row.cells, **dict.fromkeys(missing, "nan")})
        if blanks:
            table.notes.append(
                f"{blanks} blank losses and norms were read as nan, as AlgoPerf writes it"
            )

    return stream_table(source, table, mapping, rows())


#: A chart's columns are "run-1 - train/loss", and the same with `_ENDS`: of a bucket of points.
_BETWEEN = " - "
_ENDS = ("__MIN", "__MAX")


def _matches_wandb(head: str) -> bool:
    names = header_of(head)
    return any(_BETWEEN in name and all(f"{name}{end}" in names for end in _ENDS) for name in names)


def _stream_wandb(source: Source, mapping: Mapping[str, str]) -> Stream:
    table = Table(source)
    parts = {n: n.rpartition(_BETWEEN) for n in table.names if not n.endswith(_ENDS)}
    # Its "Step" counts calls of the logger; another metric on the axis is what its name states.
    shared = {n: "_step" if n == "Step" else n for n, part in parts.items() if not part[1]}
    curves: dict[str, dict[str, str]] = {}
    for name, (run, between, metric) in parts.items():
        if between:
            curves.setdefault(run, {})[name] = metric

    def rows() -> Iterator[Row]:
        for row in table.rows():
            common = {to: row.cells[name] for name, to in shared.items() if name in row.cells}
            for run, own in curves.items():
                cells = {to: row.cells[name] for name, to in own.items() if name in row.cells}
                if cells:
                    yield Row(row.line, common | cells | {RUN: run})

    metrics = dict.fromkeys(metric for _, between, metric in parts.values() if between)
    columns = columns_of_table(source, [*metrics, *shared.values()], mapping)
    columns.by_target["run"] = RUN
    return stream_rows(source, columns, rows(), table.notes)


READER = Reader("CSV with a header line", matches, stream, follows=True)
ALGOPERF = Reader(
    "AlgoPerf measurements.csv",
    lambda head: set(header_of(head)) >= _OF_ALGOPERF,
    _stream_algoperf,
    follows=True,
)
WANDB_EXPORT = Reader("W&B chart export (CSV)", _matches_wandb, _stream_wandb)
