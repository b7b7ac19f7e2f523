"""Components that replace a call of the training, each with one weakness.

A fault puts one in the place of the call. The component fails, and its code is on the stack, as
that of a library would be.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Call = Callable[..., Any]
LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p
LIBC.malloc.argtypes = [ctypes.c_size_t]
LIBC.free.argtypes = [ctypes.c_void_p]


class Part:
    """Stands before a call."""

    def __init__(self, call: Call) -> None:
        self.call = call


class NativeCopy(Part):
    """Copies a buffer to memory that is not Python's."""

    def __init__(self, call: Call, address: int) -> None:
        super().__init__(call)
        self.address, self.rows = address, bytes(4096)

    def run(self, *given: Any) -> Any:
        ctypes.memmove(self.address, self.rows, len(self.rows))
        return self.call(*given)


class NativeBuffer(Part):
    """Has a buffer of the C library's, which it gives back from where it was last read."""

    def __init__(self, call: Call, read: int) -> None:
        self.call, self.read = call, read

    def run(self, *given: Any) -> Any:
        block = LIBC.malloc(4096)
        out = self.call(*given)
        LIBC.free(block + self.read)
        return out


class MappedCache(Part):
    """Reads a file through the memory into which it is mapped."""

    def __init__(self, call: Call, path: Path) -> None:
        self.call = call
        path.write_bytes(bytes(1 << 16))
        with open(path, "rb") as file:
            self.rows = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def run(self, *given: Any) -> Any:
        self.rows[len(self.rows) // 2]
        return self.call(*given)


class Deadline(Part):
    """Ends the process when its time is over: as Python does, or at once where that is wanted."""

    def __init__(self, call: Call, end: float, code: int, *, at_once: bool) -> None:
        self.call, self.end, self.code, self.at_once = call, end, code, at_once

    def run(self, *given: Any) -> Any:
        if time.monotonic() >= self.end:
            if self.at_once:
                os._exit(self.code)
            sys.exit(self.code)
        return self.call(*given)


class Prefetcher(Part):
    """Calls ahead, in a thread."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.ready: queue.Queue[Any] = queue.Queue(maxsize=2)
        self.thread: threading.Thread | None = None

    def run(self) -> Any:
        if self.thread is None:
            self.thread = threading.Thread(target=self.fill, name="prefetch", daemon=True)
            self.thread.start()
        return self.ready.get()

    def fill(self) -> None:
        while True:
            self.ready.put(self.call())


class SharedIndex(Part):
    """Keeps an index that a thread renews, which holds the lock until news are there."""

    def __init__(self, call: Call) -> None:
        self.call, self.lock = call, threading.Lock()
        self.news, self.held = threading.Event(), threading.Event()
        threading.Thread(target=self.renew, name="index", daemon=True).start()
        self.held.wait()

    def renew(self) -> None:
        with self.lock:
            self.held.set()
            self.news.wait()

    def run(self, *given: Any) -> Any:
        with self.lock:
            return self.call(*given)


class Sampler(Part):
    """Takes batches until the weight of one is enough."""

    def __init__(self, call: Call, least: float) -> None:
        self.call, self.least = call, least

    def run(self) -> Any:
        batch = self.call()
        while batch[1].max() < self.least:
            batch = self.call()
        return batch


class Service(Part):
    """Asks a service of its node before each call, and waits for what it answers."""

    def __init__(self, call: Call, address: tuple[str, int]) -> None:
        self.call, self.address = call, address

    def run(self, *given: Any) -> Any:
        with socket.create_connection(self.address) as connection:
            connection.sendall(b"lease\n")
            connection.recv(64)
        return self.call(*given)


class GroupOfItsOwn(Part):
    """Makes a process group before the first call."""

    group = None

    def run(self, *given: Any) -> Any:
        if self.group is None:
            self.group = dist.new_group(list(range(dist.get_world_size())))
        return self.call(*given)


class Relay(Part):
    """Waits for the statistics of the rank before it."""

    def run(self, *given: Any) -> Any:
        dist.recv(torch.zeros(16), src=dist.get_rank() - 1)
        return self.call(*given)
