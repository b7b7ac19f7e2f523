"""State, planner and stager of one save by torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils._pytree import tree_leaves

from rmetric._util.host_memory import check_fits
from rmetric.guard.checkpoint_dir import SaveOutcome
from rmetric.guard.retention import SuspectMark
from rmetric.monitor.gradients import local

try:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
except ImportError as error:
    raise ImportError(
        f"rmetric's sharded checkpoints need torch 2.9 or newer, whose staging can be chosen; "
        f"this is torch {torch.__version__}"
    ) from error


@dataclass
class Save:
    """One save in progress."""

    step: int
    part: Path
    request: int
    suspect: SuspectMark | None = None
    about: dict[str, Any] = field(default_factory=dict)
    own: str | None = None
    problem: str = ""
    began: float = field(default_factory=time.perf_counter)
    blocking_seconds: float = 0.0
    durable_seconds: float = 0.0
    outcome: SaveOutcome | None = None

    def seconds(self) -> float:
        """Time since the save began."""
        return time.perf_counter() - self.began

    @contextlib.contextmanager
    def catching(self, what: str) -> Iterator[None]:
        """Record an exception as the save's problem; the rank must still join the collectives."""
        try:
            yield
        except Exception as error:
            self.problem = self.problem or f"{what}: {type(error).__name__}: {error}"


class FailingSavePlanner(DefaultSavePlanner):
    """Raises an earlier problem of this rank where DCP reports failures to all ranks."""

    def __init__(self, save: Save, folder: Path) -> None:
        super().__init__()
        self._of, self._folder = save, folder

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        if self._of.problem:
            raise RuntimeError(self._of.problem)
        if not self._folder.is_dir():  # DCP would create it, perhaps below an unmounted disk
            raise FileNotFoundError(f"the folder {self._folder} is gone")
        if self._of.part.is_symlink():
            raise OSError(f"{self._of.part} is a symbolic link, which is not followed")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


class IndexedWriter(FileSystemWriter):
    """Leaves the index in the metadata that DCP returns; torch 2.10 to 2.12 index a copy alone."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        metadata.storage_data = {
            result.index: result.storage_data for of in results for result in of
        }


class HostMemoryStager(DefaultStager):
    """Copies tensors to host memory that is reused from save to save."""

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()
        self._held = 0  # bytes of the largest state so far
        super().__init__(
            StagingOptions(
                use_pinned_memory=self._cuda,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=self._cuda,
            )
        )

    def copied(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy of the state in host memory.

        Raises:
            MemoryError: there is too little of it; the kernel would end the training.
        """
        parts = [local(leaf) for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
        size = sum(part.numel() * part.element_size() for part in parts)
        if size > self._held:
            check_fits(size - self._held, f"{size / 1e9:.3g} GB")
            self._held = size
        # Not by `DefaultStager.stage`, which in torch 2.11 gives the memory up after each use.
        copy: dict[str, Any] = self._state_dict_stager.stage(state, non_blocking=self._cuda)
        if self._cuda:
            torch.cuda.synchronize()
        return copy

    def stage(self, state_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Return the state unchanged: `copied` has copied it already."""
        return state_dict


def error_text(error: BaseException) -> str:
    """Message of an exception; for a DCP failure the message of each rank, without stacks."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    words = []
    for rank, (cause, _) in sorted(error.failures.items()):
        first = str(cause).strip().split("\n")[0]
        words.append(f"rank {rank}: {type(cause).__name__}: {first}")
    return "; ".join(words[:4]) + (f" and {len(words) - 4} more ranks" if len(words) > 4 else "")


def free_space(folder: Path) -> str:
    """Free disk space as a suffix of a message; empty if unknown."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return f" ({free / 1e9:.1f} GB are free in {os.fspath(folder)})"
