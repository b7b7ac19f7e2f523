"""Measure policies that act on failing runs, against exact twins.

    python -m studies.fault_lab.rescue                  # the 160 old seeds (hours)
    python -m studies.fault_lab.rescue --sealed         # 100 new seeds
    python -m studies.fault_lab.rescue --report         # tables and page from the committed rows

Can be interrupted: a seed that is complete is not run again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from rmetric._util.errors import INTERRUPTED
from studies.common.command import FAILED, add_jobs, command_parser

RESULTS = Path(__file__).resolve().parents[1] / "results"


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("fault_lab.rescue", __doc__)
    parser.add_argument("--sealed", action="store_true", help="run the 100 sealed seeds")
    parser.add_argument(
        "--parts",
        action="store_true",
        help="run rescue and its parts, one at a time and left out, on the failing open runs",
    )
    parser.add_argument(
        "--policies", nargs="+", metavar="NAME", help="these policies only (default: all)"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="the first N seeds only")
    parser.add_argument("--report", action="store_true", help="write the tables and end")
    parser.add_argument(
        "--out", type=Path, default=Path("rescue_runs"), metavar="DIR",
        help="folder of the rows (default: rescue_runs)",
    )  # fmt: skip
    add_jobs(parser)
    options = parser.parse_args(argv)
    if options.seeds is not None and options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}: a number from 1 is accepted")
    if options.policies is not None and options.parts:
        parser.error("--policies and --parts are given; one of them is accepted")
    try:
        return run(options)
    except ImportError as error:
        print(f"{error}: training needs pip install -e '.[live]'", file=sys.stderr)
        return FAILED
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("stopped; start the same command again to finish what is missing", file=sys.stderr)
        return INTERRUPTED


def run(options: argparse.Namespace) -> int:
    """Run the seeds, or what was requested instead; returns the exit code."""
    from studies.fault_lab.rescue import campaign
    from studies.fault_lab.rescue.policies import ABLATIONS, KNOWN, NOTHING, POLICIES, RESCUE
    from studies.fault_lab.rescue.tables import OPEN, SEALED, made, pack, write

    if options.report:
        return write(made(RESULTS), RESULTS)
    open_groups = campaign.development_failures if options.parts else campaign.old_seeds
    groups = campaign.sealed() if options.sealed else open_groups()
    groups = groups[: options.seeds]
    policies = options.policies or ([NOTHING, RESCUE, *ABLATIONS] if options.parts else [*POLICIES])
    if unknown := set(policies) - set(KNOWN):
        raise ValueError(
            f"--policies: {', '.join(sorted(unknown))} unknown; accepted: {', '.join(KNOWN)}"
        )
    print(f"{len(groups)} seeds, specs {campaign.digest_of(groups)}")
    work = campaign.run(groups, options.out, policies=policies, num_processes=options.jobs)
    for _ in tqdm(work, total=len(groups), unit="seed"):
        pass
    rows = campaign.read_rows(groups, options.out)
    path = options.out / f"{SEALED if options.sealed else OPEN}.jsonl.xz"
    pack(rows, path)
    print(f"{len(rows)} rows of {len(groups)} seeds: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
