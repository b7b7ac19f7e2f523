"""Joining of lines into entries."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis.job import MAX_TEXT
from rmetric.diagnosis.reading.joining import MAX_LINES, NEXT, EntryText, Kind, State, kind_of


def entries(text: str) -> list[str]:
    """The entries of a log, as the pass over it makes them."""
    found: list[list[str]] = []
    state = State.PLAIN
    for line in textwrap.dedent(text).strip("\n").split("\n"):
        kind = kind_of(line.encode())
        joined, state = NEXT[state][kind]
        if kind is Kind.BLANK:
            continue
        if joined and found:
            found[-1].append(line)
        else:
            found.append([line])
    return ["\n".join(lines) for lines in found]


#: Each is one entry, and the lines around it are not part of it.
ONE = {
    "traceback": """
        Traceback (most recent call last):
          File "train.py", line 3, in <module>
            main()
            ~~~~^^
          File "train.py", line 1, in main
            [Previous line repeated 4 more times]
        ValueError: no
        """,
    "traceback whose beginning was cut": """
          File "train.py", line 3, in main
            main()
        ValueError: no
        """,
    "traceback without its indentation": """
        Traceback (most recent call last):
        File "train.py", line 3, in <module>
        main()
        File "train.py", line 1, in main
        [Previous line repeated 4 more times]
        ValueError: no
        """,
    "raised while handling": """
        Traceback (most recent call last):
          File "train.py", line 3, in <module>
        KeyError: 'a'

        During handling of the above exception, another exception occurred:

        Traceback (most recent call last):
          File "train.py", line 5, in <module>
        torch.cuda.OutOfMemoryError: CUDA out of memory
        """,
    "message of several lines": """
        Traceback (most recent call last):
          File "train.py", line 3, in <module>
        RuntimeError: Error(s) in loading state_dict for Model:
        \tsize mismatch for a: [2] against [3]
        \tMissing key(s): b
        """,
    "device-side assert": """
        Traceback (most recent call last):
          File "train.py", line 3, in <module>
        torch.AcceleratorError: CUDA error: device-side assert triggered
        CUDA kernel errors might be asynchronously reported at some other API call
        For debugging consider passing CUDA_LAUNCH_BLOCKING=1
        Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
        """,
    "last error of NCCL": """
        Traceback (most recent call last):
          File "train.py", line 3, in <module>
        torch.distributed.DistBackendError: NCCL error in: a.cpp:219, unhandled system error
        ncclSystemError: System call (e.g. socket, malloc) failed.
        Last error:
        socketStartConnect: Connect to 10.0.0.1<500> failed : Connection refused
        """,
    "stack of C++": """
        terminate called after throwing an instance of 'c10::Error'
          what():  NCCL watchdog
        Exception raised from checkTimeout at a.cpp:525 (most recent call first):
        frame #0: c10::Error::Error(c10::SourceLocation) + 0x57 (0x7f in libc10.so)
        frame #1: <unknown function> + 0x8609 (0x7f in libpthread.so)
        """,
    "fatal error of Python": """
        Fatal Python error: Segmentation fault

        Current thread 0x00007f89a9fef700 (most recent call first):
          File "train.py", line 28 in step
        Thread 0x00007f89a9fef701 (most recent call first):
          File "threading.py", line 5 in wait

        Extension modules: numpy, torch (total: 2)
        """,
    "signal under Open MPI": """
        *** Process received signal ***
        *** Signal: Segmentation fault (11)
        *** Failing at address: 0x10
        [ 0] /lib/libpthread.so.0(+0x143c0)[0x7f]
        [ 1] python(PyEval+0x5)[0x5]
        *** End of error message ***
        """,
    "report of torchrun": """
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
        ============================================================
        train.py FAILED
        ------------------------------------------------------------
        Failures:
        [1]:
          time      : 2024-05-03_12:00:01
          host      : gpu-07
          rank      : 1 (local_rank: 1)
          exitcode  : 1 (pid: 12)
          error_file: <N/A>
          traceback : To enable traceback see: https://pytorch.org
        ------------------------------------------------------------
        Root Cause (first observed failure):
        [0]:
          time      : 2024-05-03_12:00:01
        ============================================================
        """,
    "in a frame": """
        ╭─────────── Traceback (most recent call last) ───────────╮
        │ train.py:3 in <module>                                   │
        ╰──────────────────────────────────────────────────────────╯
        ValueError: no
        """,
    "warning with its line": """
        a.py:171: UserWarning: low
          warnings.warn(
        """,
}


@pytest.mark.parametrize("name", list(ONE))
def test_one_entry(name):
    text = textwrap.dedent(ONE[name]).strip("\n")
    around = entries(f"before\n{text}\nafter\nafter that")
    lines = "\n".join(line for line in text.split("\n") if line)
    assert around == ["before", lines, "after", "after that"]


APART = """
 iteration 1/ 10 | loss 2.5
 iteration 2/ 10 | loss 2.4
   50%|#####     | 5/10 [00:01<00:01]
    step 3 loss 2.3
Epoch 1: begin
ValueError: one rank
ValueError: another rank
Traceback (most recent call last):
Traceback (most recent call last):
INFO: said
-----------
a title
-----------
*** said ***
"""


def test_lines_that_are_entries_of_their_own():
    assert entries(APART) == APART.strip("\n").split("\n")


def test_the_table_is_whole():
    assert [len(row) for row in NEXT] == [len(Kind)] * len(State)
    # An open entry never ends by an empty line, and a plain line that is not joined ends it.
    for state in State:
        assert NEXT[state][Kind.BLANK] == (True, state)
        joined, after = NEXT[state][Kind.PLAIN]
        assert joined == (state in (State.LED, State.FRAMED))
        assert joined or after is State.PLAIN


@given(st.binary(max_size=100), st.integers(0, 9))
def test_the_kind_does_not_depend_on_the_digits(line, digit):
    zero = bytes(48 if 48 <= byte <= 57 else byte for byte in line)
    other = bytes(48 + digit if 48 <= byte <= 57 else byte for byte in line)
    assert kind_of(zero) is kind_of(other)


@pytest.mark.parametrize("part", [b" ", b"a.", b"A", b"Error", b"=", b"#1 ", b"a "])
def test_no_line_takes_long(part):
    import time

    began = time.process_time()
    kind_of(part * (60_000 // len(part)))
    assert time.process_time() - began < 0.3


@given(st.lists(st.text(max_size=1500), min_size=1, max_size=30))
def test_an_entry_keeps_its_beginning_and_its_end(lines):
    entry = EntryText(lines[0])
    for line in lines[1:]:
        entry.add(line)
    whole, text = "\n".join(lines), entry.text()
    assert len(text) <= MAX_TEXT
    if len(whole) <= MAX_TEXT:
        assert text == whole
    else:
        assert text[: MAX_TEXT // 2] == whole[: MAX_TEXT // 2]
        assert text[-1900:] == whole[-1900:]


def test_an_entry_is_full_some_time():
    entry = EntryText("first")
    for number in range(1, MAX_LINES):
        assert not entry.full
        entry.add(f"  {number}")
    assert entry.full


def test_an_exception_in_lower_case_ends_its_traceback():
    lines = [
        b"Traceback (most recent call last):",
        b'  File "read.py", line 3, in head',
        b"struct.error: unpack requires a buffer of 4 bytes",
    ]
    assert [kind_of(line) for line in lines] == [Kind.START, Kind.FRAME, Kind.EXCEPTION]
    assert kind_of(b"train.error_rate: 3") is Kind.PLAIN


def test_a_row_of_a_table_of_epochs_is_an_entry_of_its_own():
    assert kind_of(b"     38/89     5.62G   0.02079  0.0089      6       640") is Kind.PLAIN
    assert kind_of(b"     a/b  and more words") is Kind.PART


def test_what_a_backend_raised_is_one_entry_with_who_says_so():
    says = b"torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:"
    state = State.PLAIN
    for line in (says, b"RuntimeError: no triton"):
        joined, state = NEXT[state][kind_of(line)]
    assert joined
    assert state is State.RAISED
