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
from studies.fault_lab.branches import Definitions, judge

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
    onset = truth and truth.onset_step
    config = {
        "branch_of": "seed000" if onset else None,
        "fault_injection": {"type": "LR_SPIKE" if onset else "NONE", "trigger_step": onset},
    }
    return Run(id=run_id, records=records, config=config, truth=truth or Truth())


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
