"""The R-Metric of a whole log at once, in NumPy.

The same numbers as `rmetric.metric.RMetric` at every row, bit for bit, more than
ten times as fast: for replaying long logs and for sweeping settings.

Shape suffixes: N rows of the log, W workers, E events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmetric.metric import RMetricConfig
from rmetric.records import Record
from rmetric.signals.failure_rate import SECONDS_PER_HOUR

Floats = NDArray[np.float64]

#: Rows worked on at once where several passes are made over them.
CACHED_ROWS = 32_768


@dataclass(kw_only=True)
class Observed:
    """The rows of a log that say something of one signal, and what.

    Attributes:
        rows: row numbers, rising; None for every row.
        values: shape (rows,), or (rows, W) for the workers' norms.
    """

    values: Floats
    rows: NDArray[np.intp] | None = None


@dataclass(kw_only=True)
class Columns:
    """A log as columns; a column that was never logged is None.

    Attributes:
        num_rows: N.
        time: seconds since the run began, of the rows that log events.
        event_times: shape (E,), rising.
        event_counts: events up to and including each row of `time`.
        failure_rate, gradient_variance, loss_drift: as somebody else stated them.
        worker_gradient_norms, gradient_norm, loss: what the signals are made of.
    """

    num_rows: int
    time: Observed | None = None
    event_times: Floats | None = None
    event_counts: NDArray[np.intp] | None = None
    failure_rate: Observed | None = None
    worker_gradient_norms: Observed | None = None
    gradient_variance: Observed | None = None
    gradient_norm: Observed | None = None
    loss: Observed | None = None
    loss_drift: Observed | None = None

    @classmethod
    def from_records(cls, records: Sequence[Record], config: RMetricConfig) -> Columns:
        """Columns of `records`.

        Each signal comes from one source for the whole log. Raises ValueError
        for a log that changes its sources, or its workers, on the way; stream that one.
        """
        columns = cls(num_rows=len(records))
        timed = [i for i, r in enumerate(records) if r.events is not None and r.time is not None]
        if timed:
            events = [[e.time for e in records[i].events or () if e.is_hardware] for i in timed]
            columns.time = _observed([records[i].time for i in timed], timed, len(records))
            columns.event_times = np.array([t for row in events for t in row], dtype=float)
            columns.event_counts = np.cumsum([len(row) for row in events])
        for name in (
            "failure_rate",
            "worker_gradient_norms",
            "gradient_variance",
            "gradient_norm",
            "loss_drift",
        ):
            setattr(columns, name, _column(records, name))
        columns.loss = _column(records, config.loss)
        columns._check_one_source(
            ("time", "failure_rate"),
            ("worker_gradient_norms", "gradient_variance", "gradient_norm"),
            ("loss", "loss_drift"),
        )
        columns._check_not_normalised(
            records,
            failure_rate_normalised=("time", "failure_rate"),
            gradient_variance_normalised=("worker_gradient_norms", "gradient_variance"),
            loss_drift_normalised=("loss", "loss_drift"),
        )
        return columns

    def _check_not_normalised(self, records: Sequence[Record], **better: tuple[str, str]) -> None:
        for stated, sources in better.items():
            needed = [i for i, r in enumerate(records) if getattr(r, stated) is not None]
            if not needed:
                continue
            found = next((getattr(self, s) for s in sources if getattr(self, s) is not None), None)
            if found is None or not np.isin(needed, _rows(found, self)).all():
                raise ValueError(
                    f"the log states {stated} on rows without {' or '.join(sources)}: "
                    "stream it through RMetric instead"
                )

    def _check_one_source(self, *alternatives: tuple[str, ...]) -> None:
        for first, *others in alternatives:
            present = [name for name in (first, *others) if getattr(self, name) is not None]
            for later in present[1:]:
                best, other = getattr(self, present[0]), getattr(self, later)
                if best.rows is not None and not np.isin(_rows(other, self), best.rows).all():
                    raise ValueError(
                        f"the log states {later} on rows without {present[0]}: "
                        "stream it through RMetric instead"
                    )


@dataclass(kw_only=True)
class Scores:
    """R and what it is made of, one row a record.

    Attributes:
        raw, normalised: shape (N, 3), in the order of `metric.Components`.
        score: R, shape (N,).
        alarm: R above the threshold, shape (N,).
    """

    raw: Floats
    normalised: Floats
    score: Floats
    alarm: NDArray[np.bool_]


def score_records(records: Sequence[Record], config: RMetricConfig | None = None) -> Scores:
    """R at every record; equal to streaming the same records."""
    config = config or RMetricConfig()
    return score_columns(Columns.from_records(records, config), config)


@np.errstate(all="ignore")  # what nan and inf give is defined at every stage
def score_columns(columns: Columns, config: RMetricConfig | None = None) -> Scores:
    """R at every row of `columns`. Raises ValueError for a variant that is not the paper's."""
    config = config or RMetricConfig()
    if config.variant != "paper":
        raise ValueError(f"variant is {config.variant!r}: a whole log is scored by 'paper' alone")
    raw_3N, normalised_3N = np.empty((2, 3, columns.num_rows))
    for i, signal_of in enumerate((failure_rate, variance, loss_drift)):
        signal = signal_of(columns, config)
        if signal is None:
            raw_3N[i], normalised_3N[i] = np.nan, 0.0
        else:
            scaled = sliding_min_max(signal.values, config.component_window)
            _hold(signal.values, signal.rows, before=np.nan, out=raw_3N[i])
            _hold(scaled, signal.rows, before=0.0, out=normalised_3N[i])
    score = config.weights[0] * normalised_3N[0]
    score += config.weights[1] * normalised_3N[1]
    score += config.weights[2] * normalised_3N[2]
    return Scores(
        raw=raw_3N.T, normalised=normalised_3N.T, score=score, alarm=score > config.threshold
    )


def failure_rate(columns: Columns, config: RMetricConfig) -> Observed | None:
    """λ, events per hour; see `signals.FailureRate`."""
    if columns.time is None or columns.event_times is None or columns.event_counts is None:
        return columns.failure_rate
    starts = np.concatenate([[0.0], columns.event_times])
    counts = columns.event_counts
    elapsed = columns.time.values - starts[np.maximum(counts - config.event_window, 0)]
    rate = np.minimum(counts, config.event_window) * SECONDS_PER_HOUR / elapsed
    return Observed(values=np.where(elapsed > 0, rate, np.nan), rows=columns.time.rows)


def variance(columns: Columns, config: RMetricConfig) -> Observed | None:
    """σ² from the best source there is; see `signals.GradientVariance`."""
    if columns.worker_gradient_norms is not None:
        norms = columns.worker_gradient_norms
        return Observed(values=population_variances(norms.values), rows=norms.rows)
    if columns.gradient_variance is not None or columns.gradient_norm is None:
        return columns.gradient_variance
    norms = columns.gradient_norm
    return Observed(values=trailing_variances(norms.values, config.norm_window), rows=norms.rows)


def loss_drift(columns: Columns, config: RMetricConfig) -> Observed | None:
    """ΔL, nats; see `signals.LossDrift`."""
    if columns.loss is None:
        return columns.loss_drift
    drifts = drifts_above_past(columns.loss.values, config.loss_window)
    if config.absolute_loss_drift:
        np.abs(drifts, out=drifts)
    return Observed(values=drifts, rows=columns.loss.rows)


def population_variances(norms_NW: Floats) -> Floats:
    """`signals.gradient_variance.population_variance` of each row."""
    num_rows, num_workers = norms_NW.shape
    if num_workers < 2:
        return np.where(np.isfinite(norms_NW).all(axis=1), np.nan, np.inf)
    out = np.empty(num_rows)
    for first in range(0, num_rows, CACHED_ROWS):
        rows = slice(first, first + CACHED_ROWS)
        norms_WN = norms_NW[rows].T
        total, squares = np.zeros((2, norms_WN.shape[1]))
        for norms_N in norms_WN[1:]:
            difference = norms_N - norms_WN[0]
            total += difference
            squares += difference * difference
        out[rows] = (squares - total * (total / num_workers)) / num_workers
    out[~(out < np.inf)] = np.inf
    return np.maximum(out, 0.0, out=out)


def trailing_variances(norms_N: Floats, window: int) -> Floats:
    """`signals.TrailingGradientVariance` at each norm."""
    finite = np.isfinite(norms_N)
    if not finite.all():
        out = np.full(len(norms_N), np.inf)
        out[finite] = trailing_variances(norms_N[finite], window)
        return out
    out = np.empty(len(norms_N))
    for row in range(min(window - 1, len(norms_N))):
        out[row] = population_variances(norms_N[None, : row + 1])[0]
    if len(norms_N) >= window:
        views = np.lib.stride_tricks.sliding_window_view(norms_N, window)
        out[window - 1 :] = population_variances(views)
    return out


def drifts_above_past(losses_N: Floats, window: int) -> Floats:
    """`signals.LossDrift` at each loss; the additions are the same, in the same order."""
    finite = np.isfinite(losses_N)
    if not finite.all():
        out = np.full(len(losses_N), np.inf)
        out[finite] = drifts_above_past(losses_N[finite], window)
        return out
    blocks = _blocks(losses_N, window)
    origins = np.concatenate([losses_N[:1], blocks[:-1, -1]])[:, None]
    tails = np.cumsum((blocks[:-1] - origins[1:])[:, ::-1], axis=1)[:, ::-1]
    blocks -= origins
    sums = np.zeros_like(blocks)
    np.cumsum(blocks[:, :-1], axis=1, out=sums[:, 1:])
    sums[1:] += tails
    out, past = blocks.ravel()[: len(losses_N)], sums.ravel()[: len(losses_N)]
    past[:1] = np.nan
    past[1:window] /= np.arange(1, len(past[:window]))
    past[window:] /= window
    out -= past
    return out


def sliding_min_max(x_N: Floats, window: int) -> Floats:
    """`normalisers.SlidingMinMax` of each value."""
    finite = np.isfinite(x_N)
    if not finite.all():
        out = (x_N == np.inf).astype(float)
        out[finite] = sliding_min_max(x_N[finite], window)
        return out
    low = sliding_extremes(np.minimum, x_N, window)
    high = sliding_extremes(np.maximum, x_N, window)
    span = high - low
    huge = np.flatnonzero(span == np.inf)
    span[span == 0.0] = 1.0  # where x - low is 0 too
    out = x_N - low
    out /= span
    out[huge] = (x_N[huge] / 2 - low[huge] / 2) / (high[huge] / 2 - low[huge] / 2)
    return out


def sliding_extremes(extreme: np.ufunc, x_N: Floats, window: int) -> Floats:
    """The `extreme` (np.minimum or np.maximum) of the last `window` values at each.

    That is the extreme of two: the head of the value's own block, up to it, and
    the tail of the block before (van Herk 1992; Gil and Werman 1993).
    """
    blocks = _blocks(x_N, window)
    out = extreme.accumulate(blocks, axis=1)
    tails = extreme.accumulate(blocks[:-1, :0:-1], axis=1)[:, ::-1]
    extreme(out[1:, :-1], tails, out=out[1:, :-1])
    return out.ravel()[: len(x_N)]


def _blocks(x_N: Floats, window: int) -> Floats:
    """`x_N` cut into rows of `window` values, the last filled up with zeros."""
    window = max(1, min(window, len(x_N)))
    blocks = np.zeros((-(-len(x_N) // window), window))
    blocks.ravel()[: len(x_N)] = x_N
    return blocks


def _hold(values: Floats, rows: NDArray[np.intp] | None, before: float, out: Floats) -> None:
    """Spread values over all rows: each holds until the next, `before` until the first."""
    if rows is None:
        out[:] = values
    else:
        first = rows[0] if len(rows) else len(out)
        out[:first] = before
        out[first:] = np.repeat(values, np.diff(rows, append=len(out)))


def _column(records: Sequence[Record], name: str) -> Observed | None:
    values = [getattr(record, name) for record in records]
    rows = [i for i, value in enumerate(values) if value is not None]
    if name == "worker_gradient_norms" and len({len(values[i]) for i in rows}) > 1:
        raise ValueError("the number of workers changes: stream the log through RMetric instead")
    return _observed([values[i] for i in rows], rows, len(records)) if rows else None


def _observed(values: list, rows: list[int], num_rows: int) -> Observed:
    everywhere = len(rows) == num_rows
    return Observed(
        values=np.array(values, dtype=float),
        rows=None if everywhere else np.array(rows, dtype=np.intp),
    )


def _rows(column: Observed, columns: Columns) -> NDArray[np.intp]:
    return np.arange(columns.num_rows) if column.rows is None else column.rows
