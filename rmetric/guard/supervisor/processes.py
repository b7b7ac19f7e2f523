"""Commands and processes of a launch, the spare launcher of the next, and how all are ended.

Arguments are lists and never pass through a local shell. For the remote shell of a prefix
such as `ssh NODE` they are quoted.

A killed agent leaves its workers behind, and workers may leave the process group.
Processes are therefore found by the launch variable, which each inherits, and by descent,
for a process that overwrote its environment. This needs psutil.

`python -m rmetric.guard.supervisor.processes TOKEN` ends processes on another node.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rmetric._util.durable import no_follow
from rmetric._util.lazy import install_hint
from rmetric.guard.layout import Layout
from rmetric.guard.run_folder import LAUNCH_VARIABLE, RESUME_VARIABLE, Heartbeat
from rmetric.guard.supervisor.allocation import Allocation, Pool
from rmetric.guard.trust import make_private

try:
    import psutil
except ModuleNotFoundError:  # `rmetric supervise --help` works without it
    psutil = None

PR_SET_CHILD_SUBREAPER = 36
TORCHRUNS = ("torchrun", "ft_launcher")
TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
#: Options by which a user configures the rendezvous.
_RENDEZVOUS = (
    "standalone", "master-addr", "master-port", "rdzv-backend", "rdzv-endpoint", "rdzv-id",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Program:
    """Program to run.

    Attributes:
        arguments: program and arguments, with placeholders such as {data}.
        prefixes: node -> prefix of its command, such as ("ssh", "n1"); empty for this machine.
        visible: set CUDA_VISIBLE_DEVICES.
        master: address of the first node for the others; empty for its name.
        resume: checkpoint to resume from, one of `RESUMES`; None leaves the environment as it is.
    """

    arguments: tuple[str, ...]
    prefixes: Mapping[str, tuple[str, ...]]
    visible: bool = False
    master: str = ""
    resume: str | None = None

    @property
    def is_torchrun(self) -> bool:
        return launcher_end(self.arguments) > 0

    def commands(self, allocation: Allocation, port: int) -> dict[str, list[str]]:
        filled = fill(self.arguments, allocation.layout)
        if not self.is_torchrun:
            if len(allocation.gpus) > 1:
                raise ValueError("several nodes need torchrun or ft_launcher")
            return dict.fromkeys(allocation.gpus, filled)
        filled = with_option(filled, "nproc-per-node", str(allocation.per_node))
        filled = with_option(filled, "nnodes", str(len(allocation.gpus)))
        if len(self.prefixes) <= 1:
            chosen = any(_where(filled, option) is not None for option in _RENDEZVOUS)
            end = launcher_end(filled)
            alone = [] if chosen else ["--standalone"]
            return {node: [*filled[:end], *alone, *filled[end:]] for node in allocation.gpus}
        filled = with_option(filled, "master-addr", self.master or next(iter(allocation.gpus)))
        filled = with_option(filled, "master-port", str(port))
        return {
            node: with_option(filled, "node-rank", str(rank))
            for rank, node in enumerate(allocation.gpus)
        }

    def variables(self, node: str, allocation: Allocation) -> dict[str, str]:
        """Environment variables of a node's command that follow from the program."""
        found = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        if self.resume is not None:
            found[RESUME_VARIABLE] = self.resume
        if self.visible:
            # Verdicts use the indices of NVML, which follow the PCI bus order.
            found["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, allocation.gpus[node]))
        return found

    def unit(self, pool: Pool) -> str:
        """Name of one device of the pool: `process` if no GPUs are known, else `GPU`."""
        return "GPU" if self.visible or any(pool) else "process"

    def behind(self, node: str, command: list[str], environment: Mapping[str, str]) -> list[str]:
        """Command for a node, through its prefix if it has one."""
        prefix = self.prefixes.get(node, ())
        if not prefix:
            return command
        variables = [f"{name}={value}" for name, value in environment.items()]
        there = ["env", "-C", str(Path.cwd()), *variables, *command]
        return [*prefix, *(map(shlex.quote, there) if Path(prefix[0]).name == "ssh" else there)]


def fill(arguments: Sequence[str], layout: Layout) -> list[str]:
    """Replace the placeholders in the arguments with the numbers of the layout.

    >>> fill(["train.py", "--tp={tensor}", "{gpus}", '{"a": 1}'], Layout(tensor=2, data=3))
    ['train.py', '--tp=2', '6', '{"a": 1}']
    """
    numbers = {**layout.as_json(), "gpus": layout.num_gpus, "batch": layout.global_batch}
    pattern = re.compile("{(" + "|".join(numbers) + ")}")
    return [pattern.sub(lambda m: str(numbers[m[1]]), argument) for argument in arguments]


def with_option(arguments: list[str], option: str, value: str) -> list[str]:
    """Arguments of torchrun with one of its options set to `value`.

    >>> with_option(["torchrun", "--nproc_per_node=4", "a.py"], "nproc-per-node", "3")
    ['torchrun', '--nproc-per-node=3', 'a.py']
    """
    setting = f"--{option}={value}"
    where = _where(arguments, option)
    if where is None:
        end = launcher_end(arguments)
        return [*arguments[:end], setting, *arguments[end:]]
    after = where + (1 if "=" in arguments[where] else 2)
    return [*arguments[:where], setting, *arguments[after:]]


def option_of(arguments: Sequence[str], option: str) -> str | None:
    """Value of one of torchrun's options; None if it is not given."""
    where = _where(arguments, option)
    if where is None:
        return None
    _, equals, value = arguments[where].partition("=")
    return value if equals else arguments[where + 1] if where + 1 < len(arguments) else None


def _where(arguments: Sequence[str], option: str) -> int | None:
    """Index of one of torchrun's options; arguments of the script or module are ignored."""
    first = launcher_end(arguments)
    for n in range(first, len(arguments)):
        module = n > first and arguments[n - 1] in ("-m", "--module")
        if (module or arguments[n].endswith(".py")) and not arguments[n].startswith("-"):
            return None
        name = arguments[n].partition("=")[0].lstrip("-").replace("_", "-")
        if arguments[n].startswith("--") and name == option:
            return n
    return None


def launcher_end(arguments: Sequence[str]) -> int:
    """Index after the words that start torchrun or ft_launcher; 0 for another program."""
    if not arguments:
        return 0
    if Path(arguments[0]).name in TORCHRUNS:
        return 1
    n = 1
    while n < len(arguments) - 1 and arguments[n].startswith("-"):
        if arguments[n] == "-m":
            return n + 2 if arguments[n + 1] in TORCHRUN_MODULES else 0
        n += 2 if arguments[n] in ("-X", "-W") else 1
    return n + 1 if n < len(arguments) and Path(arguments[n]).name in TORCHRUNS else 0


SCRIPT = Path(__file__).with_name("warm_launcher.py")
THREADS = "OMP_NUM_THREADS"


class WarmSpare:
    """Spare launcher of one run folder, at most one at a time; its output until it is used: `log`.

    `preload`: modules to import, besides torch; with any, the ranks are forked from it.
    """

    def __init__(self, preload: Sequence[str], log: Path) -> None:
        self.preload, self.log = tuple(preload), log
        self.process: subprocess.Popen[bytes] | None = None
        self._launch, self._several = "", False

    @property
    def pids(self) -> list[int]:
        return [] if self.process is None else [self.process.pid]

    def start(self, arguments: Sequence[str], launch: str, ranks: int) -> None:
        """Start the spare for the launch of this name with so many ranks, unless there is one.

        `arguments`: command of the training. Nothing is started unless it is torchrun.
        """
        interpreter = [] if self.process else interpreter_of(arguments)
        if not interpreter:
            return
        variables = {LAUNCH_VARIABLE: launch}
        self._several = ranks > 1
        # As torchrun does for several ranks; it is read at the import.
        if self._several and THREADS not in os.environ:
            variables[THREADS] = "1"
        with contextlib.suppress(OSError):
            make_private(self.log.parent)
            with open(self.log, "wb", opener=no_follow) as log:
                self.process = subprocess.Popen(
                    [*interpreter, "-u", str(SCRIPT), ",".join(self.preload)],
                    env={**os.environ, **variables}, stdin=subprocess.PIPE, stdout=log,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            self._launch = launch

    def take(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        allocation: Allocation,
        log: Path,
    ) -> subprocess.Popen[bytes] | None:
        """The spare as the launcher of a plain command; None if there is none that fits.

        `variables` are those of the launch, `log` the file for its output.
        """
        process, self.process = self.process, None
        if process is None or process.stdin is None:
            return None
        words = {
            "command": [*command], "arguments": [*command[launcher_end(command) :]],
            "environment": {**variables}, "ranks": allocation.per_node, "log": str(log.absolute()),
        }  # fmt: skip
        fits = THREADS in os.environ or (allocation.per_node > 1) == self._several
        if fits and process.poll() is None and variables.get(LAUNCH_VARIABLE) == self._launch:
            with contextlib.suppress(OSError):  # it has just ended
                process.stdin.write(json.dumps(words).encode() + b"\n")
                process.stdin.close()
                return process
        _kill(process)
        return None

    def close(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            _kill(process)

    def problem(self) -> str:
        """Reason why the spare ended before it was used; empty if it did not."""
        if self.process is None or self.process.poll() is None:
            return ""
        _kill(self.process)
        code, self.process = self.process.returncode, None
        lines = []
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"the spare launcher ended with {code}: {lines[-1][:300] if lines else 'no output'}"


def interpreter_of(arguments: Sequence[str]) -> list[str]:
    """Python that runs torchrun, with its options; empty if it is not known to be torchrun."""
    end = launcher_end(arguments)
    if not end or Path(arguments[end - 1]).name not in ("torchrun", "torch.distributed.run"):
        return []
    if end > 1:
        start = end - 2 if arguments[end - 2] == "-m" else end - 1
        return list(arguments[:start]) if "python" in Path(arguments[0]).name else []
    words = []
    with contextlib.suppress(OSError), open(shutil.which(arguments[0]) or "", "rb") as file:
        first = file.readline(4096).decode("utf-8", "replace").strip()
        words = first[2:].split() if first.startswith("#!") else []
    if words and Path(words[0]).name == "env":
        words = words[1:]
    return words if words and "python" in Path(words[0]).name else []


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        process.kill()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5.0)


def require_psutil() -> None:
    """Raise ModuleNotFoundError with the command that installs psutil, if it is missing."""
    if psutil is None:
        raise ModuleNotFoundError(
            f"a supervisor needs psutil, which is not installed: {install_hint('psutil')}",
            name="psutil",
        )


#: Statuses of psutil, by which a rank is stopped, and its process no longer there.
SUSPENDED, GONE = ("stopped", "tracing-stop"), ("gone", "zombie", "dead")


def states_of(beats: Mapping[int, Heartbeat]) -> dict[int, str]:
    """Status, as psutil names it, of each rank of this node; "gone" if it is of another launch."""
    found = {}
    for rank, beat in beats.items():
        if beat.node != os.uname().nodename:
            continue
        found[rank] = "gone"
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(beat.pid)
            if not beat.launch or process.environ().get(LAUNCH_VARIABLE) == beat.launch:
                found[rank] = process.status()
    return found


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Result of ending the processes of a launch, in numbers of processes."""

    found: int
    killed: int  # ignored SIGTERM
    left: int  # still alive
    unreachable: tuple[str, ...] = ()  # nodes on which it failed


def adopt_orphans() -> bool:
    """Make this process the parent of orphaned descendants (Linux); True on success."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    return False


def of_launches(token: str) -> list[psutil.Process]:
    """Living processes whose launch variable begins with `token`, except this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            launch = process.environ().get(LAUNCH_VARIABLE, "")
            if launch.startswith(token) and process.pid != os.getpid() and is_alive(process):
                found.append(process)
    return found


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def end(
    token: str, *, grace: float, also: Iterable[int] = (), keep: Collection[int] = ()
) -> Ending:
    """End the processes of all launches of `token`: TERM, after `grace` seconds KILL.

    `token` is a prefix of the launch variable, of at least 8 characters. The processes
    `also` are ended with all their descendants, those in `keep` are not. The search is repeated
    until none is left.
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
        there, nothing = program.behind(node, command, {}), subprocess.DEVNULL
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            return subprocess.run(
                there, stdin=nothing, stdout=nothing, stderr=nothing, timeout=grace + 30.0
            ).returncode
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
