"""Reader of what Megatron-LM prints, and Megatron-DeepSpeed, GPT-NeoX and NeMo after it.

One line an interval: ``iteration 10/ 100 | ... | lm loss: ... | grad norm: ... |``.
Iterations that the loss scaler left out are counted in it, and the loss is
missing where all of them were.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from math import nan

from rmetric.readers.rows import Row
from rmetric.readers.text_deepspeed import OVERFLOW
from rmetric.readers.text_parts import Clock, Overflows, fields, number_in, pieces, put, row, whole

NAME = "Megatron-LM, Megatron-DeepSpeed, GPT-NeoX or NeMo text"
_ITERATION = re.compile(r"\biteration:?\s+(\d+)\s*/\s*\d+\s*\|")
_VALIDATION = re.compile(
    r"\bvalidation (?:loss|results) at (?:iteration (\d+)|the end of training)([^|]*)\|(.*)"
)
MARK = re.compile(
    r"\biteration:?\s+\d+\s*/\s*\d+\s*\|"
    r".{0,600}(?:loss|elapsed time|learning rate|skipped iterations)"
    r"|\bvalidation (?:loss|results) at iteration \d+[^|]*\| *lm[ _]loss"
)
_LOSSES = ("lm loss", "lm_loss", "loss", "train loss", "reduced_train_loss")
_NO_LOSS = ("scale", "balanc", "aux", "z_loss", "z loss", "mtp", "moe", "sop", "ppl")


def rows(lines: Iterable[tuple[int, str]]) -> Iterator[Row]:
    clock, overflows, step = Clock(), Overflows(OVERFLOW), "0"
    for line, text in pieces(lines):
        if overflows.take_overflow(text):
            continue
        found = _ITERATION.search(text)
        if found:
            values = fields(text[found.end() :])
            # NeMo counts an epoch's iterations, and all of them beside it.
            step = str(whole(values.get("global_step")) or found[1])
            cells = _iteration(values)
            put(cells, time=clock.read(text))
            yield row(line, step, overflows.take() | cells)
            continue
        found = _VALIDATION.search(text)
        if found and "test" not in found[2]:
            loss = _loss(fields(found[3]), (" value", "_value"))
            if loss is not None:
                step = found[1] or step
                yield row(line, step, {"eval_loss": loss})


def _iteration(found: dict[str, str]) -> dict[str, float | bool]:
    cells: dict[str, float | bool] = {}
    loss = _loss(found)
    skipped = number_in(found.get("number of skipped iterations"))
    if number_in(found.get("number of nan iterations")) and not loss:
        loss = nan
    put(
        cells,
        loss=loss,
        skipped=None if skipped is None else skipped > 0,
        grad_norm=found.get("grad norm", found.get("grad_norm")),
        learning_rate=found.get("learning rate", found.get("lr")),
        eval_loss=found.get("val_loss"),
        loss_scale=found.get("loss scale"),
        parameter_norm=found.get("params norm"),
    )
    return cells


def _loss(found: dict[str, str], endings: tuple[str, ...] = ("",)) -> float | None:
    """The language model's loss, or the first other that is no part of one."""
    names = [name + ending for name in _LOSSES for ending in endings]
    names += [n for n in found if n.endswith(tuple(f"loss{e}" for e in endings))]
    for name in names:
        value = number_in(found.get(name))
        if value is not None and not any(word in name for word in _NO_LOSS):
            return value
    return None
