"""Each baseline against another way to compute it."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.ensemble import IsolationForest

from rmetric import RMetric
from rmetric.detectors import (
    GradientNorm,
    LossRise,
    LossSlope,
    LossZScore,
    Never,
    PeekingIsolationForest,
    Random,
)
from rmetric.records import Record, Run

LOSSES = st.lists(st.floats(-50, 50).map(lambda x: round(x, 2)), max_size=40)


def records_of(values: list[float]) -> list[Record]:
    return [
        Record(step=i, validation_loss=x, gradient_norm=x) for i, x in enumerate(values, start=1)
    ]


def test_an_alarmed_metric_says_what_it_is_made_of():
    metric = RMetric()
    for step, loss in enumerate([3.0, 2.5, 2.4, 2.9], start=1):
        metric.update(
            Record(step=step, validation_loss=loss, worker_gradient_norms=(1.0, 1.0 + step % 2 / 4))
        )
        assert bool(metric.reason) == metric.alarm
    assert metric.reason == (
        "R 0.70, limit 0.57, parts: ΔL 0.70 (0.267), σ² 0.00 (0 squared norm units): roll "
        "back to a checkpoint before the rise if the next evaluation is as high"
    )


@given(LOSSES)
def test_two_rises_are_three_losses_in_rising_order(values):
    rise = LossRise()
    for i, record in enumerate(records_of(values)):
        assert rise.update(record).alarm == (i >= 2 and values[i - 2] < values[i - 1] < values[i])


def test_losses_beyond_all_bounds_rise():
    rise = LossRise()
    alarms = [rise.update(record).alarm for record in records_of([2.0, nan, inf, 2.1, 2.0])]
    assert alarms == [False, False, True, True, False]


@given(LOSSES)
def test_the_slope_and_its_error_are_those_of_numpy(values):
    detector = LossSlope(window=6)
    for i, record in enumerate(records_of(values)):
        score = detector.update(record).score
        last = np.array(values[max(0, i - 5) : i + 1])
        if len(last) < 6:
            assert np.isnan(score)
        elif np.ptp(last) == 0:
            assert score == 0
        elif np.abs(np.diff(last, n=2)).max() > 1e-6:  # else a line, and rounding decides
            (slope, _), covariance = np.polyfit(range(6), last, 1, cov=True)
            assert score == pytest.approx(slope / np.sqrt(covariance[0, 0]), rel=1e-6, abs=1e-9)


@given(LOSSES)
def test_the_z_score_is_that_of_numpy(values):
    z = LossZScore(window=8, least=3)
    for i, record in enumerate(records_of(values)):
        score = z.update(record).score
        past = np.array(values[max(0, i - 8) : i])
        if len(past) < 3:
            assert np.isnan(score)
        elif np.ptp(past) == 0:
            assert score == (0 if values[i] == past[0] else inf)
        else:
            assert score == pytest.approx(abs(values[i] - past.mean()) / past.std(), rel=1e-6)


@given(LOSSES)
def test_the_gradient_norm_is_measured_against_the_median_before_it(values):
    norms = [abs(x) + 0.01 for x in values]
    detector = GradientNorm(window=7, least=2)
    for i, record in enumerate(records_of(norms)):
        score = detector.update(record).score
        past = norms[max(0, i - 7) : i]
        if len(past) < 2:
            assert np.isnan(score)
        else:
            assert score == pytest.approx(norms[i] / np.median(past))


def test_the_forest_alarms_where_sklearn_says_outlier():
    rng = np.random.default_rng(4)
    values = [*(2 + rng.normal(size=40) / 10).tolist(), 2.9, 6.0]
    run = Run(id="r", records=records_of(values))
    detector = PeekingIsolationForest().fit(run)
    column = [[value] for value in values]
    says = IsolationForest(contamination="auto", random_state=42).fit_predict(column)
    alarms = [detector.update(record).alarm for record in run.records]
    assert alarms == (says == -1).tolist()
    assert alarms[-1]


def test_a_forest_that_has_seen_nothing_refuses():
    with pytest.raises(RuntimeError, match=r"fit\(run\)"):
        PeekingIsolationForest().update(Record(step=1, validation_loss=2.0))


def test_chance_alarms_about_as_often_as_it_says():
    detector = Random(np.random.default_rng(0), probability=0.2)
    assert 0.18 < np.mean([detector.update(Record(step=i)).alarm for i in range(5000)]) < 0.22
    assert not Never().update(Record(step=1)).alarm
