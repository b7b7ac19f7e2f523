"""The laboratory's tables: what they count, and what they must not look at."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from rmetric.readers.archive import run_to_line, write_archive
from rmetric.records import Record, Run, Truth
from rmetric.simulation.study import stress_specs
from studies.fault_lab import __main__ as run_fault_lab
from studies.fault_lab import tables
from studies.fault_lab.signals import SIGNALS, response
from studies.fault_lab.tables import by_fault, facts, outcomes, times, twins, wilson

STEPS = 160
ONSET = 101


def a_record(step: int, rng: np.random.Generator) -> Record:
    """A healthy step."""
    jitter = rng.uniform(0.95, 1.05, size=12).tolist()
    return Record(
        step=step,
        time=float(step),
        training_loss=2.0 * jitter[0],
        probe_loss=2.0 * jitter[1],
        validation_loss=2.0 * jitter[2] if step % 10 == 0 else None,
        gradient_norm=jitter[3],
        worker_gradient_norms=tuple(jitter[4:8]),
        worker_gradient_cosines=tuple(0.5 * x for x in jitter[8:12]),
        non_finite_gradients=0,
        learning_rate=1e-3,
        update_norm=0.1 * jitter[3],
        parameter_norm=20.0 + step / 100,
        activation_headroom=120.0 * jitter[1] if step % 10 == 0 else None,
        attention_logit_max=5.0 * jitter[1] if step % 10 == 0 else None,
    )


def a_control(name: str = "seed000", seed: int = 0) -> Run:
    rng = np.random.default_rng(seed)
    records = [a_record(step, rng) for step in range(1, STEPS + 1)]
    config = {"branch_of": None, "fault_injection": {"type": "NONE", "trigger_step": None}}
    return Run(id=name, records=records, config=config, truth=Truth())


def a_branch(control: Run, fault: str = "LR_SPIKE", failure: int | None = 130, **worse) -> Run:
    """The control's records, some fields worse from the onset on."""
    records = [
        replace(record, **worse) if record.step >= ONSET else replace(record)
        for record in control.records
    ]
    truth = Truth(
        fault=fault,
        severity=5.0,
        onset_step=ONSET,
        duration_steps=20,
        benign=fault == "BAD_BATCH",
        outcome="failed" if failure else "absorbed",
        failure_kind="degraded" if failure else None,
        failure_step=failure,
    )
    config = {"branch_of": control.id, "fault_injection": {"type": fault, "trigger_step": ONSET}}
    return Run(id=f"{control.id}_{fault}", records=records, config=config, truth=truth)


#: What a sick run logs -> the signals that it makes worse.
WORSE = {
    "training_loss": ({"training_loss": 9.0}, {"training_loss"}),
    "probe_loss": ({"probe_loss": 9.0}, {"probe_loss"}),
    "validation_loss": ({"validation_loss": 9.0}, {"validation_rise", "r_metric"}),
    "gradient_norm": ({"gradient_norm": 99.0}, {"gradient_norm"}),
    "update_norm": ({"update_norm": 9.0}, {"update_ratio"}),
    "one worker": (
        {"worker_gradient_norms": (1.0, 1.0, 1.0, 50.0)},
        {"worst_worker", "worker_variance", "r_metric"},
    ),
    "a cosine": ({"worker_gradient_cosines": (0.5, 0.5, 0.5, -0.9)}, {"lowest_cosine"}),
    "headroom": ({"activation_headroom": 1.0}, {"activation_headroom"}),
    "logits": ({"attention_logit_max": 500.0}, {"attention_logit_max"}),
    "weights": ({"parameter_norm": 90.0}, {"weight_growth"}),
}


@pytest.mark.parametrize("name", WORSE)
def test_each_signal_sees_what_it_is_made_of_and_nothing_else(name):
    changes, seeing = WORSE[name]
    control = a_control()
    run = a_branch(control, **changes)
    for signal in SIGNALS:
        shown = response(SIGNALS[signal], run, control)
        assert (shown.shown > shown.twin) == (signal in seeing), signal


def test_nothing_at_or_after_the_failure_is_looked_at():
    control = a_control()
    early, late = a_branch(control), a_branch(control)
    for record in late.records[129:]:
        record.training_loss = record.update_norm = inf
        record.worker_gradient_norms = (nan,) * 4
    for signal in SIGNALS.values():
        assert response(signal, late, control) == response(signal, early, control)


@given(st.integers(0, 40), st.integers(1, 40))
def test_wilson_is_that_of_scipy(hits, more):
    interval = binomtest(hits, hits + more).proportion_ci(method="wilson")
    ours = wilson(hits, hits + more)
    assert (ours.low, ours.high) == pytest.approx((interval.low, interval.high), abs=1e-6)


def test_outcomes_are_counted_by_fault_those_that_fail_most_first():
    control = a_control()
    runs = [
        control,
        a_branch(control, "DEAD_WORKER", failure=None),
        a_branch(control, "LR_SPIKE"),
        a_branch(control, "LR_SPIKE", failure=111),
        a_branch(control, "BAD_BATCH", failure=None),
    ]
    found = facts(runs)
    assert list(by_fault(found)) == ["LR_SPIKE", "DEAD_WORKER", "BAD_BATCH", "NONE"]
    rows = {row[0]: row for row in outcomes(found).rows}
    name, kind, number, share, *counts, _, middle, _ = rows["LR_SPIKE"]
    assert (name, kind, number, share.point, counts) == ("LR_SPIKE", "fault", 2, 1.0, [0, 0, 2])
    assert middle == (10 + 29) / 2
    assert rows["BAD_BATCH"][1] == "benign"


def test_times_are_counted_from_the_onset_benign_failures_apart():
    control = a_control()
    runs = [control, a_branch(control, "BAD_BATCH", failure=150)]
    runs += [a_branch(control, failure=ONSET + after) for after in (0, 10, 30, 31)]
    rows = {row[0]: row[1:] for row in times(facts(runs)).rows}
    assert rows["degraded"] == rows["all"]
    assert rows["all"][:3] == (4, 1, 3)
    assert rows["all"][3:] == pytest.approx(np.percentile([0, 10, 30, 31], [10, 25, 50, 75, 90]))
    assert rows["diverged"][0] == 0
    assert all(np.isnan(rows["diverged"][3:]))


def test_twins_are_subtracted_at_the_onset_later_and_at_the_end():
    controls = [a_control(f"seed{n:03d}", n) for n in range(2)]
    runs = [a_branch(c, "EXPERT_FAILURE", failure=None) for c in controls]
    runs.append(a_branch(controls[0], "LR_SPIKE"))
    for run, extra in zip(runs, (0.0, 0.2, 9.0), strict=True):
        for record in run.records[ONSET - 1 :]:
            record.training_loss += 3.0
            record.probe_loss += 1.0 + extra + (record.step - ONSET)
    (row,) = twins([*controls, *runs]).rows
    fault, severity, number, *spreads = row
    assert (fault, severity, number) == ("EXPERT_FAILURE", "5", 2)
    assert spreads == ["3.00", "1.00 to 1.20", "11.00 to 11.20", "20.00 to 20.20", "60.00 to 60.20"]


# -- the whole report


def write_part(folder, split: str, seeds, **worse) -> None:
    folder.mkdir(exist_ok=True)
    lines = []
    for seed in seeds:
        control = a_control(f"seed{seed:03d}", seed)
        branches = [
            a_branch(control, "LR_SPIKE", **worse),
            a_branch(control, "BAD_BATCH", failure=None),
        ]
        lines += [(run.id, run_to_line(run)) for run in (control, *branches)]
    write_archive(folder / f"{split}.tar.xz", lines)


@pytest.fixture
def few_simulated(monkeypatch):
    """A simulated study of seconds instead of a minute."""
    few = [spec for spec in stress_specs() if spec.fault == "LR_SPIKE"][:3]
    monkeypatch.setattr(tables, "stress_specs", lambda seed: few)


def test_the_report_does_not_open_the_test_parts_signals(tmp_path, few_simulated, capsys):
    made = {}
    for name, worse in (("plain", {}), ("absurd", {"training_loss": 99.0, "update_norm": 99.0})):
        write_part(tmp_path / name, "development", range(2), update_norm=9.0)
        write_part(tmp_path / name, "test", range(2, 4), **worse)
        out = tmp_path / f"{name}_out"
        options = ["--report", "--archives", str(tmp_path / name), "--out", str(out)]
        assert run_fault_lab.main(options) == 0
        made[name] = {p.name: p.read_bytes() for p in out.iterdir()}
    assert made["plain"] == made["absurd"]
    names = {"outcomes", "outcomes_by_severity", "signals", "signals_by_fault", "detectors"}
    files = {f"{name}.csv" for name in names | {"simulator", "times", "twins"}}
    assert files | {"fault_lab.png", "fault_lab.pdf"} <= made["plain"].keys()
    assert b"4,1," in made["plain"]["outcomes.csv"]  # outcomes are those of all runs


def test_a_report_without_archives_says_so(tmp_path, capsys):
    options = ["--report", "--archives", str(tmp_path), "--out", str(tmp_path / "out")]
    assert run_fault_lab.main(options) == 1
    assert "no archive (*.tar.xz)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
