"""Reader of any text with ``name=value`` or ``name: value`` in its lines, where --map says which.

Without a mapping no text of unknown make is read: a number that is called a loss
may be anything. What `hint` finds is offered to the user instead. Unlike `text_pairs`, it takes
names letter for letter and needs no step: rows without one are counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from rmetric._util.strict_json import plain_non_finite
from rmetric.readers.columns import TARGETS, Columns, choose_columns
from rmetric.readers.rows import Row, UnknownFormat
from rmetric.readers.source import Source
from rmetric.readers.stream import Reader, Stream, stream_rows

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
#: With a decimal comma, which no number may have, so that it is not cut off there. A name is looked
#: for where a word begins: from each of its letters it would take the square of its length.
_PAIR = re.compile(
    rf"(?<![\w./-])[\d./-]*([A-Za-z_][\w./-]*)(?:\s*[=:]\s*|\s+)"
    rf"({_NUMBER}(?:,\d[\d.,eE+-]*)?)(?![\w.])",
    re.IGNORECASE,
)


def matches(head: str) -> bool:
    """Never by itself: any text has a number somewhere."""
    return False


def stream(source: Source, mapping: Mapping[str, str]) -> Stream:
    columns = Columns(by_target=dict(mapping))
    return stream_rows(source, columns, _rows(source, mapping))


def _rows(source: Source, mapping: Mapping[str, str]) -> Iterator[Row]:
    wanted = {name: target for target, name in mapping.items()}
    losses = {mapping[t] for t in ("loss", "eval_loss") if t in mapping}
    found = False
    for number, line in source.lines():
        pairs = _PAIR.findall(plain_non_finite(line))
        cells = {name: value for name, value in pairs if name in wanted}
        found = found or bool(cells.keys() & losses)
        # What stands alone, such as "step 5" in a message, is no measurement.
        if cells.keys() & losses or len(cells) > 1:
            yield Row(number, cells)
    if not found:
        stated = " ".join(f"--map {t}={c}" for t, c in mapping.items())
        raise UnknownFormat(source.path, None, f"no line holds what {stated} names")


def hint(head: str) -> str | None:
    """The --map that would read a text like this; None where nothing is called a loss."""
    names = dict.fromkeys(name for line in head.splitlines() for name, _ in _PAIR.findall(line))
    chosen = choose_columns(list(names), {}).by_target
    if "loss" not in chosen and "eval_loss" not in chosen:
        losses = [name for name in names if "loss" in name.lower()]
        if not losses:
            return None
        chosen["loss"] = losses[0]
    order = [target for target in TARGETS if target in chosen and target != "run"]
    return " ".join(f"--map {target}={_quoted(chosen[target])}" for target in order)


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[\w./-]+", name) else f"'{name}'"


READER = Reader("text with name=value (needs --map loss=NAME)", matches, stream, follows=True)
