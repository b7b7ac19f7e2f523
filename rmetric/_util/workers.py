"""Worker processes of joblib that end with the process that started them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
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
    # Not in the same process, and not in a worker that another program started, such as Dask's.
    if not _watched and parent != os.getpid() and parent == os.getppid():
        _watched = True
        # A parent-death signal would come at the end of the thread that started the worker.
        threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True).start()
    return function(*arguments, **named)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)
