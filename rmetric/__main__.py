"""The `rmetric` command: see `rmetric --help` and `rmetric.commands`."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from rmetric.commands import COMMANDS

#: What a shell says of a program that wrote to a pipe which nobody reads any more.
PIPE_CLOSED = 141


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="rmetric", description="Who notices first that a training run is failing?"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, words in COMMANDS.items():
        command = commands.add_parser(
            name, help=words, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        # Only the command that is meant is loaded: some take a while.
        if given and given[0] == name:
            module = import_module(f"rmetric.commands.{name}")
            command.description = module.__doc__
            command.epilog = getattr(module, "EXAMPLES", None)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    options = parser.parse_args(given)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is left in the buffer would be tried again, and complained of, at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return code


if __name__ == "__main__":
    sys.exit(main())
