"""The course of a loss as a small picture in a row of the index."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, log
from typing import NamedTuple

from rmetric.evaluation import RunVerdict
from rmetric.records import Record

#: Points of a sparkline, and its height in units of its drawing.
MOST_POINTS, HEIGHT = 60, 24
_WIDE = 20.0  # highest loss over the median, above which the scale is logarithmic


class Sparkline(NamedTuple):
    """A loss in equal stretches of a run.

    Attributes:
        heights: the highest loss of each stretch as a place from 0 (lowest) to `HEIGHT`; None
            where none was logged or none was finite.
        event: place of the verdict's event from 0 to 1; None without one.
    """

    heights: list[int | None]
    event: float | None


def sparkline_of(records: Sequence[Record], verdict: RunVerdict) -> Sparkline | None:
    """The judged loss of a run; None where fewer than two values are finite."""
    name = verdict.loss
    logged = [] if name is None else [
        (position, value)
        for position, record in enumerate(records)
        if (value := _loss_of(record, name, verdict.part)) is not None
    ]  # fmt: skip
    finite = sorted(value for _, value in logged if isfinite(value))
    if len(finite) < 2:
        return None
    wide = finite[0] > 0 and finite[-1] > _WIDE * finite[len(finite) // 2]
    low, high = (log(finite[0]), log(finite[-1])) if wide else (finite[0], finite[-1])
    count = min(MOST_POINTS, len(logged))
    stretches: list[float | None] = [None] * count
    for position, value in logged:
        place = min(count - 1, position * count // len(records))
        if isfinite(value):
            before = stretches[place]
            stretches[place] = value if before is None else max(before, value)
    heights = [
        None if value is None else _height(log(value) if wide else value, low, high)
        for value in stretches
    ]
    event = None
    if verdict.onset_step is not None:
        positions = [i for i, record in enumerate(records) if record.step >= verdict.onset_step]
        event = positions[0] / len(records) if positions else 1.0
    return Sparkline(heights, event)


def _loss_of(record: Record, name: str, part: str) -> float | None:
    if name == "reward":
        return (record.policy or {}).get(name)
    if part:
        return (record.loss_parts or {}).get(
            part if name == "training_loss" else f"validation {part}"
        )
    value: float | None = getattr(record, name)
    return value


def _height(value: float, low: float, high: float) -> int:
    width = high / 2 - low / 2  # which no difference of two floats exceeds
    return round(HEIGHT * (value / 2 - low / 2) / width) if width > 0 else HEIGHT // 2


def path_of(line: Sparkline, most: int = MOST_POINTS) -> str:
    """The `d` of an SVG path, 100 wide and `HEIGHT` high, through at most `most` points.

    >>> path_of(Sparkline([24, 12, None, 0, 6], None))
    'M0 0L25 12M75 24L100 18'
    """
    stride = -(-len(line.heights) // max(1, most))
    groups = [line.heights[i : i + stride] for i in range(0, len(line.heights), stride)]
    parts, drawn = [], False
    for i, group in enumerate(groups):
        known = [height for height in group if height is not None]
        if not known:
            drawn = False
            continue
        x = round(100 * i / max(1, len(groups) - 1))
        parts.append(f"{'L' if drawn else 'M'}{x} {HEIGHT - max(known)}")
        drawn = True
    return "".join(parts)
