"""Ends every process of a launch by pid, and verifies it. Needs psutil.

A killed agent leaves its workers behind, and workers may leave the process group.
Processes are therefore found by the launch variable, which each inherits, and by descent,
for a process that overwrote its environment.

`python -m rmetric.guard.supervisor.processes TOKEN` does the same on another node.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from rmetric._util.lazy import install_hint
from rmetric.guard.run_folder import LAUNCH_VARIABLE
from rmetric.guard.supervisor.launch_processes import Program

try:
    import psutil
except ModuleNotFoundError:  # `rmetric supervise --help` works without it
    psutil = None

PR_SET_CHILD_SUBREAPER = 36


def require_psutil() -> None:
    """Raise ModuleNotFoundError with the command that installs psutil, if it is missing."""
    if psutil is None:
        raise ModuleNotFoundError(
            f"a supervisor needs psutil, which is not installed: {install_hint('psutil')}",
            name="psutil",
        )


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Result of ending the processes of a launch, in numbers of processes."""

    found: int
    killed: int  # ignored SIGTERM
    left: int  # still alive
    unreachable: tuple[str, ...] = ()  # nodes on which it failed


def adopt_orphans() -> bool:
    """Make this process the parent of orphaned descendants (Linux); True on success."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def of_launches(token: str) -> list[psutil.Process]:
    """Living processes whose launch variable begins with `token`, except this one."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error, OSError):
            launch = process.environ().get(LAUNCH_VARIABLE, "")
            if launch.startswith(token) and is_alive(process):
                found.append(process)
    return found


def is_alive(process: psutil.Process) -> bool:
    """True if the process runs and is no zombie."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def end(
    token: str, *, grace: float, also: Iterable[int] = (), keep: Collection[int] = ()
) -> Ending:
    """End the processes of all launches of `token`: TERM, after `grace` seconds KILL.

    `token` is a prefix of the launch variable, of at least 8 characters. The processes
    `also` are ended with all their descendants, those in `keep` are not. Processes started
    meanwhile are found as well: the search is repeated until none is left.
    """
    if len(token) < 8:
        raise ValueError(f"the token {token!r} is too short to tell launches apart")
    found: set[psutil.Process] = set()
    killed: set[psutil.Process] = set()
    roots = []  # one pid, one process
    for pid in also:
        with contextlib.suppress(psutil.Error):
            roots.append(psutil.Process(pid))
    alive = _all_of(token, roots, keep)
    found.update(alive)
    _signal(alive, psutil.Process.terminate)
    _gone, alive = psutil.wait_procs(alive, timeout=grace)
    for wait in (1.0, 2.0, 5.0, 0.0):
        alive = [p for p in {*alive, *_all_of(token, roots, keep)} if is_alive(p)]
        found.update(alive)
        if not alive:
            break
        killed.update(alive)
        _signal(alive, psutil.Process.kill)
        psutil.wait_procs(alive, timeout=wait)
    return Ending(found=len(found), killed=len(killed), left=sum(map(is_alive, alive)))


def end_everywhere(token: str, program: Program, *, grace: float, **more: Any) -> Ending:
    """Run `end` here and, in parallel, on the nodes that have a prefix."""
    command = [sys.executable, "-m", __spec__.name, token, str(grace)]
    nodes = [node for node, prefix in program.prefixes.items() if prefix]

    def end_on(node: str) -> int:
        """Exit code of `end` on another node; -1 if the node cannot be reached in time."""
        there, nowhere = program.behind(node, command, {}), subprocess.DEVNULL
        try:
            return subprocess.run(
                there, stdin=nowhere, stdout=nowhere, stderr=nowhere, timeout=grace + 30.0
            ).returncode
        except (OSError, subprocess.TimeoutExpired):
            return -1

    with ThreadPoolExecutor(max(1, len(nodes))) as pool:
        remote = pool.map(end_on, nodes)
        here = end(token, grace=grace, **more)
        codes = dict(zip(nodes, remote, strict=True))
    return replace(
        here,
        left=here.left + sum(code == 1 for code in codes.values()),
        unreachable=tuple(node for node, code in codes.items() if code not in (0, 1)),
    )


def children() -> list[int]:
    """Pids of the children of this process."""
    return [child.pid for child in psutil.Process().children()]


def reap() -> None:
    """Reap adopted children that are dead; only while no other code waits for a child."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, OSError):
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def _all_of(
    token: str, roots: Iterable[psutil.Process], keep: Collection[int]
) -> list[psutil.Process]:
    found = set(of_launches(token))
    for root in roots:
        with contextlib.suppress(psutil.Error):
            found.update((root, *root.children(recursive=True)))
    return [process for process in found if process.pid not in keep and is_alive(process)]


def _signal(processes: Iterable[psutil.Process], send: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            send(process)


if __name__ == "__main__":
    done = end(sys.argv[1], grace=float(sys.argv[2]) if len(sys.argv) > 2 else 10.0)
    print(done)
    sys.exit(1 if done.left else 0)
