"""What counts as a failure of a real run."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.records import Record, Truth
from studies.case_study.twins import truth_of

INJECTED = Truth(fault="LR_SPIKE", severity=15.0, onset_step=50, duration_steps=20)
losses = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=30)


def evaluated(values) -> list[Record]:
    return [Record(step=10 * i, validation_loss=value) for i, value in enumerate(values, 1)]


@given(losses)
def test_a_run_that_is_its_twin_is_never_degraded(values):
    truth = truth_of(INJECTED, evaluated(values), evaluated(values))
    assert truth.failure_kind in (None, "diverged")


@given(losses)
def test_a_falling_loss_fails_by_no_definition(values):
    values = sorted(values, reverse=True)
    worse = [value + 1.0 for value in values]
    assert truth_of(Truth(), evaluated(values), None).outcome == "healthy"
    assert truth_of(INJECTED, evaluated(values), evaluated(worse)).outcome == "absorbed"


def test_a_loss_that_stays_up_has_diverged_since_it_rose():
    truth = truth_of(INJECTED, evaluated([3, 2, 1, 1, 1, 2, 2, 2, 2]), None)
    assert (truth.outcome, truth.failure_kind) == ("failed", "diverged")
    assert truth.failure_step == 70  # the median of three is up from the second high value on


def test_a_loss_that_comes_back_was_absorbed():
    assert truth_of(INJECTED, evaluated([3, 2, 1, 2, 2, 2, 1, 1, 1]), None).outcome == "absorbed"


def test_a_lasting_gap_to_the_twin_is_degraded():
    twin = evaluated([3, 2, 1, 0.9, 0.9, 0.9, 0.9])
    run = evaluated([3, 2, 1, 1.05, 1.05, 1.05, 1.05])
    truth = truth_of(INJECTED, run, twin)
    assert (truth.failure_kind, truth.failure_step) == ("degraded", 50)


@pytest.mark.parametrize("strange", [nan, inf])
def test_a_loss_that_stays_no_number_failed_where_it_began(strange):
    records = [Record(step=i, training_loss=2.0) for i in range(1, 60)]
    records += [Record(step=i, training_loss=strange) for i in range(60, 64)]
    truth = truth_of(INJECTED, records, records)
    assert (truth.failure_kind, truth.failure_step) == ("non_finite", 60)


def test_one_strange_loss_and_an_overflowing_gradient_are_no_failure():
    records = evaluated([3, 2, 1])
    records.insert(1, Record(step=11, training_loss=nan, gradient_norm=inf))
    assert truth_of(INJECTED, records, None).outcome == "absorbed"


def test_a_run_that_ended_early_is_compared_as_far_as_it_goes():
    run = [*evaluated([3, 2]), Record(step=25, training_loss=nan)]
    truth = truth_of(INJECTED, run, evaluated([3, 2, 1, 1]))
    assert truth.failure_kind == "non_finite"


def test_a_loss_that_still_falls_fast_at_the_end_has_not_diverged():
    assert truth_of(Truth(), evaluated([5.5, 3.2, 2.5]), None).outcome == "healthy"
