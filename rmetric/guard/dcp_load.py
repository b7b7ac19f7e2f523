"""Reader of `torch.distributed.checkpoint` that runs no code from a checkpoint; verification."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from rmetric._util.durable import no_follow
from rmetric.guard.dcp_index import read_index
from rmetric.guard.trust import TRUST_VARIABLE, distrusted_file, is_trusted_by_user

#: Numpy scalars, such as a learning rate that a scheduler computed.
_NUMPY = [
    np.dtype,
    np.float64(0).__reduce__()[0],
    *(type(np.dtype(kind)) for kind in ("f2", "f4", "f8", "?", *"bhilqBHILQ")),
]


class IndexReader(FileSystemReader):
    """Reads the index with `read_index`.

    Args:
        folder: the checkpoint.
        files: names of its files.

    Attributes:
        problem: with the index, "" for none: torch 2.11 says only that there is none.
    """

    def __init__(self, folder: Path, files: Collection[str]) -> None:
        super().__init__(folder)
        self._files, self.problem = files, ""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        try:
            metadata = read_index(Path(self.path) / ".metadata", self._files)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
            raise
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata


class PlainLoadPlanner(DefaultLoadPlanner):
    """Loads values that are no tensors by `plain_value`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        content = plain_value(value, name)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], content)
        else:
            self.state_dict[name] = content


def plain_value(file: io.BytesIO, name: str) -> Any:
    """Load a value that is no tensor with ``weights_only=True``.

    Args:
        file: what DCP saved.
        name: of the value, for the error.

    Raises:
        ValueError: it needs code to be loaded, and the folder is not declared trusted.
    """
    if is_trusted_by_user():
        return torch.load(file, map_location="cpu", weights_only=False)
    try:
        with torch.serialization.safe_globals(_NUMPY):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).strip().replace("\n", " ")
        kind = reason.partition("GLOBAL ")[2].partition(" ")[0] or type(error).__name__
        raise ValueError(
            f"the value {name} is neither a tensor nor plain, and would run code when it is loaded "
            f"({kind}): save it as plain values, or register its class with "
            f"torch.serialization.add_safe_globals, or set {TRUST_VARIABLE}=1"
        ) from None


def _pieces(
    folder: Path, metadata: Metadata, files: Collection[str], kind: type
) -> Iterator[tuple[str, io.BytesIO]]:
    """Name and content of the values of a kind in these files; one is in memory at a time."""
    assert isinstance(metadata.storage_data, Mapping)
    found = [
        (where.relative_path, where.offset, where.length, index.fqn)
        for index, where in metadata.storage_data.items()
        if where.relative_path in files
        and isinstance(metadata.state_dict_metadata[index.fqn], kind)
    ]
    for file_name, offset, length, name in sorted(found):
        with open(folder / file_name, "rb", opener=no_follow) as file:
            file.seek(offset)
            yield name, io.BytesIO(file.read(length))


def unloadable(folder: Path, metadata: Metadata, files: Collection[str]) -> str:
    """First value in these files of a DCP checkpoint that `plain_value` refuses; empty if none."""
    for name, piece in _pieces(folder, metadata, files, BytesStorageMetadata):
        try:
            plain_value(piece, name)
        except ValueError as error:
            return str(error)
    return ""


BLOCK = 1 << 20


def digest(path: Path) -> dict[str, Any]:
    """Size in bytes and sha256 of a file, read from disk where the system supports it."""
    sha = hashlib.sha256()
    with open(path, "rb", opener=no_follow) as file:
        if hasattr(os, "posix_fadvise"):  # else the page cache is read, not the disk
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := file.read(BLOCK):
            sha.update(block)
    return {"size": path.stat().st_size, "sha256": sha.hexdigest()}


def damaged(folder: Path, files: Mapping[str, Mapping[str, Any]], names: Collection[str]) -> str:
    """Problem of the first file among `names` that was or can be changed; empty if there is none.

    `files`: name -> ``size`` and ``sha256`` when written.
    """
    if why := distrusted_file(folder, names):
        return why
    for name in names:
        path, meant = folder / name, files[name]
        try:
            size = path.stat().st_size
            if size != meant["size"]:
                return f"{name} has {size} bytes instead of {meant['size']}"
            if digest(path)["sha256"] != meant["sha256"]:
                return f"{name} is not what was written (sha256)"
        except OSError as error:
            return f"{name} cannot be read: {error}"
    return ""


def non_finite(
    folder: Path,
    metadata: Metadata,
    files: Collection[str],
    *,
    may_be_infinite: Collection[str] = (),
) -> str:
    """First tensor with nan or inf in files of a DCP checkpoint; empty if there is none.

    Tensors whose name matches a pattern of `may_be_infinite`, such as masks, may hold
    infinities; nan is never allowed.
    """
    for name, piece in _pieces(folder, metadata, files, TensorStorageMetadata):
        tensor = torch.load(piece, map_location="cpu", weights_only=True)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        allowed = any(fnmatchcase(name, pattern) for pattern in may_be_infinite)
        if bad := num_non_finite(tensor, infinite_too=not allowed):
            return f"{name} holds {bad} of {tensor.numel()} values that are not finite"
    return ""


def num_non_finite(tensor: torch.Tensor, *, infinite_too: bool) -> int:
    """Number of nan, and with `infinite_too` of infinities, in a floating or complex tensor."""
    if tensor.numel() == 0:
        return 0
    if tensor.itemsize == 1:  # few operations take float8
        tensor = tensor.float()
    # The extremes of a tensor with nan are nan; one pass for them is far cheaper than a mask.
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    extremes = torch.stack(real.aminmax())
    if bool((extremes.isfinite() if infinite_too else ~extremes.isnan()).all()):
        return 0
    return int((~tensor.isfinite() if infinite_too else tensor.isnan()).sum())
