"""Text formats beyond one line: of Hugging Face, fairseq, MLPerf, Stable-Baselines3."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from rmetric._util.strict_json import loads
from rmetric.readers.columns import MEMORY, POLICY, SPEED, WITH_UNIT, columns_among
from rmetric.readers.names import unit
from rmetric.readers.rows import Row
from rmetric.readers.step_forms import BAR
from rmetric.readers.text_parts import (
    FAR,
    Cells,
    Lines,
    Overflows,
    TextFormat,
    number_in,
    pieces,
    put,
    row,
    whole,
)

_DICT = re.compile(r"\{[^{}]*\}")
_PAIR = re.compile(r"['\"]([^'\"]+)['\"]\s*:\s*(?:['\"]([^'\"]*)['\"]|(?:\w+\()?([^,}\s]+))")
_BAR = re.compile(rf"(?:^|\}})\s*{BAR}\s*(\d{{1,18}})/(\d{{1,18}})\s\[")
#: A pipe delays the entries while the bar goes on, so the bar's step is not theirs.
_PIPED = re.compile(r"\d/\d+\s\[[^\]\n]*\]\s*(?:\{[^{}]*'loss'[^{}]*\}\s*){4}")
_READ = ("loss", "eval_loss", "grad_norm", "learning_rate")
_STEPS = ("step", "global_step", "global_step/max_steps")


class _TrainerSteps:
    """Step of the next entry: its own, else that of the training's progress bar, else counted."""

    def __init__(self) -> None:
        self.step, self._interval, self._done = 0, 1, 0
        self._total = ""

    def see(self, text: str) -> None:
        for done, total in _BAR.findall(text):
            # An evaluation has a bar too, to another number; the training's is the one
            # that stood before the first entry.
            if self._total in ("", total):
                self._done, self._last_total = int(done), total

    def next(self, stated: str | None) -> int:
        if (value := whole(stated)) is not None:
            self.step = value
        elif self._done > self.step:
            self._interval, self._total = self._done - self.step, self._last_total
            self.step = self._done
        else:  # no bar, or one that lags behind
            self.step += self._interval
        return self.step


def _trainer_rows(lines: Lines, *, is_piped: bool = False) -> Iterator[Row]:
    """The closing mean ``train_loss`` is not the loss of a step and is left out."""
    steps = _TrainerSteps()
    for line, text in pieces(lines):
        if not is_piped:
            steps.see(text)
        for found in _DICT.finditer(text):
            values = {name: quoted or bare for name, quoted, bare in _PAIR.findall(found[0])}
            columns = columns_among(tuple(values), (*POLICY, *MEMORY, *SPEED))
            cells: Cells = {}
            put(cells, **{name: values.get(name) for name in _READ})
            put(cells, **{t: values[c] for t, c in columns.items()})
            for target in cells.keys() & set(WITH_UNIT):
                cells[target] *= unit(columns[target])
            if cells.keys() & {"loss", "eval_loss", "reward"}:
                stated = next((values[name] for name in _STEPS if name in values), None)
                evaluated = "eval_loss" in cells and "loss" not in cells
                yield row(line, steps.step if evaluated else steps.next(stated), cells)


def _trainer_notes(head: str) -> list[str]:
    if any(f"'{name}'" in entry for entry in _DICT.findall(head) for name in _STEPS):
        return []
    if _PIPED.search(head):
        return ["many entries stand behind one progress bar: they are counted from 1"]
    return [
        "the Trainer prints no step: it is the progress bar's where one stands before the entry, "
        "otherwise the entries are counted from 1"
    ]


HUGGING_FACE = TextFormat(
    name="Hugging Face Trainer text",
    # In double quotes it would be JSON, which has readers of its own.
    mark=re.compile(
        r"\{(?=[^{}]*'(?:(?:eval_)?loss|reward|objective/kl)'\s*:\s*'?[-+]?(?:[\d.]|nan|inf))"
        r"(?=[^{}]*'(?:epoch|learning_rate|global_step/max_steps)')[^{}]*\}",
        re.IGNORECASE,
    ),
    rows=_trainer_rows,
    rows_of=lambda head: partial(_trainer_rows, is_piped=_PIPED.search(head) is not None),
    notes=_trainer_notes,
)

_INNER = re.compile(
    rf"\bepoch (\d{{1,9}}):\s+(?:{BAR})?\s*(\d{{1,9}})\s*/\s*(\d{{1,9}})\s*(.*?\b\w*loss=.*)"
)
_SUMMARY = re.compile(r"\bepoch (\d+) \| (valid on .*? subset \| )?(.*\b(?:train_|valid_)?loss .*)")
_FAIRSEQ_JSON = re.compile(r"\b(train_inner|train|valid\w*) \| (\{.*\})\s*$")
_OF_SPLIT = re.compile(r"^(?:train|valid\w*?)_(?!wall)")
_FAIRSEQ_OVERFLOW = re.compile(r"overflow detected.*setting loss scale to:? *([-+\w.]+)")


def _fairseq_rows(lines: Lines) -> Iterator[Row]:
    """The mean over an epoch counts only where nothing was printed inside of it.

    An overflow is left out of the count of updates: it belongs to the next line.
    """
    overflows, inside, step = Overflows(_FAIRSEQ_OVERFLOW), False, 0
    for line, text in pieces(lines):
        if overflows.take_overflow(text):
            continue
        kind, values = _fairseq_entry(text)
        if kind == "train" and inside:
            inside = False
            continue
        cells: Cells = {}
        put(cells, **{"eval_loss" if kind == "valid" else "loss": values.get("loss")})
        if not cells:
            continue
        inside = kind == "train_inner" or (inside and kind == "valid")
        stated = whole(values.get("num_updates"))
        step = step if stated is None else stated
        if kind != "valid":
            put(cells, grad_norm=values.get("gnorm"), learning_rate=values.get("lr"))
            put(cells, loss_scale=values.get("loss_scale"), time=values.get("wall"))
            cells = overflows.take() | cells
        yield row(line, step, cells)


def _fairseq_entry(text: str) -> tuple[str, dict[str, str]]:
    """The kind of the line and its values by name; empty for any other line."""
    values: dict[str, Any]
    if found := _FAIRSEQ_JSON.search(text):
        kind = "valid" if found[1].startswith("valid") else found[1]
        values = _object_in(found[2])
    elif found := _INNER.search(text):
        # Older lines count updates nowhere but in the epoch.
        updates = (int(found[1]) - 1) * int(found[3]) + int(found[2])
        values = {"num_updates": updates, **dict(re.findall(r"(\w+)=([^,\s\]]+)", found[4]))}
        return "train_inner", {name: str(value) for name, value in values.items()}
    elif found := _SUMMARY.search(text):
        values = dict(re.findall(r"(\w+) ([^|\s]+)(?= \||\s*$)", found[3]))
        kind = "valid" if found[2] or "valid_loss" in values else "train"
    else:
        return "", {}
    return kind, {_OF_SPLIT.sub("", name): str(value) for name, value in values.items()}


FAIRSEQ = TextFormat(
    name="fairseq or metaseq text",
    mark=re.compile(
        rf"\bepoch \d+:\s+(?:{BAR})?\s*\d+\s*/\s*\d+"
        r".{0,300}?\bloss=.{0,300}?\b(?:wps|num_updates|gnorm)="
        r"|\b(?:train_inner|train|valid\w*) \| \{\"epoch\":"
        r"|\bepoch \d+ \| .{0,300}?\b(?:valid_)?loss .{0,300}?\bnum_updates \d"
    ),
    rows=_fairseq_rows,
    notes=lambda head: ["fairseq states losses in bits: they were kept as logged"],
)

_MLLOG = re.compile(r":::MLLOG\s*\{")
_COUNTERS = ("step_num", "step", "samples_count", "sample_count", "epoch_num", "epoch_count")
_MLPERF_NAMES = {
    "loss": ("train_loss", "reduced_train_loss", "loss", "lm_loss"),
    "eval_loss": ("eval_loss", "val_loss", "validation_loss"),
    "grad_norm": ("grad_norm", "gradient_norm"),
    "learning_rate": ("lr", "learning_rate"),
}
_DECODER = json.JSONDecoder()
_LANGUAGE = re.compile(r"gpt|llama|mixtral|mixture|deepseek", re.IGNORECASE)


def _mlperf_rows(lines: Lines) -> Iterator[Row]:
    """A loss is ``train_loss``, or stands in ``tracked_stats``.

    What a language model's benchmark calls ``eval_accuracy`` is its validation loss; other
    benchmarks' accuracies are not read.
    """
    names, begun = _MLPERF_NAMES, None
    for line, text in pieces(lines):
        found = _MLLOG.search(text)
        entry = _object_in(text[found.end() - 1 :]) if found else {}
        key, value = entry.get("key"), entry.get("value")
        time = number_in(str(entry.get("time_ms")))
        if key == "submission_benchmark" and _LANGUAGE.search(str(value)):
            names = {**names, "eval_loss": (*names["eval_loss"], "eval_accuracy")}
        if time is not None and (begun is None or key == "run_start"):
            begun = time
        stats = value if isinstance(value, dict) else {str(key): value}
        cells: Cells = {}
        put(cells, **{target: _first_of(stats, known) for target, known in names.items()})
        steps = (_first_of(entry.get("metadata"), [counter]) for counter in _COUNTERS)
        step = next((step for step in steps if step is not None and 0 <= step < FAR), None)
        if step is not None and cells.keys() & {"loss", "eval_loss"}:
            put(cells, time=None if time is None or begun is None else (time - begun) / 1000)
            yield row(line, int(step), cells)


def _object_in(text: str) -> dict[str, Any]:
    """The object that `text` begins with; empty for none, and for one that is cut off."""
    try:
        entry, _ = loads(text, _DECODER.raw_decode)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _first_of(values: Any, names: Iterable[str]) -> float | None:
    """The first number among the values of these names."""
    numbers = (number_in(str(values.get(n))) for n in names) if isinstance(values, dict) else ()
    return next((number for number in numbers if number is not None), None)


MLPERF = TextFormat(
    name="MLPerf :::MLLOG text",
    mark=_MLLOG,
    rows=_mlperf_rows,
    notes=lambda head: [
        "MLPerf counts samples, where a log counts no steps: they are the steps here"
    ],
)

_CELL = re.compile(r"^\|\s+([\w/]+)\s*\|\s*(\S*)\s*\|\s*$")
_DASHES = re.compile(r"^-{8,}\s*$")


def _stable_baselines3_rows(lines: Lines) -> Iterator[Row]:
    """The step is ``total_timesteps``; a table may hold an evaluation alone."""
    values: dict[str, str] = {}
    folder = ""
    for line, text in pieces(lines):
        if found := _CELL.match(text):
            name, value = found.groups()
            folder = name if name.endswith("/") else folder
            values |= {f"{folder}{name}": value} if value else {}
        elif _DASHES.match(text):
            if (step := whole(values.get("time/total_timesteps"))) is not None:
                cells: Cells = {}
                put(cells, **{t: values.get(f"train/{t}") for t in ("loss", "learning_rate")})
                columns = columns_among(tuple(values), POLICY)
                put(cells, **{t: values[c] for t, c in columns.items()})
                yield row(line, step, cells)
            values = {}


STABLE_BASELINES3 = TextFormat(
    name="Stable-Baselines3 text",
    mark=re.compile(r"^\|\s+total_timesteps\s*\|\s*\d+\s*\|\s*$", re.MULTILINE),
    rows=_stable_baselines3_rows,
)
PROGRAMS = (MLPERF, HUGGING_FACE, STABLE_BASELINES3, FAIRSEQ)
