import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.normalisers import SlidingMinMax
from tests.metric.plain_metric import min_max

WINDOWS = st.integers(1, 8)
ANY = st.floats() | st.integers(-5, 5).map(float)
MODERATE = st.floats(-1e6, 1e6, allow_subnormal=False)


@given(st.lists(ANY, max_size=40), WINDOWS)
def test_it_equals_the_plain_form_at_every_value(values, window):
    scale = SlidingMinMax(window)
    for i, value in enumerate(values, start=1):
        expected, found = min_max(values[:i], window), scale.update(value)
        assert found == pytest.approx(expected, abs=1e-12)
        assert 0.0 <= found <= 1.0
        assert found == 0.0 or expected  # of a constant, also where rounding could tell


@given(st.lists(MODERATE, min_size=1, max_size=30), st.integers(2, 8))
def test_the_newest_extremes_are_1_and_0_however_small_the_change(values, window):
    scale = SlidingMinMax(window)
    for value in values:
        scale.update(value)
    assert scale.update(max(values) + 1e-3) == 1.0
    assert scale.update(min(values) - 1e-3) == 0.0


@given(st.lists(MODERATE, max_size=30), WINDOWS, st.integers(-8, 8))
def test_the_unit_of_the_values_does_not_matter(values, window, power):
    plain, scaled = SlidingMinMax(window), SlidingMinMax(window)
    assert [plain.update(x) for x in values] == [scaled.update(x * 2.0**power) for x in values]


def test_the_span_of_huge_values_does_not_overflow():
    scale = SlidingMinMax()
    scale.update(-1.7e308)
    assert scale.update(1.7e308) == 1.0
    assert scale.update(0.0) == 0.5


@pytest.mark.parametrize("shape", [float, lambda i: -float(i), lambda i: 0.0, lambda i: i % 137.0])
def test_work_is_constant_a_value_and_memory_is_the_window(shape):
    class Counted(float):
        """A float that counts how often it is compared."""

        comparisons = 0

        def count(self, other, result):
            Counted.comparisons += 1
            return result

        def __lt__(self, other):
            return self.count(other, float(self) < float(other))

        def __gt__(self, other):
            return self.count(other, float(self) > float(other))

    scale = SlidingMinMax(window=100)
    for i in range(3000):
        scale.update(Counted(shape(i)))
        assert max(len(scale._recent), len(scale._lows), len(scale._highs)) <= 100
    assert 0 < Counted.comparisons <= 4 * 3000
