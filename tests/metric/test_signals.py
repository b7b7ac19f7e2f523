from math import inf, isnan, nan

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rmetric.normalisers import SlidingMinMax
from rmetric.signals import FailureRate, GradientVariance, LossDrift, TrailingGradientVariance
from tests.metric.plain_metric import population_variance as exact_variance

FINITE = st.floats(-1e6, 1e6)
NO_NUMBER = st.sampled_from([nan, inf, -inf])


class TestFailureRate:
    def test_it_counts_events_per_hour_since_the_start(self):
        rate = FailureRate()
        assert rate.update(900.0, [100.0, 800.0]) == 8.0
        assert rate.update(1800.0) == 4.0
        assert rate.value == 4.0

    def test_it_is_undefined_until_time_has_passed(self):
        rate = FailureRate(start=60.0)
        assert isnan(rate.update(60.0))
        assert rate.update(60.0 + 3600.0, [61.0]) == 1.0

    def test_a_full_window_counts_from_the_event_before_it(self):
        rate = FailureRate(window=2)
        rate.update(40.0, [10.0, 20.0, 30.0])
        assert rate.value == 2 * 3600.0 / (40.0 - 10.0)

    @given(st.lists(st.integers(1, 10_000), min_size=1, unique=True).map(sorted), st.integers(1, 9))
    def test_how_the_events_are_handed_over_does_not_matter(self, times, window):
        at_once, one_by_one = FailureRate(window), FailureRate(window)
        for time in times:
            one_by_one.update(float(time), [float(time)])
        end = times[-1] + 1.0
        assert one_by_one.update(end) == at_once.update(end, map(float, times))

    @given(st.integers(1, 9), st.floats(1.0, 1e6))
    def test_without_further_events_it_only_falls(self, window, pause):
        rate = FailureRate(window)
        before = rate.update(100.0, [10.0, 50.0, 99.0])
        assert rate.update(100.0 + pause) < before

    def test_a_time_that_is_no_number_leaves_it_undefined(self):
        rate = FailureRate()
        assert isnan(rate.update(nan, [1.0]))
        assert rate.update(3600.0) == 1.0

    def test_a_clock_behind_its_events_leaves_it_undefined(self):
        assert isnan(FailureRate(window=1).update(5.0, [6.0, 7.0]))


class TestGradientVariance:
    @given(FINITE, st.integers(2, 64))
    def test_workers_that_agree_have_none_exactly(self, norm, workers):
        assert GradientVariance().update([norm] * workers) == 0.0

    @given(st.lists(FINITE | NO_NUMBER, min_size=1, max_size=8), NO_NUMBER, st.integers(0, 8))
    def test_one_norm_that_is_no_number_makes_it_infinite(self, norms, bad, place):
        norms.insert(place, bad)
        assert GradientVariance().update(norms) == inf

    @given(st.lists(st.floats(1e150, 1e308), min_size=2, max_size=8))
    def test_huge_norms_that_differ_never_seem_to_agree(self, norms):
        assume(max(norms) > 1.1 * min(norms))
        assert GradientVariance().update(norms) > 1e297

    def test_a_sum_that_overflows_does_not_hide_a_variance_that_does_not(self):
        # The sum of the differences, squared, is beyond a float here.
        norms = [0.0] + [5e153] * 7
        assert GradientVariance().update(norms) == pytest.approx(exact_variance(norms))

    def test_fewer_than_two_workers_have_no_spread(self):
        assert isnan(GradientVariance().update([3.0]))
        assert isnan(GradientVariance().update([]))
        assert GradientVariance().update([inf]) == inf


@pytest.mark.parametrize("kind", [TrailingGradientVariance, LossDrift])
@given(st.lists(FINITE, min_size=3, max_size=12), NO_NUMBER)
def test_a_value_that_is_no_number_is_infinite_at_its_step_and_then_forgotten(kind, values, bad):
    disturbed, calm = kind(4), kind(4)
    for value in values[:-1]:
        disturbed.update(value)
        calm.update(value)
    assert disturbed.update(bad) == inf
    assert disturbed.update(values[-1]) == calm.update(values[-1])


@pytest.mark.parametrize(
    ("kind", "window", "problem"),
    [
        (FailureRate, 0, "window is 0: it must be at least 1 event"),
        (TrailingGradientVariance, 1, "window is 1: a variance needs at least 2 norms"),
        (LossDrift, 0, "window is 0: it must be at least 1 evaluation"),
        (SlidingMinMax, 0, "window is 0: it must be at least 1 value"),
    ],
)
def test_a_window_that_is_too_short_is_refused(kind, window, problem):
    with pytest.raises(ValueError, match=problem):
        kind(window)


class TestLossDrift:
    @given(st.lists(FINITE, max_size=30), FINITE, st.integers(1, 12))
    def test_a_loss_that_stands_still_drifts_by_exactly_0(self, earlier, loss, window):
        drift = LossDrift(window)
        for past in earlier + [loss] * window:
            drift.update(past)
        assert [drift.update(loss) for _ in range(2 * window)] == [0.0] * (2 * window)

    def test_it_recovers_from_finite_losses_whose_sum_overflows(self):
        drift = LossDrift(3)
        for loss in [1.7e308, -1.7e308, 1.7e308, 1.7e308] + [2.0] * 6:
            drift.update(loss)
        assert drift.update(2.5) == 0.5
