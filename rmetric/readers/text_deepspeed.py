"""Reader of what DeepSpeed itself prints: the step, how many were left out, the scale.

The engine knows no loss but the pipeline's; a training that prints its own lines
as well is read by another reader. DeepSpeed-Chat prints the perplexity of an
evaluation, whose logarithm is the loss.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from math import log, nan

from rmetric.readers.rows import Row
from rmetric.readers.text_parts import Clock, Overflows, number_in, pieces, put, row

NAME = "DeepSpeed text"
_STEP = re.compile(r"\[Rank -?\d+\] step=(\d+), skipped=(\d+), lr=\[?\(?([^,\]\s]+)")
_PIPELINE = re.compile(r"\bsteps: (\d+) loss: (\S+) iter time")
_PERPLEXITY = re.compile(
    r"^[^\w\n]{0,20}(?:epoch \d+ )?(?:ppl|perplexity): ([\w.+-]+)(?:, loss: (\S+))?$", re.I
)
_PERPLEXITY_LINE = re.compile(_PERPLEXITY.pattern, re.IGNORECASE | re.MULTILINE)
OVERFLOW = re.compile(
    r"overflow.{0,40}skipping step.{0,20}attempted loss scale: *([\w.+]+)"
    r"(?:, *(?:reducing to|but))? *([\w.+]*)",
    re.IGNORECASE,
)
MARK = re.compile(rf"{_STEP.pattern}|{_PIPELINE.pattern}|(?i:{OVERFLOW.pattern})")


def notes(head: str) -> list[str]:
    if not _PERPLEXITY_LINE.search(head):
        return []
    return ["the logarithm of an evaluation's perplexity was taken as its loss"]


def rows(lines: Iterable[tuple[int, str]]) -> Iterator[Row]:
    clock, overflows = Clock(), Overflows(OVERFLOW)
    step, skipped = "0", 0.0
    for line, text in pieces(lines):
        if overflows.take_overflow(text):
            continue
        cells: dict[str, float | bool] = {}
        put(cells, time=clock.read(text))
        if found := _STEP.search(text):
            # The count goes on from the beginning: it grew, or a step was left out before.
            step, before, skipped = found[1], skipped, float(found[2])
            put(cells, learning_rate=found[3])
            yield row(line, step, overflows.take() | cells | {"skipped": skipped > before})
        elif found := _PIPELINE.search(text):
            step = found[1]
            put(cells, loss=found[2])
            yield row(line, step, overflows.take() | cells)
        elif found := _PERPLEXITY.search(text):
            loss = _loss(found[1], found[2])
            if loss is not None:
                yield row(line, step, {"eval_loss": loss})


def _loss(perplexity: str, stated: str | None) -> float | None:
    loss, value = number_in(stated), number_in(perplexity)
    if loss is not None or value is None:
        return loss
    return log(value) if value > 0 else nan
