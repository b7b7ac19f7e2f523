"""Records as they come, through a detector, and word of each alarm."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rmetric.background import Background
from rmetric.detectors import Detector
from rmetric.records import Record
from rmetric.webhook import checked_url, post

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
    delivered is told by `say`, without the URL, which may be a secret.

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
        self._url, self._say = checked_url(url, "--webhook"), say
        self.timeout, self.tries, self.pause = timeout, tries, pause
        self._background = Background(size=100)

    def post(self, message: dict[str, Any]) -> None:
        if not self._background.submit(lambda: self._deliver(message)):
            self._say("the webhook does not keep up: an alarm was not posted")

    def close(self) -> None:
        """Wait for what is on its way, no longer than one message may take."""
        self._background.close(self.tries * self.timeout + self.pause * 2**self.tries)

    def _deliver(self, message: dict[str, Any]) -> None:
        problem = ""
        for n in range(self.tries):
            if n:
                time.sleep(self.pause * 2 ** (n - 1))
            problem = post(self._url, message, self.timeout)
            if not problem:
                return
        self._say(f"the webhook {problem}, {self.tries} times: an alarm was not posted")


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
