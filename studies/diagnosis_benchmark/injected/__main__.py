"""Make jobs with injected faults.

python -m studies.diagnosis_benchmark.injected --out DIR --count 240
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rmetric._util.errors import exit_with
from rmetric._util.options import add_jobs
from studies.common.command import command_parser
from studies.diagnosis_benchmark.injected.plan import KINDS, SPLITS, plans

#: Each is many processes. `--jobs` once was the number of jobs to be made, 240 by default.
MOST_AT_A_TIME = 64


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser(
        "diagnosis_benchmark.injected",
        __doc__,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--count", type=int, default=240, metavar="N",
        help="jobs to be judged; siblings come on top",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--ranks", type=_range, default=(16, 64), metavar="LOW-HIGH")
    parser.add_argument("--kinds", help=f"healthy or of {', '.join(KINDS)}; with commas")
    parser.add_argument("--split", choices=SPLITS, help="the first two where not given")
    add_jobs(parser, "jobs that run at a time", default=2)
    given = parser.parse_args(arguments)
    if given.jobs > MOST_AT_A_TIME:
        parser.error(
            f"--jobs is {given.jobs}: at most {MOST_AT_A_TIME} run at a time; the number of jobs "
            "to be judged is now --count"
        )
    kinds = given.kinds.split(",") if given.kinds else None
    unknown = set(kinds or ()) - {*KINDS, "healthy"}
    if unknown:
        parser.error(f"--kinds: unknown {sorted(unknown)}, there are {KINDS} and healthy")
    splits = (given.split,) if given.split else SPLITS[:2]
    jobs = plans(jobs=given.count, seed=given.seed, ranks=given.ranks, kinds=kinds, splits=splits)
    # Loads torch, which takes seconds: not before the arguments are known to be good.
    from studies.diagnosis_benchmark.injected.generate import generate

    start = time.time()
    counts = generate(jobs, given.out, lanes=given.jobs)
    said = ", ".join(f"{count} {word}" for word, count in counts.items())
    print(f"{len(jobs)} jobs: {said}; {(time.time() - start) / 60:.1f} min")
    return 1 if counts["failed"] else 0


def _range(text: str) -> tuple[int, int]:
    try:
        low, high = map(int, text.split("-"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no range as 16-64") from None
    if not 3 <= low <= high:
        raise argparse.ArgumentTypeError(f"{text}: at least 3 ranks, the smaller number first")
    return low, high


if __name__ == "__main__":
    exit_with(main)
