"""Reader of what modded-nanogpt prints, and the programs made after it.

``step:10/1000 train_loss:3.1 train_time:900ms step_avg:90.1ms``. Such a log begins
with the program's own source, so the line's form in the source counts as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from rmetric.readers.rows import Row
from rmetric.readers.text_parts import number_in, pieces, put, row

NAME = "modded-nanogpt text"
_STEP = re.compile(r"\bstep:\s?(\d+)(?:/\d+)?\s+(.*)")
_PAIR = re.compile(r"([A-Za-z][\w/]*):\s?(\S+)")
_MARK = re.compile(
    r"\bstep:\s?\d+/\d+ .{0,300}?\b(?:train_|val_)?loss:\s?[-+\dni]|step:\{.{0,300}_loss:\{",
    re.IGNORECASE,
)
_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0}
_TIME = re.compile(r"([\d.]+)(ms|s|min|m)$")


def matches(head: str) -> bool:
    return _MARK.search(head) is not None


def rows(lines: Iterable[tuple[int, str]]) -> Iterator[Row]:
    for line, text in pieces(lines):
        found = _STEP.search(text)
        if found is None:
            continue
        values = dict(_PAIR.findall(found[2]))
        cells: dict[str, float | bool] = {}
        put(
            cells,
            loss=values.get("train_loss", values.get("loss")),
            eval_loss=values.get("val_loss"),
            grad_norm=values.get("grad_norm", values.get("gnorm")),
            learning_rate=values.get("lr"),
        )
        if cells.keys() & {"loss", "eval_loss"}:
            seconds = _seconds(str(values.get("train_time", values.get("t"))))
            if seconds is not None:
                cells["time"] = seconds
            yield row(line, found[1], cells)


def _seconds(text: str) -> float | None:
    found = _TIME.match(text)
    value = number_in(found[1]) if found else None
    return None if value is None or found is None else value * _UNITS[found[2]]
