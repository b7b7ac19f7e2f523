"""The metric as the authors' code computes it: bit for bit on the logs that they ship."""

from __future__ import annotations

import csv
import json
from math import inf, isnan, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric import Record, RMetric, RMetricConfig
from rmetric.logs import run_lines, start_line
from rmetric.metric import PRESETS, VARIANTS
from rmetric.records import Run
from rmetric.signals.authors import NON_FINITE_DRIFT, FirstLossDrift
from tests.authors_data import AUTHORS, needs_authors_logs

LOSSES = st.lists(st.floats(0.5, 20), min_size=1, max_size=40)


def scores(config: RMetricConfig, losses) -> list[float]:
    metric = RMetric(config)
    return [
        metric.update(Record(step=step, validation_loss=loss)).score
        for step, loss in enumerate(losses, start=1)
    ]


@needs_authors_logs
def test_the_shipped_case_study_comes_back_to_the_last_bit():
    metric, same = RMetric(RMetricConfig.authors_case_study()), []
    with open(AUTHORS / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            metric.update(
                Record(step=int(row["step"]), training_loss=float(row["train_loss"]),
                       gradient_variance=float(row["sigma_sq"]), failure_rate=float(row["lambda"]))
            )  # fmt: skip
            same.append(
                (metric.raw.loss_drift, metric.normalised.loss_drift, metric.score)
                == tuple(float(row[name]) for name in ("delta_l", "delta_l_norm", "r_metric"))
            )
    assert same == [True] * 9


def test_the_case_study_monitor_puts_two_zeros_into_the_window():
    metric = RMetric(RMetricConfig.authors_case_study())
    drifts = []
    for step, loss in enumerate([5.0, 3.0, 2.0, 4.0], start=1):
        metric.update(Record(step=step, training_loss=loss))
        drifts.append((metric.raw.loss_drift, metric.normalised.loss_drift))
    assert drifts == [(0.0, 0.0), (0.0, 0.0), (2.0, 1.0), pytest.approx((2 / 3, 1 / 3))]


@given(LOSSES)
def test_the_first_loss_stays_out_of_its_own_window(losses):
    drifts = np.array(losses[1:]) - losses[0]
    expected = [0.0]
    for end in range(1, len(drifts) + 1):
        seen = drifts[:end]
        span = seen.max() - seen.min()
        expected.append(0.78 * ((seen[-1] - seen.min()) / span) if span else 0.0)
    assert scores(RMetricConfig.authors_simulator(), losses) == expected


def test_the_first_loss_that_is_finite_is_the_reference():
    drift = FirstLossDrift()
    seen = [drift.update(loss) for loss in (nan, 3.0, inf, 2.0)]
    assert isnan(seen[1])
    assert (seen[0], seen[2], seen[3]) == (inf, inf, -1.0)


@given(LOSSES, st.sampled_from([nan, inf]))
def test_a_loss_that_is_not_finite_counts_100_nats_unclipped_and_is_not_remembered(losses, odd):
    for variant in ("authors_simulator", "authors_average"):
        config = RMetricConfig.authors_simulator(variant=variant)
        metric, twin = RMetric(config), RMetric(config)
        drifts = []
        for step, loss in enumerate(losses, start=1):
            for instance in (metric, twin):
                instance.update(Record(step=step, validation_loss=loss))
            drifts += [] if isnan(metric.raw.loss_drift) else [metric.raw.loss_drift]
        metric.update(Record(step=100, validation_loss=odd))
        span = max(drifts) - min(drifts) if drifts else 0.0
        n = (NON_FINITE_DRIFT - min(drifts)) / span if span else 0.0
        assert metric.normalised.loss_drift == n
        for instance in (metric, twin):
            instance.update(Record(step=101, validation_loss=losses[-1]))
        assert metric.normalised.loss_drift == twin.normalised.loss_drift


@given(st.lists(st.floats(0.1, 1e6), min_size=2, max_size=16))
def test_the_variance_of_the_authors_is_numpys(norms):
    metric = RMetric(RMetricConfig.authors_simulator())
    metric.update(Record(step=1, worker_gradient_norms=tuple(norms)))
    assert metric.raw.gradient_variance == float(np.var(norms))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_takes_whatever_a_record_holds(variant):
    metric = RMetric(RMetricConfig.simulation(variant=variant))
    for step, odd in enumerate([nan, inf, -inf, 1.0, 1e308, -1e308, nan]):
        metric.update(Record(step=step, validation_loss=odd, worker_gradient_norms=(odd, 1.0)))
        metric.update(Record(step=step, worker_gradient_norms=()))
        assert not isnan(metric.score)


@pytest.mark.parametrize("name", PRESETS)
def test_a_log_states_the_variant_so_that_a_replay_computes_the_same(name):
    config = PRESETS[name]()
    stated = json.loads(start_line({}, "r", config, "FULL_METRIC"))["config"]["metric_settings"]
    assert stated.get("variant", "paper") == config.variant
    assert ("variant" in stated) == (config.variant != "paper")
    assert RMetricConfig(**stated) == config


def test_the_score_of_a_log_is_that_of_its_variant():
    records = [Record(step=s, validation_loss=x) for s, x in enumerate([3.0, 2.0, 2.5, 2.2])]
    config = RMetricConfig.authors_simulator()
    lines = list(run_lines(Run(id="r", records=records), config))
    stated = [json.loads(line)["r_metric"] for line in lines[1:]]
    assert stated == scores(config, [3.0, 2.0, 2.5, 2.2])
