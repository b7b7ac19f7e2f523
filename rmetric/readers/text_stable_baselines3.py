"""Reader of the tables that Stable-Baselines3 prints: one of names and values for each iteration.

The step is ``total_timesteps``. A table may hold an evaluation alone, which is no rollout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from rmetric.readers.columns import POLICY, columns_among
from rmetric.readers.rows import Row
from rmetric.readers.text_parts import pieces, put, row, whole

NAME = "Stable-Baselines3 text"
_LINE = re.compile(r"^\|\s+([\w/]+)\s*\|\s*(\S*)\s*\|\s*$")
MARK = re.compile(r"^\|\s+total_timesteps\s*\|\s*\d+\s*\|\s*$", re.MULTILINE)
_RULE = re.compile(r"^-{8,}\s*$")


def rows(lines: Iterable[tuple[int, str]]) -> Iterator[Row]:
    values: dict[str, str] = {}
    folder = ""
    for line, text in pieces(lines):
        if found := _LINE.match(text):
            name, value = found.groups()
            folder = name if name.endswith("/") else folder
            values |= {f"{folder}{name}": value} if value else {}
        elif _RULE.match(text):
            if (step := whole(values.get("time/total_timesteps"))) is not None:
                cells: dict[str, float | bool] = {}
                put(
                    cells,
                    loss=values.get("train/loss"),
                    learning_rate=values.get("train/learning_rate"),
                )
                columns = columns_among(tuple(values), POLICY)
                put(cells, **{t: values[c] for t, c in columns.items()})
                yield row(line, step, cells)
            values = {}
