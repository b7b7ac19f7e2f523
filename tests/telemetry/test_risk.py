"""The risk score: laws, its factors by hand, and settings that are refused."""

from dataclasses import astuple, replace
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.telemetry.reading import RECOVERY_ACTIONS, Reading
from rmetric.telemetry.risk import ERRORS, FACTORS, RiskConfig, RiskScore, RiskWeights

FULL = dict(
    slowdown_temperature_celsius=90.0,
    memory_total_bytes=100,
    **dict.fromkeys(ERRORS, 0),
)


def reading(time, **values):
    return Reading(gpu=0, time=time, **(FULL | values))


values = {
    "temperature_celsius": st.none() | st.just(nan) | st.floats(20, 110),
    "power_watts": st.none() | st.floats(0, 1500),
    "utilisation_percent": st.none() | st.floats(0, 100),
    "memory_used_bytes": st.none() | st.integers(0, 100),
    "ecc_corrected_errors": st.none() | st.integers(0, 500),
    "nvlink_replays": st.none() | st.integers(0, 5000),
}
histories = st.lists(st.fixed_dictionaries(values), min_size=1, max_size=40)


def scored(history, config=None, **last):
    """The risk after a history, whose last reading has `last` in place of its own."""
    score = RiskScore(config)
    history = [*history[:-1], history[-1] | last]
    return [score.update(reading(10.0 * n, **fields)) for n, fields in enumerate(history)][-1]


class TestLaws:
    @given(histories)
    def test_score_factors_and_reach_lie_between_0_and_1(self, history):
        risk = scored(history)
        known = {name: factor for name, factor in risk.factors.items() if factor is not None}
        assert all(0 <= factor <= 1 for factor in known.values())
        assert (risk.value is None) == (not known)
        assert risk.value is None or 0 <= risk.value <= risk.reachable + 1e-12 <= 1 + 1e-12

    @given(histories)
    def test_the_score_is_the_weighted_sum_of_its_factors(self, history):
        risk = scored(history)
        known = [(w, f) for w, f in zip(astuple(RiskWeights()), risk.factors.values(), strict=True)]
        expected = sum(w * f for w, f in known if f is not None)
        assert risk.value is None or risk.value == pytest.approx(expected)
        assert risk.reachable == pytest.approx(sum(w for w, f in known if f is not None))

    @given(histories, st.floats(0.1, 10))
    def test_weights_in_another_scale_give_the_same_score(self, history, scale):
        weights = RiskWeights(**{n: scale * getattr(RiskWeights(), n) for n in FACTORS})
        scaled, plain = scored(history, RiskConfig(weights=weights)), scored(history)
        assert scaled.value == pytest.approx(plain.value)
        assert scaled.reachable == pytest.approx(plain.reachable)

    @given(
        histories,
        st.sampled_from(["temperature_celsius", "memory_used_bytes", *sorted(ERRORS)]),
        st.integers(0, 100),
        st.integers(0, 100),
    )
    def test_what_is_worse_is_never_less_at_risk(self, history, name, first, second):
        """Also a lower utilisation."""
        low, high = sorted((first, second))
        assert scored(history, **{name: low}).value <= scored(history, **{name: high}).value + 1e-12
        idle = scored(history, utilisation_percent=low).value
        assert idle is None or idle >= scored(history, utilisation_percent=high).value - 1e-12


class TestFactors:
    def test_each_against_numpy(self):
        rng = np.random.default_rng(0)
        celsius, watts = rng.uniform(60, 85, 90), rng.uniform(100, 700, 90)
        percent = rng.uniform(40, 100, 90)
        history = [
            {"temperature_celsius": c, "power_watts": w, "utilisation_percent": u}
            for c, w, u in zip(celsius, watts, percent, strict=True)
        ]
        measured = scored(history).measured
        times = np.arange(60) / 6  # minutes
        assert measured["temperature_rise"] == pytest.approx(np.polyfit(times, celsius[-60:], 1)[0])
        assert measured["power"] == pytest.approx(watts[-60:].std() / watts[-60:].mean())
        drop = max(0, 1 - percent[-6:].mean() / percent[-60:-6].mean())
        assert measured["utilisation_drop"] == pytest.approx(drop)

    def test_errors_leave_with_the_window_and_a_reload_is_none(self):
        rises = [0, 50, 50, 20] + [20] * 60
        score = RiskScore()
        risks = [
            score.update(reading(10.0 * n, ecc_corrected_errors=count)).factors["errors"]
            for n, count in enumerate(rises)
        ]
        assert risks[:4] == [0.0, 0.5, 0.5, 0.5]
        assert risks[60:62] == [0.5, 0.0]  # the rise at 10 s is out of the window at 610 s

    def test_a_constant_temperature_does_not_rise_at_todays_times(self):
        score = RiskScore()
        for n in range(60):
            risk = score.update(reading(1.8e9 + 10.001 * n, temperature_celsius=63.0))
        assert risk.measured["temperature_rise"] == 0.0

    def test_missing_is_not_zero(self):
        risk = scored([dict.fromkeys(ERRORS)])
        assert risk.value is None
        assert risk.reachable == 0.0
        risk = scored([{"temperature_celsius": 30.0}])
        assert risk.value == 0.0
        assert risk.reachable == pytest.approx(0.5)
        assert risk.factors["memory"] is None

    @pytest.mark.parametrize("strange", [nan, inf, -inf])
    def test_a_value_that_is_no_number_is_unknown_and_does_no_harm_later(self, strange):
        warm = {"temperature_celsius": 80.0, "power_watts": 500.0}
        odd = dict.fromkeys(warm, strange)
        assert scored([warm] * 20 + [odd]).factors["temperature"] is None
        assert scored([warm] * 10 + [odd] + [warm] * 10).factors == scored([warm] * 20).factors


class TestSettings:
    def test_the_originals_are_the_default(self):
        assert astuple(RiskWeights()) == (0.25, 0.15, 0.25, 0.10, 0.15, 0.10)
        assert RiskWeights().sum == pytest.approx(1.0)
        config = RiskConfig()
        assert (config.interval, config.window, config.threshold) == (10.0, 60, 0.95)

    @pytest.mark.parametrize("weight", [-0.1, nan, inf])
    def test_a_weight_that_is_none_is_refused(self, weight):
        with pytest.raises(ValueError, match="weight of errors"):
            RiskWeights(errors=weight)

    @pytest.mark.parametrize(
        "settings",
        [
            {"interval": nan},
            {"window": 1},
            {"window": 60.0},
            {"threshold": 0.0},
            {"release": 1.5},
            {"temperature_span": 0.0},
            {"temperature_high": inf},
            {"memory_low": 1.0},
            {"corrected_errors_full": 0.0},
            {"recent": 60},
            {"least_readings": 61},
            {"least_utilisation": 101.0},
        ],
        ids=str,
    )
    def test_a_setting_out_of_range_is_refused_by_name(self, settings):
        (name,) = settings
        with pytest.raises(ValueError, match=name):
            RiskConfig(**settings)


class TestReading:
    @given(
        st.fixed_dictionaries(
            values
            | {
                "temperature_celsius": st.none() | st.floats(allow_nan=False),
                "row_remap_failed": st.none() | st.booleans(),
                "recovery_action": st.none() | st.sampled_from(RECOVERY_ACTIONS),
                "throttle_reasons": st.none() | st.frozensets(st.sampled_from(["a", "b"])),
            }
        )
    )
    def test_json_gives_the_reading_back(self, some):
        original = replace(reading(5.0), **some)
        entry = original.as_json()
        assert None not in entry.values()
        assert Reading.from_json(entry | {"event": "READING", "node": "a"}) == original

    @pytest.mark.parametrize(
        ("entry", "problem"),
        [
            ({"gpu": 0}, "missing required field `time`"),
            ({"gpu": 0.5, "time": 1}, r"`\$\.gpu`: found 0.5"),
            ({"gpu": 0, "time": 1, "pcie_replays": "many"}, r"`\$\.pcie_replays`: found 'many'"),
            ({"gpu": 0, "time": 1, "row_remap_failed": 1}, r"`\$\.row_remap_failed`: found 1"),
        ],
    )
    def test_what_is_no_reading_is_refused_by_key(self, entry, problem):
        with pytest.raises(ValueError, match=problem):
            Reading.from_json(entry)
