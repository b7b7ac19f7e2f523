"""Classes of failures: lasting, passing, full disk; and what the supervisor does with each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.guard.supervisor.launch_failure import is_lasting, with_disk_full_first

COMMAND = ("torchrun", "train.py", "--data=/data/a.bin", "--config", "c.yaml")


@pytest.mark.parametrize(
    ("raised", "lasting"),
    [
        ("SyntaxError: invalid syntax (train.py, line 3)", True),
        ("IndentationError: unexpected indent", True),
        ("ModuleNotFoundError: No module named 'flash_attn'", True),
        ("ImportError: cannot import name 'x' from 'connection'", True),
        ("NameError: name 'x' is not defined", True),
        ("TypeError: f() missing 1 required positional argument: 'x'", True),
        ("ValueError: --batch is 0", True),
        ("KeyError: 'beans'", True),
        ("rmetric.guard.checkpoint_dir.UnfitCheckpoint: step-3 is of another model", True),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/a.bin'", True),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'c.yaml'", True),
        ("NotADirectoryError: [Errno 20] Not a directory: 'c.yaml'", True),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/shard-7.bin'", False),
        ("OSError: [Errno 5] Input/output error: '/data/a.bin'", False),
        ("OSError: [Errno 116] Stale file handle: '/data/a.bin'", False),
        ("OSError: [Errno 28] No space left on device", False),
        ("OSError: [Errno 98] Address already in use", False),
        ("PermissionError: [Errno 13] Permission denied: '/data/a.bin'", False),
        ("ConnectionRefusedError: [Errno 111] Connection refused", False),
        ("TimeoutError: timed out", False),
        ("ValueError: the request timed out", False),
        ("ValueError: timeout of the store", False),
        ("ValueError: no connection", False),
        ("ValueError: overtime output", True),
        ("torch.distributed.DistNetworkError: The server socket has failed to listen", False),
        ("torch.distributed.DistStoreError: wait timeout after 30000ms", False),
        ("requests.exceptions.ReadTimeout: HTTPSConnectionPool: Read timed out.", False),
        ("ValueError: the storage service is temporarily unavailable", False),
        ("json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", False),
        ("RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable", False),
        ("RuntimeError: Broken pipe", False),
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
