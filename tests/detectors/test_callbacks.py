"""The rules of two callbacks, against the callback itself and against a plain reading of it."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric.detectors import LightningSpike, LlmFoundrySpike
from rmetric.records import Record

#: Quarters below 32: float32, in which Lightning sums, holds them exactly.
LOSSES = st.lists(
    st.integers(4, 128).map(lambda n: n / 4) | st.sampled_from([2.0, 2.25, nan, inf]), max_size=40
)


@settings(max_examples=15, deadline=None)
@given(LOSSES)
def test_the_spikes_are_those_of_lightnings_callback(values):
    spike = pytest.importorskip("lightning.fabric.utilities.spike", reason="needs lightning")
    import torch

    theirs, ours = spike.SpikeDetection(), LightningSpike()
    for step, value in enumerate(values):
        loss = torch.tensor(value)
        # Its own order: judged after the warm-up, remembered where it is not a spike. Before
        # the warm-up it would remember a nan as well; ours never does.
        if step < theirs.warmup and not np.isfinite(value):
            return
        found = step >= theirs.warmup and theirs._is_spike(loss)
        if not found:
            theirs._update_stats(loss)
        assert ours.update(Record(step=step, training_loss=value)).alarm == found


@settings(max_examples=60)
@given(st.lists(st.sampled_from([1.0, 2.0, 3.0, 5.0, 11.0, nan, inf]), max_size=60))
def test_the_kill_rules_are_those_of_their_description(values):
    window, patience, cap = 6, 2, 10.0
    detector = LlmFoundrySpike(patience=patience, window=window, cap=cap)
    for i, value in enumerate(values):
        alarm = detector.update(Record(step=i, training_loss=value)).alarm
        assert alarm == killed(values[: i + 1], window, patience, cap)


def killed(values: list[float], window: int, patience: int, cap: float) -> bool:
    def is_outlier(i: int) -> bool:
        return i >= window and values[i] >= 2 * np.mean(values[i - window : i])

    last = len(values) - 1
    if last < window:
        return False
    in_a_row = 0
    while is_outlier(last - in_a_row):
        in_a_row += 1
    high = sum(value > cap for value in values[last - window : last])
    return in_a_row > patience or (len(values) >= 2 * window and high >= window / 2)


@pytest.mark.parametrize(
    ("losses", "first", "reason"),
    [
        ([3.0] * 150 + [9.0] * 5, 154, "training loss 9: 5 in a row of at least 2 times the"),
        ([11.0] * 199, None, ""),
        ([11.0] * 200, 199, "100 of the last 100 losses are above 10: roll"),
        # A nan blinds the original for a window.
        ([3.0] * 110 + [nan] + [9.0] * 50, None, ""),
    ],
)
def test_the_kill_rules_wait_for_the_fifth_outlier_or_for_two_high_windows(losses, first, reason):
    detector = LlmFoundrySpike()
    alarms = [detector.update(Record(step=i, training_loss=x)).alarm for i, x in enumerate(losses)]
    assert (alarms.index(True) if any(alarms) else None) == first
    assert detector.reason.startswith(reason)
    assert bool(detector.reason) == bool(reason)
