"""The `rmetric` command: see `rmetric --help` and `rmetric.cli`."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from rmetric._util import __version__
from rmetric._util.errors import FAILED, INTERRUPTED, OutputError, ends_at_once, fail, guard_stdout
from rmetric._util.lazy import install_hint
from rmetric.cli import COMMANDS

#: 128 + SIGPIPE, as a shell reports a program whose output pipe was closed.
PIPE_CLOSED = 141


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    try:
        with guard_stdout():
            return _run(given)
    except OutputError as error:
        if error.closed:
            return PIPE_CLOSED
        return fail(f"standard output: {error}", FAILED)
    except ModuleNotFoundError as error:
        hint = install_hint(error.name)
        if not hint:
            raise
        return fail(f"rmetric {given[0]} needs {error.name}: {hint}")
    except BrokenPipeError:  # of what is printed beside it
        return PIPE_CLOSED
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED


def _run(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rmetric", description="Monitor, replay, guard and diagnose language-model trainings."
    )
    parser.add_argument("--version", action="version", version=f"rmetric {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, words in COMMANDS.items():
        command = commands.add_parser(
            name, help=words, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        # Only the command that is meant is loaded: some take a while.
        if given and given[0] == name:
            with ends_at_once():
                module = import_module(f"rmetric.cli.{name}")
            command.description, command.epilog = module.__doc__, module.EXAMPLES
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    options = parser.parse_args(given)
    code: int = options.run(options)
    return code
