"""Alarm lifecycle: verdict while an alarm is active, reason when it clears."""

from __future__ import annotations

from collections.abc import Collection
from math import nan

from rmetric.detectors.calibrated.held_out_loss import ValidationLoss
from rmetric.detectors.calibrated.training_loss import LEAST_RISE, TrainingLoss

HEALTHY = "healthy"
TOO_EARLY = "spike or failure, too early to tell"
RECOVERING = "recovering spike"
UNDER_WAY = "failure under way"

#: A loss that has come back to this share of its highest rise is recovering.
_RECOVERED = 0.5
#: Records of an alarm in which a rise of the loss may be either: of the spikes in the public logs
#: that came back, half were down to half of their height by the ninth record.
YOUNG = 10
#: From so many times the usual level (median of three records), and so many usual spreads, it is a
#: failure at once: none of the rises in the public logs that came back was above 3.9 times.
LOST_RATIO, LOST_SPREADS = 4.0, 6.0
#: Records that a level needs at least to get into the past of the training loss.
_LAG = 5
#: The smoothed gradient norm trails a loss that comes back, and a rate does not show it.
_TRAILING = frozenset({"gradient_norm", "rate_beyond"})
_OF_TRAINING_LOSS = frozenset(TrainingLoss.NAMES) | _TRAILING
_OF_LOSSES = _OF_TRAINING_LOSS | frozenset(ValidationLoss.NAMES)


class AlarmLifecycle:
    """The verdict on one alarm at a time, from its first record on.

    Attributes:
        verdict: as the detector's.
        lost: highest loss of the alarm in units of the usual level, where that is beyond doubt;
            else 0.
    """

    def __init__(self) -> None:
        self.verdict = HEALTHY
        self._age = 0
        self._before = nan
        self._highest = self.lost = 0.0
        self._only_losses = True

    def follow(self, names: Collection[str], loss: TrainingLoss) -> None:
        """Take a record in alarm, with the statistics that it rests on."""
        if self.verdict == HEALTHY:
            self._age, self._only_losses = 0, True
            self._before, self._highest, self.lost = loss.before, 0.0, 0.0
        self._age += 1
        self._highest = max(self._highest, loss.latest[1] - self._before)  # nan changes nothing
        ratio = loss.latest[1] / self._before if self._before > 0 else nan
        if ratio >= LOST_RATIO and loss.statistics.get("loss_jump", 0.0) >= LOST_SPREADS:
            self.lost = max(self.lost, ratio)
        self._only_losses = self._only_losses and _rests_on(names, _OF_LOSSES)
        if _rests_on(names, _OF_TRAINING_LOSS) and self._is_back(loss):
            self.verdict = RECOVERING
        elif self._only_losses and self._age <= YOUNG and not self.lost:
            self.verdict = TOO_EARLY
        else:
            self.verdict = UNDER_WAY

    def unfinished(self, names: Collection[str], loss: TrainingLoss) -> bool:
        """True if an alarm of the losses has neither come back nor become the usual level."""
        if not _rests_on(names, _OF_LOSSES):
            return False
        up = loss.latest[1] - self._before
        return up >= LEAST_RISE * abs(self._before) and loss.before - self._before < up / 2

    def end(self, names: Collection[str], labels: Collection[str], loss: TrainingLoss) -> str:
        """Why an alarm that rested on these statistics is over, in words."""
        self.verdict = HEALTHY
        if "not_finite" in names:
            return "all values are numbers again"
        of_loss = not _OF_TRAINING_LOSS.isdisjoint(names) and _rests_on(names, _OF_LOSSES)
        newest, _ = loss.latest
        up = newest - self._before
        if up >= LEAST_RISE * abs(self._before):
            why = "the new level has become usual" if self._lasts(up, loss) else "below the limit"
            return (
                f"{why}, the loss is still {newest:.4g} where {self._before:.4g} was usual before"
            )
        if of_loss and self._highest > 0:
            return f"the loss came back to {newest:.4g}"
        return f"no longer unusual: {' and '.join(labels)}"

    def _lasts(self, up: float, loss: TrainingLoss) -> bool:
        """True if the loss has stayed at its new level, which is now part of the baseline."""
        if loss.before - self._before >= up / 2:
            return True
        return self._age > _LAG and up >= _RECOVERED * self._highest

    def _is_back(self, loss: TrainingLoss) -> bool:
        # Both: one batch that is better by chance is not a recovery, nor is one jump over.
        return self._highest > 0 and max(loss.latest) - self._before < _RECOVERED * self._highest


def _rests_on(names: Collection[str], allowed: Collection[str]) -> bool:
    """True if all names are allowed and one is of a loss."""
    return all(name in allowed for name in names) and not _TRAILING.issuperset(names)
