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


def _object(found: Any, kind: type[T], **fields: Callable[[Any], Any]) -> T:
    """The object of a record, each of its fields made by a function; one that lacks is None."""
    state = _fields(found, kind.__name__)
    return kind(**{name: made(state.get(name)) for name, made in fields.items()})


def _optional(made: Callable[[Any], T]) -> Callable[[Any], T | None]:
    return lambda found: None if found is None else made(found)


def _of(kind: type[T], found: Any) -> T:
    if type(found) is not kind:
        _fail(found, f"a value of type {kind.__name__}")
    return found


def _text(found: Any) -> str:
    return _of(str, found)


def _count(found: Any) -> int:
    return found if type(found) is int and found >= 0 else _fail(found, "a number from 0")


def _mapping(key: Callable[[Any], Any], value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda found: {key(name): value(of) for name, of in _of(dict, found).items()}


def _size(found: Any) -> torch.Size:
    if (
        type(found).__name__ != "Size"
        or not isinstance(found, _Record)
        or len(found.arguments) != 1
    ):
        _fail(found, "a torch.Size")
    return torch.Size([_count(number) for number in _of(tuple, found.arguments[0])])


def _chunk(found: Any) -> ChunkStorageMetadata:
    return _object(found, ChunkStorageMetadata, offsets=_size, sizes=_size)


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
    return _object(
        found, TensorStorageMetadata, properties=_properties, size=_size,
        chunks=lambda chunks: [_chunk(chunk) for chunk in _of(list, chunks)],
    )  # fmt: skip


def _index(found: Any) -> MetadataIndex:
    return _object(
        found, MetadataIndex, fqn=_text, offset=_optional(_size), index=_optional(_count)
    )


def _storage_info(found: Any, files: Collection[str]) -> _StorageInfo:
    fields = _fields(found, "_StorageInfo")
    if fields["relative_path"] not in files:
        _fail(fields["relative_path"], "a file of the checkpoint")
    if fields.get("transform_descriptors"):
        _fail(fields["transform_descriptors"], "no transform")
    return _object(found, _StorageInfo, relative_path=_text, offset=_count, length=_count)


def _place(found: Any) -> tuple[str | int, ...]:
    """Path of a value in the nested state."""
    for part in _of(tuple, found):
        if type(part) not in (str, int):
            _fail(part, "a key")
    return tuple(found)


def _metadata(found: Any, files: Collection[str]) -> Metadata:
    made = _object(
        found, Metadata, state_dict_metadata=_mapping(_text, _content),
        planner_data=_optional(_mapping(_text, _place)),
        storage_data=_mapping(_index, lambda info: _storage_info(info, files)),
        version=_optional(_text),
    )  # fmt: skip
    made.storage_meta = StorageMeta()
    return made
