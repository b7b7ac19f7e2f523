"""Variants of each fault kind: the stages in which it occurs and its signs.

`faults.py` implements a variant; this module holds what the plan needs without torch.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Variant:
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


INITIALISE = ("initialise",)
#: What gloo and the store say of a connection that is gone.
GONE = "(Connection|recv|send|socket|Broken|closed)"
ANY = ("initialise", "load data", "train", "evaluate", "checkpoint")
LATE = ("train", "evaluate", "checkpoint")
LOADING = ("train", "evaluate")
READING = ("load data", "train", "evaluate")
TRAIN, SAVE = ("train",), ("checkpoint",)

VARIANTS: dict[str, tuple[Variant, ...]] = {
    "exception": (
        Variant(name="bad value", stages=("load data", "train"), says="ValueError: invalid"),
        Variant(name="missing key", stages=("initialise", *LATE), says="KeyError: "),
        Variant(name="wrong shape", stages=("train", "evaluate"), says="RuntimeError: mat1 and"),
        Variant(name="out of range", stages=("train", "evaluate"), says="IndexError: index out of"),
        Variant(name="not picklable", stages=("checkpoint",), says="TypeError: cannot pickle"),
        Variant(name="file too large", stages=("checkpoint",), says="(OSError|RuntimeError): "),
    ),
    "kill": (Variant(name="kill -9", stages=ANY, outside="kill"),),
    "hang": (
        Variant(name="stalled loader", stages=("train", "evaluate")),
        Variant(name="stopped", stages=ANY, outside="stop"),
        Variant(name="stuck write", stages=("checkpoint",)),
        Variant(name="other order", stages=("train",), meets=True),
    ),
    "slow": (
        Variant(name="slow storage", stages=("train",)),
        Variant(name="slow compute", stages=("train",)),
    ),
    "data": (
        Variant(name="nan", stages=("train",), says="FloatingPointError: "),
        Variant(
            name="damaged shard",
            stages=("load data", "train"),
            says="(ValueError: checksum|gzip.BadGzipFile|zlib.error|EOFError)",
        ),
        Variant(
            name="cut shard",
            stages=("load data", "train"),
            says="(ValueError: checksum|EOFError|gzip.BadGzipFile)",
        ),
    ),
    "memory": (
        Variant(
            name="address space",
            stages=("load data", "train", "evaluate", "checkpoint"),
            says="(MemoryError|RuntimeError: .*(alloc|memory))",
        ),
    ),
    "network": (
        Variant(name="all sockets", stages=ANY[1:], says=GONE),
        Variant(name="sockets of gloo", stages=ANY[1:], says=GONE),
    ),
    "environment": (
        Variant(
            name="variable missing",
            stages=INITIALISE,
            says="expected, but not set",
            environment=True,
        ),
        Variant(name="wrong port", stages=INITIALISE, environment=True),
        Variant(name="wrong rank", stages=INITIALISE, environment=True),
        Variant(name="wrong world size", stages=INITIALISE, environment=True),
        Variant(name="wrong version", stages=INITIALISE, says="is required", environment=True),
        Variant(
            name="wrong data path",
            stages=("load data",),
            says="FileNotFoundError",
            environment=True,
        ),
    ),
    "process": (
        Variant(name="segmentation fault", stages=ANY[1:], code=-signal.SIGSEGV),
        Variant(name="heap corruption", stages=ANY[1:], code=-signal.SIGABRT),
        Variant(name="bus error", stages=ANY[1:], code=-signal.SIGBUS),
        Variant(name="early exit", stages=LATE, code=0),
        Variant(name="silent exit", stages=LATE, code=3),
        Variant(name="terminated", stages=LATE, outside="terminate", code=-signal.SIGTERM),
    ),
    "storage": (
        Variant(name="folder gone", stages=SAVE, says="FileNotFoundError: "),
        Variant(name="not a folder", stages=SAVE, says="NotADirectoryError: "),
        Variant(name="disk full", stages=SAVE, says="No space left on device|RuntimeError: .*Pyt"),
        Variant(name="shard deleted", stages=READING, says="FileNotFoundError: "),
        Variant(name="bad disk", stages=READING, says="OSError: .*Input/output error"),
    ),
    "skew": (
        Variant(name="hidden size", stages=INITIALISE, meets=True),
        Variant(name="frozen layer", stages=TRAIN, meets=True),
        Variant(name="other precision", stages=TRAIN, meets=True),
        Variant(name="other interval", stages=TRAIN, meets=True),
        Variant(name="fewer steps", stages=TRAIN, meets=True),
    ),
    "deadlock": (
        Variant(name="lock", stages=ANY[1:]),
        Variant(name="empty queue", stages=LOADING, says="FileNotFoundError: "),
        Variant(name="endless loop", stages=LOADING),
        Variant(name="silent service", stages=ANY[1:]),
        Variant(name="group alone", stages=LOADING, meets=True),
        Variant(name="message of nobody", stages=LOADING, meets=True),
    ),
    "limits": (
        Variant(name="cpu time", stages=LOADING, code=-signal.SIGXCPU),
        Variant(name="threads", stages=LOADING, says="can't start new thread"),
        Variant(name="recursion", stages=READING, says="RecursionError: "),
        Variant(name="open files", stages=ANY[1:], says="Too many open files"),
    ),
    "numerics": (
        Variant(name="infinite gradient", stages=TRAIN, says="FloatingPointError: "),
        Variant(
            name="wrong rate",
            stages=TRAIN,
            says="(FloatingPointError: |RuntimeError: parameters)",
        ),
        Variant(name="flipped bit", stages=("evaluate",), says="RuntimeError: parameters"),
        Variant(name="exploding loss", stages=TRAIN, says="RuntimeError: mean loss"),
    ),
}  # fmt: skip


def variant_of(kind: str, name: str) -> Variant:
    """Raises KeyError for a variant that the kind has not."""
    return {one.name: one for one in VARIANTS[kind]}[name]
