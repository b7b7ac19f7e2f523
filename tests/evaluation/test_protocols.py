"""Hits, false alarms and leads, by hand and by law."""

from __future__ import annotations

from math import nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.evaluation import PROTOCOLS, Trace, judge
from rmetric.evaluation.protocols import Windows
from rmetric.records import Run, Truth

STEPS = list(range(0, 1000, 10))


def run(failure: int | None, onset: int | None = 500, seconds: float | None = None) -> Run:
    truth = Truth(onset_step=onset)
    if failure is not None:
        truth.outcome, truth.failure_step = "failed", failure
    return Run(id="r", records=[], truth=truth,
               config={} if seconds is None else {"seconds_per_step": seconds})  # fmt: skip


def seen(*alerts: int) -> Trace:
    alarms = np.isin(STEPS, alerts)
    return Trace(detector="d", run_id="r", steps=np.array(STEPS), scores=alarms * 1.0,
                 alarms=alarms)  # fmt: skip


def verdict(protocol: str, run: Run, *alerts: int) -> tuple[bool, bool, float]:
    outcomes = judge([run], [seen(*alerts)], protocol)
    return bool(outcomes.hit[0]), bool(outcomes.false_alarm[0]), float(outcomes.lead_steps[0])


#: what happened -> (hit, false alarm, lead) as published, causal, causal with any alert
BY_HAND = {
    "in time": ((600, 550), [(1, 0, 50), (1, 0, 50), (1, 0, 50)]),
    "at the onset": ((600, 500), [(1, 0, 100), (1, 0, 100), (1, 0, 100)]),
    "at the failure": ((600, 600), [(1, 0, 0), (0, 0, nan), (0, 0, nan)]),
    "after the failure": ((600, 700), [(1, 0, -100), (0, 0, nan), (0, 0, nan)]),
    "premature": ((600, 100), [(1, 0, 500), (0, 1, nan), (0, 1, nan)]),
    "premature, again in time": ((600, 100, 550), [(1, 0, 500), (0, 1, nan), (1, 1, 50)]),
    "never": ((600,), [(0, 0, nan)] * 3),
    "healthy and silent": ((None,), [(0, 0, nan)] * 3),
    "healthy and alarmed": ((None, 550), [(0, 1, nan)] * 3),
    "healthy, alarmed before its fault": ((None, 100, 550), [(0, 1, nan)] * 3),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_the_protocols_by_hand(case):
    (failure, *alerts), expected = BY_HAND[case]
    found = [verdict(protocol, run(failure), *alerts) for protocol in PROTOCOLS]
    np.testing.assert_array_equal(np.array(found, dtype=float), np.array(expected, dtype=float))


def test_where_the_onset_is_unknown_nothing_is_premature():
    assert verdict("causal", run(600, onset=None), 10) == (True, False, 590)


def test_a_step_costs_what_the_run_says_or_five_seconds():
    runs = [run(600), run(600, seconds=30.0)]
    outcomes = judge(runs, [seen(540), seen(540)], "causal")
    assert outcomes.lead_minutes.tolist() == [5.0, 30.0]


def test_a_run_of_unknown_end_cannot_be_judged():
    with pytest.raises(ValueError, match="how it ended is unknown"):
        judge([Run(id="r", records=[])], [seen()], "causal")


def test_an_unknown_protocol_is_refused_with_those_known():
    with pytest.raises(ValueError, match="known are published, causal"):
        judge([run(600)], [seen()], "hopeful")


RUNS = st.builds(
    run,
    failure=st.none() | st.sampled_from(STEPS[51:]),
    onset=st.none() | st.sampled_from(STEPS[:51]),
)
CASES = st.lists(
    st.tuples(RUNS, st.lists(st.sampled_from(STEPS), max_size=6)), min_size=1, max_size=8
)


def judged(cases, protocol):
    return judge([run for run, _ in cases], [seen(*alerts) for _, alerts in cases], protocol)


@given(CASES)
def test_what_the_first_alert_earns_any_alert_earns_and_the_published_rule_too(cases):
    published, causal, any_alert = (judged(cases, protocol) for protocol in PROTOCOLS)
    assert not (causal.hit & ~any_alert.hit).any()
    assert not (any_alert.hit & ~published.hit).any()
    assert not (published.false_alarm & ~causal.false_alarm).any()


@given(CASES)
def test_every_causal_lead_is_after_zero_and_within_the_window(cases):
    for protocol in ("causal", "causal_unlatched"):
        outcomes = judged(cases, protocol)
        windows = Windows.of([run for run, _ in cases])
        leads = outcomes.lead_steps[outcomes.hit]
        longest = (windows.failure - windows.onset)[outcomes.hit]
        assert ((leads > 0) & (leads <= longest)).all()


@given(CASES, st.sampled_from(STEPS))
def test_a_second_alert_after_the_first_changes_nothing_where_the_first_decides(cases, step):
    more = [
        (run, [*alerts, step] if alerts and min(alerts) <= step else alerts)
        for run, alerts in cases
    ]
    for protocol in ("published", "causal"):
        before, after = judged(cases, protocol), judged(more, protocol)
        assert np.array_equal(before.hit, after.hit)
        assert np.array_equal(before.false_alarm, after.false_alarm)
        assert np.array_equal(before.lead_steps, after.lead_steps, equal_nan=True)
