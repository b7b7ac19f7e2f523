"""Variants of each fault kind: the stages in which it occurs and its signs.

`faults.py` implements a variant; this module holds what the plan needs without torch.
"""

from __future__ import annotations

import signal
from typing import NamedTuple


class Variant(NamedTuple):
    """One way for a fault to happen.

    Attributes:
        stages: of `rmetric.diagnosis.facts.job.STAGES`, where it can come.
        says: a pattern that the faulty rank's last exception must match; "" where it writes none.
        outside: what the launcher does to the process: "kill", "stop", "terminate"; "" nothing.
        environment: it is there from the start, in the variables of the process.
        code: the exit code of the faulty rank, negative for a signal; None where others decide it.
        meets: it runs into the others' end as they do, where a hang would wait for ever.
    """

    name: str
    stages: tuple[str, ...]
    says: str = ""
    outside: str = ""
    environment: bool = False
    code: int | None = None
    meets: bool = False


#: What gloo and the store say of a connection that is gone.
GONE = "(Connection|recv|send|socket|Broken|closed)"
ANY = ("initialise", "load data", "train", "evaluate", "checkpoint")
AFTER, LATE = ANY[1:], ANY[2:]
START, FIRST, TRAIN, SAVE = ANY[:1], ("load data", "train"), ("train",), ("checkpoint",)
LOADING = ("train", "evaluate")
READING = ("load data", "train", "evaluate")

VARIANTS: dict[str, tuple[Variant, ...]] = {
    "exception": (
        Variant("bad value", FIRST, "ValueError: invalid"),
        Variant("missing key", ("initialise", *LATE), "KeyError: "),
        Variant("wrong shape", LOADING, "RuntimeError: mat1 and"),
        Variant("out of range", LOADING, "IndexError: index out of"),
        Variant("not picklable", SAVE, "TypeError: cannot pickle"),
        Variant("file too large", SAVE, "(OSError|RuntimeError): "),
    ),
    "kill": (Variant("kill -9", ANY, outside="kill"),),
    "hang": (
        Variant("stalled loader", LOADING),
        Variant("stopped", ANY, outside="stop"),
        Variant("stuck write", SAVE),
        Variant("other order", TRAIN, meets=True),
    ),
    "slow": (Variant("slow storage", TRAIN), Variant("slow compute", TRAIN)),
    "data": (
        Variant("nan", TRAIN, "FloatingPointError: "),
        Variant(
            "damaged shard", FIRST, "(ValueError: checksum|gzip.BadGzipFile|zlib.error|EOFError)"
        ),
        Variant("cut shard", FIRST, "(ValueError: checksum|EOFError|gzip.BadGzipFile)"),
    ),
    "memory": (Variant("address space", AFTER, "(MemoryError|RuntimeError: .*(alloc|memory))"),),
    "network": (Variant("all sockets", AFTER, GONE), Variant("sockets of gloo", AFTER, GONE)),
    "environment": (
        Variant("variable missing", START, "expected, but not set", environment=True),
        Variant("wrong port", START, environment=True),
        Variant("wrong rank", START, environment=True),
        Variant("wrong world size", START, environment=True),
        Variant("wrong version", START, "is required", environment=True),
        Variant("wrong data path", ("load data",), "FileNotFoundError", environment=True),
    ),
    "process": (
        Variant("segmentation fault", AFTER, code=-signal.SIGSEGV),
        Variant("heap corruption", AFTER, code=-signal.SIGABRT),
        Variant("bus error", AFTER, code=-signal.SIGBUS),
        Variant("early exit", LATE, code=0),
        Variant("silent exit", LATE, code=3),
        Variant("terminated", LATE, outside="terminate", code=-signal.SIGTERM),
    ),
    "storage": (
        Variant("folder gone", SAVE, "FileNotFoundError: "),
        Variant("not a folder", SAVE, "NotADirectoryError: "),
        Variant("disk full", SAVE, "No space left on device|RuntimeError: .*Pyt"),
        Variant("shard deleted", READING, "FileNotFoundError: "),
        Variant("bad disk", READING, "OSError: .*Input/output error"),
    ),
    "skew": (
        Variant("hidden size", START, meets=True),
        Variant("frozen layer", TRAIN, meets=True),
        Variant("other precision", TRAIN, meets=True),
        Variant("other interval", TRAIN, meets=True),
        Variant("fewer steps", TRAIN, meets=True),
    ),
    "deadlock": (
        Variant("lock", AFTER),
        Variant("empty queue", LOADING, "FileNotFoundError: "),
        Variant("endless loop", LOADING),
        Variant("silent service", AFTER),
        Variant("group alone", LOADING, meets=True),
        Variant("message of nobody", LOADING, meets=True),
    ),
    "limits": (
        Variant("cpu time", LOADING, code=-signal.SIGXCPU),
        Variant("threads", LOADING, "can't start new thread"),
        Variant("recursion", READING, "RecursionError: "),
        Variant("open files", AFTER, "Too many open files"),
    ),
    "numerics": (
        Variant("infinite gradient", TRAIN, "FloatingPointError: "),
        Variant("wrong rate", TRAIN, "(FloatingPointError: |RuntimeError: parameters)"),
        Variant("flipped bit", ("evaluate",), "RuntimeError: parameters"),
        Variant("exploding loss", TRAIN, "RuntimeError: mean loss"),
    ),
}


def variant_of(kind: str, name: str) -> Variant:
    """Raises KeyError for a variant that the kind has not."""
    return {variant.name: variant for variant in VARIANTS[kind]}[name]
