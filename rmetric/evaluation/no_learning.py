"""A loss that is flat from the start at a level that no trained model has: nothing is learnt.

A loss that is flat because a model has converged looks alike, so only two levels count: ln(k),
which a guess among k classes has, without noise; and the loss of a language model without context,
which is far above that of any that has converged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rmetric.evaluation.loss_course import Floats, Loss
from rmetric.evaluation.loss_verdict import event
from rmetric.evaluation.verdict_words import RunVerdict
from rmetric.records import Record

#: Parts of a loss, and the share of its level by which their medians differ in a flat one.
PARTS, FLAT_SHARE = 8, 0.02
#: Classes of which ln is looked for; shares of it by which the level differs, and of its noise.
CLASSES = (*range(2, 11), 100, 1000)
LEVEL_SHARE, NOISE_SHARE = 0.0005, 0.002
#: Loss per token of a language model that knows no context: below ln of the smallest vocabulary
#: of bytes one may have converged, above ln of the largest vocabulary it is no such loss.
UNTRAINED = (float(np.log(256)), float(np.log(300_000)))
#: Records from which each of the two levels is told.
FEWEST_AT_CHANCE, FEWEST_UNTRAINED = 20, 100
#: A log that begins later, as a share of its length, may go on from a trained model; a rate that
#: still rises after the second share is in its warm-up.
LATE_START, WARM_UP = 0.1, 0.75


def learns_nothing(
    verdict: RunVerdict, records: Sequence[Record], alarms: Sequence[int]
) -> RunVerdict:
    """The verdict on a run, or that its training loss shows no learning since start or restart."""
    loss, validation = Loss.of(records, "training_loss"), Loss.of(records, "validation_loss")
    if loss is None or (validation is not None and not _is_flat(validation.values)):
        return verdict
    restarts = np.flatnonzero(np.diff(loss.steps) < 0) + 1
    first = int(restarts[-1]) if len(restarts) else 0
    rates = [record.learning_rate or 0.0 for record in records]
    warms_up = max(rates) > 0 and np.argmax(rates) >= WARM_UP * len(rates)
    if warms_up or not _is_open(verdict, loss, first):
        return verdict
    values, level = loss.values[first:], float(np.median(loss.values[first:]))
    classes = _chance(values)
    untrained = UNTRAINED[0] <= level <= UNTRAINED[1] and len(values) >= FEWEST_UNTRAINED
    begins = first > 0 or loss.steps[0] <= LATE_START * loss.length
    if classes is None and not (begins and untrained and _is_flat(values)):
        return verdict
    name = "flat" if classes is None else "chance"
    facts: dict[str, Any] = {
        "since": f" since the restart at step {loss.step(first):,}" if first else "",
        "before": float(values[0]),
        "after": float(values[-1]),
        "classes": classes or 0,
        "records": len(values),
    }
    if first:
        return event(loss, name, first, alarms, **facts)
    return RunVerdict.of(name, loss=loss.name, word=loss.word, **facts)


def _chance(values: Floats) -> int | None:
    """The number of classes among which a guess has this loss; None for none."""
    settled = values[len(values) // 4 :]
    level = float(np.median(settled))
    noise = 1.4826 * float(np.median(np.abs(settled - level)))
    classes = min(CLASSES, key=lambda classes: abs(level - np.log(classes)))
    at_chance = abs(level - np.log(classes)) <= LEVEL_SHARE * level
    calm = noise <= NOISE_SHARE * level and _is_flat(settled)
    return classes if at_chance and calm and len(values) >= FEWEST_AT_CHANCE else None


def _is_open(verdict: RunVerdict, loss: Loss, first: int) -> bool:
    """True if the verdict saw nothing in the loss but the restart before record `first`."""
    if verdict.kind == "healthy":
        return True
    lasts = verdict.kind in ("diverged", "level_rose") and verdict.end_step is None
    return first > 0 and lasts and verdict.onset_step in loss.steps[first : first + 3]


def _is_flat(values: Floats) -> bool:
    """True if no part of the values differs from another one."""
    parts = np.array_split(values, min(PARTS, len(values)))
    levels = np.array([np.median(part) for part in parts])
    return bool(np.ptp(levels) <= FLAT_SHARE * abs(levels[0]))
