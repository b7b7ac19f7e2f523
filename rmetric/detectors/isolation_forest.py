"""Isolation Forest over the losses of the run it judges, the paper's first baseline."""

from __future__ import annotations

from math import isfinite, nan

from rmetric._util.lazy import needed
from rmetric.detectors.contract import LOSS
from rmetric.records import Record, Run

#: Nats; a tree cannot split at infinity.
VERY_LARGE_LOSS = 1e6


class PeekingIsolationForest:
    """Isolation Forest fitted on all validation losses of the very run it judges.

        score = 2^(-mean path length / usual path length),    alarm where score > 0.5

    **It sees the future**: whether the loss of step 100 is an outlier is decided
    with the losses up to the last step, so nobody could have had its alerts
    while the run was going on. It is here because the paper compares against
    it, with contamination 'auto' (the 0.5) and random_state 42.

    Its other weaknesses: in any falling loss the first values are the outliers,
    so it alarms at the very start of nearly every run, failing or not; and where
    all losses are the same, rounding alone decides.

    nan for a run with fewer than two losses. A loss counts as 10⁶ nats at most,
    and so does one that is nan or -inf.

    >>> losses = [2.0, 2.1, 2.0, 2.1, 9.0]
    >>> run = Run(id="r", records=[Record(step=i, validation_loss=x) for i, x in enumerate(losses)])
    >>> forest = PeekingIsolationForest().fit(run)
    >>> [forest.update(record).alarm for record in run.records]
    [False, False, False, False, True]

    Source: Fatima 2025, section 4 (baseline); Liu, Ting, Zhou 2008, "Isolation Forest".
    """

    threshold = 0.5

    def __init__(self) -> None:
        self.score = self._loss = nan
        self._score_of: dict[float, float] | None = None

    @property
    def alarm(self) -> bool:
        return self.score > self.threshold

    @property
    def reason(self) -> str:
        if not self.alarm:
            return ""
        return (
            f"validation loss {self._loss:.4g} is an outlier among all of this run: "
            f"{self.score:.3f} above {self.threshold:g}: {LOSS}"
        )

    def fit(self, run: Run) -> PeekingIsolationForest:
        """Look at the whole run, the part that has not happened yet included."""
        # Imported here: it takes a second, and whoever streams other detectors never needs it.
        IsolationForest = needed("sklearn.ensemble").IsolationForest

        losses = [_finite(r.validation_loss) for r in run.records if r.validation_loss is not None]
        self._score_of = {}
        if len(losses) > 1:
            column = [[loss] for loss in losses]
            forest = IsolationForest(contamination="auto", random_state=42).fit(column)
            scores = (-forest.score_samples(column)).tolist()
            self._score_of = dict(zip(losses, scores, strict=True))
        return self

    def update(self, record: Record) -> PeekingIsolationForest:
        """Take the next record of the fitted run. Raises RuntimeError before `fit`."""
        if self._score_of is None:
            raise RuntimeError("an Isolation Forest that peeks needs fit(run) before update")
        if record.validation_loss is not None:
            self._loss = record.validation_loss
            self.score = self._score_of.get(_finite(record.validation_loss), nan)
        return self


def _finite(loss: float) -> float:
    if not isfinite(loss):
        return VERY_LARGE_LOSS
    return min(max(loss, -VERY_LARGE_LOSS), VERY_LARGE_LOSS)
