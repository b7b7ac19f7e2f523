"""A scheduler's log is of all jobs of a cluster: what it says of the others is left out."""

from __future__ import annotations

import re
from collections.abc import Collection

#: Least number of jobs that a log of a whole cluster, or of a node, names.
MIN_JOBS = 3
#: The job that a line of a scheduler is about, also by its step: "[77.0] done with job".
_ABOUT = re.compile(
    rb"(?i)\bjob[ _]?id\W{1,3}(\d+)|\*\*\* (?:job|step) (\d+)|\bstep[ _]?id=(\d+)"
    rb"|^\[[^]]{10,40}\] \[(\d+)\."
)
_NUMBER = re.compile(r"\d{3,}")


def is_of_another(line: bytes, own: Collection[bytes]) -> bool:
    """True for a line that names jobs by their numbers, and none of `own`.

    >>> line = b"[2024-06-28T02:09:18.844] _job_complete: JobId=90241 WEXITSTATUS 0"
    >>> is_of_another(line, {b"90211"}), is_of_another(line, {b"90241"})
    (True, False)
    """
    about = {b"".join(groups) for groups in _ABOUT.findall(line)}
    return bool(about) and about.isdisjoint(own)


def numbers_in(name: str) -> set[str]:
    """Numbers in a file's name that may be of a job, as in "train-90211.out"."""
    return set(_NUMBER.findall(name))
