"""Make the written jobs.

python -m studies.diagnosis_benchmark.blind --out DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rmetric._util.errors import exit_with
from studies.diagnosis_benchmark.blind.make import ARCHIVES, SEEDS, sealed_as, unpacked, written


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m studies.diagnosis_benchmark.blind",
        description="Writes the jobs of a split: made from a seed, or unpacked from an archive.",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="the jobs go to DIR/SPLIT")
    parser.add_argument("--split", choices=(*SEEDS, *ARCHIVES), default="development")
    parser.add_argument("--seed", type=int, help="1 for development, 2 for sealed where not given")
    parser.add_argument(
        "--seal", type=Path, metavar="FILE", help="write the digest of the split's jobs, no jobs"
    )
    given = parser.parse_args(arguments)
    if (given.out is None) == (given.seal is None):
        parser.error("one of --out DIR and --seal FILE is needed")
    if given.split in ARCHIVES:
        if given.seal or given.seed is not None:
            parser.error(f"--split {given.split} is an archive: neither --seed nor --seal applies")
        jobs, lines = unpacked(given.split, given.out)
        print(f"{given.split}: {jobs} jobs, {lines} lines in {given.out / given.split}")
        return 0
    seed = SEEDS[given.split] if given.seed is None else given.seed
    if given.seal:
        print(f"{given.split}, seed {seed}: {sealed_as(given.split, seed, given.seal)}")
    else:
        jobs, lines = written(given.split, seed, given.out)
        print(
            f"{given.split}, seed {seed}: {jobs} jobs, {lines} lines in {given.out / given.split}"
        )
    return 0


if __name__ == "__main__":
    exit_with(main)
