"""Records as they come, through a detector, and an event for each alarm."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rmetric._util.printed import printable
from rmetric.detectors import Detector
from rmetric.detectors.log_end import WithLogEnd
from rmetric.records import Record

#: Runs of one file that are watched at once; the one longest silent is forgotten first.
MOST_RUNS = 1000
ALARM, CHANGED, ENDED = "ALARM", "CHANGED", "ENDED"
#: The verdict, of a detector that gives one, that is worth a message by itself.
FAILING = "failure under way"


@dataclass(frozen=True, kw_only=True)
class AlarmEvent:
    """An event of an alarm: it began, its verdict changed, or it ended.

    Attributes:
        event: ``ALARM``, ``CHANGED`` or ``ENDED``.
        id: of the run.
        step, began: at which that is so, and at which the alarm began.
        score, reason, verdict: of the detector; the reason of an end is why the alarm is over.
        was: the verdict before.
    """

    event: str
    id: str
    step: int
    began: int
    score: float
    reason: str
    verdict: str
    was: str = ""

    @property
    def urgent(self) -> bool:
        """True for an alarm that begins or turns into a failure."""
        return self.event == ALARM or (self.event == CHANGED and self.verdict == FAILING)

    @property
    def words(self) -> str:
        """One line, without the run."""
        if self.event == ENDED:
            why = f": {self.reason}" if self.reason else ""
            return f"step {self.step}: the alarm of step {self.began} is over{why}"
        why = self.reason or f"score {self.score:.4g}"
        was = f" (it was: {self.was})" if self.event == CHANGED else ""
        return f"step {self.step}: {why}{was}"


class Watch:
    """Takes records of any number of runs; each has a detector of its own.

    Args:
        make: a fresh detector; what no detector sees is watched beside it (`WithLogEnd`).
        report: called with each event of an alarm; not again in the same words, as for a log
            that is read again from its beginning.

    Attributes:
        in_alarm: run id -> the last event, for the runs that are in alarm.
        num_records, num_alarms, num_again: taken, begun, and reported before, so far.
    """

    def __init__(self, make: Callable[[], Detector], report: Callable[[AlarmEvent], None]) -> None:
        self._make, self._report = make, report
        self._reported: deque[tuple[str, str, str]] = deque(maxlen=MOST_RUNS)
        self._detectors: dict[str, WithLogEnd] = {}
        self.in_alarm: dict[str, AlarmEvent] = {}
        self.num_records = self.num_alarms = self.num_again = 0

    def begin_again(self) -> None:
        """Forget every run: the file is another one."""
        self._detectors.clear()
        self.in_alarm.clear()

    def take(self, id: str, record: Record) -> None:
        detector = self._detectors.pop(id, None) or WithLogEnd(self._make())
        self._detectors[id] = detector  # ordered by their latest record
        if len(self._detectors) > MOST_RUNS:
            forgotten = next(iter(self._detectors))
            del self._detectors[forgotten]
            self.in_alarm.pop(forgotten, None)
        detector.update(record)
        self.num_records += 1
        self._judge(id, record.step, detector)

    def finish(self, unread: Mapping[str, str]) -> None:
        """No record follows in any run; `unread`: run id -> `Run.unread`."""
        for id, detector in self._detectors.items():
            detector.finish(unread.get(id, ""))
            self._judge(id, detector.step, detector)

    def _judge(self, id: str, step: int, detector: WithLogEnd) -> None:
        before = self.in_alarm.get(id)
        if before is None:
            kind = ALARM if detector.alarm else ""
        elif detector.alarm:
            kind = CHANGED if before.verdict != detector.verdict else ""
        else:
            kind = ENDED
        if not kind:
            return
        event = AlarmEvent(
            event=kind,
            id=id,
            step=step,
            began=before.began if before else step,
            score=detector.score,
            reason=getattr(detector, "ended", "") if kind == ENDED else detector.reason,
            verdict=detector.verdict,
            was=before.verdict if before else "",
        )
        self.in_alarm[id] = event
        if kind == ENDED:
            del self.in_alarm[id]
        self.num_alarms += kind == ALARM
        words = (kind, id, event.words)
        if words in self._reported:
            self.num_again += kind == ALARM
            return
        self._reported.append(words)
        self._report(event)


def message(path: Path, detector: str, event: AlarmEvent) -> dict[str, Any]:
    """The JSON message that is posted about an alarm; chats show its ``text``."""
    return {
        "text": f"{event.event} {printable(event.id)}: {printable(event.words)}",
        "source": str(path),
        "run": event.id,
        "detector": detector,
        **{name: getattr(event, name) for name in ("event", "step", "score", "reason", "verdict")},
    }
