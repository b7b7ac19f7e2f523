"""Write the lines of the ranks to the files of a job, and record the writer of each line."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from studies.diagnosis_benchmark.injected.settings import Settings


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
        self._open: dict[str, tuple[object, list[int]]] = {}

    def of_rank(self, rank: int, channel: str, text: str) -> None:
        """`channel` is "stdout" or "stderr"."""
        file, prefix = self._place(rank, channel)
        self._write(file, prefix, rank, text, time.time())

    def of_launcher(self, text: str, node: str | None = None) -> None:
        """Among the node's lines under torchrun's layout, among the tasks' in slurm's, or apart."""
        file = "launcher.log"
        if self.settings.layout in ("torchrun", "node files") and node is not None:
            file = f"{node}.log"
        elif self.settings.layout == "srun":
            file = "slurm.out"
        for line in text.split("\n"):
            self._write(file, "", None, line, time.time())

    def close(self) -> None:
        for file, _ in self._open.values():
            file.close()  # type: ignore[attr-defined]

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

    def _write(self, file: str, prefix: str, rank: int | None, text: str, now: float) -> None:
        if file not in self._open:
            path = self.folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open[file] = (open(path, "w", encoding="utf-8"), [0])  # noqa: SIM115
        handle, count = self._open[file]
        count[0] += 1
        handle.write(f"{prefix}{text}\n")  # type: ignore[attr-defined]
        self.lines.append(WrittenLine(file=file, number=count[0], rank=rank, time=now, text=text))
