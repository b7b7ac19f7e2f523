"""The `rmetric` command: see `rmetric --help` and `rmetric.cli`."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from rmetric._util.standard_output import OutputError, told_apart
from rmetric._util.version import __version__
from rmetric.cli import COMMANDS

#: What a shell says of a program that wrote to a pipe which nobody reads any more.
PIPE_CLOSED = 141
#: And of one that was ended by Ctrl-C.
INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    try:
        with told_apart():
            return _run(given)
    except OutputError as error:
        if error.closed:
            return PIPE_CLOSED
        print(f"error: standard output: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # of what is printed beside it
        return PIPE_CLOSED
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED


def _run(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rmetric", description="Who notices first that a training run is failing?"
    )
    parser.add_argument("--version", action="version", version=f"rmetric {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, words in COMMANDS.items():
        command = commands.add_parser(
            name, help=words, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        # Only the command that is meant is loaded: some take a while.
        if given and given[0] == name:
            module = import_module(f"rmetric.cli.{name}")
            command.description = module.__doc__
            command.epilog = getattr(module, "EXAMPLES", None)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    options = parser.parse_args(given)
    code: int = options.run(options)
    return code
