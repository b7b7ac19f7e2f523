"""Bytes of host memory that this process has taken, and may still take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

#: Share of the available memory that may be taken at a time.
MOST_OF_MEMORY = 0.9
#: Files of a control group with its limit and its use, and the key in memory.stat of the file
#: cache that it gives back; of version 2 and of version 1.
_UNIFIED = "memory.max", "memory.current", "inactive_file"
_LEGACY = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"

#: Where torchrun, Open MPI and Slurm state the number of ranks of a node.
_RANKS_HERE = "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that the kernel counts as available, or that a control group allows; or None."""
    lines = _lines(root / "proc/meminfo")
    rooms = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    groups = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            rooms += _of_path(groups, path, *_UNIFIED)
        elif "memory" in controllers.split(","):
            rooms += _of_path(groups / "memory", path, *_LEGACY)
    return max(0, min(rooms)) if rooms else None


def resident_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process has in memory; None where the system does not report it."""
    for line in _lines(root / "proc/self/statm"):
        return int(line.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def available_to_rank() -> int | None:
    """`available_memory`, divided among the ranks that a launcher started on this node."""
    available = available_memory()
    stated = [os.environ.get(name, "") for name in _RANKS_HERE]
    ranks = next((int(text) for text in stated if text.isdigit() and int(text) > 0), 1)
    return None if available is None else available // ranks


def check_fits(needed: int, what: str, *, freed: int = 0, advice: str = "") -> None:
    """Raise MemoryError rather than let the kernel end the training for want of memory.

    `what` is the subject of the message for the bytes `needed`, which take the place of those
    `freed`.
    """
    room = available_to_rank()
    if room is not None and needed > MOST_OF_MEMORY * room + freed:
        raise MemoryError(
            f"{what} do not fit into host memory, of which {room / 1e9:.3g} GB is available to "
            f"this rank{advice}"
        )


def _of_path(groups: Path, path: str, limit: str, use: str, cache: str) -> Iterator[int]:
    """The room of a group and of each one above it; in a container the path may be the host's."""
    inner = groups / path.strip("/")
    for group in (inner, *inner.parents):
        if not group.is_relative_to(groups):
            return
        allowed, used = _number(group / limit), _number(group / use)
        if allowed is None or used is None:
            continue
        stated = dict(line.split() for line in _lines(group / "memory.stat"))
        yield allowed - used + int(stated.get(cache, 0))


def _number(path: Path) -> int | None:
    """None for a file that is missing, and for "max"."""
    return next((int(line) for line in _lines(path) if line.isdigit()), None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
