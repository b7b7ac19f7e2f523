"""Keep the answers of first looks, which alone tell how often an unseen log is judged rightly.

    python -m studies.diagnosis_benchmark.first_answers written_SET.json ... [--out FILE]

The scores of a first look are overwritten once the set is judged again. This file keeps of each
answer what the confidence is fitted to: its kind of evidence, its score, and if it is right. Those
of the third to the sixteenth set were made again by the code of their first looks (the commit in
first_look_SET/provenance.json).
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rmetric._util.errors import exit_with
from rmetric.logs import write_atomically
from studies.diagnosis_benchmark.reliability import Stated, calibrated_score, written_is_right
from studies.diagnosis_benchmark.written_jobs import read_written

FIRST_ANSWERS = Path("studies", "diagnosis_benchmark", "results", "first_answers.csv")


class FirstAnswer(NamedTuple):
    """One answer of a first look that states a cause or an outcome.

    Attributes:
        split, job: of the written jobs.
        kind: as the job was made.
        basis, score: the kind of the evidence, and its score before the calibration.
    """

    split: str
    job: str
    kind: str
    basis: str
    score: float
    right: bool

    def stated(self) -> Stated:
        """With the confidence that the table of today gives it."""
        return Stated(calibrated_score(self.basis, self.score), self.right, self.job)


def answers_of(path: Path) -> list[FirstAnswer]:
    """The answers in a file of scores of written jobs."""
    results = read_written(path)
    return [
        FirstAnswer(
            results.split, job.name, job.kind, job.said["basis"], job.said["score"],
            written_is_right(job),
        )
        for job in results.jobs
        if job.said["outcome"] != "unknown" or job.said["cause"]
    ]  # fmt: skip


def read_first_answers(path: Path) -> list[FirstAnswer]:
    """Those that are kept.

    Raises:
        ValueError: a row is not as `main` writes it.
    """
    out = []
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                score, right = float(row["score"]), {"yes": True, "no": False}[row["right"]]
                out.append(
                    FirstAnswer(row["split"], row["job"], row["kind"], row["basis"], score, right)
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: no first answer: {row}") from error
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Add the answers of sets that are not kept yet; a set that is kept stays as it is."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.diagnosis_benchmark.first_answers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="written_SET.json")
    parser.add_argument("--out", type=Path, default=FIRST_ANSWERS, metavar="FILE")
    given = parser.parse_args(arguments)
    kept = read_first_answers(given.out) if given.out.exists() else []
    for path in given.results:
        known = {one.split for one in kept}
        new = [one for one in answers_of(path) if one.split not in known]
        print(f"{path}: {len(new)} answers" + ("" if new else ", the set is kept already"))
        kept += new
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FirstAnswer._fields)
    writer.writerows((*one[:-1], "yes" if one.right else "no") for one in kept)
    write_atomically(given.out, [text.getvalue().encode()])
    return 0


if __name__ == "__main__":
    exit_with(main)
