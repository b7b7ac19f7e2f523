"""One save by torch.distributed.checkpoint (DCP): how it goes, and what DCP is given for it."""

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
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from rmetric.guard.good import Done, Failed


@dataclass
class Save:
    """One save, from its beginning to its outcome."""

    step: int
    part: Path
    request: int
    about: dict[str, Any] = field(default_factory=dict)
    own: str | None = None
    problem: str = ""
    began: float = field(default_factory=time.perf_counter)
    blocking_seconds: float = 0.0
    durable_seconds: float = 0.0
    outcome: Done | Failed | None = None

    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @contextlib.contextmanager
    def noting_problems(self, what: str) -> Iterator[None]:
        """A rank that cannot go on must still take part, or the others would wait for it."""
        try:
            yield
        except Exception as error:
            self.problem = self.problem or f"{what}: {type(error).__name__}: {error}"


class Planner(DefaultSavePlanner):
    """Fails, where DCP shares a failure with all ranks, for what had gone wrong before."""

    def __init__(self, save: Save, folder: Path) -> None:
        super().__init__()
        self._of, self._folder = save, folder

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        if self._of.problem:
            raise RuntimeError(self._of.problem)
        if not self._folder.is_dir():  # DCP would make it, perhaps where a disk was mounted
            raise FileNotFoundError(f"the folder {self._folder} is gone")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


class Stager(DefaultStager):
    """Keeps its host memory from save to save, and hands over what was copied already."""

    def __init__(self) -> None:
        cuda = torch.cuda.is_available()
        super().__init__(
            StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=cuda,
            )
        )

    def copied(self, state: dict[str, Any]) -> dict[str, Any]:
        copy = super().stage(state)
        assert isinstance(copy, dict)
        return copy

    def stage(self, state_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        return state_dict


def in_words(error: BaseException) -> str:
    """Each rank's own words, without the stack."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    words = []
    for rank, (cause, _) in sorted(error.failures.items()):
        first = str(cause).strip().split("\n")[0]
        words.append(f"rank {rank}: {type(cause).__name__}: {first}")
    return "; ".join(words[:4]) + (f" and {len(words) - 4} more ranks" if len(words) > 4 else "")


def free_space(folder: Path) -> str:
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return f" ({free / 1e9:.1f} GB are free in {os.fspath(folder)})"
