"""Look at the ranks of a training that hangs, and name the one that the others wait for.

FOLDER is the run folder of `rmetric supervise` or of a guard. The command collects in
FOLDER/stacks/N each local rank's last step, state of its process, stack, flight recorder, use of
its GPU and, if NCCL's RAS port answers, the answer. It diagnoses them with the output of the
launch, prints the verdict and writes it to diagnosis.json. It stops and ends nothing. psutil is
needed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rmetric._util.durable import write_atomically
from rmetric._util.errors import FAILED, error_text, fail
from rmetric._util.options import path_in
from rmetric._util.printed import printable
from rmetric.cli.diagnose import as_json
from rmetric.guard.run_folder import RunFolder
from rmetric.guard.supervisor.stacks import collect, new_look
from rmetric.guard.trust import require_trusted

EXAMPLES = """examples:
  rmetric stacks runs/llama

exit codes: 0 ranks were looked at; 1 no rank of this node has a heartbeat, or FOLDER cannot be
read or written; 2 the command line is wrong"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=path_in, metavar="FOLDER", help="run folder")
    add("--into", type=Path, metavar="FOLDER", help="only collect, into this folder")


def run(options: argparse.Namespace) -> int:
    from rmetric.diagnosis.decide import diagnose

    folder = RunFolder(options.folder)
    into = options.into or new_look(folder)
    try:
        require_trusted(options.folder)
        for line in collect(folder, into):
            print(printable(line))
        if not into.is_dir():
            return fail(f"{options.folder}: no rank of this node has a heartbeat", FAILED)
        if not options.into:
            found = diagnose(into)
            write_atomically(into / "diagnosis.json", [as_json(found)])
            print("", *map(printable, found.summary.splitlines()), sep="\n")
    except (ValueError, OSError) as error:
        return fail(error_text(error), FAILED)
    print(f"\nfiles: {into}")
    return 0
