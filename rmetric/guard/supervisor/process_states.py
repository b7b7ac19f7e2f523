"""States of the ranks' processes in /proc, and the rank that is in another state than all others.

In a hang all ranks but one usually wait for that one in a collective. Only processes of this
node are read, and nothing is attached to them.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rmetric.guard.run_folder import LAUNCH_VARIABLE, Heartbeat

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}
STOPPED = ("T", "t")
#: A rank that polls is seen running now and sleeping then.
SAMPLES, SAMPLE_SECONDS = 5, 0.05


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """State of the main thread of a rank's process.

    Attributes:
        pid: process id.
        state: letter of /proc/PID/status; empty if there is no such process.
        waits_in: function of the kernel in which it waits; empty if unknown.
    """

    pid: int
    state: str
    waits_in: str = ""

    @property
    def words(self) -> str:
        where = f" in {self.waits_in}" if self.waits_in else ""
        name = STATES.get(self.state, f"in state {self.state}") if self.state else "gone"
        return f"{name}{where}" + (f" (state {self.state})" if self.state in STOPPED else "")


@dataclass(frozen=True, kw_only=True)
class OddRank:
    """Rank whose process is in another state than those of the others, with the evidence."""

    rank: int
    words: str
    stopped: bool = False


def read_states(beats: Mapping[int, Heartbeat]) -> dict[int, ProcessState]:
    """Most frequent state, over `SAMPLES`, of each rank whose process is on this node."""
    here = os.uname().nodename
    local = {rank: beat for rank, beat in beats.items() if beat.node == here}
    seen: dict[int, Counter[ProcessState]] = {rank: Counter() for rank in local}
    for sample in range(SAMPLES if local else 0):
        time.sleep(SAMPLE_SECONDS if sample else 0.0)
        for rank, beat in local.items():
            seen[rank][read_state(beat.pid, beat.launch)] += 1
    return {rank: states.most_common(1)[0][0] for rank, states in seen.items()}


def read_state(pid: int, launch: str = "", proc: Path = Path("/proc")) -> ProcessState:
    """State of one process; without a state if it is gone or its pid is of another launch."""
    of = proc / str(pid)
    variable = f"{LAUNCH_VARIABLE}={launch}".encode()
    try:
        if launch and variable not in (of / "environ").read_bytes().split(b"\0"):
            return ProcessState(pid=pid, state="")
        status = (of / "status").read_text()
    except OSError:
        return ProcessState(pid=pid, state="")
    state = next((line.split()[1] for line in status.splitlines() if line.startswith("State:")), "")
    try:
        waits_in = (of / "wchan").read_text().strip()
    except OSError:
        waits_in = ""
    waits_in = "" if waits_in == "0" or state in STOPPED else waits_in
    return ProcessState(pid=pid, state=state, waits_in=waits_in)


def odd_one_out(states: Mapping[int, ProcessState]) -> OddRank | None:
    """The one rank that is stopped, gone, or in another state than at least two that are alike.

    >>> waits = ProcessState(pid=1, state="S", waits_in="futex_wait_queue")
    >>> sleeps = ProcessState(pid=2, state="S", waits_in="hrtimer_nanosleep")
    >>> odd_one_out({0: waits, 1: waits, 2: sleeps}).rank
    2
    >>> odd_one_out({0: waits, 1: sleeps}) is None
    True
    """
    for letters in (STOPPED, ("", "Z", "X")):
        found = [rank for rank, of in states.items() if of.state in letters]
        if len(found) == 1 and len(states) > 1:
            of = states[found[0]]
            words = f"rank {found[0]} (process {of.pid}) is {of.words}"
            return OddRank(rank=found[0], words=words, stopped=letters is STOPPED)
        if found:
            return None
    kinds = Counter((of.state, of.waits_in) for of in states.values())
    if len(kinds) != 2 or min(kinds.values()) != 1 or len(states) < 3:
        return None
    rare = min(kinds, key=lambda kind: kinds[kind])
    rank = next(rank for rank, of in states.items() if (of.state, of.waits_in) == rare)
    other = next(of for of in states.values() if (of.state, of.waits_in) != rare)
    of = states[rank]
    words = f"rank {rank} (process {of.pid}) is {of.words}, the others are {other.words}"
    return OddRank(rank=rank, words=words)
