"""Weights fitted here and used there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rmetric.evaluation import evaluate, judge
from rmetric.evaluation.scores import f1
from rmetric.evaluation.traces import Trace
from rmetric.metric import PAPER_WEIGHTS, Components, RMetric, RMetricConfig
from rmetric.records import Run
from studies.paper.transfer import halves_of, transfers, weight_grids
from tests.evaluation.synthetic_study import ARCHITECTURES, make_runs


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return make_runs(num_repetitions=4)


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
    scores = f1(grid.outcomes, np.ones(len(runs)))
    assert scores[grid.fit(np.ones(len(runs), dtype=bool))] == np.nanmax(scores)


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


def by_halves(runs, grid, fitted_on, tested_on, shift) -> list[tuple[Run, Trace]]:
    """Every run of one architecture, judged by what was fitted on a half of the other."""
    judged = []
    for half in (0, 1):
        fitted = np.array([
            run.config["model_type"] == fitted_on and run.config["repetition"] % 2 == half
            for run in runs
        ])  # fmt: skip
        there = [
            run for run in runs
            if run.config["model_type"] == tested_on
            and run.config["repetition"] % 2 == (half + shift) % 2
        ]  # fmt: skip
        judged += zip(there, streamed(there, grid.weights(grid.fit(fitted))), strict=True)
    return sorted(judged, key=lambda pair: runs.index(pair[0]))


@pytest.mark.parametrize("protocol", ["published", "causal"])
def test_own_and_moved_weights_are_judged_on_the_half_they_were_not_fitted_on(
    runs, grids, protocol
):
    grid = grids[protocol]
    moved = transfers(grid)
    assert {(m.fitted_on, m.tested_on) for m in moved} == {
        (a, b) for a in ARCHITECTURES for b in ARCHITECTURES if a != b
    }
    for row in moved:
        cases = {"own": (row.tested_on, 1), "seen": (row.tested_on, 0), "moved": (row.fitted_on, 1)}
        for name, (fitted_on, shift) in cases.items():
            there, traces = zip(
                *by_halves(runs, grid, fitted_on, row.tested_on, shift), strict=True
            )
            found = getattr(row, f"{name}_f1")
            assert found == pytest.approx(evaluate(there, traces, protocol).f1, nan_ok=True)
            assert row.num_runs == len(there)
        overfit = 100 * (1 - row.own_f1.point / row.seen_f1.point)
        assert row.overfit_percent.point == pytest.approx(overfit)
        if row.own_f1.point == 0:
            assert np.isnan(row.loss_percent.point)
        else:
            loss = 100 * (1 - row.moved_f1.point / row.own_f1.point)
            assert row.loss_percent.point == pytest.approx(loss)


def test_runs_without_a_repetition_are_halved_by_their_order(runs):
    alike = [replace(run, config={"model_type": run.config["model_type"]}) for run in runs[:5]]
    assert halves_of(alike).tolist() == [0, 1, 0, 1, 0]
    # Whatever the order, a stated repetition decides.
    assert halves_of(runs[::-1]).tolist() == [r.config["repetition"] % 2 for r in runs[::-1]]
