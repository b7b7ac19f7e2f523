"""What the tests of a supervisor in a process of its own share."""

import argparse
import time

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


def launched(folder, *arguments, token="t" * 16, told=lambda *_, **__: None, **settings):
    """A launch of a program on one GPU; what it writes and its exit are told."""
    return Attempt(
        StartLaunch(1, ONE), token, program(*arguments), folder, Settings(**settings),
        write=told, on_exit=told, now=0.0,
    )  # fmt: skip


class Notes(list):
    """What an attempt writes to the journal: events and their fields."""

    def __call__(self, event, *_, **fields):
        self.append((event, fields))


def until(condition, process=None, seconds=120.0, every=0.02):
    """Wait for a condition while the process runs."""
    end = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < end, "it never happened"
        time.sleep(every)


class Told:
    """What the folder of a supervised run tells, and the exit code of the supervisor."""

    def __init__(self, folder, code=None):
        self.folder, self.code = RunFolder(folder), code

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
