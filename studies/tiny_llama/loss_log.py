"""Loss log of a run with each step once, across restarts."""

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
    """Log in the format of docs/log_format.md, one line per step, written by one process.

    A run that resumes after step s truncates its log to s. Each line is written to the
    operating system before the step counts as done, so that it survives the process.
    `config` describes the run in the first line; `step`, the last completed one, is 0 in a new log.
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
        """Close the log after `step`; only a finished training gets a last line."""
        if finished:
            self._file.write(encode_line({"step": step, "event": ENDS[0]}))
        self._file.close()


def cut_back(path: Path, step: int) -> None:
    """Remove the lines of later steps, the last line and an incomplete line."""
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
