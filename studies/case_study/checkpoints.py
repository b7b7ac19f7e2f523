"""The state of a training, kept on disk or in memory under a name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from studies.case_study.memory import in_units
from studies.case_study.settings import CaseStudyError


class Checkpoints:
    """Named states; a kill at any moment leaves each whole or as it was.

    Args:
        folder: where they are files; None keeps them in the processor's memory,
            for machines without the disk, and nothing survives a kill.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._kept: dict[str, Any] = {}

    @property
    def on_disk(self) -> bool:
        return self._folder is not None

    def check_room(self, bytes_each: int, number: int) -> None:
        """Raise CaseStudyError where `number` states and one being written do not fit."""
        if self._folder is None:
            return
        there = next(path for path in self._folder.absolute().parents if path.exists())
        free, needed = shutil.disk_usage(there).free, bytes_each * (number + 1)
        if needed > free:
            raise CaseStudyError(
                f"{self._folder}: checkpoints need {in_units(needed)} and {in_units(free)} are "
                "free; --out takes another disk, --checkpoint-every 0 keeps what is needed in "
                "memory and cannot be resumed"
            )

    def save(self, name: str, state: dict[str, Any]) -> None:
        if self._folder is None:
            self._kept[name] = _on_host(state)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        part = self._path(name).with_suffix(".part")
        torch.save(state, part)
        part.replace(self._path(name))

    def load(self, name: str) -> dict[str, Any] | None:
        """The state of that name; None where there is none."""
        if self._folder is None:
            return self._kept.get(name)
        path = self._path(name)
        if not path.exists():
            return None
        # weights_only: whoever wrote the file, nothing in it is run.
        return torch.load(path, map_location="cpu", weights_only=True)

    def forget(self, name: str) -> None:
        self._kept.pop(name, None)
        if self._folder is not None:
            self._path(name).unlink(missing_ok=True)
            self._path(name).with_suffix(".part").unlink(missing_ok=True)
            if self._folder.is_dir() and not any(self._folder.iterdir()):
                self._folder.rmdir()

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}.pt"


def _on_host(value: Any) -> Any:
    """A copy whose tensors are in the processor's memory and change no more."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_host(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(inner) for inner in value)
    return value
