"""Reader of what llm.c prints and writes to main.log, and of build-nanogpt beside it.

On the screen a step is counted from 1 and a ``val loss`` has the step of the line
before it; in main.log a step is ``s:0``; in build-nanogpt's log.txt it stands first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from rmetric.readers.rows import Row
from rmetric.readers.text_parts import pieces, put, row

NAME = "llm.c or build-nanogpt text"
_VALUE = r"([-+]?(?:[\d.]+(?:e[-+]?\d+)?|nan|inf(?:inity)?))"
_SCREEN = re.compile(
    rf"^ *step +(\d+)(?: */ *\d+)? *\|\s*(?:train )?loss:? {_VALUE}(?=[\s|,])(.*)", re.I
)
_VALIDATION = re.compile(rf"^\s*val(?:idation)? loss:? {_VALUE}\s*$", re.IGNORECASE)
_MAIN_LOG = re.compile(rf"^s:(\d+) (trl|tel):{_VALUE}(?: lr:(\S+) norm:(\S+))?\s*$", re.IGNORECASE)
_PLAIN = re.compile(rf"^(\d+) (train|val) {_VALUE}\s*$")
_NORM = re.compile(r"\bnorm:? (\S+)")
_RATE = re.compile(r"\blr:? (\S+)")
_MARK = re.compile(
    "|".join(f"(?:{form.pattern})" for form in (_SCREEN, _MAIN_LOG, _PLAIN)),
    re.IGNORECASE | re.MULTILINE,
)


def matches(head: str) -> bool:
    return _MARK.search(head) is not None


def rows(lines: Iterable[tuple[int, str]]) -> Iterator[Row]:
    step = "0"
    for line, text in pieces(lines):
        cells: dict[str, float | bool] = {}
        if found := _SCREEN.search(text):
            step = found[1]
            norm, rate = _NORM.search(found[3]), _RATE.search(found[3])
            put(
                cells,
                loss=found[2],
                grad_norm=norm[1] if norm else None,
                learning_rate=rate[1] if rate else None,
            )
        elif found := _MAIN_LOG.search(text):
            step = found[1]
            name = "loss" if found[2].lower() == "trl" else "eval_loss"
            put(cells, **{name: found[3]}, learning_rate=found[4], grad_norm=found[5])
        elif found := _PLAIN.search(text):
            step = found[1]
            put(cells, **{"loss" if found[2] == "train" else "eval_loss": found[3]})
        elif found := _VALIDATION.search(text):
            put(cells, eval_loss=found[1])
        if cells:
            yield row(line, step, cells)
