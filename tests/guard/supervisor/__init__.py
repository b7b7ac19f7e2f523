"""What the tests of a supervisor in a process of its own share."""

import argparse
import sys
import time
from pathlib import Path

from rmetric.cli import supervise
from rmetric.guard.layout import Layout
from rmetric.guard.run_folder import Heartbeat, RunFolder
from rmetric.guard.supervisor import Settings, processes
from rmetric.guard.supervisor.allocation import Allocation
from rmetric.guard.supervisor.attempt import Attempt
from rmetric.guard.supervisor.core import StartLaunch
from rmetric.guard.supervisor.journal import read_journal
from rmetric.guard.supervisor.processes import Program
from rmetric.guard.supervisor.summary import summarise

SMALL = str(Path(__file__).with_name("small_workers.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ONE = Allocation(gpus={"": (0,)}, layout=Layout(data=1))
TWO = Allocation(gpus={"": (0, 1)}, layout=Layout(data=2))


def beat(rank, step, phase="training", time=100.0, **more):
    given = {"pid": 1, "node": "n", "launch": "x"} | more
    return Heartbeat(rank=rank, step=step, phase=phase, time=time, **given)


def program(*arguments, nodes=("",), **more):
    return Program(arguments=arguments, prefixes=dict.fromkeys(nodes, ()), **more)


def options_of(*arguments):
    """Options of `rmetric supervise`."""
    parser = argparse.ArgumentParser()
    supervise.add_arguments(parser)
    return parser.parse_args(list(map(str, arguments)))


def supervise_command(folder, *arguments):
    """`rmetric supervise` on a folder, where no fault of small_workers.py is to happen."""
    folder.mkdir(exist_ok=True)
    (folder / "faults.json").write_text("[]")
    return [sys.executable, "-m", "rmetric", "supervise", str(folder), *arguments]


def launched(folder, *arguments, token="t" * 16, report=lambda *_, **__: None, **settings):
    """A launch of a program on one GPU; `report` gets what it writes and its exit."""
    return Attempt(
        StartLaunch(1, ONE), token, program(*arguments), folder, Settings(**settings),
        write=report, on_exit=report, now=0.0,
    )  # fmt: skip


class SupervisedRun:
    """A supervised run, read from its folder; the supervisor's exit code, or its process."""

    def __init__(self, folder, code=None, process=None):
        self.folder, self.code, self.process = RunFolder(folder), code, process

    def until(self, condition):
        """Wait for a condition while the supervisor runs."""
        end = time.monotonic() + 240.0
        while not condition():
            assert self.process.poll() is None, self.process.stderr and self.process.stderr.read()
            assert time.monotonic() < end, "it never happened"
            time.sleep(0.005)

    def end(self, code=0, seconds=400):
        _, errors = self.process.communicate(timeout=seconds)
        assert self.process.returncode == code, errors
        assert self.nobody_is_left()
        return self

    @property
    def lines(self):
        return read_journal(self.folder.journal)

    def of(self, event):
        """Lines of the journal about an event."""
        return [line for line in self.lines if line["event"] == event]

    @property
    def summary(self):
        return summarise(self.lines)

    @property
    def failures(self):
        return [line["words"] for line in self.of("failure")]

    def log(self, launch):
        return (self.folder.logs / f"launch-{launch}.log").read_text()

    def nobody_is_left(self):
        return not processes.of_launches(self.of("supervisor")[0]["token"])
