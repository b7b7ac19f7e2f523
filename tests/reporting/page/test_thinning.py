"""Thinning out: fewer points, and nothing that stands out is lost."""

from __future__ import annotations

from math import inf, nan

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rmetric.reporting.page.series import kept, merged, spans

VALUES = arrays(
    float,
    st.integers(1, 200),
    elements=st.one_of(st.floats(-10, 10), st.sampled_from([nan, inf, -inf, 1e300])),
)


@given(VALUES, st.integers(1, 40))
def test_each_stretch_keeps_its_extremes_and_its_strange_values(values, num_buckets):
    chosen = kept(values, num_buckets)
    assert np.all(np.diff(chosen) > 0)
    assert {0, len(values) - 1} <= set(chosen.tolist())
    size = -(-len(values) // num_buckets)
    for start in range(0, len(values), size):
        whole = values[start : start + size]
        left = values[chosen[(start <= chosen) & (chosen < start + size)]]
        for strange in (np.isnan, np.isposinf, np.isneginf):
            assert strange(whole).any() == strange(left).any()
        finite = whole[np.isfinite(whole)]
        if len(finite):
            seen = left[np.isfinite(left)]
            assert (seen.min(), seen.max()) == (finite.min(), finite.max())


@given(VALUES, st.integers(1, 40))
def test_it_gets_short_and_what_is_short_stays(values, num_buckets):
    chosen = kept(values, num_buckets)
    assert len(chosen) <= 5 * num_buckets + 2
    if len(values) <= 2 * num_buckets:
        assert len(chosen) == len(values)


@given(arrays(bool, st.integers(1, 60)))
def test_spans_are_the_alarms(alarms):
    inside = np.zeros(len(alarms), dtype=bool)
    last = len(alarms) - 1
    for start, end in spans(alarms):
        inside[start : end if end < last or not alarms[last] else last + 1] = True
    assert np.array_equal(inside, alarms)


@given(arrays(bool, st.integers(1, 200)), st.integers(1, 20))
def test_merged_spans_cover_every_alarm(alarms, most):
    whole = spans(alarms).astype(float)
    fewer = merged(whole, most)
    assert len(fewer) == min(len(whole), most)
    for start, end in whole:
        assert any(a <= start and end <= b for a, b in fewer)
