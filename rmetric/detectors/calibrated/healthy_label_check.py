"""Evidence that a run which is given as healthy failed."""

from __future__ import annotations

from collections import deque
from math import isfinite, nan
from statistics import median

from rmetric.detectors.calibrated.alarm_lifecycle import UNDER_WAY, YOUNG
from rmetric.detectors.calibrated.detector import CalibratedDetector
from rmetric.detectors.calibrated.training_loss import LEAST_RISE
from rmetric.detectors.followed_loss import FollowedLoss
from rmetric.records import Record

#: The end of a run: a tenth of its losses, at least 5 and at most 40.
_SHARE, _LEAST, _MOST = 10, 5, 40


class HealthyLabelCheck:
    """The judgement of a whole run, from the detector's own alarms under the floors.

    A run failed if one of these holds:

    1. a value was not finite, as `NotFinite` counts it;
    2. an alarm older than ten records had the verdict ``failure under way``;
    3. the log ends in an alarm;
    4. the loss never came back: at the end (median of the last tenth) it is 10 % above
       what was usual before the first alarm. An announced change begins this anew.

    A spike that came back is none of these, and nor is a run that never alarmed.
    """

    def __init__(self) -> None:
        self._followed = FollowedLoss()
        self._last: deque[float] = deque(maxlen=_MOST)
        self._num_losses = 0
        self._age = 0
        self._before = nan
        self._alarmed_at = 0
        self._not_finite = self._under_way = self._first = self._open = ""

    def update(self, record: Record, detector: CalibratedDetector) -> None:
        """Take a record that the detector has judged."""
        loss = self._followed.of(record)
        if record.planned_events:
            self._before, self._first = nan, ""
            self._last.clear()
            self._num_losses = 0
        if loss is not None and isfinite(loss):
            self._last.append(loss)
            self._num_losses += 1
        if not detector.alarm:
            self._age, self._open = 0, ""
            return
        self._age += 1
        words = detector.measured.partition(": ")[2]
        self._open = words
        if not self._first:
            self._first, self._alarmed_at = words, record.step
            self._before = detector.usual_loss
        if "not_finite" in detector.leading:
            self._not_finite = self._not_finite or words
        elif self._age > YOUNG and detector.verdict == UNDER_WAY and not self._under_way:
            self._under_way = f"{UNDER_WAY} at step {record.step}: {words}"

    @property
    def failure(self) -> str:
        """The evidence, in words; empty for a run that may be healthy."""
        if self._not_finite:
            return self._not_finite
        end = median(list(self._last)[-max(_LEAST, self._num_losses // _SHARE) :] or [nan])
        least = LEAST_RISE * abs(self._before)
        back = not end - self._before >= least  # nan: there is nothing to compare
        level = f"the loss is {end:.4g} at the end, {self._before:.4g} was usual before"
        if self._under_way:
            return self._under_way if back else f"{self._under_way}; {level}"
        if self._open:
            return f"the log ends in an alarm: {self._open}"
        if not back:
            return f"{level} the alarm at step {self._alarmed_at}: {self._first}"
        return ""
