"""Reader of the Hugging Face Trainer's trainer_state.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rmetric._util.errors import LogError
from rmetric.readers.rows import Row
from rmetric.readers.source import Source
from rmetric.readers.stream import Stream, columns_of_table, stream_rows

NAME = "Hugging Face trainer_state.json"
FOLLOWS = False
_OWN_NAMES = ("step", "loss", "eval_loss", "grad_norm", "learning_rate")
_HISTORY = re.compile(r'\s*\{.*"log_history"\s*:\s*\[', re.DOTALL)


def matches(head: str) -> bool:
    return '"log_history"' in head and _HISTORY.match(head) is not None


def stream(source: Source, mapping: Mapping[str, str]) -> Stream:
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
    try:
        return json.loads(source.whole())
    except json.JSONDecodeError as error:
        raise LogError(source.path, error.lineno, f"no whole JSON: {error.msg}") from None
    except ValueError:
        raise LogError(source.path, None, "a number has thousands of digits") from None
