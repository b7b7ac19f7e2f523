"""Reader of the Hugging Face Trainer's trainer_state.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from rmetric.logs import LogError
from rmetric.records import Run
from rmetric.replay.rows import Row, runs_from_rows
from rmetric.replay.source import text_of

NAME = "Hugging Face trainer_state.json"
_OWN_NAMES = ("step", "loss", "eval_loss", "grad_norm", "learning_rate")
_HISTORY = re.compile(r'\s*\{.*"log_history"\s*:\s*\[', re.DOTALL)


def matches(head: str) -> bool:
    return _HISTORY.match(head) is not None


def read(path: Path, data: bytes, mapping: Mapping[str, str]) -> list[Run]:
    text = text_of(path, data)
    try:
        history = json.loads(text)["log_history"]
    except json.JSONDecodeError as error:
        raise LogError(path, error.lineno, f"no whole JSON: {error.msg}") from None
    except ValueError:
        raise LogError(path, None, "a number has thousands of digits") from None
    except (KeyError, TypeError):
        raise LogError(path, None, "no 'log_history' at the top of the file") from None
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        raise LogError(path, None, "'log_history' must be a list of objects")
    # The closing summary's train_loss is a mean over the run and no step's loss.
    entries = [entry for entry in history if "train_runtime" not in entry]
    if not entries:
        raise LogError(path, None, "'log_history' is empty: nothing was logged yet")
    names = list(dict.fromkeys(name for entry in entries for name in entry))
    own = {name: name for name in _OWN_NAMES if name in names}
    rows = [Row(None, entry) for entry in entries]
    return runs_from_rows(path, names, rows, own | dict(mapping))
