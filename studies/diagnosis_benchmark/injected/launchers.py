"""Launcher messages for real exits, in the order of detection.

The wording is that of srun and slurmstepd; torch formats torchrun's report itself.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterable, Mapping

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from studies.diagnosis_benchmark.injected.settings import Settings
from studies.diagnosis_benchmark.injected.writing import Writer

STEP = "218411.0"


class Launcher:
    """One that writes nothing."""

    def __init__(self, settings: Settings, writer: Writer, pids: Mapping[int, int]) -> None:
        self.settings, self.writer, self.pids = settings, writer, pids

    def exited(self, codes: Mapping[int, int]) -> None:
        """The exit codes, negative for signals, of the ranks seen dead at one look."""

    def ending(self, ranks: Iterable[int], *, by_limit: bool) -> None:
        """Those ranks are about to be ended."""

    def over(self) -> None:
        """No process is left."""

    def _say(self, text: str, node: str | None = None) -> None:
        self.writer.of_launcher(text, node)


class Srun(Launcher):
    def exited(self, codes: Mapping[int, int]) -> None:
        alike: dict[tuple[str, str | None], list[int]] = {}
        for rank, code in codes.items():
            if code:
                how = signal.strsignal(-code) if code < 0 else f"Exited with exit code {code}"
                alike.setdefault((self.settings.node(rank), how), []).append(rank)
        for (node, how), ranks in alike.items():
            word = "task" if len(ranks) == 1 else "tasks"
            self._say(f"srun: error: {node}: {word} {_ranges(ranks)}: {how}")

    def ending(self, ranks: Iterable[int], *, by_limit: bool) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%S")
        why = " DUE TO TIME LIMIT" if by_limit else ""
        if not by_limit:
            self._say(f"srun: Terminating StepId={STEP}")
        self._say(f"slurmstepd: error: *** STEP {STEP} ON node-00 CANCELLED AT {now}{why} ***")


class Torchrun(Launcher):
    """An agent for each node, which knows of its own processes only."""

    def __init__(self, settings: Settings, writer: Writer, pids: Mapping[int, int]) -> None:
        super().__init__(settings, writer, pids)
        self.failures: dict[str, dict[int, ProcessFailure]] = {}
        self.codes: dict[int, int] = {}

    def exited(self, codes: Mapping[int, int]) -> None:
        self.codes.update(codes)
        for rank, code in codes.items():
            node = self.settings.node(rank)
            if code:
                first = node not in self.failures
                known = self.failures.setdefault(node, {})
                known[rank] = ProcessFailure(
                    rank % self.settings.ranks_per_node, self.pids[rank], code, "<N/A>"
                )
                if first:
                    self._first_failure(node, rank, code)

    def _first_failure(self, node: str, rank: int, code: int) -> None:
        api = "elastic/multiprocessing/api"
        for other in self._alive(node):
            what = f"Sending process {self.pids[other]} closing signal SIGTERM"
            self._say(f"{_torch_head('W', api, 1028)} {what}", node)
        local = rank % self.settings.ranks_per_node
        which = f"local_rank: {local} (pid: {self.pids[rank]}) of binary: /usr/bin/python3"
        self._say(f"{_torch_head('E', api, 1002)} failed (exitcode: {code}) {which}", node)

    def _alive(self, node: str) -> list[int]:
        mine = [rank for rank in self.pids if self.settings.node(rank) == node]
        return [rank for rank in mine if rank not in self.codes]

    def ending(self, ranks: Iterable[int], *, by_limit: bool) -> None:
        if by_limit:
            for node in sorted({self.settings.node(rank) for rank in ranks}):
                self._say(f"{_torch_head('W', 'elastic/agent/server/api', 725)} Received 15 death "
                          "signal, shutting down workers", node)  # fmt: skip

    def over(self) -> None:
        for node, failures in sorted(self.failures.items()):
            report = ChildFailedError("train.py", failures).format_msg()
            report = report.replace(socket.getfqdn(), node)
            self._say(
                f"torch.distributed.elastic.multiprocessing.errors.ChildFailedError: {report}", node
            )


LAUNCHERS = {"none": Launcher, "srun": Srun, "torchrun": Torchrun}


def _ranges(ranks: Iterable[int]) -> str:
    """3,5-7: as slurm abbreviates."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(str(one[0]) if len(one) == 1 else f"{one[0]}-{one[-1]}" for one in parts)


def _torch_head(level: str, module: str, line: int) -> str:
    now = time.time()
    stamp = time.strftime("%m%d %H:%M:%S", time.localtime(now)) + f".{int(now % 1 * 1e6):06d}"
    return f"{level}{stamp} {line} torch/distributed/{module}.py:{line}]"
