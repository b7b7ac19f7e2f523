"""Value of a guard over many GPUs.

python -m studies.fleet risk     failure warnings and false alarms of risk predictors
python -m studies.fleet cost     savings by emergency checkpoints and shrinking
python -m studies.fleet faults   the same with repairs and repeated failures of a recorded fleet
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from rmetric._util.errors import exit_code_of, exit_with, fail
from studies.common.command import command_parser

#: Each has NAME, HELP, add_arguments(parser) and run(options), which returns the exit status.
MODULES = ("studies.fleet.risk_report", "studies.fleet.cost_report", "studies.fleet.faults")


def parser() -> argparse.ArgumentParser:
    out = command_parser("fleet", __doc__)
    subcommands = out.add_subparsers(required=True, metavar="COMMAND")
    for module in map(import_module, filter(find_spec, MODULES)):
        subcommand = subcommands.add_parser(module.NAME, help=module.HELP)
        module.add_arguments(subcommand)
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
