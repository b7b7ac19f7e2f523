"""Snapshots in a folder, written by torch.distributed.checkpoint in the background."""

from __future__ import annotations

import inspect
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from rmetric.guard.dcp import IndexedWriter, IndexReader, PlainLoadPlanner, error_text
from rmetric.guard.trust import make_private, require_trusted
from rmetric.monitor.actions.action import rank


class SnapshotFolder:
    """Folder ``rescue-snapshots-rank-N`` of one rank's snapshots; earlier ones are removed.

    Each rank writes its own part without the others, so a save needs no collective. RuntimeError:
    this torch cannot save one rank alone. ValueError: other users can write the folder. OSError: it
    cannot be written.
    """

    def __init__(self, folder: Path | str) -> None:
        if "no_dist" not in inspect.signature(dcp.save).parameters:
            raise RuntimeError(
                f"torch {torch.__version__} has no saves of one rank alone, which a folder for "
                "snapshots needs (2.9 has); host and device can be used"
            )
        self.folder = Path(folder) / f"rescue-snapshots-rank-{rank()}"
        make_private(Path(folder))
        require_trusted(Path(folder))
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o755)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rmetric-rescue")
        self._under_way: Future[None] | None = None

    def write(self, step: int, memory: dict[str, Tensor], after: list[Any]) -> None:
        """Begin to write blocks of bytes, once the CUDA events of `after` have come.

        The blocks must not change before `wait` returns.
        """
        self._under_way = self._writer.submit(self._write, step, memory, after)

    def wait(self) -> None:
        """Wait for the write that is under way. Raises its exception."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def read(self, step: int, memory: dict[str, Tensor]) -> None:
        """Read a snapshot into blocks of the same sizes. Raises ValueError if it is damaged."""
        folder = self._of(step)
        reader = IndexReader(folder, {path.name for path in folder.iterdir()})
        try:
            dcp.load(memory, storage_reader=reader, planner=PlainLoadPlanner(), no_dist=True)
        except CheckpointException as error:  # no Exception: it would end the training
            problem = reader.problem or error_text(error)
            raise ValueError(f"{folder} cannot be read: {problem}") from None

    def remove(self, step: int) -> None:
        shutil.rmtree(self._of(step), ignore_errors=True)

    def close(self) -> None:
        self._writer.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, step: int, memory: dict[str, Tensor], after: list[Any]) -> None:
        for event in after:
            event.synchronize()
        with torch.no_grad():
            dcp.save(dict(memory), storage_writer=IndexedWriter(self._of(step)), no_dist=True)

    def _of(self, step: int) -> Path:
        return self.folder / f"step-{step}"
