"""The losses of a run, each step once, however often the run was started again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rmetric._util.strict_json import encode_line, parse_line
from rmetric.logs import record_to_json, start_line
from rmetric.metric import RMetricConfig
from rmetric.records import Record

ENDS = ("EXPERIMENT_SUCCESS", "EXPERIMENT_FAILURE")


class LossLog:
    """A log in the form of docs/log_format.md, one line a step, written by one process.

    A run that goes on after step s cuts its log back to s, and so measures what comes
    after anew. Each line is handed to the system before the step counts as done: it
    outlives the process.

    Args:
        path: of the log; its folder is made.
        config: describes the run, in the first line.
        step: last step that is done; 0 begins a new log.
    """

    def __init__(self, path: Path, config: dict[str, Any], step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if step == 0 or not path.exists():
            first = start_line(config, "reference_training", RMetricConfig(), "FULL_METRIC")
            path.write_bytes(first)
        else:
            cut_back(path, step)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115

    def write(self, record: Record) -> None:
        self._file.write(encode_line(record_to_json(record)))

    def close(self, step: int, *, finished: bool) -> None:
        """The training ends after `step`; a log that another launch goes on has no last line."""
        if finished:
            self._file.write(encode_line({"step": step, "event": ENDS[0]}))
        self._file.close()


def cut_back(path: Path, step: int) -> None:
    """Leave out the lines of later steps, the last line, and what was not written whole."""
    kept = 0
    with open(path, "rb") as file:
        for line in file:
            try:
                entry = parse_line(line)
            except ValueError:
                break
            if not line.endswith(b"\n") or entry["event"] in ENDS or entry.get("step", 0) > step:
                break
            kept += len(line)
    os.truncate(path, kept)
