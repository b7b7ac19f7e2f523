"""Pinned memory of snapshots: unpinned before it goes; a refusal leaves no error behind."""

import pytest
import torch

from rmetric.rescue import snapshot
from rmetric.rescue.snapshot import Buffer


class Runtime:
    """Stands in for CUDA's runtime; refuses to pin what is pinned."""

    def __init__(self):
        self.pinned, self.status = set(), 0

    def cudaHostRegister(self, address, size, flags):
        if address in self.pinned:
            return 208
        self.pinned.add(address)
        return 0

    def cudaHostUnregister(self, address):
        self.pinned.remove(address)
        return self.status


@pytest.fixture
def runtime(monkeypatch):
    found = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    return found


@pytest.fixture
def forgotten(monkeypatch):
    calls = []
    monkeypatch.setattr(snapshot, "forget_cuda_error", lambda: calls.append(1))
    return calls


def made():
    return Buffer(4096, torch.device("cpu"), pinned=True)


@pytest.mark.parametrize("status", [0, 1])
def test_memory_is_unpinned_once_when_it_is_freed_and_an_error_of_that_is_forgotten(
    status, runtime, forgotten
):
    buffer, runtime.status = made(), status
    assert runtime.pinned == {buffer.memory.data_ptr()}
    buffer.free()
    buffer.free()
    assert not runtime.pinned
    assert bool(forgotten) == bool(status)


def test_memory_is_unpinned_before_another_buffer_can_have_it(runtime, forgotten):
    for _ in range(20):
        buffer = made()
        buffer.views([torch.zeros(8)])
    assert runtime.pinned == {buffer.memory.data_ptr()}
    assert not forgotten


def test_a_refusal_is_an_error_of_the_buffer_alone(runtime, forgotten):
    runtime.cudaHostRegister = lambda *_: 208
    with pytest.raises(MemoryError, match="cannot be pinned: 208"):
        made()
    assert forgotten
