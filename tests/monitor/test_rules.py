"""What the two rules say of one step."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.monitor.rules import StepRules

NORMS = st.floats(0.1, 10.0)


def names(broken):
    return [rule for rule, _ in broken]


@given(st.lists(NORMS, max_size=60))
def test_norms_that_stay_within_the_factor_break_nothing(norms):
    rules = StepRules(factor=101.0, window=10)
    assert all(rules.update(2.0, norm) == [] for norm in norms)


@pytest.mark.parametrize(
    ("loss", "norm"), [(nan, 1.0), (inf, 1.0), (2.0, nan), (2.0, inf), (nan, nan)]
)
def test_what_is_no_number_is_reported_once(loss, norm):
    [(rule, reason)] = StepRules().update(loss, norm)
    assert rule == "non_finite"
    assert ("loss is" in reason, "gradient norm is" in reason) == (loss != 2.0, norm != 1.0)


TEN = dict(factor=10.0, window=10)


@pytest.mark.parametrize(
    ("settings", "past", "norm", "explodes"),
    [
        (TEN, [1.0] * 5, 9.9, False),
        (TEN, [1.0] * 5, 10.1, True),
        (TEN, [1.0] * 4, 1e6, False),  # half the window must be past
        ({"window": 4}, [0.0] * 4, 1e-3, False),
        ({}, [], None, False),
    ],
)
def test_an_explosion_is_measured_against_the_median(settings, past, norm, explodes):
    rules = StepRules(**settings)
    assert all(rules.update(2.0, usual) == [] for usual in past)
    assert names(rules.update(norm and 2.0, norm)) == ["gradient_explosion"] * explodes


def test_a_scaler_may_overflow_until_it_does_so_too_often():
    rules = StepRules(scaled=True, overflows=3)
    assert [names(rules.update(2.0, inf)) for _ in range(4)] == [[], [], *[["non_finite"]] * 2]
    assert names(StepRules(scaled=True).update(nan, inf)) == ["non_finite"]
    rules = StepRules(scaled=True, overflows=2)  # a finite step starts the count anew
    assert [names(rules.update(2.0, norm)) for norm in (inf, 1.0, inf, 1.0)] == [[], [], [], []]
