"""Ctrl-C while modules are loaded; loads next to nothing itself."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Within it Ctrl-C ends the process with 130 and no traceback.

    An extension whose import is broken off by an exception may crash, or name another reason.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # a caller's own
        return
    try:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    except ValueError:  # on another thread, which gets no signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
