"""One thread for what must not hold up its caller: writing files, sending messages."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

logger = logging.getLogger("rmetric")

#: What the end of a training waits for each thread.
CLOSE_SECONDS = 5.0


class Background:
    """Runs functions one after the other on a daemon thread, which begins with the first.

    A function that raises is reported and the next one runs. Of more than `size` functions that
    wait, the others are dropped and counted. The queue of an executor has no bound. `what` they
    write names them in the report of what is not done at the end; empty: the caller reports it.

    >>> background = Background()
    >>> background.submit(lambda: None)
    True
    >>> background.close(1.0)
    True
    """

    def __init__(self, size: int = 1000, what: str = "") -> None:
        self.dropped, self._what = 0, what
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue(size)
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], object]) -> bool:
        """Run `function` soon; False where the queue is full."""
        try:
            self._queue.put_nowait(function)
        except queue.Full:
            self.dropped += 1
            return False
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="rmetric", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no new threads while the interpreter ends
                self._run(wait=False)
        return True

    def wait(self, timeout: float) -> bool:
        """Wait until all that was submitted is done, at most `timeout` seconds; whether it was."""
        done = threading.Event()
        return self.submit(done.set) and done.wait(timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Wait until all is done, at most `timeout` seconds, by default 5; whether it was."""
        timeout = CLOSE_SECONDS if timeout is None else timeout
        thread, self._thread = self._thread, None
        if thread is None or not thread.is_alive():
            return True
        with suppress(queue.Full):
            self._queue.put(None, timeout=timeout)
            thread.join(timeout)
        if (is_behind := thread.is_alive()) and self._what:
            logger.error("rmetric: %s: not all was written within %g s", self._what, timeout)
        return not is_behind

    def _run(self, *, wait: bool = True) -> None:
        while (wait or not self._queue.empty()) and (function := self._queue.get()) is not None:
            try:
                function()
            except Exception as error:
                logger.error("rmetric: in the background: %s: %s", type(error).__name__, error)
