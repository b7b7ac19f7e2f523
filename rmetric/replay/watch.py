"""Records as they come, through a detector, and word of each alarm."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from queue import Full, Queue
from typing import Any
from urllib.parse import urlsplit

from rmetric.detectors import Detector
from rmetric.records import Record
from rmetric.strict_json import encode

#: Runs of one file that are watched at once; the one longest silent is forgotten first.
MOST_RUNS = 1000


class Watch:
    """Takes records of any number of runs; each has a detector of its own.

    Args:
        make: a fresh detector.
        alarmed: called with run id, step, score and reason when an alarm begins.

    Attributes:
        num_records, num_alarms: taken and begun so far.
    """

    def __init__(
        self, make: Callable[[], Detector], alarmed: Callable[[str, int, float, str], None]
    ) -> None:
        self._make, self._alarmed = make, alarmed
        self._detectors: dict[str, Detector] = {}
        self._in_alarm: set[str] = set()
        self.num_records = self.num_alarms = 0

    def begin_again(self) -> None:
        """Forget every run: the file is another one."""
        self._detectors.clear()
        self._in_alarm.clear()

    def take(self, id: str, record: Record) -> None:
        detector = self._detectors.pop(id, None) or self._make()
        self._detectors[id] = detector  # the one heard of last stands last
        if len(self._detectors) > MOST_RUNS:
            forgotten = next(iter(self._detectors))
            del self._detectors[forgotten]
            self._in_alarm.discard(forgotten)
        detector.update(record)
        self.num_records += 1
        if not detector.alarm:
            self._in_alarm.discard(id)
        elif id not in self._in_alarm:
            self._in_alarm.add(id)
            self.num_alarms += 1
            self._alarmed(id, record.step, detector.score, detector.reason)


class Webhook:
    """Posts JSON to a URL from a thread of its own, so that the tail never waits for it.

    Each message is tried `tries` times, with pauses that double; what cannot be
    delivered is told by `say`, without the URL, which may be a secret. `rmetric.live`
    has another for a training that runs: that one stands on torch.

    Args:
        url: http or https.
        timeout: seconds for one try, above 0.
        tries: at least 1.
        pause: seconds before the second try.
    """

    def __init__(
        self,
        url: str,
        say: Callable[[str], None],
        *,
        timeout: float = 5.0,
        tries: int = 3,
        pause: float = 1.0,
    ) -> None:
        self._url, self._say = checked_url(url), say
        self.timeout, self.tries, self.pause = timeout, tries, pause
        self._queue: Queue[dict[str, Any] | None] = Queue(100)
        self._thread = threading.Thread(target=self._run, name="rmetric webhook", daemon=True)
        self._thread.start()

    def post(self, message: dict[str, Any]) -> None:
        try:
            self._queue.put_nowait(message)
        except Full:
            self._say("the webhook does not keep up: an alarm was not posted")

    def close(self) -> None:
        """Wait for what is on its way, no longer than one message may take."""
        longest = self.tries * self.timeout + self.pause * 2**self.tries
        try:
            self._queue.put(None, timeout=longest)
        except Full:
            return
        self._thread.join(longest)

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            self._deliver(json.dumps(encode(message)).encode())

    def _deliver(self, content: bytes) -> None:
        problem = ""
        for n in range(self.tries):
            if n:
                time.sleep(self.pause * 2 ** (n - 1))
            request = urllib.request.Request(
                self._url, data=content, headers={"Content-Type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=self.timeout):
                    return
            except Exception as error:  # of which only what cannot hold the address is told
                problem = f"{type(error).__name__} {getattr(error, 'code', '')}".strip()
        self._say(f"the webhook failed {self.tries} times ({problem}): an alarm was not posted")


def checked_url(url: str) -> str:
    """`url`, if it can be posted to. Raises ValueError that does not repeat it."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        fine = False
    if not fine:
        raise ValueError("--webhook: a URL that begins with http:// or https:// is accepted")
    return url


def message(path: Path, detector: str, id: str, step: int, score: float, reason: str) -> dict:
    """What is posted about an alarm; chats show the ``text``."""
    return {
        "text": f"{id}: alarm at step {step}: {reason}",
        "event": "ALARM",
        "source": str(path),
        "run": id,
        "step": step,
        "detector": detector,
        "score": score,
        "reason": reason,
    }
