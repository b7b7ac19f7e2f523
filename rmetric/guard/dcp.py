"""Saves and loads by torch.distributed.checkpoint (DCP) that run no code from a checkpoint.

The index of DCP, `.metadata`, is a pickle: it is written for other programs, and never read here.
`IndexedWriter` writes the same facts as `index.json`, which `IndexReader` reads. Values that are
no tensors are loaded with ``weights_only=True``.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils._pytree import tree_leaves

from rmetric._util.durable import durable_file, no_follow
from rmetric._util.host_memory import check_fits
from rmetric.guard.policy import SuspectMark
from rmetric.guard.run_folder import Count
from rmetric.guard.trust import TRUST_VARIABLE, distrusted_file, is_trusted_by_user
from rmetric.monitor.gradients import local

try:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
except ImportError as error:
    raise ImportError(
        f"rmetric's sharded checkpoints need torch 2.9 or newer, whose staging can be chosen; "
        f"this is torch {torch.__version__}"
    ) from error

INDEX_NAME = "index.json"
BLOCK = 1 << 20
#: Numpy scalars, such as a learning rate that a scheduler computed.
_NUMPY = [
    np.dtype,
    np.float64(0).__reduce__()[0],
    *(type(np.dtype(kind)) for kind in ("f2", "f4", "f8", "?", *"bhilqBHILQ")),
]


# -- the index


class _Tensor(msgspec.Struct):
    dtype: str
    size: list[Count]
    chunks: list[tuple[list[Count], list[Count]]]  # offsets, sizes


class _Piece(msgspec.Struct):
    """Place of a value, or of a chunk of it, in a file."""

    name: str
    offset: list[Count] | None
    index: Count | None
    file: str
    start: Count
    length: Count


class _Index(msgspec.Struct):
    tensors: dict[str, _Tensor]
    plain: list[str]
    paths: dict[str, list[str | int]]  # of each value in the nested state
    pieces: list[_Piece]


def _index_of(metadata: records.Metadata) -> bytes:
    tensors, plain = {}, []
    for name, of in metadata.state_dict_metadata.items():
        if isinstance(of, records.TensorStorageMetadata):
            chunks = [(list(chunk.offsets), list(chunk.sizes)) for chunk in of.chunks]
            dtype = str(of.properties.dtype).removeprefix("torch.")
            tensors[name] = _Tensor(dtype, list(of.size), chunks)
        else:
            plain.append(name)
    pieces = [
        _Piece(
            at.fqn, None if at.offset is None else list(at.offset), at.index,
            where.relative_path, where.offset, where.length,
        )
        for at, where in metadata.storage_data.items()
    ]  # fmt: skip
    paths = {name: list(path) for name, path in (metadata.planner_data or {}).items()}
    return msgspec.json.encode(_Index(tensors, plain, paths, pieces))


def read_index(path: Path, files: Collection[str]) -> records.Metadata:
    """Read the index of a checkpoint, which may refer to no other files than these.

    Raises ValueError if it holds anything else, OSError if it cannot be read or is a symbolic link.
    """
    with open(path, "rb", opener=no_follow) as file:
        data = file.read()
    try:
        found = msgspec.json.decode(data, type=_Index)
        content: dict[str, records.TensorStorageMetadata | records.BytesStorageMetadata] = {
            name: records.BytesStorageMetadata() for name in found.plain
        }
        for name, tensor in found.tensors.items():
            dtype = getattr(torch, tensor.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{tensor.dtype[:50]!r} is not a dtype of torch")
            chunks = [
                records.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                for offsets, sizes in tensor.chunks
            ]
            size, properties = torch.Size(tensor.size), records.TensorProperties(dtype=dtype)
            content[name] = records.TensorStorageMetadata(properties, size, chunks)
        places = {}
        for piece in found.pieces:
            if piece.file not in files or piece.name not in content:
                raise ValueError(f"{piece.name[:50]} in {piece.file[:50]!r} is not of it")
            at = records.MetadataIndex(piece.name, piece.offset, piece.index)
            places[at] = _StorageInfo(piece.file, piece.start, piece.length)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not an index of a checkpoint: {error}") from None
    paths = {name: tuple(path) for name, path in found.paths.items()}
    return records.Metadata(
        content, planner_data=paths, storage_data=places, storage_meta=records.StorageMeta()
    )


# -- loads and verification


class IndexReader(FileSystemReader):
    """Reads the index of `folder` with `read_index`; `files` are the names of its files.

    `problem`: with the index, "" if none; torch 2.11 reports only that the index is missing.
    """

    def __init__(self, folder: Path, files: Collection[str]) -> None:
        super().__init__(folder)
        self._files, self.problem = files, ""

    def read_metadata(self, *_: Any, **__: Any) -> records.Metadata:
        try:
            metadata = read_index(Path(self.path) / INDEX_NAME, self._files)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
            raise
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata


class PlainLoadPlanner(DefaultLoadPlanner):
    """Loads values other than tensors by `plain_value`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        content = plain_value(value, name)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], content)
        else:
            self.state_dict[name] = content


def plain_value(file: io.BytesIO, name: str) -> Any:
    """Load a value other than a tensor, as DCP saved it; `name` is for the error.

    Raises ValueError if it needs code to be loaded, and the folder is not declared trusted.
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
    folder: Path, metadata: records.Metadata, files: Collection[str], kind: type
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


def unloadable(folder: Path, metadata: records.Metadata, files: Collection[str]) -> str:
    """First value in these files of a DCP checkpoint that `plain_value` refuses; empty if none."""
    for name, piece in _pieces(folder, metadata, files, records.BytesStorageMetadata):
        try:
            plain_value(piece, name)
        except ValueError as error:
            return str(error)
    return ""


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
    """Problem of the first file among `names` that was or can be changed; else empty."""
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
    metadata: records.Metadata,
    files: Collection[str],
    *,
    may_be_infinite: Collection[str] = (),
) -> str:
    """First tensor with nan or inf in these files, as a problem; empty if there is none.

    Tensors whose name matches a pattern of `may_be_infinite`, such as masks, may hold infinities.
    """
    for name, piece in _pieces(folder, metadata, files, records.TensorStorageMetadata):
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


# -- saves


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

    def seconds(self) -> float:
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
    """Writes `index.json`, too, and leaves the index in the metadata that DCP returns.

    torch 2.10 to 2.12 index a copy of the metadata alone.
    """

    def finish(self, metadata: records.Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        metadata.storage_data = {
            result.index: result.storage_data for of in results for result in of
        }
        with durable_file(Path(self.path) / INDEX_NAME) as file:
            file.write(_index_of(metadata))


class HostMemoryStager(DefaultStager):
    """Copies tensors to host memory that is reused from save to save."""

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()
        self._held = 0  # bytes of the largest state so far
        super().__init__(
            StagingOptions(
                use_pinned_memory=self._cuda, use_non_blocking_copy=self._cuda,
                use_shared_memory=False, use_async_staging=False,
            )
        )  # fmt: skip

    def copied(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy of the state in host memory; MemoryError if there is too little of it."""
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
    with contextlib.suppress(OSError):
        return f" ({shutil.disk_usage(folder).free / 1e9:.1f} GB are free in {os.fspath(folder)})"
    return ""
