"""Verification of checkpoint files: size, sha256 and finite tensors."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmetric._util.durable import no_follow
from rmetric.guard.trust import distrusted_file

if TYPE_CHECKING:
    from torch import Tensor

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
    folder: Path, metadata: Any, files: Collection[str], *, may_be_infinite: Collection[str] = ()
) -> str:
    """First tensor with nan or inf in files of a DCP checkpoint; empty if there is none.

    `metadata` is that of `FileSystemReader.read_metadata`. Tensors whose name matches a
    pattern of `may_be_infinite`, such as masks, may hold infinities; nan is never allowed.
    """
    import torch
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    pieces = [
        (where.relative_path, where.offset, where.length, index.fqn)
        for index, where in metadata.storage_data.items()
        if where.relative_path in files
        and isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata)
    ]
    for file_name, offset, length, name in sorted(pieces):  # one in memory at a time
        with open(folder / file_name, "rb", opener=no_follow) as file:
            file.seek(offset)
            piece = io.BytesIO(file.read(length))
        tensor = torch.load(piece, map_location="cpu", weights_only=True)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        allowed = any(fnmatchcase(name, pattern) for pattern in may_be_infinite)
        if bad := num_non_finite(tensor, infinite_too=not allowed):
            return f"{name} holds {bad} of {tensor.numel()} values that are not finite"
    return ""


def num_non_finite(tensor: Tensor, *, infinite_too: bool) -> int:
    """Number of nan, and with `infinite_too` of infinities, in a floating or complex tensor."""
    import torch

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
