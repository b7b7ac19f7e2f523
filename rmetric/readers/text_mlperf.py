"""Reader of MLPerf's log: ``:::MLLOG`` and one JSON object a line.

A loss is ``train_loss``, or stands in ``tracked_stats``. What a language model's
benchmark calls ``eval_accuracy`` is its validation loss; other benchmarks'
accuracies are not read. The step is a count of samples where no other is logged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rmetric._util.strict_json import loads
from rmetric.readers.rows import Row
from rmetric.readers.text_parts import FAR, number_in, pieces, row

NAME = "MLPerf :::MLLOG text"
MARK = re.compile(r":::MLLOG\s*\{")
_STEPS = ("step_num", "step", "samples_count", "sample_count", "epoch_num", "epoch_count")
_LOSSES = ("train_loss", "reduced_train_loss", "loss", "lm_loss")
_EVALUATIONS = ("eval_loss", "val_loss", "validation_loss")
_DECODER = json.JSONDecoder()
_LANGUAGE = re.compile(r"gpt|llama|mixtral|mixture|deepseek", re.IGNORECASE)


def notes(head: str) -> list[str]:
    return ["MLPerf counts samples, where a log counts no steps: they are the steps here"]


def rows(lines: Iterable[tuple[int, str]]) -> Iterator[Row]:
    language, begun = False, None
    for line, text in pieces(lines):
        entry = _entry(text)
        key, value = entry.get("key"), entry.get("value")
        if key == "submission_benchmark":
            language = _LANGUAGE.search(str(value)) is not None
        time = entry.get("time_ms")
        if isinstance(time, (int, float)) and (begun is None or key == "run_start"):
            begun = time
        cells = _cells(key, value, language=language)
        step = _step(entry.get("metadata"))
        if cells and step is not None:
            if isinstance(time, (int, float)) and begun is not None:
                cells["time"] = (time - begun) / 1000
            yield row(line, step, cells)


def _entry(text: str) -> dict[str, Any]:
    """The object on the line; empty for any other line, and for one that is cut off."""
    found = MARK.search(text)
    if found is None:
        return {}
    try:
        entry, _ = loads(text[found.end() - 1 :], _DECODER.raw_decode)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _cells(key: Any, value: Any, *, language: bool) -> dict[str, float | bool]:
    stats: Mapping[str, Any] = value if isinstance(value, dict) else {str(key): value}
    names = {
        "loss": _LOSSES,
        "eval_loss": (*_EVALUATIONS, *(("eval_accuracy",) if language else ())),
        "grad_norm": ("grad_norm", "gradient_norm"),
        "learning_rate": ("lr", "learning_rate"),
    }
    cells: dict[str, float | bool] = {}
    for target, known in names.items():
        number = next((n for n in (_number(stats.get(k)) for k in known) if n is not None), None)
        if number is not None:
            cells[target] = number
    return cells if cells.keys() & {"loss", "eval_loss"} else {}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    return number_in(value) if isinstance(value, str) else float(value)


def _step(metadata: Any) -> int | None:
    values = metadata if isinstance(metadata, dict) else {}
    for name in _STEPS:
        value = _number(values.get(name))
        if value is not None and 0 <= value < FAR:
            return int(value)
    return None
