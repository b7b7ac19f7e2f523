"""Reader of what nanochat prints: pretraining, fine-tuning, and programs made after it.

Its evaluation is in bits per byte, which is no loss per token: it stays under its
own name and counts only where ``--map`` says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from rmetric.readers.rows import Row
from rmetric.readers.text_parts import fields, number_in, pieces, put, row

NAME = "nanochat text"
_STEP = re.compile(r"\bstep (\d+)(?:\s*/\s*\d+)?(?: \([\d.]+ ?%\))? \| (.*)", re.IGNORECASE)
_MARK = re.compile(
    r"\bstep \d+(?:\s*/\s*\d+)? \([\d.]+ ?%\) \| (?:train(?:ing)? )?loss: "
    r"|\bstep \d+(?:/\d+)? \| (?:training loss: .{0,100}\| *lrm: |validation (?:bpb|loss): )",
    re.IGNORECASE,
)
#: Cells that count only where ``--map`` says so: the evaluation in bits per byte.
BITS = "validation_bpb"
OTHER_NAMES = (BITS,)


def matches(head: str) -> bool:
    return _MARK.search(head) is not None


def notes(head: str) -> list[str]:
    if "bpb:" not in head:
        return []
    return [
        "the evaluation is in bits per byte, which is no loss per token, and was left out: "
        f"--map eval_loss={BITS} reads it"
    ]


def rows(lines: Iterable[tuple[int, str]]) -> Iterator[Row]:
    total, last = 0.0, None
    for line, text in pieces(lines):
        found = _STEP.search(text)
        if found is None:
            continue
        values = fields(found[2])
        cells: dict[str, float | bool] = {}
        put(
            cells,
            loss=_first(values, "loss", "training loss", "train loss"),
            eval_loss=_first(values, "validation loss", "val loss"),
            grad_norm=_first(values, "grad norm", "grad_norm", "gnorm", "gn"),
            learning_rate=_first(values, "lr", "learning rate"),
        )
        put(cells, **{BITS: _first(values, "validation bpb", "val bpb")})
        if "loss" in cells:
            # Every step prints how long it took; where some do not, the sum is not known.
            took = number_in(values.get("dt"))
            step = float(found[1])
            known = took is not None and last in (None, step - 1)
            total, last = (total + took / 1000, step) if known and took else (total, -1)
            if known:
                cells["time"] = total
        if cells:
            yield row(line, found[1], cells)


def _first(values: dict[str, str], *names: str) -> str | None:
    return next((values[name] for name in names if name in values), None)
