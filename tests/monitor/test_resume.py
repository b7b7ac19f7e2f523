"""A monitor that resumes with other settings, or from a state that does not fit."""

import json
import logging

from rmetric import RMetricConfig
from rmetric.monitor import Monitor, MonitorConfig
from tests.monitor.training import make_model


def state_after(config, norms, scaler=None):
    monitor = Monitor(make_model(), config=config, scaler=scaler)
    for norm in norms:
        monitor.check_before_step(1.0, gradient_norm=norm)
    state = json.loads(json.dumps(monitor.state_dict()))
    monitor.close()
    return state


def test_the_settings_of_the_new_process_hold_after_a_resume():
    state = state_after(MonitorConfig(explosion_window=10), [1.0] * 10)
    config = MonitorConfig(
        explosion_factor=50.0,
        explosion_window=10,
        stall_seconds=60.0,
        slow_rank_factor=3.0,
        slow_drift=0.5,
        metric=RMetricConfig(threshold=0.9, loss="training_loss"),
    )
    fresh, monitor = Monitor(make_model(), config=config), Monitor(make_model(), config=config)
    monitor.load_state_dict(state)
    for norm in (30.0, 1.0):  # 30 times the usual norm
        monitor.check_before_step(1.0, gradient_norm=norm)
    assert [alert.source for alert in monitor.alerts] == []
    monitor.check_before_step(1.0, gradient_norm=60.0)
    monitor.close()
    assert [alert.source for alert in monitor.alerts] == ["gradient_explosion"]
    for of in (lambda m: m.metric, lambda m: m._rule_judge.rules):
        for name in type(of(monitor)).SETTINGS:
            assert getattr(of(monitor), name) == getattr(of(fresh), name), name
    for part in ("_stall", "_slow_rank", "_drift"):
        rule, other = (getattr(m._step_time_judge.rules, part) for m in (monitor, fresh))
        for name in type(rule).SETTINGS:
            assert getattr(rule, name) == getattr(other, name), name


def test_a_part_whose_state_does_not_fit_starts_anew_and_the_rest_goes_on(caplog):
    state = state_after(MonitorConfig(explosion_window=10), [1.0] * 10)
    del state["detectors"]["calibrated"]["_course"]  # as of an earlier version
    state["alarmed"] = ["calibrated"]
    config = MonitorConfig(
        explosion_window=10, metric=RMetricConfig.authors_simulator(),
        detectors=("calibrated", "gradient_norm"),
    )  # fmt: skip
    monitor = Monitor(make_model(), config=config)
    with caplog.at_level(logging.WARNING, "rmetric"):
        monitor.load_state_dict(state)
    assert monitor.usable
    assert monitor.step == 10
    assert ["starts anew" in message for message in caplog.messages] == [True] * 3
    assert "the saved state has no gradient_norm: it starts anew" in caplog.text
    assert monitor._detector_judge.alarmed == set()
    for norm in (30.0, 1.0):
        monitor.check_before_step(1.0, gradient_norm=norm)
    monitor.close()
    assert [alert.source for alert in monitor.alerts] == ["gradient_explosion"]
