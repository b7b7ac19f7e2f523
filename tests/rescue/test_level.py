"""The level of the loss before and after an incident, and the distance of snapshots."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.rescue.judgement import LossLevel
from rmetric.rescue.snapshot_keeper import BUDGET, SnapshotPace


def level_of(losses, onset, *, after=()):
    level = LossLevel()
    for step, loss in enumerate(losses, start=1):
        level.update(step, loss)
    level.mark(onset)
    for step, loss in enumerate(after, start=len(losses) + 1):
        level.update(step, loss)
    return level


@given(st.integers(0, 1000), st.floats(0.001, 1000), st.floats(0.0, 0.2))
def test_a_loss_that_only_has_noise_is_back_and_one_a_third_higher_is_not(seed, scale, noise):
    rng = np.random.default_rng(seed)
    losses = scale * (2 + noise * rng.normal(size=60)).clip(0.1)
    assert level_of(losses[:30], 25, after=losses[30:]).has_recovered
    assert level_of(losses[:30], 25, after=losses[30:] + scale).has_recovered is False


def test_the_level_before_is_that_of_the_steps_before_the_onset():
    losses = [2.0, 2.1] * 10 + [9.0] * 5
    assert level_of(losses, 21).has_recovered is False
    assert level_of(losses, 21, after=[2.0, 2.1] * 5).has_recovered


def test_too_few_losses_tell_nothing():
    assert level_of([2.0, 2.0, 9.0], 3).has_recovered is None
    assert level_of([], 1).has_recovered is None
    assert level_of([2.0] * 5 + [float("nan")] * 9, 6).has_recovered


def test_a_return_keeps_the_level_before_the_incident():
    level = level_of([2.0, 2.1] * 10, 21)
    level.go_back([(1, 5.0), (2, 5.1)])
    for step in range(3, 13):
        level.update(step, 3.0)
    assert level.has_recovered is False
    level.forget()
    assert level.has_recovered is None


@given(st.floats(1e-4, 100), st.floats(1e-6, 100))
def test_snapshots_at_the_distance_that_is_found_take_no_more_than_the_budget(step, cost):
    pace = SnapshotPace(beside=False)
    for number in range(35):
        if number % 10 == 0:
            pace.snapshot_taken(cost)
        pace.step_made(step)
    assert pace.is_known
    assert pace.distance % 10 == 0
    assert 10 <= pace.distance <= 1000
    if pace.distance < 1000:
        assert cost <= BUDGET * step * pace.distance * (1 + 1e-6)


@pytest.mark.parametrize("beside", [True, False])
def test_a_step_that_waits_for_a_copy_counts_where_copies_run_beside_it(beside):
    pace = SnapshotPace(beside=beside)
    for number in range(35):
        if number % 10 == 0:
            pace.snapshot_taken(0.001)
        pace.step_made(0.3 if number % 10 == 0 else 0.1)
    assert pace.distance == (210 if beside else 10)
