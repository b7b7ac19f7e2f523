"""Look at the ranks of a running training, and say which one the others wait for.

FOLDER is the run folder of `rmetric supervise` or of a guard. Of each rank with a heartbeat the
last step, the state of its process, its stack, its flight recorder and the use of its GPU go to
FOLDER/stacks/N, and `rmetric diagnose` reads them with the output of the launch. Nothing is
stopped or ended. Ranks of other nodes: run it there. See docs/supervisor.md.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from rmetric._util.durable import write_atomically
from rmetric._util.errors import FAILED, error_text, fail
from rmetric._util.options import path_in
from rmetric._util.printed import printable
from rmetric.cli.diagnose import as_json
from rmetric.diagnosis.result import Diagnosis
from rmetric.guard.run_folder import RunFolder
from rmetric.guard.supervisor import stacks
from rmetric.guard.trust import require_trusted

EXAMPLES = """examples:
  rmetric stacks runs/llama
  rmetric stacks runs/llama --json | jq '.diagnosis.nodes[].name'

exit codes: 0 ranks were looked at; 1 no rank of this node has a heartbeat, or FOLDER cannot be
read or written; 2 the command line is wrong"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=path_in, metavar="FOLDER", help="run folder")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--into", type=Path, metavar="FOLDER",
        help="folder of a look that has begun on another node (default: the next one)",
    )  # fmt: skip
    parser.add_argument(
        "--no-diagnosis", dest="diagnosis", action="store_false",
        help="only look, as on the other nodes of a run",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    folder = RunFolder(options.folder)
    try:
        require_trusted(options.folder)
        into = options.into or stacks.new_look(folder)
        looks = stacks.collect(folder, into)
        diagnosis = _diagnosis(folder, into) if options.diagnosis and into.exists() else None
    except (ValueError, OSError) as error:
        return fail(error_text(error), FAILED)
    if not looks and diagnosis is None:
        node = os.uname().nodename
        return fail(f"{options.folder}: no rank of this node, {node}, has a heartbeat", FAILED)
    if options.json:
        found = json.loads(as_json(diagnosis)) if diagnosis else None
        ranks = [asdict(look) for look in looks]
        print(json.dumps({"folder": str(into), "ranks": ranks, "diagnosis": found}))
    else:
        for look in looks:
            print(printable(str(look)))
        print(f"files: {into}")
        if diagnosis is not None:
            print("", *map(printable, diagnosis.summary.splitlines()), sep="\n")
    return 0


def _diagnosis(folder: RunFolder, into: Path) -> Diagnosis:
    """The diagnosis of a look, which is saved in its folder."""
    from rmetric.diagnosis.decide import diagnose

    stacks.add_output(folder, into)
    found = diagnose(into)
    write_atomically(into / "diagnosis.json", [as_json(found)])
    return found
