"""Reader of the index of a DCP checkpoint that runs no code from it.

The index (`.metadata`) is a pickle. It is decoded with the few operations and names that DCP
writes, into plain records; the objects of DCP are made from these after their types were
checked. Anything else is a ValueError.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import reprlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from rmetric._util.durable import no_follow

T = TypeVar("T")

#: The pickle machine that is written in Python: its operations can be restricted.
_Machine: Any = pickle._Unpickler

_METADATA = "torch.distributed.checkpoint.metadata"
#: Operations in what `pickle.dump` writes for an index, in protocols 2 to 5.
_OPERATIONS = (
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "REDUCE", "NEWOBJ", "BUILD"),
    *("BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GLOBAL", "STACK_GLOBAL"),
)
_CODES = {opcode.name: opcode.code.encode("latin-1")[0] for opcode in pickletools.opcodes}


class _Record:
    """One object of the index as it was pickled, or a call, not made; nothing in it is checked."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


_KEYS = (str, _Record)


def _names() -> dict[tuple[str, str], type[_Record]]:
    """Names that an index may hold, each as a new class of records."""
    paths = ("Path", "PosixPath", "WindowsPath")
    names = {
        _METADATA: (
            "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
            "BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
        ),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.serialization": ("_get_layout",), "torch": ("Size",),
        "pathlib": paths, "pathlib._local": paths,
    }  # fmt: skip
    return {(m, name): type(name, (_Record,), {}) for m, of in names.items() for name in of}


class _Reader(_Machine):  # type: ignore[misc]
    """Pickle machine with the operations above, in which nothing but records can be called.

    The one written in Python: its memo takes no more memory than the file.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        code: function
        for code, function in _Machine.dispatch.items()
        if code in {_CODES[name] for name in _OPERATIONS}
    }

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._names = _names()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._names:
            return self._names[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise ValueError(f"it names {module}.{name}, which no index holds")

    def load_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self._set({key: value} if isinstance(key, _KEYS) else _fail(key, "a key"))

    def load_setitems(self) -> None:
        items = self.pop_mark()
        for key in items[::2]:  # the hash of a nested tuple may take for ever
            if not isinstance(key, _KEYS):
                _fail(key, "a key")
        self._set(dict(zip(items[::2], items[1::2], strict=True)))

    def _set(self, items: dict[Any, Any]) -> None:
        _of(dict, self.stack[-1]).update(items)

    dispatch[_CODES["SETITEM"]] = load_setitem
    dispatch[_CODES["SETITEMS"]] = load_setitems


def read_index(path: Path, files: Collection[str]) -> Metadata:
    """Read the index of a DCP checkpoint.

    Args:
        path: the file `.metadata`.
        files: names of the files of the checkpoint, the only ones it may refer to.

    Raises:
        ValueError: it holds anything else than an index.
        OSError: it cannot be read, or is a symbolic link.
    """
    with open(path, "rb", opener=no_follow) as file:
        data = file.read()
    try:
        return _metadata(_Reader(io.BytesIO(data)).load(), frozenset(files))
    except KeyError as error:
        what = "pickle operation" if isinstance(error.args[0], int) else "field"
        why = f"it has the {what} {error}, or lacks it, unlike an index"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    raise ValueError(f"{path} is no index of torch.distributed.checkpoint: {why}"[:500])


# -- from records to the objects of DCP


def _fail(found: Any, wanted: str) -> NoReturn:
    raise ValueError(f"found {shown(found)} in place of {wanted}")


def shown(found: Any) -> str:
    """Short text on a value, in bounded time."""
    return type(found).__name__ if isinstance(found, _Record) else reprlib.repr(found)


def _fields(found: Any, name: str) -> Mapping[str, Any]:
    if type(found).__name__ != name or not isinstance(found, _Record):
        _fail(found, name)
    if found.arguments or not isinstance(found.state, dict):
        _fail(found.state, f"the fields of {name}")
    return found.state


def _of(kind: type[T], found: Any) -> T:
    if type(found) is not kind:
        _fail(found, f"a value of type {kind.__name__}")
    return found


def _text(found: Any) -> str:
    return _of(str, found)


def _count(found: Any) -> int:
    return found if type(found) is int and found >= 0 else _fail(found, "a number from 0")


def _mapping(found: Any, key: Callable[[Any], Any], value: Callable[[Any], Any]) -> dict[Any, Any]:
    return {key(name): value(of) for name, of in _of(dict, found).items()}


def _size(found: Any) -> torch.Size:
    if (
        type(found).__name__ != "Size"
        or not isinstance(found, _Record)
        or len(found.arguments) != 1
    ):
        _fail(found, "a torch.Size")
    return torch.Size([_count(number) for number in _of(tuple, found.arguments[0])])


def _chunk(found: Any) -> ChunkStorageMetadata:
    fields = _fields(found, "ChunkStorageMetadata")
    return ChunkStorageMetadata(offsets=_size(fields["offsets"]), sizes=_size(fields["sizes"]))


def _properties(found: Any) -> TensorProperties:
    """State: dtype, layout, requires_grad, encoded memory format, pin_memory, newer ones: strides.

    The strides are those of the tensor that was saved; its file does not depend on them.
    """
    if type(found).__name__ != "TensorProperties" or not isinstance(found, _Record):
        _fail(found, "TensorProperties")
    dtype, _, requires_grad, _, pin_memory, *strides = _of(tuple, found.state)
    if len(strides) > 1:
        _fail(found.state, "at most six properties")
    for stride in strides:
        if stride is not None:
            [_count(number) for number in _of(tuple, stride)]
    properties = TensorProperties(
        dtype=_of(torch.dtype, dtype),
        requires_grad=_of(bool, requires_grad),
        pin_memory=_of(bool, pin_memory),
    )
    if strides and hasattr(properties, "strides"):  # torch 2.15
        properties.strides = strides[0]
    return properties


def _content(found: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(found).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(found, "TensorStorageMetadata")
    return TensorStorageMetadata(
        properties=_properties(fields["properties"]),
        size=_size(fields["size"]),
        chunks=[_chunk(chunk) for chunk in _of(list, fields["chunks"])],
    )


def _index(found: Any) -> MetadataIndex:
    fields = _fields(found, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        fqn=_of(str, fields["fqn"]),
        offset=None if offset is None else _size(offset),
        index=None if index is None else _count(index),
    )


def _storage_info(found: Any, files: Collection[str]) -> _StorageInfo:
    fields = _fields(found, "_StorageInfo")
    if fields["relative_path"] not in files:
        _fail(fields["relative_path"], "a file of the checkpoint")
    if fields.get("transform_descriptors"):
        _fail(fields["transform_descriptors"], "no transform")
    return _StorageInfo(
        relative_path=fields["relative_path"],
        offset=_count(fields["offset"]),
        length=_count(fields["length"]),
    )


def _place(found: Any) -> tuple[str | int, ...]:
    """Path of a value in the nested state."""
    for part in _of(tuple, found):
        if type(part) not in (str, int):
            _fail(part, "a key")
    return tuple(found)


def _metadata(found: Any, files: Collection[str]) -> Metadata:
    fields = _fields(found, "Metadata")
    planner_data, version = fields.get("planner_data"), fields.get("version")
    return Metadata(
        state_dict_metadata=_mapping(fields["state_dict_metadata"], _text, _content),
        planner_data=None if planner_data is None else _mapping(planner_data, _text, _place),
        storage_data=_mapping(
            fields["storage_data"], _index, lambda info: _storage_info(info, files)
        ),
        storage_meta=StorageMeta(),
        version=None if version is None else _of(str, version),
    )
