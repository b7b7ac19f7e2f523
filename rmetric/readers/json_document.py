"""Readers of one JSON document: trainer_state.json; lists of objects, pairs, numbers; arrays."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rmetric._util.errors import LogError
from rmetric._util.strict_json import loads, why_not_read
from rmetric.readers.columns import choose_columns, find_mapped
from rmetric.readers.curves import Curves, stream_curves
from rmetric.readers.json_lines import flat
from rmetric.readers.rows import Row, UnknownFormat
from rmetric.readers.source import Source
from rmetric.readers.stream import Reader, Stream, columns_of_table, stream_rows, stream_wide
from rmetric.readers.trackers import widened

_BEGINS = re.compile(r'\s*(\{\s*"|\[\s*\{)')
#: A list of numbers or of lists of numbers, up to where the head of a file ends.
_NUMBER_LIST = re.compile(
    r"\s*\[\s*(?:\[\s*)?(?:-?[\d.][\d.eE+-]*|[-+]?(?:nan|inf)[\w()]*|null)\s*,", re.IGNORECASE
)
_OTHER_THAN_NUMBERS = re.compile(r"[^\s\d\[\],.eE+\-NaInfityul]")
_SCALAR = (int, float, str, type(None))


def matches(head: str) -> bool:
    return _BEGINS.match(head) is not None or _is_list_of_numbers(head)


def _is_list_of_numbers(head: str) -> bool:
    """True for a list that is one document; a line of text may begin with ``[12, 3]`` too."""
    if _NUMBER_LIST.match(head) is None:
        return False
    return _OTHER_THAN_NUMBERS.search(head) is None or isinstance(_parsed(head), list)


def _parsed(text: str) -> Any:
    try:
        return loads(text)
    except ValueError:
        return None


def stream(source: Source, mapping: Mapping[str, str]) -> Stream:
    try:
        document = parse_document(source)
    except LogError as error:
        if "loss" in source.head_text() or mapping:
            raise
        raise UnknownFormat(source.path, error.line, error.problem) from None
    if isinstance(document, list) and document and not isinstance(document[0], dict):
        return _stream_numbers(source, document, mapping)
    if objects := _longest_list_of_objects(document):
        cells = [flat(entry) for entry in objects]
        if (wide := widened((None, entry) for entry in cells)) is not None:
            return stream_wide(source.path, lambda: wide, mapping)
        names = list(dict.fromkeys(name for entry in cells for name in entry))
        columns = columns_of_table(source, names, mapping)
        return stream_rows(source, columns, (Row(None, entry) for entry in cells))
    if not (runs := _curves_of_runs(document, mapping)):
        problem = "a JSON document that holds neither a list of objects nor arrays"
        raise UnknownFormat(source.path, None, problem)
    named = [(run, None, curves) for run, curves in runs.items()]
    return stream_curves(source, named, mapping)


def _stream_numbers(source: Source, entries: list[Any], mapping: Mapping[str, str]) -> Stream:
    """A list of losses, or of pairs of step and loss. Nothing names the values."""
    pairs = isinstance(entries[0], list)
    accepted = "[step, loss] with rising whole steps" if pairs else "a loss, NaN or null"
    rows: list[Row] = []
    step = -1
    for number, entry in enumerate(entries, start=1):
        if not (_is_pair(entry, step) if pairs else _is_loss(entry)):
            problem = f"entry {number} of the list is {json.dumps(entry)[:60]}"
            size = len(source.whole().splitlines())  # one line, or a line for each entry
            line = {1: 1, len(entries) + 2: number + 1}.get(size)
            raise UnknownFormat(source.path, line, f"{problem}; accepted: {accepted}")
        step = int(entry[0]) if pairs else number - 1
        rows.append(Row(None, {"step": step, "loss": entry[1] if pairs else entry}))
    losses = [row.cells["loss"] for row in rows]
    if all(loss is None or isinstance(loss, int) for loss in losses):
        problem = f"the list holds whole numbers alone, as {json.dumps(losses[0])}"
        raise UnknownFormat(source.path, None, f"{problem}; accepted: losses")
    columns = columns_of_table(source, ["step", "loss"], mapping)
    columns.notes = [
        "a list of pairs: the first number is read as step, the second as training loss"
        if pairs
        else "a list of bare numbers: read as training losses, counted from 0"
    ]
    return stream_rows(source, columns, rows)


def _is_loss(entry: Any) -> bool:
    return entry is None or (isinstance(entry, (int, float)) and not isinstance(entry, bool))


def _is_pair(entry: Any, last: int) -> bool:
    if not isinstance(entry, list) or len(entry) != 2 or not all(map(_is_loss, entry)):
        return False
    step = entry[0]
    return step is not None and last < step < 2**63 and step == int(step)


def _longest_list_of_objects(document: Any) -> list[dict[str, Any]]:
    """The longest list of objects, at the top of the document or under a key."""
    values = [document] if isinstance(document, list) else list(_leaves(document))
    lists = [v for v in values if _is_list_of(v, dict)]
    return max(lists, key=len, default=[])


def _curves_of_runs(document: Any, mapping: Mapping[str, str]) -> dict[str, Curves]:
    """Run -> its curves; the only run of a document has no name."""
    if not isinstance(document, dict):
        return {}
    curves = _curves(document)
    if _is_judged(curves, mapping):
        return {"": curves}
    by_run = {str(k): _curves(v) for k, v in document.items() if isinstance(v, dict)}
    with_loss: dict[str, Curves] = {k: c for k, c in by_run.items() if _is_judged(c, mapping)}
    return with_loss or ({"": curves} if curves else {})


def _is_judged(curves: Curves, mapping: Mapping[str, str]) -> bool:
    known = {t: c for t, c in find_mapped(curves, mapping).items() if c in curves}
    return choose_columns(list(curves), known).is_judged


def _curves(entry: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {
        name: list(value)
        for name, value in flat(_arrays_from_indices(entry)).items()
        if _is_list_of(value, _SCALAR)
    }


def _arrays_from_indices(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Objects whose keys are 0, 1, 2, ... as lists, as saved data frames have them."""
    out: dict[str, Any] = {}
    for name, value in entry.items():
        if isinstance(value, dict) and value and all(key.isdecimal() for key in value):
            out[name] = [value[key] for key in sorted(value, key=int)]
        else:
            out[name] = _arrays_from_indices(value) if isinstance(value, dict) else value
    return out


def _is_list_of(value: Any, kind: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, kind) for v in value)


def _leaves(document: Any) -> Iterator[Any]:
    """The values of an object, and of the objects in it."""
    if isinstance(document, dict):
        for value in document.values():
            if isinstance(value, dict) and not all(key.isdecimal() for key in value):
                yield from _leaves(value)
            else:
                yield value


_OWN_NAMES = ("step", "loss", "eval_loss", "grad_norm", "learning_rate")
_LOG_HISTORY = re.compile(r'\s*\{.*"log_history"\s*:\s*\[', re.DOTALL)


def _matches_trainer_state(head: str) -> bool:
    if '"log_history"' not in head or _LOG_HISTORY.match(head) is None:
        return False
    # A log of lines may have the history on one of them, as the last of ms-swift's has.
    first = head.lstrip().partition("\n")[0]
    return '"log_history"' in first or _parsed(first) is None


def _stream_trainer_state(source: Source, mapping: Mapping[str, str]) -> Stream:
    try:
        history = parse_document(source)["log_history"]
    except (KeyError, TypeError):
        raise LogError(source.path, None, "no 'log_history' at the top of the file") from None
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        raise LogError(source.path, None, "'log_history' must be a list of objects")
    # The closing summary's train_loss is a mean over the run and no step's loss.
    entries = [entry for entry in history if "train_runtime" not in entry]
    if not entries:
        raise LogError(source.path, None, "'log_history' is empty: nothing was logged yet")
    names = list(dict.fromkeys(name for entry in entries for name in entry))
    own = {name: name for name in _OWN_NAMES if name in names}
    columns = columns_of_table(source, names, own | dict(mapping))
    return stream_rows(source, columns, (Row(None, entry) for entry in entries))


def parse_document(source: Source) -> Any:
    """The whole file as JSON, in which nan and the infinities may stand bare."""
    text = source.whole()
    try:
        return loads(text)
    except json.JSONDecodeError as error:
        raise LogError(source.path, error.lineno, f"no whole JSON: {error.msg}") from None
    except ValueError as error:
        raise LogError(source.path, None, why_not_read(error)) from None


READER = Reader("JSON (a list of objects, or arrays)", matches, stream)
TRAINER_STATE = Reader(
    "Hugging Face trainer_state.json", _matches_trainer_state, _stream_trainer_state
)
