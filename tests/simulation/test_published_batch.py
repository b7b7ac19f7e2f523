"""Many published studies at once: the same numbers as one after the other, and what they say."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf
from random import Random

import numpy as np
import pytest

from rmetric import Record, RMetric, RMetricConfig, Run
from rmetric.detectors import DETECTORS
from rmetric.evaluation import judge, score
from rmetric.evaluation.traces import trace_by
from rmetric.simulation.published import (
    ACTING,
    PublishedDynamics,
    PublishedSpec,
    published_specs,
    simulate_published,
)
from studies.paper.analysis import metric_trace
from studies.paper.anatomy import (
    ANATOMY,
    AUTHORS,
    FAULT_OF_RUN,
    PUBLISHED,
    ROWS,
    alerts_of_batch,
    anatomy,
    judge_batch,
    over_seeds,
    r_metric,
)
from studies.paper.published_batch import Draws, Faults, PublishedBatch, run_batch, scores
from studies.paper.published_study import CONFIG

SMALL = PublishedDynamics(total_steps=400, evaluate_every=20, onset_step=200, num_workers=4)
OFTEN = PublishedDynamics(total_steps=300, evaluate_every=3, onset_step=100)


def specs(number: int = 24) -> list[PublishedSpec]:
    cells = published_specs()[24:]
    return [replace(spec, mode="FULL_METRIC") for spec in cells[:number]]


def drawn(specs: list[PublishedSpec], dynamics: PublishedDynamics, seed: int) -> Draws:
    """The uniform numbers in the order of the specification, by what they are for."""
    random = Random(seed).random
    draws = Draws.random(len(specs), dynamics, np.random.default_rng(0))
    for run, spec in enumerate(specs):
        crashed, step = False, 0
        while not crashed and step < dynamics.total_steps:
            step += 1
            at = step // dynamics.evaluate_every - 1
            training, rise = random(), 0.0
            age = step - dynamics.onset_step + 1
            if acting := spec.acts and age >= 1:
                rise, chance = random(), random()
                draws.crash_RK[run, age - 1] = chance
                crashed = chance < (age / 15) ** 2
            if step % dynamics.evaluate_every == 0:
                draws.training_RE[run, at], draws.rise_RE[run, at] = training, rise
                draws.validation_RE[run, at] = random()
                draws.norms_REW[run, at] = [random() for _ in range(dynamics.num_workers)]
                if acting:
                    draws.blow_REW[run, at] = [random() for _ in range(dynamics.num_workers)]
    return draws


def faults(specs: list[PublishedSpec], dynamics: PublishedDynamics) -> Faults:
    acts = np.array([spec.acts for spec in specs])
    return Faults(acts=acts, crashes=acts, onset=np.full(len(specs), dynamics.onset_step))


def runs_of(batch: PublishedBatch) -> list[Run]:
    return [
        Run(
            id=str(run),
            records=[
                Record(step=int(step), validation_loss=float(loss), worker_gradient_norms=tuple(n))
                for step, loss, n, seen in zip(
                    batch.steps_E, batch.validation_RE[run], batch.norms_REW[run].tolist(),
                    batch.seen_RE[run], strict=True,
                )
                if seen
            ],
        )
        for run in range(len(batch.failure_R))
    ]  # fmt: skip


@pytest.mark.parametrize(
    "dynamics", [PublishedDynamics(), SMALL, OFTEN], ids=["", "small", "often"]
)
def test_the_same_draws_give_the_same_runs_to_the_last_bit(dynamics):
    batch = run_batch(dynamics, faults(specs(), dynamics), drawn(specs(), dynamics, seed=5))
    exact = list(simulate_published(specs(), Random(5), dynamics))
    for run, other in zip(exact, runs_of(batch), strict=True):
        assert [(r.step, r.validation_loss, r.worker_gradient_norms) for r in run.records] == [
            (r.step, r.validation_loss, r.worker_gradient_norms) for r in other.records
        ]
    failures = [inf if r.truth.failure_step is None else r.truth.failure_step for r in exact]
    assert batch.failure_R.tolist() == failures
    assert any(failure < inf for failure in failures)


@pytest.mark.parametrize(
    "config",
    [
        AUTHORS,
        AUTHORS.with_mode("SIGMA_ONLY"),
        AUTHORS.with_mode("LAMBDA_ONLY"),
        RMetricConfig.simulation(),
        RMetricConfig.authors_readme(component_window=1000),
        RMetricConfig.simulation(loss_window=7),
    ],
)
def test_r_is_that_of_the_stream(config):
    batch = run_batch(OFTEN, faults(specs(), OFTEN), drawn(specs(), OFTEN, seed=2))
    for row, run in zip(scores(batch, config), runs_of(batch), strict=True):
        metric = RMetric(config)
        streamed = [metric.update(record).score for record in run.records]
        exact = config is AUTHORS  # to the last bit
        assert row[: len(streamed)] == pytest.approx(streamed, rel=0, abs=0 if exact else 1e-12)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RMetricConfig.simulation(component_window=50), "at most the component window of 50"),
        (RMetricConfig.authors_case_study(), "follows no validation loss"),
    ],
)
def test_settings_that_cannot_be_scored_at_once_are_refused(config, message):
    batch = run_batch(OFTEN, faults(specs(4), OFTEN), drawn(specs(4), OFTEN, seed=0))
    with pytest.raises(ValueError, match=message):
        scores(batch, config)


def _norms(run):
    return [float(np.mean(record.worker_gradient_norms)) for record in run.records]


#: Rows of no registered detector: settings of the metric, or the alarms of a run in plain Python.
STREAMED = {
    "sigma_paired": CONFIG.with_mode("SIGMA_ONLY"),
    "delta_l_paired": CONFIG.with_mode("DELTA_L_ONLY"),
    "authors": RMetricConfig.authors_simulator(),
    "true_mean": replace(CONFIG, variant="paper"),
    "authors_true_mean": replace(RMetricConfig.authors_simulator(), variant="paper"),
    "readme_weights": replace(CONFIG, weights=RMetricConfig.authors_readme().weights),
    "gradient_norm": lambda run: [norm > 100 for norm in _norms(run)],
    "loss_jump": lambda run: [
        False,
        *(b.validation_loss - a.validation_loss > 0.15 for a, b in pairwise(run.records)),
    ],
    "norm_jump": lambda run: [False, *(b / a > 2 for a, b in pairwise(_norms(run)))],
    "at_onset": lambda run: [
        record.step == PublishedDynamics().onset_step for record in run.records
    ],
}


def test_every_row_without_a_registered_detector_is_streamed_here():
    unregistered = {n for n, row in ROWS.items() if row.rule is not None and not row.registered}
    assert STREAMED.keys() == unregistered


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.rule is not None])
def test_a_rule_on_many_runs_is_its_detector_on_each(name):
    row, batch = ROWS[name], PUBLISHED.study(3)
    if name == "random":
        pytest.skip("the two draw their chances differently")
    alarms = row.rule(batch, np.random.default_rng(0)) & batch.seen_RE
    for run, expected in zip(runs_of(batch), alarms, strict=True):
        streamed = STREAMED.get(name)
        if row.redrawn:
            mode = DETECTORS[row.registered].mode
            found = metric_trace(name, run, config=CONFIG.with_mode(mode)).alarms.tolist()
        elif row.registered:
            detector = DETECTORS[row.registered].make(np.random.default_rng(0))
            found = trace_by(detector, run, name).alarms.tolist()
        elif isinstance(streamed, RMetricConfig):
            found = trace_by(RMetric(streamed), run, name).alarms.tolist()
        else:
            found = streamed(run)
        assert found == expected[: len(found)].tolist()


def test_a_study_is_scored_as_its_runs_are_one_by_one():
    exact = list(simulate_published(specs(), Random(8), SMALL))
    batch = run_batch(SMALL, faults(specs(), SMALL), drawn(specs(), SMALL, seed=8))
    traces = [metric_trace("r_metric", run, config=AUTHORS) for run in exact]
    one_by_one = {rule: score(judge(exact, traces, rule)) for rule in ("published", "causal")}
    found = judge_batch(batch, r_metric(AUTHORS), np.random.default_rng(0))
    published, causal = one_by_one["published"], one_by_one["causal"]
    assert found[:4] == [
        published.f1.point, causal.f1.point, published.hits, published.false_alarms
    ]  # fmt: skip
    assert found[5] == pytest.approx(published.lead_minutes.point)


def test_a_run_that_has_crashed_is_silent():
    batch = PUBLISHED.study(0)
    late = np.ones(batch.validation_RE.shape, dtype=bool) & (batch.steps_E > 2600)
    assert (alerts_of_batch(batch, late).first[np.isfinite(batch.failure_R)] == inf).all()


def test_the_same_seed_draws_the_same_noise_under_every_condition():
    plain, healthy = PUBLISHED.study(4), ~np.isin(FAULT_OF_RUN, ACTING)
    for condition in ANATOMY:
        batch = condition.study(4)
        if condition.dynamics == PUBLISHED.dynamics:
            assert (batch.validation_RE[healthy] == plain.validation_RE[healthy]).all()
        if condition.absorbed:
            assert np.isfinite(batch.failure_R).sum() == 36


@pytest.mark.parametrize(
    ("title", "published", "causal"),
    [("As published", 0.985, 0.963), ("(a) ΔL from the true moving average", 0.785, 0.497),
     ("(b) Onset at a random step", 0.169, 0.116), ("Onset one step later (2501)", 0.038, 0.0),
     ("Half of the faults absorbed", 0.648, 0.633), ("Evaluation noise × 2", 0.951, 0.884),
     ("Evaluation noise × 4", 0.847, 0.640), ("All noise of the loss × 2", 0.843, 0.636),
     ("All noise of the loss × 4", 0.691, 0.280), ("Evaluation every 10 steps", 0.577, 0.014),
     ("(a) and (b)", 0.423, 0.044)],
)  # fmt: skip
def test_one_change_takes_the_number_apart(title, published, causal):
    """By the authors' weights, against a prototype written from the specification by another."""
    [condition] = [condition for condition in ANATOMY if condition.title == title]
    number = 8 if condition.dynamics.evaluate_every < 100 else 50
    config = replace(condition.config, weights=AUTHORS.weights)
    [found] = over_seeds(condition, [r_metric(config)], number)
    assert found.published_f1.mean() == pytest.approx(published, abs=0.02)
    assert found.causal_f1.mean() == pytest.approx(causal, abs=0.025)


def test_the_anatomy_has_the_authors_weights_beside_the_papers(monkeypatch):
    kept = [PUBLISHED, next(c for c in ANATOMY if c.title.startswith("Weights"))]
    monkeypatch.setattr("studies.paper.anatomy.ANATOMY", kept)
    published, other_weights = anatomy(4)
    rules = [r_metric(CONFIG), r_metric(AUTHORS)]
    for found, expected in zip(published[1:], over_seeds(PUBLISHED, rules, 4), strict=True):
        assert [list(x) for x in found] == [list(x) for x in expected]
    assert other_weights.by_authors is None
