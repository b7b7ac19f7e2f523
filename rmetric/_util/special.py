"""Refusal of what is no file of a disk.

To read it may never end, or takes from another reader; to write it would replace a device.
"""

from __future__ import annotations

import stat
from contextlib import suppress
from functools import cache
from pathlib import Path

from rmetric._util.errors import LogError

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
#: File systems of the kernel. Their files have no size, and some of them no end.
_OF_KERNEL = ("/proc", "/sys", "/dev", "/sys/kernel/debug", "/sys/kernel/tracing")


def refuse_special(path: Path | str) -> None:
    """Raise LogError for a pipe, a socket, a device, and what lies in /proc, /sys or /dev.

    Files and folders pass, links to them, and what does not exist.
    """
    if what := special_kind(path):
        raise LogError(path, None, f"{what}; files and folders of a disk are accepted")


def special_kind(path: Path | str) -> str:
    """What the path, or what it links to, is besides a file or folder of a disk; else empty."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return ""
    what = _KINDS.get(stat.S_IFMT(found.st_mode), "")
    if not what and found.st_dev in _kernel_devices():
        what = f"in a file system of the kernel ({', '.join(_OF_KERNEL[:3])})"
    return what


@cache
def _kernel_devices() -> frozenset[int]:
    found = set()
    for path in map(Path, _OF_KERNEL):
        with suppress(OSError):
            found.add(path.stat().st_dev)
    return frozenset(found - {Path("/").stat().st_dev})  # none of them is mounted
