"""The logs of a study, read once: logs_<MODE>/*.jsonl under one folder."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rmetric._util.errors import LogError
from rmetric._util.lazy import needed
from rmetric.evaluation.protocols import seconds_per_step
from rmetric.log_entries import stated_alarm
from rmetric.logs import LogReader
from rmetric.metric import MODES
from rmetric.records import Run, Truth, records_to_frame

if TYPE_CHECKING:
    from pandas import DataFrame

REFERENCE = "FULL_METRIC"


class UnusableStudy(ValueError):
    """A folder that cannot be analysed as a study."""


class StatedScore(NamedTuple):
    """R and its alarm as a log states them at one record; None where it states nothing."""

    score: float | None
    alarm: bool | None


@dataclass(kw_only=True)
class Study:
    """The runs of a study, mode by mode.

    Attributes:
        runs: the runs of each mode that is there, in the order of their file names.
        stated: for each run of each mode, what its log states of the metric.
        missing: modes whose folder is missing or empty.
        skipped: logs that cannot be used, each with the reason.
        digest: sha256 over the names and the bytes of the logs used.
    """

    folder: Path
    runs: dict[str, list[Run]] = field(default_factory=dict)
    stated: dict[str, list[list[StatedScore]]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    digest: str = ""

    @property
    def reference(self) -> list[Run]:
        """The runs of the full metric, which every comparison is made against."""
        return self.runs[REFERENCE]

    @property
    def num_logs(self) -> int:
        return sum(len(runs) for runs in self.runs.values())

    def paired(self, mode: str) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Indices of the runs with the same id, in the reference and in `mode`."""
        there = {run.id: i for i, run in enumerate(self.runs[mode])}
        ours = [i for i, run in enumerate(self.reference) if run.id in there]
        theirs = [there[self.reference[i].id] for i in ours]
        return np.array(ours, dtype=np.intp), np.array(theirs, dtype=np.intp)

    def to_frame(self) -> DataFrame:
        """All records of all runs as one tidy pandas DataFrame, one row a record.

        The columns `mode`, `run` (its id), `architecture` (its `model_type`), `fault`, `benign`,
        `outcome`, `onset_step`, `failure_step` and `failure_kind` repeat for every record of a
        run; `r_metric` and `alarm` are those that the log states; the rest are the fields of the
        records, as in `rmetric.records.records_to_frame`.

        The mean R-Metric of the published study for each fault and step::

            frame = read_study(Path()).to_frame()
            frame[frame["mode"] == "FULL_METRIC"].groupby(["fault", "step"])["r_metric"].mean()
        """
        pd = needed("pandas")
        runs = [(mode, run) for mode, of_mode in self.runs.items() for run in of_mode]
        stated = [row for of_mode in self.stated.values() for of_run in of_mode for row in of_run]
        rows = [
            (mode, run.id, run.config.get("model_type"),
             *(getattr(run.truth or Truth(), name) for name in OF_RUN[3:]))
            for mode, run in runs
        ]  # fmt: skip
        of_runs = pd.DataFrame(rows, columns=OF_RUN).convert_dtypes()
        lengths = [len(run.records) for _, run in runs]
        repeated = of_runs.loc[np.repeat(of_runs.index, lengths)].reset_index(drop=True)
        repeated["r_metric"] = pd.Series([row.score for row in stated], dtype="float64")
        repeated["alarm"] = pd.Series([row.alarm for row in stated], dtype="boolean")
        records = [record for _, run in runs for record in run.records]
        frame: DataFrame = pd.concat([repeated, records_to_frame(records)], axis="columns")
        return frame


#: Columns of `Study.to_frame` that hold one value for each run.
OF_RUN = [
    "mode", "run", "architecture", "fault", "benign", "outcome", "onset_step", "failure_step",
    "failure_kind",
]  # fmt: skip


def read_study(folder: Path) -> Study:
    """Read every log of a study.

    A log that is cut off, has no end, or cannot be read is skipped and named
    in `skipped`. Logs of one mode that carry the same run id are named by their
    files. Raises UnusableStudy if there is no usable log of the full metric.
    """
    study = Study(folder=folder)
    digest = hashlib.sha256()
    for mode in MODES:
        _read_mode(study, mode, digest)
    if REFERENCE not in study.runs:
        skipped = "".join(f"; skipped {problem}" for problem in study.skipped[:1])
        raise UnusableStudy(
            f"{folder}: no usable log in logs_{REFERENCE}/*.jsonl{skipped}. Accepted is the "
            "folder that run_modern_experiments.py wrote its logs_<MODE>/ to"
        )
    study.digest = digest.hexdigest()
    return study


def _read_mode(study: Study, mode: str, digest: hashlib._Hash) -> None:
    runs: list[Run] = []
    stated: list[list[StatedScore]] = []
    for path in sorted((study.folder / f"logs_{mode}").glob("*.jsonl")):
        try:
            content = path.read_bytes()
            run, scores = _usable(path, content)
        except (OSError, LogError) as error:
            study.skipped.append(str(error))
            continue
        runs.append(run)
        stated.append(scores)
        digest.update(f"{mode}/{path.name}\0".encode())
        digest.update(hashlib.sha256(content).digest())
    if runs:
        _name_by_files(runs)
        study.runs[mode], study.stated[mode] = runs, stated
    else:
        study.missing.append(mode)


def _usable(path: Path, content: bytes) -> tuple[Run, list[StatedScore]]:
    reader = LogReader(path)
    records, alerts = [], []
    for place, line in enumerate(io.BytesIO(content), start=1):
        if (record := reader.take(place, line)) is not None:
            records.append(record)
            alerts.append(reader.entry.get("alerts"))
    run = reader.finish()
    run.records, truth = records, run.truth
    if truth is None:
        raise LogError(path, None, "; ".join(run.notes))
    if truth.failed and truth.failure_step is None:
        raise LogError(path, None, "it failed, and does not say at which step")
    try:
        seconds_per_step(run)
        return run, [
            StatedScore(record.stated_score, stated_alarm({"step": record.step, "alerts": stated}))
            for record, stated in zip(records, alerts, strict=True)
        ]
    except ValueError as error:
        raise LogError(path, None, str(error)) from None


def _name_by_files(runs: Sequence[Run]) -> None:
    """Name runs that share an id by their files; the authors ship two logs of one id."""
    times = Counter(run.id for run in runs)
    for run in runs:
        if times[run.id] > 1 and run.source is not None:
            run.notes.append(f"another log has the id {run.id!r}: this one is named by its file")
            run.id = run.source.stem
