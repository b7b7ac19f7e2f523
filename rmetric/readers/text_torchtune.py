"""Reader of torchtune's log file, and of the progress bar that it shows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from rmetric.readers.rows import Row
from rmetric.readers.text_parts import number_in, pieces, put, row

NAME = "torchtune text"
_STEP = re.compile(r"\bStep (\d+) \| (.*)")
_PAIR = re.compile(r"(\w+):(\S+)")
_BAR = re.compile(r"(?:^|:)\s*\d+\|(\d+)\|Loss: ([-+\w.]+):")
_MARK = re.compile(
    r"\bStep \d+ \| (?:\w+:\S+ )*(?:val_|valid_)?loss:[-+\dni]|\b\d+\|\d+\|Loss: [-\dni]"
)


def matches(head: str) -> bool:
    return _MARK.search(head) is not None


def rows(lines: Iterable[tuple[int, str]]) -> Iterator[Row]:
    shown = None
    for line, text in pieces(lines):
        if found := _STEP.search(text):
            cells = _cells(dict(_PAIR.findall(found[2])))
            if cells:
                yield row(line, found[1], cells)
        elif (found := _BAR.search(text)) and found[1] != shown:
            # The bar is drawn again and again with the loss of the last step.
            shown = found[1]
            loss = number_in(found[2])
            if loss is not None:
                yield row(line, found[1], {"loss": loss})


def _cells(values: dict[str, str]) -> dict[str, float | bool]:
    cells: dict[str, float | bool] = {}
    put(
        cells,
        loss=values.get("loss"),
        eval_loss=values.get("val_loss", values.get("valid_loss")),
        grad_norm=values.get("grad_norm"),
        learning_rate=values.get("lr"),
    )
    return cells
