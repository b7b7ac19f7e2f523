"""Ctrl-C while modules are loaded; loads next to nothing itself."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread

INTERRUPTED = 130


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Within it Ctrl-C ends the process with 130 and no traceback.

    An extension whose import is broken off by an exception may crash, or name another reason.
    """
    before = signal.getsignal(signal.SIGINT)
    own = before is signal.default_int_handler and current_thread() is main_thread()
    if own:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        if own:
            signal.signal(signal.SIGINT, before)
