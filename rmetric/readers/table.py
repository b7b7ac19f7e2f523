"""Readers of tables with a header line: CSV, printed columns, AlgoPerf's measurements, W&B."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterable, Iterator, Mapping

from rmetric._util.errors import LogError
from rmetric._util.strict_json import shown
from rmetric.readers.names import is_loss
from rmetric.readers.rows import Row
from rmetric.readers.source import Source
from rmetric.readers.stream import RUN, Reader, Stream, columns_of_table, stream_rows

_DELIMITERS = ",;\t"
#: Of tables that are printed for people: with bars, as in Markdown, or aligned by blanks.
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
        self._lines = (line for line in source.lines())
        first = next((line for line in self._lines if line[1].strip()), (1, ""))
        self._first_line, header = first
        self._delimiter = _delimiter(header)
        self._header = header_of(header)
        self._decimal: dict[str, str] = {}  # column -> comma or point, once it was seen
        self._places = {name: self._header.index(name) for name in self._header}
        self.names = list(self._places)
        doubled = sorted({n for n in self._header if self._header.count(n) > 1})
        if doubled:
            self.notes.append(f"columns named twice, the first was read: {', '.join(doubled)}")

    def rows(self) -> Iterator[Row]:
        size = len(self._header)
        for line, cells in self._cells():
            if len(cells) < size:
                if not self.source.cut:
                    self._leave_out(line, cells)
                    continue
                self.notes.append(f"line {line} is cut off and was left out")
                continue
            if len(cells) > size and any(cell.strip() for cell in cells[size:]):
                self._leave_out(line, cells)
                continue
            filled = {}
            for name, place in self._places.items():
                cell = cells[place]
                if cell and (cell := cell.strip()):
                    filled[name] = cell
            self.source.foreign_lines.good += 1
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

    def _leave_out(self, line: int, cells: list[str]) -> None:
        size = f"{len(cells)} cells, the header has {len(self._header)}"
        problem = f"{size}: {shown(self._delimiter.join(cells))}"
        self.source.foreign_lines.add(line, problem, of_record=_is_number(cells[0]))

    def _cells(self) -> Iterator[tuple[int, list[str]]]:
        """Number of the last line and cells of each row below the header that is not blank."""
        # Lists in cells outgrow the module's limit, which is set for all of its users.
        csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
        at = self._first_line

        printed = self._delimiter in (_BARS, _BLANKS)
        delimiter = "\t" if printed else self._delimiter

        def numbered() -> Iterator[str]:
            nonlocal at
            lines = (
                self._lines
                if printed
                else _without_stray_quotes(self._lines, delimiter, len(self._header))
            )
            for number, line in lines:
                at = number
                if printed:
                    line = "" if _RULE.fullmatch(line) else "\t".join(_cells(line, self._delimiter))
                # The module joins lines within quotes by the ends that they have.
                yield f"{line}\n"

        reader = csv.reader(
            numbered(),
            delimiter=delimiter,
            quoting=csv.QUOTE_NONE if printed else csv.QUOTE_MINIMAL,
        )
        try:
            for cells in reader:
                if any(cells):
                    yield at, cells
        except csv.Error as error:
            raise LogError(self.source.path, at, f"not CSV: {error}") from None


_LONGEST_CELL = min(sys.maxsize, 2**31 - 1)
_Lines = Iterable[tuple[int, str]]


def _without_stray_quotes(lines: _Lines, delimiter: str, size: int) -> Iterator[tuple[int, str]]:
    """The lines, with a quote that is never closed as a letter of its cell.

    A quoted cell may go on on the next lines; its quote is stray where one of these is a record
    by itself.
    """
    held: list[tuple[int, str]] = []
    numbers: list[int] = []
    for number, line in lines:
        if held and _is_record(line, numbers, delimiter, size):
            yield from _by_themselves(held, delimiter, size)
            held = []
        if held or '"' in line:
            is_open = _is_open(f'"{line}' if held else line, delimiter)
            if is_open and not held:
                cells = _cells(line, delimiter)[:-1]
                numbers = [i for i, cell in enumerate(cells) if _is_number(cell)]
            held.append((number, line))
            if not is_open:
                yield from held
                held = []
        else:
            yield number, line
    yield from _by_themselves(held, delimiter, size)


def _is_record(line: str, numbers: list[int], delimiter: str, size: int) -> bool:
    """True for `size` cells with numbers where the line with the quote has them."""
    if re.match(rf'[^"]*(?:""[^"]*)*"(?:{re.escape(delimiter)}|$)', line):
        return False  # it closes the quote
    cells = _cells(line, delimiter)
    if len(cells) != size:
        return False
    found = [_is_number(cells[i]) for i in numbers or range(size) if cells[i].strip()]
    return any(found) and (not numbers or all(found))


def _is_open(line: str, delimiter: str) -> bool:
    """True if a quoted cell of the line goes on on the next one."""
    return _cells(f"{line}\n", delimiter)[-1].endswith("\n")


def _by_themselves(held: _Lines, delimiter: str, size: int) -> Iterator[tuple[int, str]]:
    for number, line in held:
        if '"' in line and _is_open(line, delimiter):
            *cells, last = _cells(line, delimiter)
            cells += [f'"{last}'] if len(cells) + 1 == size else f'"{last}'.split(delimiter)
            line = delimiter.join('"' + cell.replace('"', '""') + '"' for cell in cells)
        yield number, line


def matches(head: str) -> bool:
    names = header_of(head)
    delimiter = _delimiter(head.lstrip("\r\n").split("\n", 1)[0])
    below = [line for line in head.lstrip("\r\n").split("\n", 3)[1:3] if not _RULE.fullmatch(line)]
    # Prose has commas too; below a header at least one cell is a number.
    cells = _cells(below[0].replace('"', ""), delimiter) if below else ["0"]
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
    names = [name.strip() for name in _cells(header, _delimiter(header))]
    # Saved data frames carry their row numbers in a first column without a name.
    return ["(index)", *names[1:]] if len(names) > 1 and not names[0] else names


def _cells(line: str, delimiter: str) -> list[str]:
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
    # Its "Step" counts calls of the logger; another metric on the axis is what it says.
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
