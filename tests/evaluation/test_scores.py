"""Scores, intervals and sweeps against plainer ways to get them."""

from __future__ import annotations

from dataclasses import replace
from math import isnan, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, precision_score, recall_score

from rmetric.evaluation import (
    PROTOCOLS,
    Outcomes,
    Trace,
    evaluate,
    f1_difference,
    intervals,
    score,
    trace_all,
)
from rmetric.evaluation.intervals import estimate
from rmetric.evaluation.scores import precision
from rmetric.records import Run, Truth
from studies.paper.figures.threshold_curves import threshold_sweep
from tests.evaluation.synthetic_study import make_runs


def outcomes(failed, hit, false_alarm, leads=None) -> Outcomes:
    leads = np.full(len(failed), nan) if leads is None else np.array(leads, dtype=float)
    return Outcomes(
        failed=np.array(failed, dtype=bool),
        hit=np.array(hit, dtype=bool),
        false_alarm=np.array(false_alarm, dtype=bool),
        lead_steps=leads,
        lead_minutes=leads / 12,
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_the_ratios_are_those_of_sklearn(pairs):
    failed, alarmed = np.array(pairs).T
    scores = score(outcomes(failed, failed & alarmed, ~failed & alarmed))
    assert scores.hits + scores.misses == scores.num_failed == failed.sum()
    for ours, theirs, defined in (
        (scores.precision, precision_score, alarmed.any()),
        (scores.recall, recall_score, failed.any()),
        (scores.f1, f1_score, failed.any() or alarmed.any()),
    ):
        assert isnan(ours.point) != defined
        if defined:
            assert ours.point == pytest.approx(theirs(failed, alarmed, zero_division=0))
            assert ours.low <= ours.point <= ours.high


def test_leads_are_means_over_the_hits_alone():
    scores = score(outcomes([1, 1, 1], [1, 1, 0], [0, 0, 0], [20, 50, nan]))
    assert scores.lead_steps.point == 35
    assert scores.median_lead_steps == 35
    assert scores.lead_minutes.point == pytest.approx(35 / 12)


def test_the_bootstrap_is_that_of_a_plain_loop():
    rng = np.random.default_rng(1)
    failed = rng.random(30) < 0.5
    found = outcomes(failed, failed & (rng.random(30) < 0.7), ~failed & (rng.random(30) < 0.3))
    by_loop = []
    draws = np.random.default_rng([intervals.SEED, 30])
    for drawn in draws.integers(30, size=(intervals.NUM_RESAMPLES, 30)):
        hits = found.hit[drawn].sum()
        alarms = hits + found.false_alarm[drawn].sum()
        by_loop.append(hits / alarms if alarms else nan)
    low, high = np.nanpercentile(by_loop, [2.5, 97.5])
    ours = estimate(lambda counts: precision(found, counts), 30)
    assert (ours.low, ours.high) == pytest.approx((low, high))


def test_a_paired_difference_is_narrower_than_two_intervals():
    rng = np.random.default_rng(2)
    failed = rng.random(80) < 0.5
    hit = failed & (rng.random(80) < 0.6)
    worse = hit.copy()
    worse[np.flatnonzero(hit)[:3]] = False
    ours, theirs = outcomes(failed, hit, ~failed), outcomes(failed, worse, ~failed)
    difference = f1_difference(ours, theirs)
    alone = score(ours).f1
    assert difference.low > 0 or difference.point > 0
    assert difference.high - difference.low < (alone.high - alone.low) / 2


def test_no_runs_at_all_have_no_score():
    assert isnan(evaluate([], [], "causal").f1.point)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_sweep_is_what_each_threshold_alone_would_give(protocol):
    runs = make_runs(num_repetitions=2)
    traces = trace_all("r_metric", runs)
    thresholds = [-1.0, 0.0, 0.3, 0.57, 0.9, 2.0]
    sweep = threshold_sweep(runs, traces, thresholds, protocol)
    for i, threshold in enumerate(thresholds):
        cut = [replace(trace, alarms=trace.scores > threshold) for trace in traces]
        alone = evaluate(runs, cut, protocol)
        for found, expected in (
            (sweep.hits[i], alone.hits),
            (sweep.false_alarms[i], alone.false_alarms),
            (sweep.precision[i], alone.precision.point),
            (sweep.recall[i], alone.recall.point),
            (sweep.f1[i], alone.f1.point),
        ):
            assert found == pytest.approx(expected, nan_ok=True)


def test_a_score_that_is_not_there_is_above_no_threshold():
    run = Run(id="r", records=[], truth=Truth(outcome="failed", failure_step=9))
    silent = Trace(detector="d", run_id="r", steps=np.array([1, 2]), scores=np.array([nan, nan]),
                   alarms=np.zeros(2, dtype=bool))  # fmt: skip
    assert threshold_sweep([run], [silent], [-np.inf], "published").hits[0] == 0
