"""Robust detectors of norms, and the forest that draws no tree, against other ways to compute."""

from __future__ import annotations

from math import isnan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.ensemble import IsolationForest

from rmetric.detectors import OnlineIsolationForest, RobustGradientNorm, WorkerDispersion
from rmetric.detectors.online_isolation_forest import mean_depth, usual_depth
from rmetric.detectors.rolling_baseline import RobustBaseline, RollingBaseline, plain_mean
from rmetric.records import Record
from tests.detectors.calibrated_streams import records, scores

NORMS = st.lists(st.floats(0.01, 50).map(lambda x: round(x, 2)), max_size=40)


@given(NORMS)
def test_the_norm_is_held_against_scipys_median_deviation(norms):
    detector = RobustGradientNorm(window=9, least=3)
    for i, norm in enumerate(norms):
        score = detector.update(Record(step=i, gradient_norm=norm)).score
        detector.update(Record(step=i, gradient_norm=0.0))  # is left out
        past = np.log(norms[max(0, i - 9) : i])
        if len(past) < 3:
            assert isnan(score)
        elif (mad := stats.median_abs_deviation(past)) > 1e-6:
            expected = (np.log(norm) - np.median(past)) / (1.4826 * mad)
            assert score == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(st.lists(st.tuples(*[st.floats(0.1, 9).map(lambda x: round(x, 2))] * 4), max_size=30))
def test_the_workers_are_held_against_their_own_past(rows):
    detector, dispersions = WorkerDispersion(window=8, least=3), []
    for i, row in enumerate(rows):
        score = detector.update(Record(step=i, worker_gradient_norms=row)).score
        for silent in ((), (1.0,), (0.0, 0.0), (-1.0, -1.1)):  # nothing of dispersion
            detector.update(Record(step=i, worker_gradient_norms=silent))
        assert repr(detector.score) == repr(score)
        past = np.array(dispersions[-8:])
        dispersions.append(np.std(row) / np.mean(row))
        if len(past) < 3:
            assert isnan(score)
        elif (mad := stats.median_abs_deviation(past)) > 1e-6:
            expected = (dispersions[-1] - np.median(past)) / (1.4826 * mad)
            assert score == pytest.approx(expected, rel=1e-5, abs=1e-5)
    detector.update(Record(step=99, worker_gradient_norms=(1.0, float("nan"))))
    assert detector.reason.startswith("a worker's gradient norm is not finite: ")


@given(st.lists(st.integers(-9, 9), min_size=3, max_size=40), st.integers(3, 8))
def test_a_past_is_the_window_and_no_more(values, window):
    own, robust = RollingBaseline(window, 2), RobustBaseline(window, 2)
    for value in values:
        own.before(float(value))
        robust.before(float(value))
    last = values[-window:]
    assert own.before(0.0) == pytest.approx((np.mean(last), max(np.std(last), 1e-9)))
    mad = stats.median_abs_deviation(last)
    assert robust.before(0.0) == pytest.approx((np.median(last), max(1.4826 * mad, 1e-9)))
    assert plain_mean(last) == pytest.approx(np.mean(last))


# --- The forest.


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=4, max_size=30))
def test_the_closed_form_is_the_mean_depth_of_many_random_trees(values):
    ordered = np.sort(np.array(values, dtype=float))
    rng = np.random.default_rng(0)
    for value in {ordered[0], ordered[len(ordered) // 2], ordered[-1]}:
        drawn = [depth_in_a_tree(ordered, value, rng) for _ in range(1500)]
        error = np.std(drawn) / np.sqrt(len(drawn))
        assert mean_depth(ordered, value) == pytest.approx(np.mean(drawn), abs=5 * error + 1e-9)


def depth_in_a_tree(ordered: np.ndarray, value: float, rng: np.random.Generator) -> float:
    """Cut at random until `value` is alone, as Liu, Ting and Zhou say."""
    depth = 0
    while ordered[0] != ordered[-1]:
        cut = rng.uniform(ordered[0], ordered[-1])
        ordered = ordered[ordered > cut] if value > cut else ordered[ordered <= cut]
        depth += 1
    return depth + usual_depth(len(ordered))


def test_an_outlier_scores_as_in_sklearn():
    rng = np.random.default_rng(1)
    values = [*(2 + rng.normal(size=199) / 10).tolist(), 3.2]
    forest = IsolationForest(n_estimators=300, random_state=0).fit([[x] for x in values])
    detector = OnlineIsolationForest()
    scores(records(values), detector)
    theirs = -forest.score_samples([[values[-1]]])[0]
    assert detector.score == pytest.approx(theirs, abs=0.03)
    assert detector.alarm
    assert detector.update(Record(step=201, training_loss=-50.0)).score == 0  # below the median
