"""The public training logs: the manifest, and the available logs as a data set.

data/real_logs.csv lists them; it is made by benchmarks/real_logs.py. The logs themselves
are not part of the repository: they are read from a folder, or downloaded
(`studies.detector_benchmark.fetch`).
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Sequence
from math import floor, inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pandas import factorize

from rmetric.evaluation.protocols import Windows
from rmetric.logs import LogError
from rmetric.readers import read_log
from rmetric.records import Run
from studies.detector_benchmark.cases import Cases
from studies.detector_benchmark.data_sets import DataSet, sha256

MANIFEST = Path(__file__).parent / "data" / "real_logs.csv"
#: Label -> kind of case; a spike should be detected too.
LABELS = {
    "healthy": "control",
    "spike-recovered": "spiking",
    "diverged": "failing",
    "nan": "failing",
    "collapse": "failing",
}
CONFIDENCES = ("high", "medium", "low")

#: Number of logging intervals after the labelled onset within which an alarm is in time.
LATE_INTERVALS = 2
#: Number of logging intervals before the onset within which an alarm is a warning by the causal
#: rule; an earlier alarm is false. Labels were assigned by eye, at the resolution of the logging.
EARLY_INTERVALS = 10
#: Records on either side of the onset from which the logging interval is taken.
AROUND = 10


class Listed(NamedTuple):
    """One line of the manifest; see the docstring of benchmarks/real_logs.py."""

    run: str
    repository: str
    commit: str
    path: str
    file: str
    run_in_file: str
    sha256: str
    bytes: int
    published_bytes: bool
    licence: str
    format: str
    label: str
    onset: int | None
    confidence: str
    group: str


COLUMNS = Listed._fields


def read_manifest(path: Path = MANIFEST) -> list[Listed]:
    """The lines of a manifest. Raises LogError for one that cannot be."""
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise LogError(path, 1, f"the columns must be {', '.join(COLUMNS)}")
        return [_listed(path, reader.line_num, row) for row in reader]


def _listed(path: Path, line: int, row: dict[str, Any]) -> Listed:
    for name, known in (("label", LABELS), ("confidence", CONFIDENCES)):
        if row[name] not in known:
            raise LogError(path, line, f"{name} is {row[name]!r}: known are {', '.join(known)}")
    try:
        row["bytes"] = int(row["bytes"])
        row["onset"] = int(float(row["onset"])) if row["onset"] else None
        return Listed(**row | {"published_bytes": row["published_bytes"] == "yes"})
    except (TypeError, ValueError) as error:
        raise LogError(path, line, str(error)) from None


def real(folder: Path, manifest: Path = MANIFEST) -> DataSet:
    """The listed logs that are in `folder` (or in raw/ below it); the others are named as skipped.

    Labels are assigned by eye, with low to high confidence; most troubled runs have the step at
    which the trouble begins. `Cases.windows` hold the causal rule (`EARLY_INTERVALS` before to
    `LATE_INTERVALS` after the onset).
    """
    listed = read_manifest(manifest)
    runs: list[Run] = []
    lines: list[Listed] = []
    skipped: list[str] = []
    for name in dict.fromkeys(line.file for line in listed):
        mine = [line for line in listed if line.file == name]
        for line, found in _read(folder, name, mine, skipped):
            runs += found
            lines += [line] * len(found)
    if not runs:
        first = f": {skipped[0]}" if skipped else ""
        raise ValueError(f"{folder}: none of the {len(listed)} logs in {manifest} is there{first}")
    return DataSet(
        name="real",
        title="public training logs",
        runs=runs,
        cases=cases_of(runs, lines),
        group="configurations",
        inputs={"manifest_sha256": sha256(manifest), "logs": len(runs), "listed": len(listed)},
        notes=_notes(lines, len(listed)),
        skipped=skipped,
        confidence=np.array([line.confidence for line in lines]),
        spacing=np.array(
            [spacing_of(run, line.onset) for run, line in zip(runs, lines, strict=True)]
        ),
    )


def _read(
    folder: Path, name: str, lines: Sequence[Listed], skipped: list[str]
) -> list[tuple[Listed, list[Run]]]:
    """The runs of one file, by the lines that name them."""
    places = (folder / name, folder / "raw" / name)
    path = next((place for place in places if place.is_file()), None)
    count = f" ({len(lines)} runs)" if len(lines) > 1 else ""
    if path is None:
        skipped.append(f"{name}{count}: not in {folder}")
        return []
    try:
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if digest != lines[0].sha256 and lines[0].published_bytes:
            skipped.append(f"{path}{count}: other bytes than the manifest's, sha256 is {digest}")
            return []
        runs = read_log(path).runs
    except (LogError, OSError) as error:
        skipped.append(f"{error}{count}")
        return []
    found = []
    for line in lines:
        mine = [run for run in runs if _is_named(run, path, line)]
        if mine:
            found.append((line, _parts(line, mine)))
        else:
            skipped.append(f"{path}: holds no run {line.run_in_file!r}")
    return found


def _is_named(run: Run, path: Path, line: Listed) -> bool:
    stem, name = path.stem, line.run_in_file
    return not name or run.id in {f"{stem}__{name}", f"{stem}__row{name}", name}


def _parts(line: Listed, runs: list[Run]) -> list[Run]:
    """All runs of a healthy file, else the first run with steps up to the onset."""
    usable = [run for run in runs if run.records]
    if line.label == "healthy" or len(usable) < 2:
        return usable
    onset = line.onset or 0
    return [next((run for run in usable if run.records[-1].step >= onset), usable[0])]


def cases_of(runs: Sequence[Run], lines: Sequence[Listed]) -> Cases:
    """The facts, under the causal rule for labelled onsets."""
    kinds = np.array([LABELS[line.label] for line in lines])
    failed = kinds != "control"
    onset = np.full(len(runs), -inf)
    deadline = np.full(len(runs), inf)
    for i, (run, line) in enumerate(zip(runs, lines, strict=True)):
        if failed[i] and line.onset is not None:
            spacing = spacing_of(run, line.onset)
            onset[i] = line.onset - EARLY_INTERVALS * spacing
            # whole steps, and the deadline itself is in time
            deadline[i] = floor(line.onset + LATE_INTERVALS * spacing) + 1
    first = np.array([run.records[0].step for run in runs], dtype=float)
    last = np.array([run.records[-1].step for run in runs], dtype=float)
    return Cases(
        windows=Windows(
            failed=failed, onset=onset, failure=deadline, seconds_per_step=np.ones(len(runs))
        ),
        kinds=kinds,
        groups=factorize(np.array([line.group for line in lines], dtype=object))[0],
        broken=np.full(len(runs), inf),
        warned=failed & np.isfinite(onset),
        seen_before_step=np.zeros(len(runs), dtype=bool),
        healthy_from=first,
        healthy_to=np.where(failed, first, last + 1),
    )


def spacing_of(run: Run, onset: int | None) -> float:
    """The logging interval in steps: the median distance of the training records about the onset.

    All records count where there is no onset; 1 for a run with a single record.
    """
    steps = np.unique([
        record.step for record in run.records
        if record.training_loss is not None or record.gradient_norm is not None
    ])  # fmt: skip
    if onset is not None:
        place = int(np.searchsorted(steps, onset))
        steps = steps[max(0, place - AROUND) : place + AROUND + 1]
    return float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0


def _notes(lines: Sequence[Listed], num_listed: int) -> list[str]:
    troubled = [line for line in lines if line.label != "healthy"]
    high = [line for line in troubled if line.confidence == "high"]
    blind = [line for line in troubled if line.onset is None]
    named = len({line.run for line in lines})
    sure = sum(line.confidence == "high" for line in lines if line.label == "healthy")
    return [
        f"{len(lines)} runs: {len(troubled)} failing or spiking ({len(high)} of high confidence), "
        f"{len(lines) - len(troubled)} healthy ({sure} of high confidence). Labels were assigned "
        f"by eye. The runs are {named} of the {num_listed} in the manifest; a file with a second "
        "run appended counts twice.",
        f"{len(blind)} troubled runs have no labelled onset (they never learned): any alarm counts "
        "as caught there, under both rules.",
    ]
