"""Runs of the laboratory: outcomes, what is stored (without torch), and the tables of them."""

import subprocess
import sys
from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from rmetric.logs import LogError
from rmetric.readers.archive import read_runs, run_from_line, run_to_line, write_archive
from rmetric.records import Record, Run, Truth
from rmetric.simulation.study import stress_specs
from studies.fault_lab import __main__ as run_fault_lab
from studies.fault_lab import tables
from studies.fault_lab.branches import Definitions, judge
from studies.fault_lab.signals import SIGNALS, response
from studies.fault_lab.tables import by_fault, facts, outcomes, times, twins, wilson

numbers = st.floats(width=32) | st.sampled_from([nan, inf, -inf])
SPIKE = Truth(fault="LR_SPIKE", severity=5.0, onset_step=3)
NOISY = Truth(fault="NOISY_EVALUATION", onset_step=3, duration_steps=3)


def records_of(losses: list[float], begin: int = 1) -> list[Record]:
    """One record a loss, evaluated at every step."""
    return [
        Record(step=step, training_loss=1.0, validation_loss=loss)
        for step, loss in enumerate(losses, start=begin)
    ]


def a_run(run_id: str, records: list[Record], truth: Truth | None = None) -> Run:
    """A run, of the control in its name if it has a fault."""
    truth = truth or Truth()
    fault = {"type": truth.fault, "trigger_step": truth.onset_step}
    control = run_id.partition("_")[0] if truth.onset_step else None
    config = {"branch_of": control, "fault_injection": fault}
    return Run(id=run_id, records=records, config=config, truth=truth)


TWIN = [3.0, 2.5, 2.0, 1.9, 1.8, 1.7, 1.6]
NOISE = [3.0, 2.5, 0.5, 9.0, 0.5, 1.7, 1.6]
CLOSE = [3.0, 2.5, 1.8, 1.95, 1.95, 1.95]


@pytest.mark.parametrize(
    ("truth", "losses", "twin", "definitions", "kind", "step"),
    [
        (SPIKE, [3.0, 2.0, 2.0, 9.0, nan], None, {}, "non_finite", 5),
        (Truth(), [2.2, 2.0, 2.5, 2.6, 2.7, 2.8], None, {}, "diverged", 4),
        (Truth(), [2.2, 2.0, 2.5, 2.6, 2.0, 2.0], None, {}, "healthy", None),
        (SPIKE, [3.0, 2.5, 2.2, 2.1, 2.0, 1.9], TWIN, {}, "degraded", 4),
        (SPIKE, TWIN, TWIN, {}, "absorbed", None),
        (SPIKE, CLOSE, TWIN, {}, "degraded", 6),
        (SPIKE, CLOSE, TWIN, {"degraded_nats": 0.3}, "absorbed", None),
        (SPIKE, CLOSE, TWIN, {"degraded_nats": 0.3, "diverged_ratio": 1.01}, "diverged", 2),
        # Noise of the evaluation is no failure; what it hides is one.
        (NOISY, NOISE, TWIN, {}, "absorbed", None),
        (SPIKE, NOISE, TWIN, {}, "diverged", 6),
    ],
)
def test_the_outcome_follows_from_the_evaluations(truth, losses, twin, definitions, kind, step):
    found = judge(truth, records_of(losses), twin and records_of(twin), Definitions(**definitions))
    assert (found.failure_kind or found.outcome, found.failure_step) == (kind, step)


records = st.builds(
    Record,
    step=st.integers(1, 10**6),
    training_loss=st.none() | numbers,
    validation_loss=st.none() | numbers,
    worker_gradient_norms=st.none() | st.tuples(numbers, numbers),
    layer_gradient_norms=st.none() | st.dictionaries(st.text(min_size=1), numbers, max_size=3),
    non_finite_gradients=st.none() | st.integers(0, 10**9),
    planned_events=st.none() | st.tuples(st.sampled_from(["batch_size", "learning_rate"])),
)


@given(st.lists(records, min_size=1, max_size=5))
def test_a_stored_run_comes_back_as_it_was(found):
    run = a_run("seed000", found)
    assert repr(run_from_line(run_to_line(run))) == repr(run)


@pytest.fixture
def stored(tmp_path):
    """A control and its branch, and the archive of both."""
    control = a_run("seed000", records_of([3.0, 2.0, 1.0]))
    branch = a_run("seed000_x", control.records[:2] + records_of([7.0], begin=3), SPIKE)
    path = tmp_path / "runs.tar.xz"
    write_archive(path, [(run.id, run_to_line(run)) for run in (control, branch)])
    return path, control, branch


def test_an_archive_yields_its_runs_and_is_the_same_bytes_again(stored, tmp_path):
    path, *runs = stored
    back = list(read_runs(path))
    assert [(run.records, run.truth) for run in back] == [(run.records, run.truth) for run in runs]
    assert back[1].config["branch_of"] == "seed000"
    assert b"2.0" not in run_to_line(runs[1])  # stored from its onset on
    write_archive(tmp_path / "again.tar.xz", [(run.id, run_to_line(run)) for run in back])
    assert (tmp_path / "again.tar.xz").read_bytes() == path.read_bytes()


def test_an_archive_that_is_damaged_or_lacks_a_control_is_named(stored):
    path, _, branch = stored
    for content in (path.read_bytes()[:-40], b"not an archive"):
        path.write_bytes(content)
        with pytest.raises(LogError, match=r"runs\.tar\.xz: not a whole archive"):
            list(read_runs(path))
    with pytest.raises(ValueError, match="its control seed000 is not there"):
        run_from_line(run_to_line(branch))
    write_archive(path, [(branch.id, run_to_line(branch))])
    with pytest.raises(LogError, match=r"seed000_x: .*control"):
        list(read_runs(path))


def test_reading_needs_no_torch_and_the_rescue_demo_starts_without_matplotlib(stored):
    code = (
        "import sys, studies.fault_lab.rescue.demo; from studies.fault_lab import read_runs\n"
        f"assert len(list(read_runs({str(stored[0])!r}))) == 2\n"
        "assert not {'torch', 'matplotlib'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- the tables: what they count, and what they must not look at

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
    return a_run(name, records)


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
    return a_run(f"{control.id}_{fault}", records, truth)


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


@pytest.mark.parametrize(("changes", "seeing"), WORSE.values(), ids=WORSE)
def test_each_signal_sees_what_it_is_made_of_and_nothing_else(changes, seeing):
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


def test_the_report_does_not_open_the_test_parts_signals(tmp_path, monkeypatch):
    few = [spec for spec in stress_specs() if spec.fault == "LR_SPIKE"][:3]
    monkeypatch.setattr(tables, "stress_specs", lambda seed: few)  # all of them take a minute
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
