"""The rules of LLM Foundry's KillLossSpike callback."""

from __future__ import annotations

from collections import deque
from math import inf, nan

from rmetric._util.errors import require
from rmetric.detectors.contract import LOSS, FollowedLoss
from rmetric.detectors.rolling_baseline import plain_mean
from rmetric.records import Record


class LlmFoundrySpike:
    """Five losses in a row of twice the recent mean, or a loss that stays above 10 nats.

        score = max(k / (`patience` + 1), share / (1/2)),    alarm where score >= 1

    k counts the losses in a row of at least `factor` times the mean of the
    `window` before each; share is how many of those lie above `cap`, counted from
    the record 2 `window` on. nan until the window is full.

    It is the callback as of 2024 with all its defaults; there the cap only
    speaks where k does not, which here makes no difference. Later versions take
    a twentieth of the planned steps for the window, at least 100, and a lower
    cap from the first window: a log does not hold the plan, so 100 and 10 stay.
    It follows the validation loss where a run logs no training loss.

    Its weaknesses: a loss that is nan counts for nothing and, as in the
    original, blinds the mean while it is in the window; twice the loss is more
    than most failing runs reach; and never before record 101.

    Args:
        patience: outliers in a row that are let pass, at least 0 (its default: 4).
        factor: multiple of the mean, above 1 (its default: 2).
        window: losses, at least 1 (its default: 100).
        cap: nats, above 0 (its default: 10).

    >>> spike = LlmFoundrySpike(patience=1, window=3)
    >>> [spike.update(Record(step=i, training_loss=x)).alarm
    ...  for i, x in enumerate([2.0, 2.1, 2.0, 4.5, 6.5, 2.0])]
    [False, False, False, False, True, False]

    Source: the documentation of `KillLossSpike` in llmfoundry.callbacks
    (mosaicml/llm-foundry, kill_loss_spike_callback).
    """

    def __init__(
        self, patience: int = 4, factor: float = 2.0, window: int = 100, cap: float = 10.0
    ) -> None:
        require("patience", patience, patience >= 0, "at least 0 losses")
        require("factor", factor, 1 < factor < inf, "finite and above 1")
        require("window", window, window >= 1, "at least 1 loss")
        require("cap", cap, 0 < cap < inf, "finite and above 0")
        self.patience, self.factor, self.window, self.cap = patience, factor, window, cap
        self.score = nan
        self._seen = self._in_a_row = self._high = 0
        self._recent: deque[float] = deque(maxlen=window)
        self._followed = FollowedLoss()

    @property
    def alarm(self) -> bool:
        return self.score >= 1

    @property
    def reason(self) -> str:
        if not self.alarm:
            return ""
        if self._in_a_row > self.patience:
            return (
                f"{self._followed.shown}: {self._in_a_row} in a row of at least {self.factor:g} "
                f"times the recent mean; {self.patience} are let pass: {LOSS}"
            )
        return f"{self._high} of the last {self.window} losses are above {self.cap:g}: {LOSS}"

    def update(self, record: Record) -> LlmFoundrySpike:
        """Take the next record; one without a loss changes nothing."""
        loss = self._followed.of(record)
        if loss is None:
            return self
        self._seen += 1
        if len(self._recent) == self.window:
            mean = plain_mean(self._recent)
            self._in_a_row = self._in_a_row + 1 if loss >= self.factor * mean else 0
            self._high = sum(past > self.cap for past in self._recent)
            share = self._high / self.window if self._seen >= 2 * self.window else 0.0
            self.score = max(self._in_a_row / (self.patience + 1), 2 * share)
        self._recent.append(loss)
        return self
