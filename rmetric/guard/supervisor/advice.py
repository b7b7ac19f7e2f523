"""What the diagnosis says of a launch that hangs or has failed, and of its restart.

Commands in processes of their own give the answers: of a hang `rmetric stacks`, before anything is
ended; of another failure `rmetric diagnose`, beside the restart.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rmetric._util.errors import error_text
from rmetric.guard.run_folder import RunFolder
from rmetric.guard.supervisor.journal_lines import launch_log
from rmetric.guard.supervisor.launch_processes import Program
from rmetric.guard.supervisor.stacks import new_look


class Adviser:
    """Asks for diagnoses, each of at most `seconds`; 0: for none.

    The answers are fields of the journal, or `trouble`, why there is none. `processes` are those
    that diagnose, which are no part of the training.
    """

    def __init__(self, folder: RunFolder, program: Program, seconds: float) -> None:
        self.folder, self.program, self.seconds = folder, program, seconds
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def of_hang(self, launch: int) -> dict[str, Any]:
        """Look at the ranks of a launch that hangs, on all nodes, and diagnose what is seen."""
        into = new_look(self.folder)
        look = [sys.executable, "-m", "rmetric", "stacks", str(self.folder.path.resolve())]
        look += ["--into", str(into)]
        nodes = [node for node, prefix in self.program.prefixes.items() if prefix]
        there = [self.program.behind(node, look, {}) for node in nodes]
        with ThreadPoolExecutor(len(nodes) or 1) as pool:
            list(pool.map(self._answer, there))
        return self._fields(launch, [*look, "--json"]) | {"look": f"stacks/{into.name}"}

    def of_failure(self, launch: int) -> dict[str, Any]:
        """Diagnose the outputs of a launch and of the one before it, as two attempts."""
        with tempfile.TemporaryDirectory(prefix="rmetric-") as folder:
            for number in (launch - 1, launch):
                log = self.folder.path.resolve() / launch_log(number)
                if log.is_file():
                    Path(folder, f"attempt_{number}").mkdir()
                    Path(folder, f"attempt_{number}", log.name).symlink_to(log)
            command = [sys.executable, "-m", "rmetric", "diagnose", folder, "--json"]
            return self._fields(launch, command)

    def _fields(self, launch: int, command: Sequence[str]) -> dict[str, Any]:
        printed, said = self._answer(command)
        try:
            found: dict[str, Any] = json.loads(printed)
            found = found.get("diagnosis", found)
        except ValueError:
            why = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
            return {"trouble": f"launch {launch}: no diagnosis: {why or 'no answer'}"}
        kept = {name: found[name] for name in ("outcome", "cause", "confidence", "restart")}
        return {"launch": launch, "words": found["title"], "rank": named_rank(found), **kept}

    def _answer(self, command: Sequence[str]) -> tuple[bytes, bytes]:
        """What a command prints and says; of one that fails, why."""
        nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
        try:
            with subprocess.Popen(command, stdin=nothing, stdout=pipe, stderr=pipe) as process:
                self.processes[process.pid] = process
                try:
                    return process.communicate(timeout=self.seconds)
                except subprocess.TimeoutExpired:
                    process.kill()
                    return b"", f"it took longer than {self.seconds:g} s".encode()
                finally:
                    del self.processes[process.pid]
        except OSError as error:
            return b"", error_text(error).encode()


def named_rank(found: dict[str, Any]) -> int | None:
    """The rank that a diagnosis names: its first suspect, or the only one that logged the cause.

    >>> named_rank({"nodes": [], "events": [{"role": "cause", "who": ["rank 2"]}]})
    2
    """
    if found["nodes"]:
        rank: int | None = found["nodes"][0]["rank"]
        return rank
    who: list[str] = next((one["who"] for one in found["events"] if one["role"] == "cause"), [])
    name = who[0].removeprefix("rank ") if len(who) == 1 else ""
    return int(name) if name.isdigit() else None
