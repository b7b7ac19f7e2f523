"""The threshold file of the calibrated detector, and how it is made from healthy runs."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric._util.strict_json import encode
from rmetric.cli.main import main
from rmetric.detectors.calibrated import (
    CalibratedDetector,
    Thresholds,
    default_thresholds,
    read_thresholds,
    thresholds_to_json,
)
from rmetric.detectors.calibrated.calibration import FLOORS, MARGIN, NotHealthy, calibrate
from rmetric.detectors.calibrated.thresholds import DEFAULT, sources
from rmetric.records import HardwareEvent, Record, Run
from tests.detectors.calibrated_streams import records, scores

ROOT = Path(__file__).parents[2]
LAB = ROOT / "studies/fault_lab/data"
PAGE = ROOT / "docs" / "calibrated.md"
NAMES = {name for source in sources() for name in source.NAMES}
STRENGTH = st.floats(1e-9, 1e12)
PART = st.dictionaries(st.sampled_from(sorted(NAMES)), STRENGTH | st.just(inf))


def written(path: Path, content) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@settings(max_examples=30)
@given(PART, PART, PART)
def test_what_is_written_reads_back_the_same(tmp_path_factory, alone, together, full_scale):
    ours = Thresholds(
        alone=alone, together=together, full_scale=full_scale, provenance={"runs": 3, "who": ["a"]}
    )
    path = tmp_path_factory.getbasetemp() / "thresholds.json"
    written(path, encode(thresholds_to_json(ours)))
    assert read_thresholds(path) == ours


FINE = {"alone": {"loss_jump": 4}, "together": {}, "full_scale": {}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not a threshold file (not JSON: '')"),
        ('{"alone": {"loss_jump": 4', "not a threshold file (not JSON: "),
        ("[1, 2]", "not a threshold file (an object is expected)"),
        ("4", "not a threshold file (an object is expected)"),
        ({"alone": {}, "together": {}}, "'full_scale' is missing or no object"),
        (FINE | {"together": [1]}, "'together' is missing or no object"),
        (FINE | {"alone": {"los_jump": 4}}, "'alone' has 'los_jump', which is not a statistic; a"),
        (FINE | {"alone": {"loss_jump": 0}}, "threshold of 'loss_jump' is 0: a number above 0"),
        (FINE | {"alone": {"loss_jump": -1.5}}, "threshold of 'loss_jump' is -1.5: a number"),
        (FINE | {"alone": {"loss_jump": True}}, "threshold of 'loss_jump' is True: a number"),
        (FINE | {"alone": {"loss_jump": "4"}}, "threshold of 'loss_jump' is '4': a number above"),
        (FINE | {"alone": {"loss_jump": [4]}}, "threshold of 'loss_jump' is [4]: a number above"),
        (FINE | {"alone": {"loss_jump": nan}}, "threshold of 'loss_jump' is nan: a number above"),
        (FINE | {"alone": {"loss_jump": inf}}, "threshold of 'loss_jump' is inf: a number above"),
        (FINE | {"alone": {"loss_jump": 10**400}}, "threshold of 'loss_jump' is 1000"),
        (FINE | {"provenance": "mine"}, "'provenance' is 'mine': an object is expected"),
    ],
)
def test_a_damaged_file_is_refused_and_named(tmp_path, content, message):
    path = written(tmp_path / "mine.json", content)
    with pytest.raises(ValueError, match="mine") as caught:
        read_thresholds(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_file_that_is_not_there_or_no_text_is_refused_and_named(tmp_path):
    with pytest.raises(ValueError, match=r"absent.json: cannot be read \(No such file"):
        read_thresholds(tmp_path / "absent.json")
    with pytest.raises(ValueError, match=r"cannot be read \(Is a directory\)"):
        read_thresholds(tmp_path)
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match="binary: not a threshold file"):
        read_thresholds(tmp_path / "binary")


def test_null_is_never_and_what_is_absent_too(tmp_path):
    content = {"alone": {"loss_jump": None}, "together": {}, "full_scale": {}}
    thresholds = read_thresholds(written(tmp_path / "t.json", content))
    assert thresholds.alone == {"loss_jump": inf}
    stream = records([2.0] * 60 + [90.0] * 40)
    assert not any(x > 1 for x in scores(stream, CalibratedDetector(thresholds)))


def test_the_shipped_thresholds_are_the_floors_or_above():
    shipped = default_thresholds()
    assert set(shipped.alone) == set(FLOORS.alone)
    assert set(shipped.together) == set(FLOORS.together)
    for part in ("alone", "together", "full_scale"):
        ours, least = getattr(shipped, part), getattr(FLOORS, part)
        assert set(ours) == set(least)
        assert all(ours[name] >= least[name] for name in ours)
        assert set(ours) <= NAMES
    assert shipped.provenance["alarmed_by_the_floors"] <= 0.01 * shipped.provenance["runs"]


def test_the_shipped_thresholds_are_what_the_command_makes_of_the_laboratorys_open_parts(tmp_path):
    parts = [str(LAB / f"{part}.tar.xz") for part in ("calibration", "development")]
    assert main(["calibrate", *parts, "--budget", "0.01", "--out", str(tmp_path / "t.json")]) == 0
    assert (tmp_path / "t.json").read_bytes() == DEFAULT.read_bytes()


def runs_of(seed: int, number: int, *, noise: float = 0.3, steps: int = 90) -> list[Run]:
    """Healthy runs, some of which are rougher than the floors allow."""
    rng = np.random.default_rng(seed)
    runs = []
    for n in range(number):
        jump = rng.choice([0.0, 0.0, 0.8, 3.0])
        at = int(rng.integers(30, 80))
        rough = np.exp(noise * rng.standard_normal((steps, 6)))
        records = []
        for step in range(steps):
            up = jump * (at <= step < at + 6)
            norms = rough[step, :4] * (1 + 3 * (n % 5 == 0))
            records.append(
                Record(
                    step=step + 1, training_loss=2 + 0.1 * float(rough[step, 4]) + up,
                    probe_loss=2 + up / 2, gradient_norm=float(rough[step, 5]) * (1 + 4 * up),
                    worker_gradient_norms=tuple(norms.tolist()), learning_rate=1e-3,
                    update_norm=float(rough[step, 4]) * (1 + up),
                    events=(HardwareEvent(0.0, "ecc"),) * (step == at),
                )
            )  # fmt: skip
        runs.append(Run(id=f"run{n:02}", records=records))
    return runs


def num_alarmed(runs: list[Run], thresholds: Thresholds) -> int:
    return sum(any(x > 1 for x in scores(r.records, CalibratedDetector(thresholds))) for r in runs)


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), number=st.integers(1, 12),
       budget=st.sampled_from([0.0, 0.1, 0.25, 0.29, 0.5]))  # fmt: skip
def test_the_runs_that_it_was_made_of_alarm_within_the_budget(seed, number, budget):
    runs = runs_of(seed, number)
    thresholds = calibrate(runs, budget)
    assert num_alarmed(runs, thresholds) <= budget * number + 1e-9
    for part in ("alone", "together", "full_scale"):
        least = getattr(FLOORS, part)
        assert all(x >= least[name] for name, x in getattr(thresholds, part).items())
    assert thresholds.provenance["runs"] == number


def test_rough_runs_raise_what_they_go_beyond_and_nothing_alone_else():
    runs = runs_of(1, 12)
    assert num_alarmed(runs, FLOORS) > 3
    thresholds = calibrate(runs, 0.0)
    most = thresholds.provenance["most_in_the_others"]
    raised = {name for name, x in thresholds.alone.items() if x > FLOORS.alone[name]}
    assert raised
    for name, x in thresholds.alone.items():
        if name in raised:
            assert x == pytest.approx(MARGIN * most[name], abs=0.012)
        else:
            assert MARGIN * most[name] <= x + 1e-3
    factors = {thresholds.together[n] / x for n, x in FLOORS.together.items()}
    assert min(factors) > 1
    assert max(factors) < 1.02 * min(factors)  # pairs are raised as a whole


def test_quiet_runs_leave_the_floors_as_they_are():
    quiet = [
        Run(id=str(n), records=[Record(step=s, training_loss=2.0, events=()) for s in range(60)])
        for n in range(3)
    ]
    thresholds = calibrate(quiet)
    assert (thresholds.alone, thresholds.together) == (FLOORS.alone, FLOORS.together)
    assert thresholds.full_scale == FLOORS.full_scale
    assert thresholds.provenance["given_up"] == []


def test_a_larger_budget_never_raises_a_threshold():
    runs = runs_of(3, 12)
    before = None
    for budget in (0.0, 0.1, 0.2, 0.4, 0.8):
        thresholds = calibrate(runs, budget)
        if before is not None:
            for part in ("alone", "together", "full_scale"):
                ours, theirs = getattr(thresholds, part), getattr(before, part)
                assert all(ours[name] <= theirs[name] for name in ours)
        before = thresholds


def test_the_order_of_the_runs_does_not_matter():
    runs = runs_of(4, 10)
    assert calibrate(runs, 0.2) == calibrate(iter(runs[::-1]), 0.2)


def test_a_budget_of_29_per_cent_gives_up_29_of_100():
    loud = [Record(step=s, training_loss=2.0 if s < 40 else 9.0) for s in range(60)]
    runs = [Run(id=f"{n:03}", records=loud) for n in range(100)]
    assert len(calibrate(runs, 0.29).provenance["given_up"]) == 29


@pytest.mark.parametrize("budget", [-0.1, 1.0, nan, inf])
def test_a_budget_that_is_no_share_is_refused(budget):
    with pytest.raises(ValueError, match="a share from 0 to less than 1 is accepted"):
        calibrate(runs_of(0, 1), budget)


def test_no_run_or_a_broken_one_is_not_healthy():
    with pytest.raises(NotHealthy, match="no healthy run to calibrate on"):
        calibrate([])
    runs = runs_of(5, 4)
    runs[2].records[50] = replace(runs[2].records[50], training_loss=nan)
    with pytest.raises(NotHealthy, match="run02: holds values that are not finite"):
        calibrate(runs, 0.0)
    assert calibrate(runs, 0.25).provenance["given_up"] == ["run02"]  # it is within the budget


def rows_of_the_page() -> dict[str, tuple[float, float]]:
    """Statistic -> (alone, together) as docs/calibrated.md prints them, inf for an empty cell."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 6 and cells[1].startswith("`"):
            alone, together = (float(cell) if cell else inf for cell in cells[3:5])
            found[cells[1].strip("`")] = (alone, together)
    return found


def test_the_page_has_the_floors():
    named = FLOORS.alone.keys() | FLOORS.together.keys()
    assert rows_of_the_page() == {
        name: (FLOORS.alone.get(name, inf), FLOORS.together.get(name, inf)) for name in named
    }
    labels = {source.LABEL for source in sources()}
    assert labels <= {line.split("|")[1].strip() for line in PAGE.read_text().splitlines()
                      if line.count("|") == 7}  # fmt: skip


def test_the_pages_reason_is_a_real_one():
    (quoted,) = (line[2:] for line in PAGE.read_text().splitlines() if line.startswith("> "))
    reasons = json.loads(Path(__file__).with_name("calibrated_reasons.json").read_text())
    (run,) = (run for run, reason in reasons.items() if reason.endswith(f": {quoted}"))
    assert f"run {run} at {reasons[run].split(':')[0]}." in PAGE.read_text()
