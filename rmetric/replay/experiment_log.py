"""Reader of our own logs and of the authors', one JSON object a line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rmetric.logs import LogError, decode_number, parse_line, read_lines
from rmetric.metric import RMetric
from rmetric.records import Run
from rmetric.replay.settings import settings_of

NAME = "experiment log (JSONL)"
_EVENT = re.compile(r'"event"\s*:\s*"(EXPERIMENT_\w+|METRICS|FAULT_INJECTED)"')
_COMPUTED_FROM = {
    "failure_rate": "events",
    "gradient_variance": "worker_gradient_norms",
    "loss_drift": "validation_loss",
}
_TOLERANCE = 1e-9


def matches(head: str) -> bool:
    return _EVENT.search(head) is not None


def read(path: Path, data: bytes, mapping: Mapping[str, str]) -> list[Run]:
    logged: list[float | None] = []
    run = read_lines(path, _noting_scores(data.splitlines(keepends=True), logged))
    if not run.records:
        raise LogError(path, None, "no METRICS line: there is nothing to score")
    if mapping:
        run.notes.append("--map is not needed for this format and was not used")
    run.notes += _forget_repeated(run)
    if any(score is not None for score in logged):
        run.notes.append(comparison(run, logged))
    return [run]


def _forget_repeated(run: Run) -> list[str]:
    """Drop a stated signal from the lines that lack what the others compute it from.

    The authors' logs may repeat the last ΔL on lines without an evaluation; taken
    as observations the copies would fill the window that it is normalised over.
    """
    notes = []
    for stated, source in _COMPUTED_FROM.items():
        sourced = sum(getattr(record, source) is not None for record in run.records)
        repeated = [
            record
            for record in run.records
            if getattr(record, source) is None and getattr(record, stated) is not None
        ]
        if sourced >= 2 and repeated:
            for record in repeated:
                setattr(record, stated, None)
            notes.append(
                f"{stated} is stated on {len(repeated)} lines without {source}: left out there, "
                f"and computed from {source} elsewhere"
            )
    return notes


def comparison(run: Run, logged: list[float | None]) -> str:
    """Whether R, recomputed from the records, is what the log states, in a sentence."""
    settings = settings_of(run)
    metric = RMetric(settings.config)
    scores = [metric.update(record).score for record in run.records]
    stated = [
        (record.step, score, log)
        for record, score, log in zip(run.records, scores, logged, strict=True)
        if log is not None
    ]
    differing = [row for row in stated if not abs(row[1] - row[2]) <= _TOLERANCE]
    if not differing:
        return f"R recomputed equals the logged r_metric at all {len(stated)} records that state it"
    step, score, log = differing[0]
    return (
        f"R recomputed (settings: {settings.name}) differs from the logged r_metric at "
        f"{len(differing)} of {len(stated)} records, first at step {step}: {score:.4f}, "
        f"logged {log:.4f}"
    )


def _noting_scores(lines: Iterable[bytes], scores: list[float | None]) -> Iterator[bytes]:
    """Pass the lines on and keep what each METRICS line states as its R."""
    for line in lines:
        if b'"METRICS"' in line:
            # The reader of the lines says what is wrong with one, and stops there.
            with suppress(ValueError, AttributeError):
                entry = parse_line(line)
                if entry.get("event") == "METRICS":
                    scores.append(_score(entry.get("r_metric")))
        yield line


def _score(stated: Any) -> float | None:
    try:
        return decode_number(stated)
    except ValueError:
        return None
