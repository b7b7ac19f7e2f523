"""Recognise files that are not text logs, by name or first bytes."""

from __future__ import annotations

import re
from pathlib import Path

from rmetric.diagnosis.reading.lines import utf16

#: Suffixes of files that stand beside logs and are none: read only where they are named.
_OTHER = {
    "weights, data and archives": "bin ckpt distcp idx index model npy npz onnx parquet pickle pkl "
    "pt pth safetensors arrow h5 hdf5 tfrecord tar tgz zip 7z whl so db sqlite",
    "pictures and documents": "gif html ico ipynb jpeg jpg pdf png svg webp",
    "settings and tables": "cfg conf csv ini json lock toml tsv xml yaml yml",
    "programs": "bash c cc cpp cu css cuh f90 go h hpp java jl js lua py pyc pyi rs sbatch sh "
    "slurm sub ts",
    "documentation": "md rst tex license",
}
_SUFFIXES = {f".{suffix}": what for what, words in _OTHER.items() for suffix in words.split()}
_NAMES = re.compile(
    r"(?i)(?:requirements.*|merges|vocab|license|readme|notice|authors|makefile|dockerfile)(?:\.txt)?"
)
_MAGIC = (b"\x89PNG", b"PK\x03\x04", b"\x7fELF", b"\x80\x02", b"\x80\x04", b"BZh", b"\xfd7zXZ")
_CONTROL = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x07\x1b")) + b"\x7f"
#: A run of the project's own: a log of numbers, which `rmetric replay` reads.
_OWN = re.compile(rb'\s*\{[^\n]*"event": ?"(?:EXPERIMENT_START|METRICS)"')


def other_by_name(path: Path) -> str:
    """Kind of a non-log file by its name; "" if it may be a log."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    if _NAMES.fullmatch(name):
        return "documentation"
    return _SUFFIXES.get(Path(name).suffix.lower(), "")


def other_by_content(head: bytes) -> str:
    """Kind of a non-log file by its first unpacked bytes; "" if it may be a log."""
    if _OWN.match(head):
        return "logs of numbers, for rmetric replay"
    return "binary" if is_binary(head) else ""


def is_binary(head: bytes) -> bool:
    """Return True if bytes are no text in any encoding that `lines` reads.

    A hole in a text, where a log was cut while it was written to, is a run of zeros and is
    passed over; other control characters are rare in text and common in everything else.
    """
    if utf16(head):
        return False
    if head.startswith(_MAGIC) or (head[4:9] == b"\0\0\0\0{"):
        return True
    head = re.sub(rb"\x1b\[[0-?]*[@-~]|\0{16,}", b"", head)
    return len(head) - len(head.translate(None, _CONTROL)) > 0.02 * len(head)
