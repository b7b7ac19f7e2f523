"""Scalar streams, healthy and failing, for the calibrated detector: a loss and a gradient norm."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rmetric.detectors import Detector
from rmetric.detectors.calibrated import CalibratedDetector
from rmetric.records import Record

STEPS = 3000


def healthy(kind: str, rng: np.random.Generator, steps: int = STEPS) -> tuple:
    """Losses and gradient norms, shape (steps,) each.

    `quiet`: pretraining, little noise. `bumpy`: bumps of up to 0.3 nat, one at a time. `noisy`:
    fine-tuning on few samples a step, heavy tails.
    """
    t = np.arange(steps)
    falling = 2.2 + 6 * np.exp(-t / 300)
    if kind == "quiet":
        losses = falling + 0.01 * rng.normal(size=steps)
    elif kind == "bumpy":
        losses = falling + 0.03 * rng.normal(size=steps)
        for centre in range(100, steps, 250):
            width, height = rng.uniform(5, 40), rng.uniform(0.05, 0.3)
            losses += height * np.exp(-0.5 * ((t - centre) / width) ** 2)
    elif kind == "noisy":
        losses = 0.8 + 0.8 * np.exp(-t / 500) + 0.25 * rng.standard_t(4, size=steps)
        losses = np.maximum(0.05, losses)
    else:
        raise ValueError(kind)
    norms = np.exp(0.15 * rng.normal(size=steps)) * (1 + 2 * np.exp(-t / 200))
    norms[rng.random(steps) < 0.002] *= 10
    return losses, norms


def rise(kind: str, onset: int, steps: int = STEPS) -> np.ndarray:
    """Nats above the trend, shape (steps,)."""
    since = np.arange(steps) - onset
    shapes = {
        "jump": np.full(steps, 3.0),
        "ramp": np.clip(3 * since / 100, 0, 4),
        "exponential": np.minimum(0.02 * np.exp(np.minimum(since, 500) / 25), 6),
    }
    return np.where(since >= 0, shapes[kind], 0.0)


def records(losses: Iterable[float], norms: Iterable[float] | None = None) -> list[Record]:
    """A record a step, from step 1."""
    values = [float(x) for x in losses]
    seen = [None] * len(values) if norms is None else [float(x) for x in norms]
    return [
        Record(step=step, training_loss=loss, gradient_norm=norm)
        for step, (loss, norm) in enumerate(zip(values, seen, strict=True), start=1)
    ]


def first_alarm(stream: Iterable[Record]) -> int | None:
    """Its step."""
    detector = CalibratedDetector()
    return next((record.step for record in stream if detector.update(record).alarm), None)


def scores(stream: Iterable[Record], detector: Detector | None = None) -> list[float]:
    detector = detector or CalibratedDetector()
    return [detector.update(record).score for record in stream]
