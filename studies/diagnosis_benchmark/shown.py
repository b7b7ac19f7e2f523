"""Helpers that all tables share."""

from __future__ import annotations

from rmetric.evaluation.intervals import NUM_RESAMPLES
from rmetric.reporting.table import Column

INTERVALS = (
    f"Brackets: 95 % intervals by {NUM_RESAMPLES} bootstrap resamples of whole groups (a real "
    "log's case; an injected job by itself). Where all jobs are alike an interval has no width, "
    "which is no certainty."
)


def columns(*labels: str, digits: int = 2) -> tuple[Column, ...]:
    return tuple(Column(label=label, digits=digits) for label in labels)
