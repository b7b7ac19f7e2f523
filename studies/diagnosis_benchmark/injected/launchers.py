"""What stands around the ranks: the files of their lines, and launcher messages for real exits.

The wording is that of srun and slurmstepd; torch formats torchrun's report itself.
"""

from __future__ import annotations

import signal
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from studies.diagnosis_benchmark.injected.plan import Settings

STEP = "218411.0"


@dataclass(frozen=True, kw_only=True)
class WrittenLine:
    """A line as it was written.

    Attributes:
        file: below the job's folder of logs. number: from 1.
        rank: None for the launcher's.
        time: seconds since 1970 when it was received.
        text: without the launcher's prefix.
    """

    file: str
    number: int
    rank: int | None
    time: float
    text: str


class Writer:
    """Writes the logs of a job in its layout, as the launchers do that tag their tasks' output."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        self.lines: list[WrittenLine] = []
        self._files: dict[str, TextIO] = {}
        self._numbers = Counter[str]()

    def of_rank(self, rank: int, channel: str, text: str) -> None:
        """`channel` is "stdout" or "stderr"."""
        file, prefix = self._place(rank, channel)
        self._write(file, prefix, rank, text)

    def of_launcher(self, text: str, node: str | None = None) -> None:
        """Among the node's lines under torchrun's layout, among the tasks' in slurm's, or apart."""
        file = "launcher.log"
        if self.settings.layout in ("torchrun", "node files") and node is not None:
            file = f"{node}.log"
        elif self.settings.layout == "srun":
            file = "slurm.out"
        for line in text.split("\n"):
            self._write(file, "", None, line)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _place(self, rank: int, channel: str) -> tuple[str, str]:
        settings, node = self.settings, self.settings.node(rank)
        local = rank % settings.ranks_per_node
        return {
            "rank files": (f"{node}/rank_{rank}.log", ""),
            "attempt folders": (f"{node}/attempt_0/{local}/{channel}.log", ""),
            "node files": (f"{node}.log", f"[rank{rank}]: "),
            "torchrun": (f"{node}.log", f"[default{local}]:"),
            "srun": ("slurm.out", f"{rank:{len(str(settings.world_size - 1))}d}: "),
            "mpirun": ("mpirun.log", f"[1,{rank}]<{channel}>:"),
        }[settings.layout]

    def _write(self, name: str, prefix: str, rank: int | None, text: str) -> None:
        if name not in self._files:
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[name] = open(path, "w", encoding="utf-8")  # noqa: SIM115
        self._numbers[name] += 1
        self._files[name].write(f"{prefix}{text}\n")
        line = WrittenLine(
            file=name, number=self._numbers[name], rank=rank, time=time.time(), text=text
        )
        self.lines.append(line)


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
        for other, pid in self.pids.items():
            if self.settings.node(other) == node and other not in self.codes:
                what = f"Sending process {pid} closing signal SIGTERM"
                self._say(f"{_torch_head('W', api, 1028)} {what}", node)
        local = rank % self.settings.ranks_per_node
        which = f"local_rank: {local} (pid: {self.pids[rank]}) of binary: /usr/bin/python3"
        self._say(f"{_torch_head('E', api, 1002)} failed (exitcode: {code}) {which}", node)

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
