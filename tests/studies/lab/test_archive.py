"""Outcomes, and runs as they are stored: what goes in comes out, without torch."""

from __future__ import annotations

import subprocess
import sys
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.logs import LogError
from rmetric.readers.archive import read_runs, run_from_line, run_to_line, write_archive
from rmetric.records import Record, Run, Truth
from studies.fault_lab.outcome import Definitions, judge

numbers = st.floats(width=32) | st.sampled_from([nan, inf, -inf])


def records_of(losses: list[float], begin: int = 1) -> list[Record]:
    """One record a loss, evaluated at every step."""
    return [
        Record(step=step, training_loss=1.0, validation_loss=loss)
        for step, loss in enumerate(losses, start=begin)
    ]


def a_run(run_id: str, records: list[Record], onset: int | None = None) -> Run:
    config = {
        "branch_of": "seed000" if onset else None,
        "fault_injection": {"type": "LR_SPIKE" if onset else "NONE", "trigger_step": onset},
    }
    truth = Truth(fault="LR_SPIKE", severity=5.0, onset_step=onset) if onset else Truth()
    return Run(id=run_id, records=records, config=config, truth=truth)


# -- outcomes


def test_a_loss_that_is_no_number_is_the_failure_whatever_comes_before():
    losses = [3.0, 2.0, 2.0, 9.0, nan]
    assert judge(Truth(fault="LR_SPIKE"), records_of(losses)).failure_kind == "non_finite"
    broken = records_of([3.0, 2.0, 2.0, 2.0])
    broken[2].gradient_norm = inf
    truth = judge(Truth(fault="LR_SPIKE"), broken)
    assert (truth.outcome, truth.failure_step) == ("failed", 3)


def test_a_run_has_diverged_where_it_stays_above_its_best():
    stays, returns = [2.2, 2.0, 2.5, 2.6, 2.7, 2.8], [2.2, 2.0, 2.5, 2.6, 2.0, 2.0]
    assert judge(Truth(), records_of(stays)).failure_kind == "diverged"
    assert judge(Truth(), records_of(stays)).failure_step == 4
    assert judge(Truth(), records_of(returns)).outcome == "healthy"


def test_a_run_is_degraded_where_it_stays_above_its_twin():
    twin = records_of([3.0, 2.5, 2.0, 1.9, 1.8, 1.7])
    worse = records_of([3.0, 2.5, 2.2, 2.1, 2.0, 1.9])
    truth = judge(Truth(fault="LR_SPIKE", onset_step=3), worse, twin)
    assert (truth.failure_kind, truth.failure_step) == ("degraded", 4)
    assert judge(Truth(fault="LR_SPIKE"), twin, twin).outcome == "absorbed"


@pytest.mark.parametrize(
    ("definitions", "kind"),
    [
        ({}, "degraded"),
        ({"degraded_nats": 0.3}, None),
        ({"degraded_nats": 0.3, "diverged_ratio": 1.01}, "diverged"),
    ],
)
def test_definitions_can_be_set(definitions, kind):
    twin = records_of([3.0, 2.5, 2.0, 1.9, 1.8, 1.7])
    worse = records_of([3.0, 2.5, 1.8, 1.95, 1.95, 1.95])
    truth = judge(Truth(fault="LR_SPIKE"), worse, twin, Definitions(**definitions))
    assert truth.failure_kind == kind


@pytest.mark.parametrize("wrong", [{"diverged_ratio": 1.0}, {"degraded_nats": 0.0}])
def test_a_definition_that_everything_meets_is_refused(wrong):
    with pytest.raises(ValueError, match="must be above"):
        Definitions(**wrong)


def test_evaluation_noise_is_no_failure_while_what_it_hides_is():
    noisy = Truth(fault="NOISY_EVALUATION", onset_step=3, duration_steps=3)
    twin = records_of([3.0, 2.5, 2.0, 1.9, 1.8, 1.7, 1.6])
    under_noise = records_of([3.0, 2.5, 0.5, 9.0, 0.5, 1.7, 1.6])
    assert judge(noisy, under_noise, twin).outcome == "absorbed"
    assert judge(Truth(fault="LR_SPIKE"), under_noise, twin).outcome == "failed"


# -- archives


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
    back = run_from_line(run_to_line(run))
    assert repr(back) == repr(run)


def test_a_branch_is_stored_from_its_onset_and_comes_back_whole():
    control = a_run("seed000", records_of([3.0, 2.0, 1.0, 0.5]))
    branch = a_run("seed000_x", control.records[:2] + records_of([7.0, 8.0], begin=3), onset=3)
    line = run_to_line(branch)
    assert b"2.0" not in line
    assert run_from_line(line, control).records == branch.records
    with pytest.raises(ValueError, match="its control seed000 is not there"):
        run_from_line(line)


def an_archive(folder, name="runs.tar.xz"):
    control = a_run("seed000", records_of([3.0, 2.0, 1.0]))
    branch = a_run("seed000_x", control.records[:2] + records_of([7.0], begin=3), onset=3)
    write_archive(folder / name, [(run.id, run_to_line(run)) for run in (control, branch)])
    return folder / name, [control, branch]


def test_an_archive_yields_its_runs_and_is_the_same_bytes_again(tmp_path):
    path, runs = an_archive(tmp_path)
    back = list(read_runs(path))
    assert [run.records for run in back] == [run.records for run in runs]
    assert [run.truth for run in back] == [run.truth for run in runs]
    assert back[1].config["branch_of"] == "seed000"
    again, _ = an_archive(tmp_path, "again.tar.xz")
    assert again.read_bytes() == path.read_bytes()


def test_an_archive_that_is_damaged_is_named(tmp_path):
    path, _ = an_archive(tmp_path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(LogError, match=r"runs\.tar\.xz: not a whole archive"):
        list(read_runs(path))
    path.write_text("not an archive")
    with pytest.raises(LogError, match=r"runs\.tar\.xz: not a whole archive"):
        list(read_runs(path))


def test_a_branch_without_its_control_is_named(tmp_path):
    control = a_run("seed000", records_of([3.0, 2.0]))
    branch = a_run("seed000_x", control.records[:1] + records_of([7.0], begin=2), onset=2)
    write_archive(tmp_path / "runs.tar.xz", [(branch.id, run_to_line(branch))])
    with pytest.raises(LogError, match=r"seed000_x: .*control"):
        list(read_runs(tmp_path / "runs.tar.xz"))


def test_reading_needs_no_torch(tmp_path):
    path, _ = an_archive(tmp_path)
    code = (
        "import sys; from studies.fault_lab import read_runs\n"
        f"assert len(list(read_runs({str(path)!r}))) == 2\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
