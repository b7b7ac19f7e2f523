"""The cause of an exit or a hang: the rank, its GPU, and whether it lasts."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.guard.layout import Layout
from rmetric.guard.run_folder import LAUNCH_VARIABLE
from rmetric.guard.supervisor.allocation import Allocation
from rmetric.guard.supervisor.launch_failure import (
    explain_exit,
    explain_hang,
    is_lasting,
    with_disk_full_first,
)
from rmetric.guard.supervisor.processes import states_of
from tests.guard.supervisor import beat

#: What torchrun 2.13 printed when rank 2 of 4 was killed, and when rank 1 raised.
KILLED = """
[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:5004
============================================================
studies.tiny_llama FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_21:28:03
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 22517) 
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_21:27:41
  host      : localhost
  rank      : 2 (local_rank: 2)
  exitcode  : -9 (pid: 22519)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 22519
============================================================
"""  # noqa: W291
RAISED = KILLED.replace("rank      : 2 (local_rank: 2)", "rank      : 1 (local_rank: 1)").replace(
    "exitcode  : -9 (pid: 22519)  (SIGKILL)", "exitcode  : 1 (pid: 22519) "
)


def failure_of(log, code=1, error_file=None, **more):
    four = Allocation(gpus={"": (0, 1, 5, 7)}, layout=Layout(data=4))
    return explain_exit(
        code, node="", allocation=four, log=log, error_file=error_file,
        beats={2: beat(2, 16)}, **more,
    )  # fmt: skip


LOCAL = "[ERROR] [ft_launcher4389@vm] failed (exitcode: -9) local_rank: 1 (pid: 4400) of binary"
#: torchrun's own report after the usage of a training that was given a wrong option.
USAGE = """usage: train.py [-h] [--steps STEPS]
train.py: error: unrecognized arguments: --nope
E1121 22:02:26.623000 14997 torch/x/api.py:1002] failed (exitcode: 2) local_rank: 0 (pid: 15002)
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : 2 (pid: 15002)
"""
ENDED_BY_AGENT = KILLED.replace(
    "exitcode  : -9 (pid: 22519)  (SIGKILL)", "exitcode  : -15 (pid: 22519)  (SIGTERM)"
).replace("exitcode  : 1 (pid: 22517) ", "exitcode  : -9 (pid: 22517)  (SIGKILL)")


@pytest.mark.parametrize(
    ("log", "code", "more", "words"),
    [
        (KILLED, 1, {}, "rank 2 was killed by SIGKILL, last seen at step 16"),
        ("[rank1]: Traceback\n[rank1]: ValueError: no beans\n" + RAISED, 1, {},
         "rank 1 failed with exit code 1: ValueError: no beans"),
        (ENDED_BY_AGENT, 1, {}, "rank 0 was killed by SIGKILL"),
        (LOCAL, 1, {}, "rank 1 was killed by SIGKILL"),
        (USAGE, 2, {},
         "rank 0 failed with exit code 2: train.py: error: unrecognized arguments: --nope"),
        ("", -9, {}, "the launcher was killed by SIGKILL"),
        ("", -9, {"launcher": False}, "the program was killed by SIGKILL"),
        ("loading\nno space on the moon\n\n", 3, {},
         "the training failed with exit code 3: no space on the moon"),
    ],
)  # fmt: skip
def test_the_cause_of_an_exit(log, code, more, words):
    failure = failure_of(log, code, **more)
    assert (failure.words, failure.gpu) == (words, None)


def test_the_error_file_goes_before_the_log(tmp_path):
    path = tmp_path / "e.json"
    path.write_text(json.dumps({"message": {"message": "KeyError: 'beans'", "extraInfo": {}}}))
    assert failure_of(RAISED, error_file=path).words.endswith("exit code 1: KeyError: 'beans'")
    path.write_text("{cut")
    assert "Connection closed" in failure_of(RAISED, error_file=path).words


def test_a_local_rank_is_that_of_its_node():
    two = Allocation(gpus={"a": (0, 1), "b": (4, 5)}, layout=Layout(data=4))
    failure = explain_exit(1, node="b", allocation=two, log=LOCAL, error_file=None, beats={})
    assert (failure.rank, failure.node, failure.code) == (3, "b", -9)


@pytest.mark.parametrize(
    ("words", "blamed"),
    [
        ("KeyError: 'beans'", False),
        ("rmetric.monitor.protocol.ArgumentError: the loss", False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", False),
        ("torch.AcceleratorError: CUDA error: device-side assert triggered", False),
        ("torch.distributed.DistBackendError: NCCL error in: a.cpp:3, unhandled cuda error", False),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `c()`", False),
        ("AssertionError: Torch not compiled with CUDA enabled", False),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", True),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `c()`", True),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", True),
        ("RuntimeError: HIP error: unspecified launch failure", True),
    ],
)
def test_only_an_exception_that_names_the_device_speaks_against_it(words, blamed):
    failure = failure_of(f"[rank1]: {words}\n" + RAISED)
    assert words in failure.words
    assert (failure.rank, failure.gpu) == (1, ("", 1) if blamed else None)


@pytest.mark.parametrize(
    ("code", "blamed"), [(-11, True), (-7, True), (-6, True), (-4, True), (-8, True), (-9, False),
                         (-15, False), (-2, False)]
)  # fmt: skip
def test_only_a_signal_of_its_own_speaks_against_a_ranks_device(code, blamed):
    log = RAISED.replace("exitcode  : 1 (pid: 22519)", f"exitcode  : {code} (pid: 22519)")
    log = log.split("Failures:")[0] + log[log.index("Root Cause") :]
    assert (failure_of(log).code, failure_of(log).gpu) == (code, ("", 1) if blamed else None)
    lost = "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)\n"
    assert failure_of(lost + log).gpu is None


@given(st.text(), st.integers(-64, 255).filter(bool))
def test_no_log_makes_the_diagnosis_fall_over(log, code):
    assert failure_of(log, code).words


@pytest.mark.parametrize(
    ("steps", "seconds", "blamed"),
    [((9, 7, 9), 1.0, 1), ((9, 9), 1.0, None), ((9, 8), 0.06, None), ((9, 8), 0.99, None),
     ((9, 8), 30.0, 1)],
)  # fmt: skip
def test_the_rank_behind_is_blamed_unless_the_pace_of_the_heartbeats_explains_it(
    steps, seconds, blamed
):
    allocation = Allocation(gpus={"": (0, 1, 2)}, layout=Layout(data=3))
    times = [100.0 + seconds * (step == 9) for step in steps]
    beats = {rank: beat(rank, step, time=times[rank], every=1.0) for rank, step in enumerate(steps)}
    failure = explain_hang(beats, 61.0, 60.0, allocation)
    assert (failure.rank, failure.gpu) == (blamed, None if blamed is None else ("", blamed))
    assert ("all ranks are at step 9" in failure.words) == (blamed is None)


COMMAND = ("torchrun", "train.py", "--data=/data/a.bin", "--config", "c.yaml")


@pytest.mark.parametrize(
    ("raised", "lasting"),
    [
        ("SyntaxError: invalid syntax (train.py, line 3)", True),
        ("ImportError: cannot import name 'x' from 'connection'", True),
        ("NameError: name 'x' is not defined", True),
        ("KeyError: 'beans'", True),
        ("rmetric.guard.checkpoint_dir.UnfitCheckpoint: step-3 is of another model", True),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/a.bin'", True),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'c.yaml'", True),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/shard-7.bin'", False),
        ("OSError: [Errno 5] Input/output error: '/data/a.bin'", False),
        ("PermissionError: [Errno 13] Permission denied: '/data/a.bin'", False),
        ("ConnectionRefusedError: [Errno 111] Connection refused", False),
        ("ValueError: the request timed out", False),
        ("ValueError: overtime output", True),
        ("torch.distributed.DistNetworkError: The server socket has failed to listen", False),
        ("requests.exceptions.ReadTimeout: HTTPSConnectionPool: Read timed out.", False),
        ("ValueError: the storage service is temporarily unavailable", False),
        ("json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", False),
        ("RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable", False),
    ],
)
def test_the_class_follows_from_the_type_of_the_exception(raised, lasting):
    assert is_lasting(raised, 1, COMMAND) is lasting


@pytest.mark.parametrize(("code", "lasting"), [(2, True), (126, True), (127, True), (1, False),
                                               (None, False), (-9, False), (3, False)])  # fmt: skip
def test_without_an_exception_the_exit_code_decides(code, lasting):
    assert is_lasting("", code) is lasting


@given(st.text(), st.none() | st.integers(-64, 255), st.lists(st.text()))
def test_any_words_have_a_class(raised, code, arguments):
    assert is_lasting(raised, code, arguments) in (True, False)
    assert raised in with_disk_full_first(raised)


def here(rank, pid, launch="x", **more):
    at = {"node": os.uname().nodename} | more
    return beat(rank, 9, pid=pid, launch=launch, every=1.0, **at)


@pytest.mark.parametrize(
    ("states", "named"),
    [
        (("sleeping", "running", "stopped"), 2),
        (("sleeping", "gone"), 1),
        (("zombie", "disk-sleep"), 0),
        (("stopped", "stopped", "sleeping"), None),  # somebody stopped the job
        (("sleeping", "running", "sleeping"), None),
        (("stopped",), None),
        ((), None),
    ],
)
def test_a_rank_that_alone_is_stopped_or_gone_is_named_and_no_gpu(states, named):
    three = Allocation(gpus={"": (0, 1, 2)}, layout=Layout(data=3))
    beats = {rank: here(rank, 100 + rank) for rank in range(len(states) or 3)}
    failure = explain_hang(beats, 61.0, 60.0, three, dict(enumerate(states)))
    detail = "" if named is None else f"; rank {named} (process {100 + named}) is {states[named]}"
    assert failure.words == (
        f"no heartbeat for 61 s while training, the limit is 60; all ranks are at step 9{detail}"
    )
    assert (failure.rank, failure.gpu) == (named, None)


def test_the_states_of_real_processes(start):
    launch = f"hang-{os.getpid()}"
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    given = {"stdin": subprocess.PIPE, "env": {**os.environ, LAUNCH_VARIABLE: launch}}
    processes = [start(command, **given) for _ in range(2)]
    beats = {rank: here(rank, process.pid, launch) for rank, process in enumerate(processes)}
    os.kill(processes[1].pid, signal.SIGSTOP)
    while states_of(beats) != {0: "sleeping", 1: "stopped"}:
        time.sleep(0.01)  # until it waits
    assert states_of({0: here(0, processes[0].pid, launch, node="other")}) == {}
    assert states_of({0: here(0, processes[0].pid, "of-another-launch")}) == {0: "gone"}
    for process in processes:
        process.kill()
        process.communicate()
    assert states_of(beats) == {0: "gone", 1: "gone"}
