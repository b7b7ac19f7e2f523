"""One thread for what must not hold up its caller: writing files, sending messages."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger("rmetric")


class Background:
    """Runs functions one after the other on a daemon thread, which begins with the first.

    A function that raises is reported and the next one runs. Of more than `size` functions that
    wait, the others are dropped and counted. The queue of an executor has no bound.

    >>> background = Background()
    >>> background.submit(lambda: None)
    True
    >>> background.close(1.0)
    True
    """

    def __init__(self, size: int = 1000) -> None:
        self.dropped = 0
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
                self._queue.put_nowait(None)
                self._run()
        return True

    def wait(self, timeout: float) -> bool:
        """Wait until all that was submitted is done, at most `timeout` seconds; whether it was."""
        done = threading.Event()
        return self.submit(done.set) and done.wait(timeout)

    def close(self, timeout: float) -> bool:
        """Wait until all is done, at most `timeout` seconds; whether it was."""
        thread, self._thread = self._thread, None
        if thread is None or not thread.is_alive():
            return True
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            return False
        thread.join(timeout)
        return not thread.is_alive()

    def _run(self) -> None:
        while (function := self._queue.get()) is not None:
            try:
                function()
            except Exception as error:
                logger.error("rmetric: in the background: %s: %s", type(error).__name__, error)
