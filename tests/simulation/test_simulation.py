"""The simulator: what a reader can check of its dynamics, its outcomes and its bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from rmetric.logs import run_lines
from rmetric.metric import RMetricConfig
from rmetric.records import Run
from rmetric.simulation import ARCHITECTURES, FAULTS, RunSpec, simulate
from rmetric.simulation.architectures import CONSTANTS, architecture
from rmetric.simulation.dynamics import sharpened
from rmetric.simulation.hardware import simulate_hardware
from rmetric.simulation.outcome import degraded_at, diverged_at, median_of_three

SHORT = dict(total_steps=1000, onset_step=500, evaluate_every=20)


def spec(run_id: str, **changes) -> RunSpec:
    settings = dict(architecture="Llama-3-8B", **SHORT) | changes
    return RunSpec(experiment_id=run_id, **settings)


def repeated(number: int, name: str, **changes) -> list[Run]:
    return simulate([spec(f"{name}-{i}", **changes) for i in range(number)])


def log_of(run: Run) -> bytes:
    return b"".join(run_lines(run, RMetricConfig()))


def failure_rate(runs: list[Run]) -> float:
    return sum(run.truth.failed for run in runs) / len(runs)


@pytest.fixture(scope="module")
def healthy() -> dict[str, list[Run]]:
    return {
        name: repeated(8, f"healthy-{name}", architecture=name, total_steps=5000, onset_step=1)
        for name in ARCHITECTURES
    }


def test_without_faults_no_run_fails(healthy):
    assert {run.truth.outcome for runs in healthy.values() for run in runs} == {"healthy"}


def test_without_faults_the_excess_loss_is_a_power_of_the_step(healthy):
    for name, runs in healthy.items():
        steps = np.array([record.step for record in runs[0].records], dtype=float)
        losses = np.mean([[r.validation_loss for r in run.records] for run in runs], axis=0)
        excess = losses - architecture(name).irreducible_loss
        fitted = steps >= 100
        x, y = np.log(steps[fitted]), np.log(excess[fitted])
        slope, offset = np.polyfit(x, y, 1)
        unexplained = np.var(y - slope * x - offset) / np.var(y)
        assert unexplained < 0.03
        assert -0.5 < slope < -0.25  # Hoffmann et al. 2022: -0.28 in tokens


@pytest.mark.parametrize(
    ("name", "severities"),
    [
        ("LR_SPIKE", (2, 15, 60)),
        ("RMS_NORM_ERROR", (1.1, 1.5, 4.0)),
        ("GRADIENT_EXPLOSION", (10, 30, 100)),
        ("EXPERT_FAILURE", (1, 2, 4)),
        ("NODE_FAILURE", (0.2, 1, 5)),
    ],
)
def test_severity_is_monotone_in_expectation(name, severities):
    changes = dict(architecture="GPT-4-MoE", fault=name, duration_steps=200)
    rates = [
        failure_rate(repeated(12, f"{name}-{severity}", severity=severity, **changes))
        for severity in severities
    ]
    assert all(a <= b for a, b in pairwise(rates))
    assert rates[-1] > rates[0]


def test_a_softmax_saturates():
    curvature = sharpened(np.array([0.5, 1.0, 2.0, 8.0, 1e6]))
    assert curvature[1] == 1.0
    assert all(a < b for a, b in pairwise(curvature))
    assert curvature[-1] <= 1.0 + CONSTANTS.softmax_bound


def test_rubbish_in_the_data_costs_what_hedging_costs():
    """A model that sets a share f of its probability aside pays -ln(1 - f) on true tokens."""
    for share in (0.1, 0.3, 0.6):
        [struck] = repeated(
            1, "hedge", fault="DATA_CORRUPTION", severity=share, evaluate_every=1, onset_step=500
        )
        [twin] = repeated(1, "hedge", evaluate_every=1, onset_step=500)
        gap = [
            a.validation_loss - b.validation_loss
            for a, b in zip(struck.records, twin.records, strict=False)
        ]
        assert gap[:499] == [0.0] * 499
        assert np.mean(gap[520:540]) == pytest.approx(-np.log(1 - share), rel=0.15)
        jump = struck.records[499].training_loss - twin.records[499].training_loss
        assert jump > 4 * share  # noise is far from anything that was learnt


@pytest.mark.parametrize("name", [kind.name for kind in FAULTS.values() if kind.benign])
def test_benign_changes_fail_no_run(name):
    for severity in FAULTS[name].severities:
        runs = repeated(4, f"{name}-{severity}", fault=name, severity=severity)
        assert {run.truth.outcome for run in runs} == {"absorbed"}
        assert all(run.truth.benign for run in runs)


@pytest.mark.parametrize("name", ["EXPERT_FAILURE", "ROUTER_IMBALANCE"])
def test_an_expert_fault_has_nothing_to_act_on_in_a_dense_model(name):
    [struck] = simulate([spec("same", fault=name)])
    [control] = simulate([spec("same")])
    assert struck.truth.outcome == "not_applicable"
    assert struck.records == control.records


def test_before_the_onset_a_struck_run_is_its_control():
    specs = [spec("same", architecture="GPT-4-MoE", fault=name) for name in FAULTS]
    control, *struck = simulate(specs)
    assert control.truth.fault == "NONE"
    for run in struck:
        before = [record for record in run.records if record.step < 500]
        assert before == [record for record in control.records if record.step < 500]
        if FAULTS[run.truth.fault].act is not None:
            assert run.records != control.records, run.truth.fault


def test_a_fault_of_severity_one_that_multiplies_changes_nothing():
    names = ("LR_SPIKE", "GQA_MISMATCH", "RMS_NORM_ERROR", "BATCH_SIZE_CHANGE")
    specs = [spec("same", fault=name, severity=1.0) for name in names]
    control, *struck = simulate([spec("same"), *specs])
    for run in struck:
        assert run.records == control.records, run.truth.fault
        assert run.truth.outcome == "absorbed"


def test_same_seed_same_bytes_whatever_the_batch():
    specs = [
        spec(f"{name}-{i}", architecture=arch, fault=name, total_steps=300, onset_step=100 + i)
        for i, (name, arch) in enumerate(
            (name, arch) for name in FAULTS for arch in ("Mistral-7B", "GPT-4-MoE")
        )
    ]
    together = {run.id: log_of(run) for run in simulate(specs)}
    backwards = {run.id: log_of(run) for run in simulate(specs[::-1])}
    alone = {s.experiment_id: log_of(simulate([s])[0]) for s in specs[::5]}
    assert together == backwards
    assert all(together[run_id] == log for run_id, log in alone.items())


def test_another_seed_or_id_is_another_run():
    base = spec("one", total_steps=100, onset_step=50)
    logs = {
        log_of(simulate([changed])[0])
        for changed in (base, replace(base, seed=1), replace(base, experiment_id="two"))
    }
    assert len(logs) == 3


def test_the_cadence_of_the_log_does_not_change_the_run():
    [often] = simulate([spec("same", fault="LR_SPIKE", severity=25, evaluate_every=10)])
    [seldom] = simulate([spec("same", fault="LR_SPIKE", severity=25, evaluate_every=100)])
    losses = {record.step: record.validation_loss for record in often.records}
    assert [losses[r.step] for r in seldom.records] == [r.validation_loss for r in seldom.records]
    assert often.truth == seldom.truth


def test_a_worker_whose_gradient_leaves_float32_ends_the_run():
    [run] = simulate([spec("boom", fault="GRADIENT_EXPLOSION", severity=1e39, evaluate_every=1)])
    assert run.truth.failure_kind == "non_finite"
    last = run.records[-1]
    assert last.step == run.truth.failure_step
    assert np.isinf(last.gradient_norm)
    assert np.isinf(last.worker_gradient_norms[0])
    assert np.isfinite(last.worker_gradient_norms[1:]).all()


def test_a_lost_worker_ends_the_log_in_the_step_before():
    for run in repeated(6, "sick", fault="NODE_FAILURE", severity=50.0, evaluate_every=1):
        assert run.truth.failure_kind == "lost_worker"
        assert run.records[-1].step == run.truth.failure_step - 1


def test_workers_norms_follow_one_law_whether_first_or_last():
    """Drawing the healthy workers given their sum must not show."""
    runs = repeated(20, "exchangeable", evaluate_every=10)
    norms = np.array([r.worker_gradient_norms for run in runs for r in run.records if r.step > 200])
    means, spreads = norms.mean(axis=0), norms.std(axis=0)
    assert np.ptp(means) < 0.03 * means.mean()
    assert np.ptp(spreads) < 0.12 * spreads.mean()
    deviations = norms - norms.mean(axis=1, keepdims=True)
    correlation = np.corrcoef(deviations.T)[np.triu_indices(8, 1)]
    assert np.abs(correlation + 1 / 7).max() < 0.1  # of independent values about their mean


def test_a_slow_link_slows_the_job_and_is_seen_in_its_events():
    slow, control = simulate(
        [spec("same", fault="NETWORK_DEGRADATION", severity=250), spec("same")]
    )
    assert slow.records[-1].time > control.records[-1].time + 100
    assert len([e for r in slow.records for e in r.events if e.kind == "link_retry"]) > 5
    losses = [[record.validation_loss for record in run.records] for run in (slow, control)]
    assert losses[0] == losses[1][: len(losses[0])]


def hardware(seed: int, process: str | None, severity: float, steps: int, begin: int, last: int):
    return simulate_hardware(
        np.random.default_rng(seed), num_workers=8, total_steps=steps, seconds_per_step=5.0,
        process=process, severity=severity, onset_step=begin, duration_steps=last,
    )  # fmt: skip


def test_two_in_ten_sick_nodes_give_signs():
    signs = 0
    for i in range(400):
        history = hardware(i, "sick_node", 0.5, 3000, 500, 2000)
        workers = [e.worker for e in history.events if e.time > 2500.0]
        signs += any(workers.count(w) >= 5 for w in set(workers))
    assert 40 < signs < 110  # 80 expected, fewer where the node dies at once


def test_hardware_times_rise_and_lie_within_the_run():
    for process in (None, "sick_node", "slow_link"):
        history = hardware(3, process, 20.0, 500, 100, 300)
        times = [event.time for event in history.events]
        assert times == sorted(times)
        assert all(0 <= time <= history.end_seconds[-1] for time in times)


def test_outcomes_are_what_their_definitions_say():
    flat = np.full(50, 2.0)
    spike = flat.copy()
    spike[20] = 9.0
    recovers = flat.copy()
    recovers[20:30] = 9.0
    broken = flat.copy()
    broken[20:] = 2.5
    assert diverged_at(flat) is None
    assert diverged_at(spike) is None  # the median of three forgives one evaluation
    assert diverged_at(recovers) is None
    assert diverged_at(broken) == 21
    assert diverged_at(flat * 1.15) is None
    assert degraded_at(flat + 0.2, flat) == 0
    assert degraded_at(flat + 0.09, flat) is None
    assert degraded_at(broken, flat) == 21
    assert median_of_three(np.array([3.0, 1.0, 2.0, 9.0])).tolist() == [3.0, 3.0, 2.0, 2.0]
    assert diverged_at(np.empty(0)) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(architecture="GPT-2"), "unknown architecture 'GPT-2': known are Llama-3-8B"),
        (dict(fault="GREMLINS"), "unknown fault 'GREMLINS': known are NONE, EXPERT_FAILURE"),
        (dict(severity=-1.0), "severity of NONE is -1.0"),
        (dict(severity=float("nan")), "severity of NONE is nan"),
        (dict(severity=float("inf")), "severity of NONE is inf"),
        (dict(fault="DATA_CORRUPTION", severity=1.5), "at least 0 and at most 1"),
        (dict(fault="EXPERT_FAILURE", severity=1.5), "must be a whole number"),
        (dict(onset_step=0), "onset_step is 0: it must be from 1 to total_steps"),
        (dict(onset_step=1001), "onset_step is 1001"),
        (dict(duration_steps=-1), "duration_steps is -1"),
        (dict(num_workers=1), "num_workers is 1: it must be at least 2"),
        (dict(seed=-1), "seed is -1"),
        (dict(seed=2**64), "it must be below"),
        (dict(total_steps=0), "total_steps is 0"),
    ],
)
def test_a_run_that_cannot_be_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        spec("bad", **change)


def test_runs_of_different_shapes_are_not_stepped_together():
    with pytest.raises(ValueError, match="must share"):
        simulate([spec("a"), spec("b", num_workers=4)])
