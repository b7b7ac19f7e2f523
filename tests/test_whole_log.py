import numpy as np
import pytest
from hypothesis import given, settings

from rmetric import HardwareEvent, Record, RMetric, RMetricConfig, whole_log
from rmetric.whole_log import Columns, Observed, score_columns, score_records, sliding_min_max
from tests.streams import CONFIGS, TAME, WILD, streams


def assert_equal_at_every_prefix(records, config):
    scores = score_records(records, config)
    assert len(scores.score) == len(records)
    metric = RMetric(config)
    for i, record in enumerate(records):
        metric.update(record)
        np.testing.assert_allclose(scores.score[i], metric.score, rtol=0, atol=1e-12)
        np.testing.assert_allclose(scores.normalised[i], metric.normalised, rtol=0, atol=1e-12)
        np.testing.assert_allclose(scores.raw[i], metric.raw, rtol=1e-12)
        assert scores.alarm[i] == metric.alarm


@settings(max_examples=200)
@given(streams(values=TAME | WILD, max_size=40), CONFIGS)
def test_it_equals_the_stream_at_every_prefix(records, config):
    assert_equal_at_every_prefix(records, config)


@pytest.mark.parametrize("preset", [RMetricConfig.simulation, RMetricConfig.case_study])
def test_it_equals_the_stream_on_a_long_run(preset):
    rng = np.random.default_rng(3)
    odd = (np.nan, np.inf, -np.inf, 1e300, -1e308)
    records = [
        Record(
            step=step,
            time=5.0 * step,
            validation_loss=float(rng.choice(odd) if rng.random() < 0.02 else rng.normal(3, 1)),
            worker_gradient_norms=tuple(rng.gamma(4.0, size=8)),
            events=(HardwareEvent(5.0 * step - rng.random(), "xid"),) * rng.poisson(0.3),
        )
        for step in range(1, 2501)
    ]
    assert_equal_at_every_prefix(records, preset())


@given(streams(values=WILD), CONFIGS)
def test_no_score_looks_ahead(records, config):
    whole = score_records(records, config).score
    for length in {len(records) // 3, len(records) // 2}:
        np.testing.assert_array_equal(score_records(records[:length], config).score, whole[:length])


def test_columns_can_be_given_without_records():
    columns = Columns(
        num_rows=4,
        time=Observed(values=np.array([0.0, 1800.0, 3600.0, 7200.0])),
        event_times=np.array([600.0, 7000.0]),
        event_counts=np.array([0, 1, 1, 2]),
        loss=Observed(values=np.array([3.0, 2.0, 4.0]), rows=np.array([0, 2, 3])),
    )
    scores = score_columns(columns)
    np.testing.assert_array_equal(scores.raw[:, 0], [np.nan, 2.0, 1.0, 1.0])
    np.testing.assert_array_equal(scores.raw[:, 2], [np.nan, np.nan, -1.0, 1.5])
    np.testing.assert_array_equal(scores.normalised[:, 2], [0.0, 0.0, 0.0, 1.0])
    np.testing.assert_allclose(scores.score, [0.0, 0.0, 0.0, 0.70])
    np.testing.assert_array_equal(scores.alarm, [False, False, False, True])


def test_how_many_rows_are_worked_on_at_once_does_not_matter(monkeypatch):
    norms = Observed(values=np.random.default_rng(1).gamma(2.0, size=(100, 4)))
    columns = Columns(num_rows=100, worker_gradient_norms=norms)
    at_once = score_columns(columns)
    monkeypatch.setattr(whole_log, "CACHED_ROWS", 7)
    np.testing.assert_array_equal(score_columns(columns).raw, at_once.raw)


def test_an_empty_log_has_no_scores():
    scores = score_records([])
    assert scores.score.shape == (0,)
    assert scores.raw.shape == (0, 3)


def test_scores_do_not_write_into_what_they_were_given():
    values = np.array([3.0, 2.0, 5.0, 1.0])
    columns = Columns(
        num_rows=4,
        loss=Observed(values=values),
        worker_gradient_norms=Observed(values=np.stack([values, values**2], axis=1)),
    )
    score_columns(columns, RMetricConfig(loss_window=2, component_window=2))
    np.testing.assert_array_equal(values, [3.0, 2.0, 5.0, 1.0])


def test_a_window_longer_than_the_log_needs_no_memory_for_it():
    x = np.array([1.0, 3.0, 2.0])
    np.testing.assert_array_equal(sliding_min_max(x, 10**12), [0.0, 1.0, 0.5])


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({"time": 5.0, "events": ()}, {"failure_rate": 1.0}, "failure_rate on rows without time"),
        (
            {"worker_gradient_norms": (1.0, 2.0)},
            {"gradient_norm": 1.0},
            "gradient_norm on rows without worker_gradient_norms",
        ),
        ({"validation_loss": 2.0}, {"loss_drift": 1.0}, "loss_drift on rows without loss"),
        (
            {"worker_gradient_norms": (1.0, 2.0)},
            {"worker_gradient_norms": (1.0, 2.0, 3.0)},
            "the number of workers changes",
        ),
    ],
)
def test_a_log_that_changes_its_sources_must_be_streamed(first, second, named):
    records = [Record(step=1, **first), Record(step=2, **second)]
    with pytest.raises(ValueError, match=named):
        score_records(records)


def test_a_statement_beside_its_source_is_ignored_as_in_the_stream():
    records = [
        Record(step=s, validation_loss=float(s % 5), loss_drift=99.0, gradient_variance=2.0 * s)
        for s in range(1, 30)
    ]
    assert_equal_at_every_prefix(records, RMetricConfig(component_window=4, loss_window=3))
