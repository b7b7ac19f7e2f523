"""Runs that do not belong among healthy ones must not blind the calibrated detector."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from rmetric.cli.main import main
from rmetric.detectors.calibrated import (
    CalibratedDetector,
    Thresholds,
    default_thresholds,
    read_thresholds,
)
from rmetric.detectors.calibrated.calibration import FLOORS, watch
from rmetric.detectors.calibrated.recall import (
    PATH,
    SIGNALS,
    detected,
    failing_runs,
    failing_runs_to_bytes,
)
from rmetric.readers import read_runs
from rmetric.records import Run
from tests.detectors.calibrated_streams import records, scores

STEPS, ONSET = 160, 90


def healthy(seed: int, *, noise: float = 0.02, steps: int = STEPS) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return 2 + np.exp(-np.arange(steps) / 30) + noise * rng.normal(size=steps)


def diverged(seed: int, *, to: float = 7.2, over: int = 1) -> np.ndarray:
    """Loss that goes up by a ramp of `over` records and stays there."""
    losses = healthy(seed)
    ramp = np.clip((np.arange(STEPS) - ONSET) / over, 0, 1)
    return losses + (to - 2) * ramp


def spiked(seed: int, *, by: float = 5.0, over: int = 6) -> np.ndarray:
    losses = healthy(seed)
    losses[ONSET : ONSET + over] += by
    return losses


def write(folder: Path, runs: dict[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, losses in runs.items():
        lines = (json.dumps({"step": n, "loss": x}) for n, x in enumerate(losses.tolist(), 1))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def crowd(number: int = 20) -> dict[str, np.ndarray]:
    return {f"fine{n:02}": healthy(n) for n in range(number)}


def alarms(thresholds: Thresholds, losses: np.ndarray) -> bool:
    return any(score > 1 for score in scores(records(losses), CalibratedDetector(thresholds)))


@pytest.fixture
def calibrated(tmp_path, capsys):
    """Calibrate on runs; exit code, what was printed, and the thresholds if written."""

    def call(runs: dict[str, np.ndarray], *options: str):
        out = tmp_path / "t.json"
        code = main(["calibrate", str(write(tmp_path / "runs", runs)), "--out", str(out), *options])
        return code, capsys.readouterr(), read_thresholds(out) if out.exists() else None

    return call


DIVERGED = {
    "jump": diverged(50),
    "slow": diverged(51, over=40),
    "lower": diverged(52, to=3.4, over=5),
    "huge": diverged(53, to=400.0),
}


def test_one_diverged_run_among_twenty_is_left_out_with_its_evidence(calibrated):
    code, printed, thresholds = calibrated(crowd() | {"bad": diverged(50)})
    assert code == 0
    (line,) = printed.err.splitlines()
    assert line.startswith("left out: bad: looks like a failure: failure under way at step 104: ")
    assert "training loss" in line
    assert "the loss is 7.217 at the end, 2.111 was usual before" in line
    assert alarms(thresholds, diverged(50))
    assert thresholds.provenance["runs"] == 20
    assert thresholds.provenance["left_out"] == [
        {"run": "bad", "evidence": line.partition("failure: ")[2]}
    ]
    assert "left out, they look like failures: bad" in printed.out


def test_diverged_runs_of_several_kinds_do_not_hide_each_other(calibrated):
    code, printed, thresholds = calibrated(crowd() | DIVERGED)
    assert code == 0
    assert [line.split(": ")[1] for line in printed.err.splitlines()] == sorted(DIVERGED)
    assert thresholds.alone == FLOORS.alone
    assert all(alarms(thresholds, losses) for losses in DIVERGED.values())


def test_where_every_run_diverged_nothing_is_written(calibrated):
    code, printed, thresholds = calibrated({f"bad{n}": diverged(n) for n in range(5)})
    assert (code, thresholds) == (1, None)
    assert printed.err.count("left out: bad") == 5
    assert "error: no healthy run to calibrate on: all 5 look like failures" in printed.err


@pytest.mark.parametrize(
    ("at", "to", "why"),
    [(156, 7.0, "the log ends in an alarm"), (100, np.nan, "training loss is nan, since step 101")],
)
def test_a_run_that_ends_in_its_alarm_or_is_nan_is_left_out(calibrated, at, to, why):
    broken = healthy(70)
    broken[at:] = to
    code, printed, thresholds = calibrated(crowd() | {"broken": broken})
    assert code == 0
    assert f"left out: broken: looks like a failure: {why}" in printed.err
    assert thresholds.alone == FLOORS.alone
    assert thresholds.provenance["runs"] == 20


def test_a_spike_that_recovers_is_named_and_refused_where_it_blinds(calibrated):
    runs = crowd() | {"spiky": spiked(80)}
    code, printed, thresholds = calibrated(runs)
    assert (code, thresholds) == (1, None)
    assert "error: nothing was written: " in printed.err
    assert "of 28 failing runs" in printed.err
    (line,) = (line for line in printed.err.splitlines() if "by spiky" in line)
    assert "loss_jump 4 to " in line
    assert "(4 without it)" in line
    assert "let them alarm (--budget)" in line

    code, printed, thresholds = calibrated(runs, "--force")
    assert code == 0
    recall = thresholds.provenance["recall"]
    assert recall["detected_before"] == 28
    assert recall["detected_after"] < 0.9 * 28
    assert len(recall["no_longer_detected"]) == 28 - recall["detected_after"]
    assert thresholds.provenance["raised_by"]["loss_jump"]["run"] == "spiky"
    assert thresholds.provenance["raised_by"]["loss_jump"]["without_it"] == 4.0
    assert f"shipped thresholds, {recall['detected_after']} with these" in printed.out


def test_the_budget_gives_a_spike_up_and_nothing_is_lost(calibrated):
    code, printed, thresholds = calibrated(crowd() | {"spiky": spiked(80)}, "--budget", "0.05")
    assert code == 0
    assert "may alarm, by the budget: spiky" in printed.out
    assert "28 of 36 with the shipped thresholds, 28 with these" in printed.out
    assert "cannot show" not in printed.out
    assert thresholds.provenance["recall"]["no_longer_detected"] == []


def test_a_run_may_be_kept_by_name_and_the_loss_is_then_refused(calibrated):
    runs = crowd(5) | {"bad": diverged(90)}
    code, printed, thresholds = calibrated(runs, "--keep", "bad")
    assert (code, thresholds) == (1, None)
    assert "by bad" in printed.err
    code, printed, thresholds = calibrated(runs, "--keep", "bad", "--force")
    assert code == 0
    assert not alarms(thresholds, runs["bad"])
    assert thresholds.provenance["kept"] == ["bad"]


HARMLESS = {
    "quieter": healthy(100, noise=0.002),
    "constant": np.full(STEPS, 2.0),
    "longer": healthy(102, steps=2000),
    "noisier": healthy(103, noise=0.04),
    "ten times": 10 * healthy(104),
    "a tenth": 0.1 * healthy(105),
    "a thousand times": 1000 * healthy(106),
    "below zero": healthy(107) - 5,
    "short": healthy(108, steps=12),
}


def test_healthy_runs_of_other_kinds_are_kept_and_cost_nothing(calibrated):
    code, printed, thresholds = calibrated(crowd(5) | HARMLESS)
    assert (code, printed.err) == (0, "")
    assert thresholds.provenance["left_out"] == []
    assert thresholds.provenance["recall"]["no_longer_detected"] == []
    assert alarms(thresholds, diverged(1))


def test_an_announced_change_of_level_is_no_failure():
    losses = healthy(1)
    losses[ONSET:] += 2.0
    run = Run(id="a", records=records(losses))
    assert watch(run).failure
    run.records[ONSET].planned_events = ("data_mixture",)
    assert not watch(run).failure


def test_the_shipped_failing_runs_are_small_and_detected():
    assert PATH.stat().st_size < 200_000
    runs = failing_runs()
    assert len({run.fault for run in runs}) == 20
    assert all(run.records[0].step < run.onset_step < run.records[-1].step for run in runs)
    every, loss = (detected(default_thresholds(), s) for s in (SIGNALS, {"training_loss"}))
    assert loss < every
    assert (len(every), len(loss)) == (34, 28)


def test_the_shipped_failing_runs_come_from_the_open_parts():
    from itertools import chain

    from rmetric.readers.archive import read_runs as read_archive
    from studies.fault_lab.failing_runs import DATA, OPEN_PARTS, choose

    made = choose(chain.from_iterable(read_archive(DATA / part) for part in OPEN_PARTS))
    # As text: a nan is not equal to itself.
    assert lzma.decompress(failing_runs_to_bytes(made)) == lzma.decompress(PATH.read_bytes())


LOGS = Path(__file__).parents[3] / "shared/data/training_logs"


@pytest.mark.skipif(not LOGS.exists(), reason="the public logs are not here")
def test_no_healthy_public_run_looks_like_a_failure():
    import csv

    with (LOGS / "labels.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["label"] == "healthy"]
    flagged = []
    for row in rows:
        runs = read_runs(LOGS / row["local_file"])
        named = [run for run in runs if row["run_id_in_file"] in run.id] or runs
        flagged += [row["run"]] * bool(watch(named[0]).failure)
    assert flagged == []
