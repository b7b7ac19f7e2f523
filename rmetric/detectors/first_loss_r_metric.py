"""The R-Metric with ΔL as the authors' last simulator computes it."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite

from rmetric.metric import RMetric, RMetricConfig
from rmetric.records import Record


class FirstLossRMetric:
    """The R-Metric with the first validation loss in place of the moving average.

        ΔL(t) = L(t) - L(first)

    In the published simulator the average of past losses only ever holds its
    first value. It changes what R means: ΔL falls with the loss and stays at the
    bottom of its window, where against a moving average it creeps to the top as
    the loss flattens. It is here to show how much of a result hangs on that.

    Its weakness: a rise that stays below the first loss is seen only as far as
    it stands out of the whole fall since the start.

    >>> metric = FirstLossRMetric()
    >>> for step, loss in enumerate([3.0, 2.5, 2.4, 2.9], start=1):
    ...     _ = metric.update(Record(step=step, validation_loss=loss))
    >>> round(metric.score, 2), metric.alarm
    (0.58, True)

    Source: the simulator in the repository of Fatima 2025.
    """

    __slots__ = ("_first", "_metric")

    def __init__(self, config: RMetricConfig | None = None) -> None:
        self._metric = RMetric(config)
        self._first: float | None = None

    @property
    def score(self) -> float:
        return self._metric.score

    @property
    def alarm(self) -> bool:
        return self._metric.alarm

    @property
    def reason(self) -> str:
        return self._metric.reason

    def update(self, record: Record) -> FirstLossRMetric:
        """Take the next record; a loss that is nan or ±inf is beyond all bounds."""
        loss = record.validation_loss
        if loss is not None:
            record = replace(record, validation_loss=None, loss_drift=self._drift(loss))
        self._metric.update(record)
        return self

    def _drift(self, loss: float) -> float:
        if not isfinite(loss):
            return inf
        if self._first is None:
            self._first = loss
        return loss - self._first
