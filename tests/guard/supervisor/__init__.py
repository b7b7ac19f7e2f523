"""What the tests of a supervisor in a process of its own share."""

import time

from rmetric.guard.run_folder import RunFolder
from rmetric.guard.supervisor.journal import read_journal


def until(condition, process=None, seconds=120.0):
    """Wait for a condition while the process runs."""
    end = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def lines(folder, event):
    """Lines of the journal about an event."""
    return [line for line in read_journal(RunFolder(folder).journal) if line["event"] == event]
