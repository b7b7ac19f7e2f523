"""Reader of what torchtitan prints: coloured, by each rank, with validation lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from rmetric.readers.rows import Row
from rmetric.readers.text_parts import Clock, FirstRank, pieces, put, rank_of, row

NAME = "torchtitan text"
_MARK = re.compile(
    r"\bstep:\s+\d+\s+(?:global_avg_)?loss:\s+\S+\s+.{0,300}(?:grad_norm|memory|tps):\s"
)
_STEP = re.compile(r"\b(validate )?step:\s+(\d+)\s+(?:\w*_)?loss:\s+(\S+)(.*)")
_NORM = re.compile(r"\bgrad_norm:\s+(\S+)")
_RATE = re.compile(r"\blr:\s+(\S+)")


def matches(head: str) -> bool:
    return _MARK.search(head) is not None


def rows(lines: Iterable[tuple[int, str]]) -> Iterator[Row]:
    clock, rank = Clock(), FirstRank()
    for line, text in pieces(lines):
        found = _STEP.search(text)
        if found is None:
            continue
        norm, rate = _NORM.search(found[4]), _RATE.search(found[4])
        cells: dict[str, float | bool] = {}
        put(
            cells,
            **{"eval_loss" if found[1] else "loss": found[3]},
            grad_norm=norm[1] if norm else None,
            learning_rate=rate[1] if rate else None,
        )
        if cells and rank.accepts(rank_of(text), {"step": float(found[2]), **cells}):
            seconds = clock.read(text)
            if seconds is not None:
                cells["time"] = seconds
            yield row(line, found[2], cells)
