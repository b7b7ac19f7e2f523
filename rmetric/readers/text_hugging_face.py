"""Reader of what the Hugging Face Trainer prints: a dict for each logged step.

A dict has no step (some programs add one). Where the progress bar stands in the
same file its count is the step; elsewhere the dicts are counted from 1. The
closing mean ``train_loss`` is no step's loss and is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rmetric.readers.columns import MEMORY, POLICY, SPEED, WITH_UNIT, columns_among
from rmetric.readers.names import unit
from rmetric.readers.rows import Row
from rmetric.readers.text_parts import pieces, put, row, whole

NAME = "Hugging Face Trainer text"
_DICT = re.compile(r"\{[^{}]*\}")
_PAIR = re.compile(r"['\"]([^'\"]+)['\"]\s*:\s*(?:['\"]([^'\"]*)['\"]|(?:\w+\()?([^,}\s]+))")
_BAR = re.compile(r"(?:^|\})\s*\d+%\|[^|]*\|\s*(\d{1,18})/(\d{1,18})\s\[")
_READ = ("loss", "eval_loss", "grad_norm", "learning_rate")
_STEPS = ("step", "global_step", "global_step/max_steps")
# In double quotes it would be JSON, which has readers of its own.
MARK = re.compile(
    r"\{(?=[^{}]*'(?:(?:eval_)?loss|reward|objective/kl)'\s*:\s*'?[-+]?(?:[\d.]|nan|inf))"
    r"(?=[^{}]*'(?:epoch|learning_rate|global_step/max_steps)')[^{}]*\}",
    re.IGNORECASE,
)


def notes(head: str) -> list[str]:
    if any(f"'{name}'" in entry for entry in _DICT.findall(head) for name in _STEPS):
        return []
    return [
        "the Trainer prints no step: it is the progress bar's where one stands before the entry, "
        "otherwise the entries are counted from 1"
    ]


@dataclass(slots=True)
class _Steps:
    """Step of the next entry, from the progress bar or by counting."""

    step: int = 0
    interval: int = 1
    bar: tuple[int, int] | None = None
    total: int | None = None

    def see(self, text: str) -> None:
        for done, total in _BAR.findall(text):
            # An evaluation has a bar too, to another number; the training's is the one
            # that stood before the first entry.
            if self.total in (None, int(total)):
                self.bar = (int(done), int(total))

    def next(self, stated: str | None) -> int:
        value, before = whole(stated), self.step
        if value is not None:
            self.step = value
        elif self.bar is not None and self.bar[0] > before:
            self.step, self.total = self.bar
            self.interval = self.step - before
        else:
            # No bar, or one that lags behind.
            self.step += self.interval
        return self.step


def rows(lines: Iterable[tuple[int, str]]) -> Iterator[Row]:
    steps = _Steps()
    for line, text in pieces(lines):
        steps.see(text)
        for found in _DICT.finditer(text):
            values = {name: quoted or bare for name, quoted, bare in _PAIR.findall(found[0])}
            cells: dict[str, float | bool] = {}
            put(cells, **{name: values.get(name) for name in _READ})
            columns = columns_among(tuple(values), (*POLICY, *MEMORY, *SPEED))
            put(cells, **{t: values[c] for t, c in columns.items()})
            for target in cells.keys() & set(WITH_UNIT):
                cells[target] *= unit(columns[target])
            if cells.keys() & {"loss", "eval_loss", "reward"}:
                stated = next((values[name] for name in _STEPS if name in values), None)
                evaluated = "eval_loss" in cells and "loss" not in cells
                step = steps.step if evaluated else steps.next(stated)
                yield row(line, step, cells)
