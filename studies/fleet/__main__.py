"""Value of a guard over many GPUs.

python -m studies.fleet risk     failure warnings and false alarms of risk predictors
python -m studies.fleet cost     savings by emergency checkpoints and shrinking
python -m studies.fleet faults   the same with repairs and repeated failures of a recorded fleet
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from studies.common.command import add_jobs, command_parser, exit_code_of, exit_with, fail
from studies.fleet import cost_report, faults, risk_report

#: Each has NAME, HELP, OUT, add_arguments(parser) and run(options), which returns the exit status.
MODULES = (risk_report, cost_report, faults)


def parser() -> argparse.ArgumentParser:
    out = command_parser("fleet", __doc__)
    subcommands = out.add_subparsers(required=True, metavar="COMMAND")
    for module in MODULES:
        subcommand = subcommands.add_parser(module.NAME, help=module.HELP)
        module.add_arguments(subcommand)
        subcommand.add_argument(
            "--out", type=Path, default=module.OUT, metavar="DIR", help="default: %(default)s"
        )
        add_jobs(subcommand)
        subcommand.set_defaults(run=module.run)
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all well; 1: the results cannot be written; 2: nothing was done."""
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (OSError, ValueError) as error:
        return fail(error, exit_code_of(error))


if __name__ == "__main__":
    exit_with(main)
