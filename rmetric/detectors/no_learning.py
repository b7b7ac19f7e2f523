"""A loss that is flat from the start at a level that no trained model has: nothing is learnt.

A loss that is flat because a model has converged looks alike, so only two levels count: ln(k),
which a guess among k classes has, without noise; and the loss of a language model without context,
which is far above that of any that has converged.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rmetric._util.printed import short_number
from rmetric.records import Record

ADVICE = "look for a rate that is too high or 0, frozen weights, and labels of other inputs"
#: Parts of a loss, and the share of its level by which their medians differ in a flat one.
NUM_PARTS, FLAT_SHARE = 8, 0.02
#: Classes of which ln is looked for; shares of it by which the level differs, and of its noise.
CLASSES = (*range(2, 11), 100, 1000)
LEVEL_SHARE, NOISE_SHARE = 0.0005, 0.002
#: Loss per token of a language model that knows no context: below ln of the smallest vocabulary
#: of bytes one may have converged, above ln of the largest vocabulary it is another kind of loss.
UNTRAINED = (float(np.log(256)), float(np.log(300_000)))
#: Records from which each of the two levels is computed.
FEWEST_AT_CHANCE, FEWEST_UNTRAINED = 20, 100
#: A log that begins later, as a share of its length, may go on from a trained model; a rate that
#: still rises after the second share is in its warm-up.
LATE_START, WARM_UP = 0.1, 0.75
#: Preferences are separated by chance alone within so many standard errors of one half, from the
#: error on that is small enough to judge.
CHANCE_ERRORS, LARGEST_ERROR = 2.0, 0.02
#: Losses that are held; of more every second one is, every fourth and so on.
MOST_KEPT = 1 << 15

Floats = NDArray[np.float64]


class NotLearnt(NamedTuple):
    """A run that learns nothing, in words."""

    first: int  # place of the first loss after the last restart; 0 without a restart
    text: str
    detail: str


class NoLearning:
    """Follows the losses of a run, and states at its end whether they show no learning."""

    def __init__(self) -> None:
        self._losses: list[tuple[int, float, float]] = []
        self._evaluations: deque[float] = deque(maxlen=MOST_KEPT)
        self._accuracies: deque[float] = deque(maxlen=MOST_KEPT)
        self._every, self._count = 1, 0

    def update(self, record: Record) -> None:
        """Take the next record."""
        if record.validation_loss is not None:
            self._evaluations.append(record.validation_loss)
        if record.policy and "preference_accuracy" in record.policy:
            self._accuracies.append(record.policy["preference_accuracy"])
        if record.training_loss is None or record.skipped:
            return
        if self._count % self._every == 0:
            self._losses.append((record.step, record.training_loss, record.learning_rate or 0.0))
        self._count += 1
        if len(self._losses) > MOST_KEPT:
            self._losses, self._every = self._losses[::2], 2 * self._every

    def judge(self) -> NotLearnt | None:
        """Evidence that nothing was learnt; None without any."""
        if not self._losses:
            return None
        steps, losses, rates = np.array(self._losses).T
        restarts = np.flatnonzero(np.diff(steps) < 0) + 1
        first = int(restarts[-1]) if len(restarts) else 0
        length = len(steps) if first else steps[-1] - steps[0]
        values, evaluations = losses[first:], np.array(self._evaluations)
        warms_up = rates.max() > 0 and rates.argmax() >= WARM_UP * len(rates)
        if warms_up or not np.isfinite(values).all() or not _is_flat(evaluations):
            return None
        if by_chance := self._by_chance():
            return by_chance
        flat = _is_flat(values)
        classes = _chance(values) or (_chance(evaluations) if flat else None)
        untrained = UNTRAINED[0] <= np.median(values) <= UNTRAINED[1]
        begins = (first > 0 or steps[0] <= LATE_START * length) and len(values) >= FEWEST_UNTRAINED
        if classes is None and not (flat and untrained and begins):
            return None
        what, records = "does not fall", self._count - first * self._every
        why = f" in {records:,} records, no level of a model that has converged"
        if classes is not None:
            what, why = f"stays at ln({classes:,})", f", as of a guess among {classes:,} classes"
        since = f" since the restart at step {int(steps[first]):,}" if first else ""
        return NotLearnt(
            first=first * self._every,
            text=f"LEARNS NOTHING{since}: the loss {what}",
            detail=f"loss {short_number(values[0])} -> {short_number(values[-1])}{why}",
        )

    def _by_chance(self) -> NotLearnt | None:
        """Evidence that preferences (DPO) are guessed, from the last half of the log."""
        half = np.array(self._accuracies)[len(self._accuracies) // 2 :]
        error = float(half.std()) / len(half) ** 0.5 if len(half) >= FEWEST_AT_CHANCE else 1.0
        if error > LARGEST_ERROR or abs(half.mean() - 0.5) > CHANCE_ERRORS * error:
            return None
        text = "LEARNS NOTHING: preferred and rejected answers are separated by chance alone"
        return NotLearnt(0, text, f"accuracy {half.mean():.3f} in the last {len(half):,} records")


def _chance(values: Floats) -> int | None:
    """The number of classes among which a guess has this loss; None for none."""
    if len(values) < FEWEST_AT_CHANCE:
        return None
    settled = values[len(values) // 4 :]
    level = float(np.median(settled))
    noise = 1.4826 * float(np.median(np.abs(settled - level)))
    classes = min(CLASSES, key=lambda classes: abs(level - np.log(classes)))
    at_chance = abs(level - np.log(classes)) <= LEVEL_SHARE * level
    calm = noise <= NOISE_SHARE * level and _is_flat(settled)
    return classes if at_chance and calm else None


def _is_flat(values: Floats) -> bool:
    """True if no part of the values differs from another one; also of no values."""
    parts = np.array_split(values, min(NUM_PARTS, len(values)) or 1)
    levels = np.array([np.median(part) for part in parts if len(part)])
    return not len(levels) or bool(np.ptp(levels) <= FLAT_SHARE * abs(levels[0]))
