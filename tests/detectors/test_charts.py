"""The detectors that follow the loss step by step, each against another way to compute it."""

from __future__ import annotations

from math import log, nan

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from rmetric.detectors import (
    BayesianChangePoint,
    LightningSpike,
    LlmFoundrySpike,
    LossCusum,
    LossEwma,
    OnlineIsolationForest,
    PageHinkley,
)
from rmetric.detectors.contract import FollowedLoss
from rmetric.records import Record
from tests.detectors.calibrated_streams import records, scores

FOLLOWING = [
    LossEwma, LossCusum, PageHinkley, BayesianChangePoint, OnlineIsolationForest, LightningSpike,
    LlmFoundrySpike,
]  # fmt: skip
EVERY = pytest.mark.parametrize("kind", FOLLOWING)


def every_but(*kinds):
    return pytest.mark.parametrize("kind", [kind for kind in FOLLOWING if kind not in kinds])


LOSSES = st.lists(st.floats(0.5, 9).map(lambda x: round(x, 2)), max_size=50)


def falling(length: int, seed: int = 0, noise: float = 0.05) -> list[float]:
    draw = np.random.default_rng(seed).normal(size=length)
    return [2 + 3 / (1 + i / 30) + noise * float(x) for i, x in enumerate(draw)]


def alarms(detector, values: list[float]) -> list[int]:
    """The places of the alarms."""
    return [i for i, r in enumerate(records(values)) if detector.update(r).alarm]


@given(LOSSES)
def test_the_smoothed_loss_is_held_against_limits_as_numpy_has_them(values):
    found = scores(records(values), LossEwma(window=12, least=4))
    level = nan
    for i, x in enumerate(np.log(values)):
        level = x if i == 0 else 0.2 * x + 0.8 * level
        past = np.log(values[max(0, i - 12) : i])
        if len(past) < 4:
            assert np.isnan(found[i])
        elif past.std() > 1e-6:
            limit = past.std() * np.sqrt(0.2 / 1.8)
            assert found[i] == pytest.approx((level - past.mean()) / limit, rel=1e-6, abs=1e-6)


@given(LOSSES)
def test_the_sum_is_that_of_numpy_and_starts_again_after_an_alarm(values):
    found, total = scores(records(values), LossCusum(window=12, least=4)), 0.0
    for i, x in enumerate(np.log(values)):
        past = np.log(values[max(0, i - 12) : i])
        if len(past) < 4:
            assert np.isnan(found[i])
            continue
        if past.std() < 1e-6:
            return  # divided by next to nothing: rounding decides
        total = max(0.0, (total if total <= 5 else 0.0) + (x - past.mean()) / past.std() - 0.5)
        assert found[i] == pytest.approx(total, rel=1e-6, abs=1e-6)


# A rise before the first score is not an alarm, so nothing starts anew.
@example([0.0] * 28 + [6.0, 0.0], 5.0)
@settings(max_examples=40)
@given(
    st.lists(st.floats(0, 60).map(lambda x: round(x, 2)), max_size=120),
    st.sampled_from([50.0, 5.0]),
)
def test_page_hinkley_is_that_of_river(values, limit):
    drift = pytest.importorskip("river.drift", reason="river is not installed: pip install river")
    ours, theirs = PageHinkley(limit=limit), drift.PageHinkley(mode="up", threshold=limit)
    for record in records(values):
        theirs.update(record.training_loss)
        ours.update(record)
        if ours.score == pytest.approx(limit, rel=1e-9):
            return  # rounding decides
        assert ours.alarm == theirs.drift_detected


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 99), st.integers(5, 60))
def test_the_probabilities_of_the_stretches_are_those_of_the_plain_recursion(seed, jump):
    values = [x + (i >= jump) for i, x in enumerate(falling(60, seed, noise=0.2))]
    found = scores(records(values), BayesianChangePoint(least=5, recent=6))
    expected = plain_change_point(values, least=5, recent=6)
    assert found == pytest.approx(expected, abs=1e-9, nan_ok=True)


def plain_change_point(values: list[float], *, least: int, recent: int) -> list[float]:
    """Adams and MacKay, one stretch at a time, none forgotten."""
    found, seen = [], []
    stretches = [(1.0, [])]  # probability, the values in it
    for i, x in enumerate(np.log(values)):
        past = np.log(values[max(0, i - 100) : i])
        if len(past) >= least:
            z = float(np.clip((x - past.mean()) / past.std(), -20, 20))
            seen.append(z)
            weighed = [(p * student(z, inside), inside) for p, inside in stretches]
            total = sum(p for p, _ in weighed)
            stretches = [(1 / 250, [])]
            stretches += [(249 / 250 * p / total, [*inside, z]) for p, inside in weighed]
        short = [p for p, inside in stretches if len(inside) <= recent and posterior(inside)[0] > 1]
        found.append(sum(short) if len(seen) > recent else nan)
    return found


def posterior(values: list[float]) -> tuple[float, float, float, float]:
    """Mean, weight, shape and rate of the normal-gamma posterior, Murphy 2007, equations 85-89."""
    n, mean = len(values), float(np.mean(values)) if values else 0.0
    weight = 0.1 + n
    rate = 1 + 0.5 * sum((x - mean) ** 2 for x in values) + 0.1 * n * mean**2 / (2 * weight)
    return n * mean / weight, weight, 1 + n / 2, rate


def student(z: float, values: list[float]) -> float:
    mean, weight, shape, rate = posterior(values)
    scale = np.sqrt(rate * (weight + 1) / (shape * weight))
    return float(stats.t.pdf(z, 2 * shape, mean, scale))


# --- What each of them promises in words.


@every_but(OnlineIsolationForest)  # noise alone parts values, as its docstring states
def test_a_falling_loss_never_alarms(kind):
    assert alarms(kind(), falling(600)) == []


@EVERY
def test_a_loss_that_explodes_alarms_at_once_or_after_the_patience_it_has(kind):
    values = falling(300) + [30.0] * 20
    first = alarms(kind(), values)[0]
    assert 300 <= first <= 304


@every_but(PageHinkley, LlmFoundrySpike)
@pytest.mark.parametrize("unit", [1 / 64, 32.0])
def test_units_cancel_unless_the_rule_is_in_nats(kind, unit):
    values = [x + (i > 200) for i, x in enumerate(falling(260, noise=0.3))]
    plain, scaled = (scores(records([u * x for x in values]), kind()) for u in (1.0, unit))
    assert scaled == pytest.approx(plain, rel=1e-6, abs=1e-6, nan_ok=True)


@EVERY
def test_it_follows_the_training_loss_where_there_is_one(kind):
    values = falling(200) + [30.0] * 10
    with_evaluations, without, validation = kind(), kind(), kind()
    for step, value in enumerate(values):
        with_evaluations.update(Record(step=step, training_loss=value, validation_loss=step % 7))
        without.update(Record(step=step, training_loss=value))
        validation.update(Record(step=step, validation_loss=value))
        assert repr(with_evaluations.score) == repr(without.score) == repr(validation.score)
        assert without.reason == validation.reason.replace("validation", "training")


def test_a_followed_loss_of_zero_or_less_has_no_logarithm():
    followed = FollowedLoss()
    logs = [followed.log_of(Record(step=1, training_loss=x)) for x in (1.0, 0.0, -2.0, 3.0)]
    assert logs == [0.0, None, None, log(3.0)]
