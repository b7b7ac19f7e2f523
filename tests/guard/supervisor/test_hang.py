"""The rank that the others of a hang wait for, by steps and by the states of its processes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from rmetric.guard.layout import Layout
from rmetric.guard.run_folder import LAUNCH_VARIABLE, Heartbeat
from rmetric.guard.supervisor.allocation import Allocation
from rmetric.guard.supervisor.launch_failure import (
    ProcessState,
    explain_hang,
    odd_one_out,
    read_states,
)

THREE = Allocation(gpus={"": (0, 1, 2)}, layout=Layout(data=3))
WAITS = {"state": "S", "waits_in": "futex_do_wait"}
SLEEPS = {"state": "S", "waits_in": "hrtimer_nanosleep"}


def beat(rank, pid, launch="x", node=None):
    return Heartbeat(rank=rank, pid=pid, node=node or os.uname().nodename, launch=launch, step=9,
                     phase="training", time=100.0, every=1.0)  # fmt: skip


def states(*of):
    return {rank: ProcessState(pid=100 + rank, **one) for rank, one in enumerate(of)}


@pytest.mark.parametrize(
    ("of", "named"),
    [
        ((WAITS, WAITS, SLEEPS), "rank 2 (process 102) is sleeping in hrtimer_nanosleep, the others"
         " are sleeping in futex_do_wait"),
        ((WAITS, {"state": "R"}, WAITS), "rank 1 (process 101) is running, the others are"),
        (({"state": "D", "waits_in": "nfs_wait"}, WAITS, WAITS),
         "rank 0 (process 100) is in uninterruptible sleep in nfs_wait, "),
        ((WAITS, {"state": "T"}), "rank 1 (process 101) is stopped by a signal (state T)"),
        ((WAITS, SLEEPS, {"state": ""}), "rank 2 (process 102) is gone"),
        ((WAITS, SLEEPS), None),  # either may be the one
        ((WAITS, SLEEPS, {"state": "R"}), None),
        (({"state": "T"}, {"state": "T"}, WAITS), None),  # somebody stopped the job
        ((WAITS, WAITS, WAITS), None),
        (({"state": "T"},), None),
        ((), None),
    ],
)  # fmt: skip
def test_only_one_rank_that_differs_from_all_others_is_named(of, named):
    odd = odd_one_out(states(*of))
    assert (odd is None) == (named is None)
    if named is not None:
        assert odd.words.startswith(named)


def test_the_message_names_the_rank_with_the_evidence_and_no_gpu():
    beats = {rank: beat(rank, 100 + rank) for rank in range(3)}
    of = states(WAITS, WAITS, {"state": "T"})
    failure = explain_hang(beats, 61.0, 60.0, THREE, of)
    assert failure.words == (
        "no heartbeat for 61 s while training, the limit is 60; all ranks are at step 9; "
        "rank 2 (process 102) is stopped by a signal (state T)"
    )
    assert (failure.rank, failure.gpu) == (2, None)
    without = explain_hang(beats, 61.0, 60.0, THREE, states(WAITS, WAITS, WAITS))
    assert (without.rank, without.gpu) == (None, None)


def test_the_states_of_real_processes():
    launch = f"hang-{os.getpid()}"
    # Two wait for input, as for another rank; the third sleeps in its own code or is stopped.
    codes = ["import sys; sys.stdin.read()"] * 2 + ["import time; time.sleep(600)"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            env={**os.environ, LAUNCH_VARIABLE: launch},
        )
        for code in codes
    ]
    try:
        beats = {rank: beat(rank, one.pid, launch) for rank, one in enumerate(processes)}

        os.kill(processes[2].pid, signal.SIGSTOP)
        while (odd := odd_one_out(read_states(beats))) is None or odd.rank != 2:
            time.sleep(0.01)  # until they wait
        assert "is stopped by a signal (state T)" in odd.words
        elsewhere = {
            rank: beat(rank, one.pid, launch, "other") for rank, one in enumerate(processes)
        }
        assert read_states(elsewhere) == {}
        reused = {0: beat(0, processes[0].pid, "of-another-launch")}
        assert read_states(reused)[0].state == ""
    finally:
        for one in processes:
            one.kill()
            one.communicate()
