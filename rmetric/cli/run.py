"""Run a training's command with the monitor in it; its code stays as it is.

Each Python that the command starts, also by torchrun, accelerate or deepspeed, gets our callback
into the trainers of transformers (so of TRL, LLaMA-Factory, axolotl and others) and of Lightning;
what torchtitan logs is watched, too. A trainer that has the callback already is left alone, and so
is any other program: rmetric is imported where one of these is, and nowhere else. Signals go to the
command.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rmetric._util.errors import fail
from rmetric._util.options import path_out
from rmetric._util.webhook import checked_url
from rmetric.integrations.startup import DEFAULTS, FOLDER, VARIABLES, audits_of, is_on

EXAMPLES = """examples:
  rmetric run -- python train.py
  rmetric run --rescue --log runs/llama.jsonl -- torchrun --nproc-per-node 8 train.py
  RMETRIC_WEBHOOK=https://example.org/hook rmetric run -- llamafactory-cli train sft.yaml
  rmetric supervise runs/llama -- rmetric run --rescue -- torchrun --nproc-per-node 8 train.py

Each option has an environment variable: RMETRIC_LOG, RMETRIC_RESCUE=1, RMETRIC_WEBHOOK and
RMETRIC_AUDITS=0.

exit codes: 0 the command has succeeded; 1 or any other: that of the command, 128 + the signal that
ended it in a shell; 2 the command line is wrong, or the command cannot be started"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("command", nargs="+", metavar="-- COMMAND",
        help="the training: a program and its arguments")  # fmt: skip
    add("--log", type=path_out, metavar="FILE", help="log of the monitor; an older one is moved "
        f"aside (default: {DEFAULTS['log']})")  # fmt: skip
    add("--rescue", action=argparse.BooleanOptionalAction, help="go back to a snapshot of before "
        "a fault, leave bad steps out (default: no)")  # fmt: skip
    add("--webhook", metavar="URL", help="post alarms and decisions there; RMETRIC_WEBHOOK keeps "
        "the address from other users")  # fmt: skip
    add("--audits", nargs="?", const="1", metavar="NAMES",
        help="look for silent errors: all (default), NAMES with commas between them, all but those "
        "with a minus: --audits=-resume,-batches, or with --no-audits for none")  # fmt: skip
    add("--no-audits", dest="audits", action="store_const", const="0", help="look for none")


def run(options: argparse.Namespace) -> int:
    try:
        environment = environment_of(options)
        os.execvpe(options.command[0], options.command, environment)
    except ValueError as error:
        return fail(error)
    except OSError as error:
        return fail(f"{options.command[0]}: {error.strerror}")


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    """Environment of the command: that of this process, the options, and our `sitecustomize`.

    Raises:
        ValueError: a value is not accepted.
    """
    found = dict(os.environ)
    for name, variable in VARIABLES.items():
        value = getattr(options, name, None)
        if value is not None:
            found[variable] = str(int(value) if isinstance(value, bool) else value)
    is_on("rescue", found)
    audits_of(found)
    # Processes of the command may have other working directories.
    found[VARIABLES["log"]] = str(Path(found.get(VARIABLES["log"], DEFAULTS["log"])).absolute())
    if found.get(VARIABLES["webhook"]):
        checked_url(found[VARIABLES["webhook"]], "--webhook")
    paths = [str(FOLDER), *filter(None, [found.get("PYTHONPATH")])]
    return found | {"PYTHONPATH": os.pathsep.join(paths)}
