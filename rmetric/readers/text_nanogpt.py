"""Reader of what nanoGPT prints, and llama2.c, which is made after it.

Each iteration's line has the loss of its own batch; an evaluation's line has
means over many batches of both splits, and that of the training split is kept as
a training loss of its own, as it is logged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from rmetric.readers.rows import Row
from rmetric.readers.text_parts import number_in, pieces, put, row

NAME = "nanoGPT text"
_VALUE = r"([-+]?(?:[\d.]+(?:e[-+]?\d+)?|nan|inf))"
_ITERATION = re.compile(rf"\biter (\d+): loss {_VALUE}(?=,|\s|$)(.*)", re.IGNORECASE)
_EVALUATION = re.compile(
    rf"\b(?:step|iter) (\d+): train loss {_VALUE}, val(?:id(?:ation)?)? loss {_VALUE}(.*)", re.I
)
_LLAMA2_C = re.compile(rf"^(\d+) \| loss {_VALUE} \| lr (\S+) \| (\S+?)ms(.*)", re.IGNORECASE)
_MARK = re.compile(
    "|".join(f"(?:{form.pattern})" for form in (_ITERATION, _EVALUATION, _LLAMA2_C)),
    re.IGNORECASE | re.MULTILINE,
)
_RATE = re.compile(r"\b(?:lr|learning[ _]rate)[: =]+(\S+)", re.IGNORECASE)
_NORM = re.compile(r"\b(?:grad(?:ient)?[ _]?norm|gnorm)[: =]+(\S+)", re.IGNORECASE)


def matches(head: str) -> bool:
    return _MARK.search(head) is not None


def rows(lines: Iterable[tuple[int, str]]) -> Iterator[Row]:
    for line, text in pieces(lines):
        cells: dict[str, float | bool] = {}
        if found := _ITERATION.search(text):
            put(cells, loss=found[2], **_rest(found[3]))
        elif found := _EVALUATION.search(text):
            put(cells, loss=found[2], eval_loss=found[3], **_rest(found[4]))
        elif found := _LLAMA2_C.search(text):
            put(cells, loss=found[2], learning_rate=found[3])
        if found and cells:
            yield row(line, found[1], cells)


def _rest(text: str) -> dict[str, str | None]:
    """What forks of it add to the line."""
    rate, norm = _RATE.search(text), _NORM.search(text)
    return {
        "learning_rate": rate[1] if rate and number_in(rate[1]) is not None else None,
        "grad_norm": norm[1] if norm else None,
    }
