"""Run one job: fork, watch and end its processes; none outlives the call."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from studies.diagnosis_benchmark.injected import logs, trainer
from studies.diagnosis_benchmark.injected.faults import Fault, wrong_environment
from studies.diagnosis_benchmark.injected.launchers import LAUNCHERS, Writer, WrittenLine
from studies.diagnosis_benchmark.injected.plan import Plan
from studies.diagnosis_benchmark.injected.storage import write_shards
from studies.diagnosis_benchmark.injected.variants import variant_of

LOOK_SECONDS = 0.05
#: Between SIGTERM and SIGKILL.
TERM_SECONDS = 1.0
#: The faulty rank is left to itself so long after the others have ended.
ALONE_SECONDS = 1.0
#: A job that takes longer has gone wrong; the slowest healthy ones take a third of it.
MOST_SECONDS = 180.0
PR_SET_PDEATHSIG = 1
#: What the launcher does to a process, see `variants.Variant`.
OUTSIDE = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}


@dataclass(kw_only=True)
class RunRecord:
    """Record of one run.

    Attributes:
        exits: rank -> (exit code, negative for a signal; seconds since 1970 when it was seen).
        ended: ranks that the launcher ended. by: "itself", "launcher" or "limit".
        onset: what the faulty process told at the fault, and when; None before.
        own_seconds: (step, seconds) of the faulty rank's own part of its steps.
    """

    start: float = 0.0
    end: float = 0.0
    exits: dict[int, tuple[int, float]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    by: str = "itself"
    onset: dict[str, Any] | None = None
    own_seconds: list[tuple[int, float]] = field(default_factory=list)
    lines: list[WrittenLine] = field(default_factory=list)
    pids: dict[int, int] = field(default_factory=dict)


def die_with_parent() -> None:
    """The kernel ends this process when the one that forked it is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run(plan: Plan, folder: Path, scratch: Path) -> RunRecord:
    """Runs the job in this process's group; logs to `folder`, data and checkpoints in `scratch`.

    Raises TimeoutError after `MOST_SECONDS`.
    """
    data, output = scratch / "data", scratch / "checkpoints"
    data.mkdir()
    output.mkdir()
    write_shards(data, plan.settings.world_size, plan.seed)
    return _World(plan, folder, data, output).run()


class _World:
    def __init__(self, plan: Plan, folder: Path, data: Path, output: Path) -> None:
        self.plan, self.settings = plan, plan.settings
        self.writer = Writer(folder, plan.settings)
        self.record = RunRecord(start=time.time())
        self.paths = {"DATA_DIR": str(data), "OUTPUT_DIR": str(output)}
        self.selector = selectors.DefaultSelector()
        self.pids: dict[int, int] = {}
        self.launcher = LAUNCHERS[plan.settings.launcher](plan.settings, self.writer, self.pids)
        self.deadline: float | None = None
        self.terminated: float | None = None
        self.first_bad: float | None = None
        self.alone_since: float | None = None

    def run(self) -> RunRecord:
        told, self.tell = os.pipe()
        self.answer, _ = os.pipe()
        self.ports = _free_ports(2)
        for rank in range(self.settings.world_size):
            self._start(rank)
        os.close(self.tell)
        os.close(self.answer)
        self.selector.register(told, selectors.EVENT_READ, self._reader(self._heard))
        if self.plan.faulty and variant_of(self.plan.kind, self.plan.variant).environment:
            self._onset({"time": self.record.start, "stage": self.plan.stage, "step": None})
        while len(self.record.exits) < len(self.pids) or self.selector.get_map():
            self._look()
        self.launcher.over()
        self.writer.close()
        self.record.end, self.record.lines = time.time(), self.writer.lines
        self.record.pids = dict(self.pids)
        return self.record

    def _start(self, rank: int) -> None:
        pipes = {channel: os.pipe() for channel in ("stdout", "stderr")}
        pid = os.fork()
        if pid == 0:
            self._child(rank, {name: ends[1] for name, ends in pipes.items()})
        self.pids[rank] = pid
        for channel, (out, into) in pipes.items():
            os.close(into)
            take = functools.partial(self.writer.of_rank, rank, channel)
            self.selector.register(out, selectors.EVENT_READ, self._reader(take))

    def _child(self, rank: int, outputs: dict[str, int]) -> None:
        code = 1
        try:
            die_with_parent()
            # One pipe keeps the order of a rank's lines where both outputs go to one file.
            apart = self.settings.layout in ("attempt folders", "mpirun")
            os.dup2(outputs["stdout"], 1)
            os.dup2(outputs["stderr" if apart else "stdout"], 2)
            kept = {0, 1, 2, self.tell, self.answer} if rank == self.plan.rank else {0, 1, 2}
            for entry in list(Path("/proc/self/fd").iterdir()):
                if int(entry.name) not in kept:
                    with contextlib.suppress(OSError):
                        os.close(int(entry.name))
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            code = self._train(rank)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _train(self, rank: int) -> int:
        settings, node = self.settings, self.settings.node(rank)
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % settings.ranks_per_node),
            "WORLD_SIZE": str(settings.world_size),
            "MASTER_ADDR": settings.address(0),
            "MASTER_PORT": str(self.ports[0]),
            "UNUSED_PORT": str(self.ports[1]),
            "GLOO_SOCKET_IFNAME": "lo",
            "NODE_NAME": node,
            "NODE_ADDRESS": settings.address(rank),
            "TOKENIZER_VERSION": trainer.VERSION,
            **self.paths,
        }
        faulty = rank == self.plan.rank
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(wrong_environment(self.plan.variant, variables) if faulty else variables)
        offset = logs.clock_offset(settings, node, self.plan.seed)
        log = logs.set_up(settings, str(rank), offset)
        hooks = Fault(self.plan, faulty=faulty, tell=self.tell, answer=self.answer)
        one = trainer.Trainer(settings, self.plan.noise, log, hooks)
        try:
            one.main()
        except SystemExit as end:
            return int(end.code or 0)
        except Exception as error:
            # The frame of this function is no part of a trainer's traceback.
            trace = error.__traceback__
            sys.excepthook(type(error), error, trace.tb_next if trace else None)
            return 1
        return 0

    def _reader(self, take: Callable[[str], None]) -> Callable[[int], None]:
        """Hands whole lines to `take`; what stands before the end of a pipe is a line too."""
        rest = b""

        def read(descriptor: int) -> None:
            nonlocal rest
            chunk = os.read(descriptor, 1 << 16)
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop() if chunk else b""
            for line in lines:
                if chunk or line:
                    take(line.decode("utf-8", "replace"))
            if not chunk:
                self.selector.unregister(descriptor)
                os.close(descriptor)

        return read

    def _heard(self, text: str) -> None:
        message = json.loads(text)
        if message["event"] == "step":
            self.record.own_seconds.append((message["step"], message["seconds"]))
            return
        self._onset(message)
        rank = self.plan.rank
        assert rank is not None
        if message["outside"] == "kill":
            message["time"] = time.time()
        if message["outside"]:
            os.kill(self.pids[rank], OUTSIDE[message["outside"]])

    def _onset(self, message: dict[str, Any]) -> None:
        self.record.onset = message
        if self.plan.limit is not None:
            self.deadline = time.time() + self.plan.limit

    def _look(self) -> None:
        if self.selector.get_map():
            for key, _ in self.selector.select(LOOK_SECONDS):
                key.data(key.fd)
        else:
            time.sleep(LOOK_SECONDS)
        self._reap()
        self._end_those_left(time.time())

    def _reap(self) -> None:
        seen: dict[int, int] = {}
        ranks = {pid: rank for rank, pid in self.pids.items()}
        while len(self.record.exits) < len(self.pids):
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            seen[ranks[pid]] = os.waitstatus_to_exitcode(status)
            self.record.exits[ranks[pid]] = (seen[ranks[pid]], time.time())
        if seen:
            self.launcher.exited(seen)
        if any(seen.values()) and self.first_bad is None:
            self.first_bad = time.time()

    def _end_those_left(self, now: float) -> None:
        left = [rank for rank in self.pids if rank not in self.record.exits]
        if now - self.record.start > MOST_SECONDS:
            raise TimeoutError(f"{len(left)} ranks are left after {MOST_SECONDS:.0f} s")
        if not left:
            return
        if self.terminated is not None:
            if now > self.terminated + TERM_SECONDS:
                self._signal(left, signal.SIGKILL)
            return
        by_limit = self.deadline is not None and now > self.deadline
        if left == [self.plan.rank] and self.alone_since is None:
            self.alone_since = now
        alone = self.alone_since is not None and now > self.alone_since + ALONE_SECONDS
        grace = self.settings.grace
        late = self.first_bad is not None and grace is not None and now > self.first_bad + grace
        if by_limit or late or alone:
            self.record.by = "limit" if by_limit else "launcher"
            self.launcher.ending(left, by_limit=by_limit)
            self.record.ended, self.terminated = set(left), now
            self._signal(left, signal.SIGTERM)

    def _signal(self, ranks: list[int], number: signal.Signals) -> None:
        for rank in ranks:
            os.kill(self.pids[rank], number)


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


def prepare() -> None:
    """Once, before jobs are forked: one thread, so that forks are safe."""
    torch.set_num_threads(1)
    # The first optimizer loads torch._dynamo, which would cost each rank a second.
    torch.optim.AdamW(trainer.Model(8).parameters()).step()
