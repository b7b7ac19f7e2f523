"""What the diagnosis says of a launch that hangs or has failed, and of its restart.

Commands of their own give the answers, so that neither the memory nor an error of a diagnosis can
reach the supervisor: of a hang `rmetric stacks` before anything is ended, of any other failure
`rmetric diagnose` beside the restart, which does not wait for it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from rmetric._util.errors import error_text
from rmetric.guard.run_folder import RunFolder
from rmetric.guard.supervisor.journal_lines import launch_log
from rmetric.guard.supervisor.launch_processes import Program
from rmetric.guard.supervisor.stacks import log_end, new_look

_RMETRIC = (sys.executable, "-m", "rmetric")


class Adviser:
    """Asks for diagnoses, one at a time.

    Args:
        folder: run folder.
        program: its prefixes lead to the other nodes.
        seconds: that a diagnosis may take; 0: none is asked for.
    """

    def __init__(self, folder: RunFolder, program: Program, seconds: float) -> None:
        self.folder, self.program, self.seconds = folder, program, seconds
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="advice")
        self._wanted: int | None = None
        self._found: Future[dict[str, Any]] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pids(self) -> list[int]:
        """The process that diagnoses, which is no part of the training."""
        return [self._process.pid] if self._process else []

    def of_hang(self, launch: int) -> dict[str, Any]:
        """Fields of the journal about a launch that hangs; its ranks are looked at.

        Raises:
            ValueError: there is no answer, in words for "no diagnosis: ...".
        """
        into = new_look(self.folder).resolve()
        look = [*_RMETRIC, "stacks", str(self.folder.path.resolve()), "--into", str(into)]
        self._on_other_nodes([*look, "--no-diagnosis"])
        found = self._answer([*look, "--json"])["diagnosis"]
        return _fields(launch, found) | {"look": str(into.relative_to(self.folder.path.resolve()))}

    def want(self, launch: int) -> None:
        """Ask for the diagnosis of a launch that has failed; of several the last is made."""
        self._wanted = launch if self.seconds else None

    def take(self, wait: float = 0.0) -> dict[str, Any] | None:
        """Fields of the journal about the last launch that was asked for; None if there are none.

        Waits so many seconds for them. Raises ValueError as `of_hang`.
        """
        if self._found is None and self._wanted is not None:
            self._found, self._wanted = self._pool.submit(self._of_logs, self._wanted), None
        if self._found is None or not (wait or self._found.done()):
            return None
        found, self._found = self._found, None
        return found.result()

    @property
    def pending(self) -> bool:
        """An answer is still to come."""
        return self._found is not None or self._wanted is not None

    def _of_logs(self, launch: int) -> dict[str, Any]:
        """The diagnosis of the outputs of a launch and of the one before it, as two attempts."""
        with tempfile.TemporaryDirectory(prefix="rmetric-") as folder:
            for number in (launch - 1, launch):
                log = self.folder.path / launch_log(number)
                if log.is_file():
                    attempt = Path(folder, f"attempt_{number}")
                    attempt.mkdir()
                    log_end(log, attempt / log.name)
            nice = [found, "-n", "10"] if (found := shutil.which("nice")) else []
            return _fields(launch, self._answer([*nice, *_RMETRIC, "diagnose", folder, "--json"]))

    def _answer(self, command: Sequence[str]) -> dict[str, Any]:
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe
            )
            with self._process as process:
                try:
                    printed, said = process.communicate(timeout=self.seconds)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise ValueError(f"it took longer than {self.seconds:g} s") from None
        except OSError as error:
            raise ValueError(error_text(error)) from None
        finally:
            self._process = None
        try:
            found: dict[str, Any] = json.loads(printed)
        except ValueError:
            lines = said.decode("utf-8", "replace").strip().splitlines()
            raise ValueError(lines[-1] if lines else "it gave no answer") from None
        return found

    def _on_other_nodes(self, command: list[str]) -> None:
        """Look at the ranks of the nodes that have a prefix, all at once; one may not answer."""
        nodes = [node for node, prefix in self.program.prefixes.items() if prefix]

        def look_on(node: str) -> None:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    self.program.behind(node, command, {}), stdin=subprocess.DEVNULL,
                    capture_output=True, timeout=self.seconds,
                )  # fmt: skip

        with ThreadPoolExecutor(max(1, len(nodes))) as pool:
            list(pool.map(look_on, nodes))


def _fields(launch: int, found: dict[str, Any]) -> dict[str, Any]:
    """Fields of the journal's line about a diagnosis."""
    return {
        "launch": launch,
        "words": found["title"],
        **{name: found[name] for name in ("outcome", "cause", "confidence", "restart")},
        "rank": named_rank(found),
        "nodes": [suspect["name"] for suspect in found["nodes"]],
    }


def named_rank(found: dict[str, Any]) -> int | None:
    """The one rank that a diagnosis names, as suspect or as the only one that logged the cause.

    >>> named_rank({"nodes": [{"rank": 3}], "events": []})
    3
    >>> named_rank({"nodes": [], "events": [{"role": "cause", "who": ["rank 2"]}]})
    2
    """
    if found["nodes"]:
        rank: int | None = found["nodes"][0]["rank"]
        return rank
    who = next((one["who"] for one in found["events"] if one["role"] == "cause"), [])
    name = str(who[0]) if len(who) == 1 else ""
    return int(name[5:]) if name.startswith("rank ") and name[5:].isdigit() else None
