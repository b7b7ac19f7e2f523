"""Worker processes of joblib: they end with the process that started them, and report progress."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import joblib

#: Between two looks at the parent, seconds.
POLL_SECONDS = 0.25
_watched = False


def delayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`joblib.delayed`, for a task whose worker ends when this process has been killed.

    A worker of joblib notices that only between two tasks, and a task may take minutes.
    """
    made: Callable[..., Any] = joblib.delayed(partial(_run, os.getpid(), function))
    return made


def _run(parent: int, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    global _watched
    # Not in the same process, and not in a worker that somebody else started, as Dask's are.
    if not _watched and parent != os.getpid() and parent == os.getppid():
        _watched = True
        # A parent-death signal would come at the end of the thread that started the worker.
        threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True).start()
    return function(*arguments, **named)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def _write_share(path: Path, total: int, done: int) -> None:
    """In a worker: write which share of its steps is done, at some of them."""
    if done % max(1, total // 50) == 0:
        with suppress(OSError):
            path.write_text(f"{done / total}")


@contextmanager
def follow_shares(on_progress: Callable[[float], None] | None) -> Iterator[Callable[..., Any]]:
    """Report what workers on this machine have done so far, also in the middle of a task.

    `on_progress` is called on a thread of its own, about twice a second, with the sum of the
    shares, each times the size of its task; it never falls. Yields a function of a task's size and
    number of steps that makes what its worker calls with each step, or None.
    """
    if on_progress is None:
        yield lambda size, total: None
        return
    sizes: list[float] = []
    shares: dict[int, float] = {}
    over = threading.Event()
    with TemporaryDirectory(prefix="rmetric-", ignore_cleanup_errors=True) as folder:

        def share_file(size: float, total: int) -> Callable[[int], None]:
            sizes.append(size)
            return partial(_write_share, Path(folder) / str(len(sizes) - 1), total)

        def follow() -> None:
            while not over.wait(2 * POLL_SECONDS):
                for index in range(len(sizes)):
                    with suppress(OSError, ValueError):  # not begun, or just being written
                        share = float((Path(folder) / str(index)).read_text())
                        shares[index] = max(share, shares.get(index, 0.0))
                on_progress(sum(sizes[index] * share for index, share in shares.items()))

        thread = threading.Thread(target=follow, name="progress", daemon=True)
        thread.start()
        try:
            yield share_file
        finally:
            over.set()
            thread.join()
