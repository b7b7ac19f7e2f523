"""Reader of what fairseq and metaseq print, as JSON or between bars.

Its losses are in bits, and are kept as logged. The mean over an epoch counts only
where nothing was printed inside of it. An overflow is left out of the count of
updates: it belongs to the next line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from rmetric._util.strict_json import loads
from rmetric.readers.rows import Row
from rmetric.readers.text_parts import Overflows, pieces, put, row, whole

NAME = "fairseq or metaseq text"
_INNER = re.compile(
    r"\bepoch (\d{1,9}):\s+(?:\d+%\|[^|]*\|)?\s*(\d{1,9})\s*/\s*(\d{1,9})\s*(.*?\b\w*loss=.*)"
)
_SUMMARY = re.compile(r"\bepoch (\d+) \| (valid on .*? subset \| )?(.*\b(?:train_|valid_)?loss .*)")
_JSON = re.compile(r"\b(train_inner|train|valid\w*) \| (\{.*\})\s*$")
_OVERFLOW = re.compile(r"overflow detected.*setting loss scale to:? *([-+\w.]+)")
MARK = re.compile(
    r"\bepoch \d+:\s+(?:\d+%\|[^|\n]*\|)?\s*\d+\s*/\s*\d+"
    r".{0,300}?\bloss=.{0,300}?\b(?:wps|num_updates|gnorm)="
    r"|\b(?:train_inner|train|valid\w*) \| \{\"epoch\":"
    r"|\bepoch \d+ \| .{0,300}?\b(?:valid_)?loss .{0,300}?\bnum_updates \d"
)


def notes(head: str) -> list[str]:
    return ["fairseq states losses in bits: they were kept as logged"]


def rows(lines: Iterable[tuple[int, str]]) -> Iterator[Row]:
    overflows, inside, step = Overflows(_OVERFLOW), False, 0
    for line, text in pieces(lines):
        if overflows.take_overflow(text):
            continue
        kind, values = _entry(text)
        if not values or (kind == "train" and inside):
            inside = inside and kind != "train"
            continue
        cells = _cells(kind, values)
        if not cells:
            continue
        inside = kind == "train_inner" or (inside and kind == "valid")
        stated = whole(str(values.get("num_updates", "")))
        step = step if stated is None else stated
        if kind != "valid":
            cells = overflows.take() | cells
        yield row(line, step, cells)


def _entry(text: str) -> tuple[str, dict[str, Any]]:
    """The kind of the line and its values by name; empty for any other line."""
    if found := _JSON.search(text):
        kind = "valid" if found[1].startswith("valid") else found[1]
        try:
            values = loads(found[2])
        except ValueError:
            return kind, {}
        return kind, {re.sub(r"^(?:train|valid\w*?)_(?!wall)", "", n): v for n, v in values.items()}
    if found := _INNER.search(text):
        pairs = dict(re.findall(r"(\w+)=([^,\s\]]+)", found[4]))
        # Older lines count updates nowhere but in the epoch.
        whole = (int(found[1]) - 1) * int(found[3]) + int(found[2])
        return "train_inner", {"num_updates": str(whole), **pairs}
    if found := _SUMMARY.search(text):
        pairs = dict(re.findall(r"(\w+) ([^|\s]+)(?= \||\s*$)", found[3]))
        plain = {re.sub(r"^(?:train|valid)_(?!wall)", "", n): v for n, v in pairs.items()}
        return "valid" if found[2] or "valid_loss" in pairs else "train", plain
    return "", {}


def _cells(kind: str, values: dict[str, Any]) -> dict[str, float | bool]:
    cells: dict[str, float | bool] = {}
    text = {name: str(value) for name, value in values.items()}
    put(cells, **{"eval_loss" if kind == "valid" else "loss": text.get("loss")})
    if cells and kind != "valid":
        put(
            cells,
            grad_norm=text.get("gnorm"),
            learning_rate=text.get("lr"),
            loss_scale=text.get("loss_scale"),
            time=text.get("wall"),
        )
    return cells
