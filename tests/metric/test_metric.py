import doctest
import pickle
import re
from math import inf, isfinite, nan
from pathlib import Path

import pytest
from hypothesis import given

from rmetric import HardwareEvent, Record, RMetric, RMetricConfig
from rmetric.metric import MODES, PRESETS, Components
from tests.detectors.streams import CONFIGS, TAME_CONFIGS, WILD, streams
from tests.metric.plain_metric import PlainMetric


def losses(*values, **fields):
    return [Record(step=i, validation_loss=v, **fields) for i, v in enumerate(values, start=1)]


def assert_same(metric, plain):
    assert metric.score == pytest.approx(plain.score, abs=1e-12)
    assert metric.normalised == pytest.approx(plain.normalised, abs=1e-12)
    assert metric.raw == pytest.approx(plain.raw, rel=1e-12, nan_ok=True)


@given(streams(), TAME_CONFIGS)
def test_the_stream_equals_the_plain_metric_at_every_record(records, config):
    metric, plain = RMetric(config), PlainMetric(config)
    for record in records:
        assert_same(metric.update(record), plain.update(record))


@given(streams(values=WILD), CONFIGS)
def test_whatever_is_logged_the_score_stays_between_0_and_the_sum_of_the_weights(records, config):
    metric = RMetric(config)
    for record in records:
        metric.update(record)
        assert 0.0 <= metric.score <= sum(config.weights) + 1e-12
        assert all(0.0 <= value <= 1.0 for value in metric.normalised)
        assert metric.alarm == (metric.score > config.threshold)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-300, 1e100, 2.7182818])
def test_a_run_that_stands_still_scores_0(value):
    fields = (
        {"validation_loss": value},
        {"worker_gradient_norms": (value, value * 1.1, value * 0.7)},
        {"gradient_norm": value},
        {"failure_rate": value, "gradient_variance": value, "loss_drift": value},
    )
    for signals in fields:
        metric = RMetric(RMetricConfig(component_window=7, loss_window=3, norm_window=5))
        for step in range(1, 60):
            assert metric.update(Record(step=step, **signals)).score == 0.0


def test_the_alarm_needs_a_score_above_the_threshold():
    alone = RMetricConfig(threshold=1.0).with_mode("DELTA_L_ONLY")
    metric = RMetric(alone).update_all(losses(1.0, 1.0, 5.0))
    assert metric.score == 1.0
    assert not metric.alarm
    below = RMetricConfig(threshold=0.99).with_mode("DELTA_L_ONLY")
    assert RMetric(below).update_all(losses(1.0, 1.0, 5.0)).alarm


def test_the_drift_at_the_top_of_its_window_is_an_alarm_by_itself():
    metric = RMetric().update_all(losses(3.0, 2.5, 2.4, 2.9))
    assert metric.score == 0.70
    assert metric.alarm


def test_a_signal_that_a_record_says_nothing_about_keeps_its_value():
    metric = RMetric().update_all(losses(1.0, 1.0, 5.0, gradient_variance=2.0))
    before = metric.raw, metric.normalised, metric.score
    metric.update(Record(step=4, training_loss=9.0))
    assert (metric.raw, metric.normalised, metric.score) == before
    assert metric.sources == (None, None, None)
    assert metric.variance_source == "logged"


def test_each_signal_says_what_it_was_taken_from():
    metric = RMetric()
    updated = metric.update(
        Record(step=1, time=9.0, events=(), worker_gradient_norms=(1.0, 2.0), validation_loss=3.0)
    )
    assert updated.sources == ("events", "workers", "validation_loss")
    metric.update(Record(step=2, gradient_norm=1.0, loss_drift=0.5))
    assert metric.sources == (None, None, "logged")  # one norm adds nothing to the workers' own
    assert RMetric().update(Record(step=1, gradient_norm=1.0)).sources == (None, "trailing", None)
    on_training = RMetric(RMetricConfig(loss="training_loss"))
    assert on_training.update(Record(step=1, training_loss=2.0)).sources[2] == "training_loss"


def test_what_a_signal_is_made_of_goes_before_what_a_log_states():
    metric = RMetric().update(
        Record(step=1, time=3600.0, events=(HardwareEvent(1.0, "xid"),), failure_rate=99.0,
               worker_gradient_norms=(1.0, 3.0), gradient_variance=99.0, gradient_norm=99.0)
    )  # fmt: skip
    assert metric.raw[:2] == (1.0, 1.0)


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_a_loss_that_is_no_number_is_very_large_and_is_forgotten(bad):
    metric = RMetric().update_all(losses(3.0, 2.0, bad))
    assert metric.raw.loss_drift == inf
    assert metric.alarm
    metric.update(Record(step=4, validation_loss=2.5))
    assert metric.raw.loss_drift == 0.0
    assert metric.normalised.loss_drift == 1.0  # 0.0 above -1.0, the only other drift


@pytest.mark.parametrize(
    ("logged", "normalised"), [(nan, 0.0), (-inf, 0.0), (inf, 1.0), (2.0, 0.5), (9.0, 1.0)]
)
@pytest.mark.parametrize("signal", Components._fields)
def test_a_stated_signal_that_is_no_number_has_a_defined_score(signal, logged, normalised):
    metric = RMetric()
    for step, value in enumerate((1.0, 3.0, logged), start=1):
        metric.update(Record(step=step, **{signal: value}))
    assert getattr(metric.normalised, signal) == normalised
    assert isfinite(metric.score)


@pytest.mark.parametrize("mode", MODES)
def test_an_ablation_scores_one_signal_alone(mode):
    metric = RMetric(RMetricConfig().with_mode(mode))
    for step, (rate, variance, drift) in enumerate([(1, 1, 1), (9, 9, 9), (2, 3, 5)], start=1):
        metric.update(
            Record(step=step, failure_rate=rate, gradient_variance=variance, loss_drift=drift)
        )
    weights = {
        "FULL_METRIC": (0.10, 0.45, 0.70),
        "LAMBDA_ONLY": (1, 0, 0),
        "SIGMA_ONLY": (0, 1, 0),
        "DELTA_L_ONLY": (0, 0, 1),
    }[mode]
    parts = (1 / 8, 2 / 8, 4 / 8)
    assert metric.score == pytest.approx(sum(w * p for w, p in zip(weights, parts, strict=True)))


def test_the_presets_are_the_papers():
    simulation, case_study = PRESETS["simulation"](), PRESETS["case_study"]()
    assert simulation == RMetricConfig() == RMetricConfig.simulation()
    assert simulation.weights == (0.10, 0.45, 0.70)
    assert simulation.threshold == 0.57
    windows = simulation.component_window, simulation.event_window, simulation.loss_window
    assert windows == (1000, 50, 100)
    assert not simulation.absolute_loss_drift
    assert (case_study.component_window, case_study.loss_window) == (100, 10)
    assert case_study.absolute_loss_drift
    assert RMetricConfig.case_study(loss_window=7).loss_window == 7


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"weights": (0.1, -0.1, 0.7)}, "weight of gradient_variance is -0.1"),
        ({"weights": (nan, 0.1, 0.7)}, "weight of failure_rate is nan"),
        ({"weights": (0.1, 0.1, inf)}, "weight of loss_drift is inf"),
        ({"weights": (0.1, 0.1, "0.7")}, "weight of loss_drift is '0.7'"),
        ({"weights": (0.0, 0.0, 0.0)}, "all three weights are 0"),
        ({"weights": (0.1, 0.2)}, "weights are (0.1, 0.2): three are needed"),
        ({"weights": 0.7}, "weights are 0.7: three are needed"),
        ({"threshold": nan}, "threshold is nan"),
        ({"threshold": "high"}, "threshold is 'high'"),
        ({"component_window": 1}, "component_window is 1: it must be an int of at least 2"),
        ({"component_window": 10.0}, "component_window is 10.0"),
        ({"component_window": nan}, "component_window is nan"),
        ({"event_window": 0}, "event_window is 0: it must be an int of at least 1"),
        ({"loss_window": -3}, "loss_window is -3: it must be an int of at least 1"),
        ({"norm_window": 1}, "norm_window is 1: it must be an int of at least 2"),
        ({"loss": "perplexity"}, "loss is 'perplexity'"),
        ({"variant": "theirs"}, "variant is 'theirs': known are paper, authors_simulator"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        RMetricConfig(**changes)


def test_an_unknown_mode_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'SIGMA': known are FULL_METRIC, LAMBDA_ONLY"):
        RMetricConfig().with_mode("SIGMA")


@pytest.mark.parametrize("trend", [1.0, -1.0, 0.0])
def test_memory_is_constant(trend):
    metric = RMetric(RMetricConfig(component_window=50, event_window=20, loss_window=30))

    def size_after(steps):
        for step in steps:
            value = trend * step + 0.25 * (step % 7)
            event = HardwareEvent(5.0 * step, "thermal")
            fields = dict(worker_gradient_norms=(value, 2 * value), validation_loss=value)
            metric.update(Record(step=step, time=5.0 * step, events=(event,), **fields))
        return len(pickle.dumps(metric))

    full = max(size_after([step]) for step in range(1, 200))
    assert size_after(range(200, 3000)) <= 1.2 * full


def test_the_example_on_the_page_gives_what_it_shows():
    page = Path(__file__).resolve().parents[2] / "docs" / "metric.md"
    tried = doctest.testfile(str(page), module_relative=False)
    assert (tried.failed, tried.attempted) == (0, 3)
