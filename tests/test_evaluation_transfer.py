"""Weights fitted here and used there."""

from __future__ import annotations

import numpy as np
import pytest

from rmetric.evaluation import evaluate, judge, mean_loss, transfers, weight_grids
from rmetric.evaluation.scores import f1
from rmetric.evaluation.traces import Trace
from rmetric.metric import PAPER_WEIGHTS, Components, RMetric, RMetricConfig
from rmetric.records import Run
from tests.synthetic_study import ARCHITECTURES, make_runs


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return make_runs(num_repetitions=2)


@pytest.fixture(scope="module")
def grids(runs):
    return weight_grids(runs, ("published", "causal"))


def streamed(runs: list[Run], weights: Components) -> list[Trace]:
    traces = []
    for run in runs:
        metric = RMetric(RMetricConfig(weights=weights))
        rows = [(metric.update(r).score, metric.alarm) for r in run.records]
        scores, alarms = zip(*rows, strict=True)
        traces.append(
            Trace(detector="r_metric", run_id=run.id, steps=np.array([r.step for r in run.records]),
                  scores=np.array(scores), alarms=np.array(alarms))
        )  # fmt: skip
    return traces


@pytest.mark.parametrize("weights", [PAPER_WEIGHTS, (0.0, 0.6, 0.0), (1.0, 0.05, 0.35)])
@pytest.mark.parametrize("protocol", ["published", "causal"])
def test_each_point_of_the_grid_is_the_metric_with_those_weights(runs, grids, weights, protocol):
    grid = grids[protocol]
    index = grid.index(Components(*weights))
    assert grid.weights(index) == pytest.approx(weights)
    everyone = np.ones(len(runs), dtype=bool)
    found = grid.verdicts(index, everyone)
    expected = judge(runs, streamed(runs, Components(*weights)), protocol)
    assert np.array_equal(found.hit, expected.hit)
    assert np.array_equal(found.false_alarm, expected.false_alarm)
    assert np.array_equal(found.lead_steps, expected.lead_steps, equal_nan=True)


def test_no_weights_of_the_grid_beat_those_fitted(runs, grids):
    grid = grids["causal"]
    everyone = np.ones(len(runs), dtype=bool)
    best = grid.fit(everyone)
    scores = f1(grid.outcomes, np.ones(len(runs)))
    assert scores[best] == np.nanmax(scores)


def test_among_equals_the_nearest_to_the_papers_weights_are_taken(grids):
    grid = grids["published"]
    nobody_failed = ~grid.outcomes.failed
    # Nothing fails there, so no weights score above 0 and all that alarm are equal.
    scores = f1(grid.outcomes.select(nobody_failed), np.ones(nobody_failed.sum()))
    assert np.nanmax(scores) == 0
    chosen = np.array(grid.weights(grid.fit(nobody_failed)))
    equals = np.flatnonzero(scores == 0)
    distances = ((grid.units[equals] / 20 - np.array(PAPER_WEIGHTS)) ** 2).sum(axis=1)
    assert ((chosen - np.array(PAPER_WEIGHTS)) ** 2).sum() == pytest.approx(distances.min())


def test_every_architecture_is_tried_on_every_other(runs, grids):
    moved = transfers(grids["causal"])
    assert {(m.fitted_on, m.tested_on) for m in moved} == {
        (a, b) for a in ARCHITECTURES for b in ARCHITECTURES if a != b
    }
    for one in moved:
        there = [run for run in runs if run.config["model_type"] == one.tested_on]
        expected = evaluate(there, streamed(there, one.weights), "causal")
        assert one.num_runs == len(there)
        assert one.moved_f1 == pytest.approx(expected.f1, nan_ok=True)
        # Nothing does better there than what was fitted there.
        assert one.own_f1.point >= one.moved_f1.point
        loss = 100 * (1 - one.moved_f1.point / one.own_f1.point)
        assert one.loss_percent.point == pytest.approx(loss)


def test_the_mean_loss_is_the_mean_of_the_losses(grids):
    losses = [one.loss_percent.point for one in transfers(grids["causal"])]
    assert mean_loss(grids["causal"]).point == pytest.approx(np.mean(losses))


def test_one_architecture_alone_has_nowhere_to_move(runs):
    alone = [run for run in runs if run.config["model_type"] == ARCHITECTURES[0]]
    grid = weight_grids(alone, ("causal",))["causal"]
    assert transfers(grid) == []
    assert np.isnan(mean_loss(grid).point)
