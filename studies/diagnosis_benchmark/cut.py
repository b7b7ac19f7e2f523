"""Whether an answer is sure only where the logs still hold it.

    python -m studies.diagnosis_benchmark.cut [--set 2 ... 26 | all]

A part of each written job's logs is cut away, and the answer is judged by the job's label. What is
left may no longer hold the cause: then the answer may be wrong, but not sure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from rmetric._util.errors import LogError, exit_with
from rmetric.diagnosis.report.result import SURE
from studies.common.processes import mapped
from studies.diagnosis_benchmark.transformed import OTHERS, Files, command, diagnosed, files_of
from studies.diagnosis_benchmark.written_jobs import scored
from studies.diagnosis_benchmark.written_sets import WrittenCase

Lines = list[bytes]
#: Lines of a file from which the last ten are cut.
LEAST_LINES = 40


def of_lines(change: Callable[[Lines, np.random.Generator], Lines]) -> Callable[..., Files]:
    """The change of every text file."""

    def cut(files: Files, rng: np.random.Generator) -> Files:
        return {
            name: data
            if name.endswith(OTHERS)
            else b"\n".join([*change(data.removesuffix(b"\n").split(b"\n"), rng), b""])
            for name, data in files.items()
        }

    return cut


def without_one(files: Files, rng: np.random.Generator) -> Files:
    gone = rng.choice(sorted(files))
    return {name: data for name, data in files.items() if name != gone}


def one_alone(files: Files, rng: np.random.Generator) -> Files:
    name = str(rng.choice(sorted(files)))
    return {name: files[name]}


CUTS: dict[str, Callable[[Files, np.random.Generator], Files]] = {
    "without the first 30 % of lines": of_lines(lambda lines, _: lines[int(0.3 * len(lines)) :]),
    "without the first 70 % of lines": of_lines(lambda lines, _: lines[int(0.7 * len(lines)) :]),
    "without the last three lines": of_lines(lambda lines, _: lines[:-3]),
    "without the last ten lines": of_lines(
        lambda lines, _: lines[:-10] if len(lines) > LEAST_LINES else lines
    ),
    "without the last 20 % of lines": of_lines(lambda lines, _: lines[: int(0.8 * len(lines))]),
    "without every tenth line, at random": of_lines(
        lambda lines, rng: [line for line in lines if rng.random() > 0.1]
    ),
    "without one file": without_one,
    "one file alone": one_alone,
}


def answered(job: WrittenCase, at: int) -> list[tuple[str, bool, bool]]:
    """The cut, and whether the answer is right and is sure, for each cut of the `at`-th job."""
    found, files = [], files_of(job.case.folder)
    for number, (name, cut) in enumerate(CUTS.items()):
        if len(files) < 2 and cut in (without_one, one_alone):
            continue
        try:
            diagnosis = diagnosed(cut(files, np.random.default_rng([at, number])))
        except LogError:  # nothing is left to read
            continue
        found.append((name, scored(job, diagnosis).right, diagnosis.confidence >= SURE))
    return found


def table(jobs: Sequence[WrittenCase], cores: int) -> pd.DataFrame:
    """A row for each cut."""
    each = mapped(answered, jobs, range(len(jobs)), processes=cores)
    found = pd.DataFrame([row for rows in each for row in rows], columns=["cut", "right", "sure"])
    found["sure and right"] = found["sure"] & found["right"]
    counts = found.groupby("cut").agg(
        **{"Jobs": ("right", "size"), "Right": ("right", "sum"), "Sure": ("sure", "sum"),
           "Sure and right": ("sure and right", "sum")}
    )  # fmt: skip
    return counts.reindex([*CUTS], fill_value=0).rename_axis("Logs").reset_index()


def main(arguments: Sequence[str] | None = None) -> int:
    return command("cut", __doc__, table, arguments)


if __name__ == "__main__":
    exit_with(main)
