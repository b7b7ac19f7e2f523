"""`rmetric calibrate` on small logs of several kinds, healthy, broken and failed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rmetric.cli.main import main
from rmetric.detectors.calibrated import CalibratedDetector, read_thresholds
from rmetric.readers import read_runs

ROOT = Path(__file__).parents[2]


def losses(seed: int, jump: float = 0.0) -> list[float]:
    rng = np.random.default_rng(seed)
    values = 2 + np.exp(-np.arange(120) / 30) + 0.02 * rng.normal(size=120)
    values[80:86] += jump
    return values.tolist()


@pytest.fixture
def logs(tmp_path):
    folder = tmp_path / "healthy"
    folder.mkdir()
    lines = [json.dumps({"step": n, "loss": x}) for n, x in enumerate(losses(1), start=1)]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    rows = [f"{n},{x}" for n, x in enumerate(losses(2, jump=0.5), start=1)]
    (folder / "b.csv").write_text("step,train_loss\n" + "\n".join(rows) + "\n")
    (folder / "c.jsonl").write_text("nothing that a log would hold\n")
    return folder


def test_healthy_logs_become_thresholds_and_a_broken_one_is_reported(logs, tmp_path, capsys):
    out = tmp_path / "new" / "mine.json"
    assert main(["calibrate", str(logs), "--budget", "0", "--out", str(out)]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(f"failed: {logs / 'c.jsonl'}")
    assert printed.err.count("\n") == 1
    counts, raised, recall, lost, promise, where = printed.out.splitlines()
    assert counts == "2 runs; 1 would alarm under the lowest thresholds that there are"
    assert recall.startswith("failing runs of the laboratory detected by training_loss: 28 of 36")
    assert recall.endswith(", 26 with these")
    assert lost.startswith("no longer detected: ")
    assert promise == "0 of 2 runs alarm; other runs still may"
    assert where == f"thresholds: {out}"
    thresholds = read_thresholds(out)
    assert raised.startswith("raised above the lowest: ")
    assert f"loss_jump 4 to {thresholds.alone['loss_jump']:g}" in raised
    assert "update_size" not in raised
    assert thresholds.alone["loss_jump"] > 4
    for name, shipped in (("a.jsonl", False), ("b.csv", True)):
        (run,) = read_runs(logs / name)
        for detector, expected in (
            (CalibratedDetector(thresholds), False),
            (CalibratedDetector(), shipped),
        ):
            assert any(detector.update(r).alarm for r in run.records) == expected


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("0.02", "1 run cannot show a share of 2 %: at least 50 are needed to see one alarm in 50"),
        ("0.3", "1 run cannot show a share of 30 %: at least 4 are needed to see one alarm in 4"),
        ("0", "0 of 1 run alarm; other runs still may"),
    ],
)
def test_runs_within_the_floors_and_too_few_are_reported(logs, tmp_path, capsys, budget, message):
    out = str(tmp_path / "t.json")
    assert main(["calibrate", str(logs / "a.jsonl"), "--budget", budget, "--out", out]) == 0
    printed = capsys.readouterr().out
    assert "no threshold was raised: these runs stay within the lowest ones" in printed
    assert message in printed


def test_runs_whose_own_log_says_that_they_failed_are_left_out(tmp_path, capsys):
    out = tmp_path / "t.json"
    sample = sorted((ROOT / "logs_FULL_METRIC").glob("*.jsonl*"))
    failed = [path for path in sample if "_none_" not in path.name]
    healthy = [path for path in sample if "_none_" in path.name]
    assert failed
    assert healthy
    assert main(["calibrate", *map(str, sample), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("left out: ") == len(failed)
    assert printed.out.startswith(f"{len(healthy)} runs; ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "error: no healthy run to calibrate on"),
        (
            '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": NaN}\n',
            "error: no healthy run to calibrate on: the only run",
        ),
    ],
)
def test_without_a_healthy_run_nothing_is_written(tmp_path, capsys, content, message):
    log, out = tmp_path / "x.jsonl", tmp_path / "t.json"
    log.write_text(content)
    assert main(["calibrate", str(log), "--out", str(out)]) == 1
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("content", [b"", b"no archive", b"\xfd7zXZ\x00 cut"])
def test_a_damaged_archive_is_reported(tmp_path, capsys, content):
    archive = tmp_path / "x.tar.xz"
    archive.write_bytes(content)
    assert main(["calibrate", str(archive), "--out", str(tmp_path / "t.json")]) == 1
    assert "x.tar.xz: not a whole archive of runs" in capsys.readouterr().err


def test_a_log_that_was_cut_off_at_its_beginning_does_not_count(logs, tmp_path, capsys):
    (logs / "c.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    out = tmp_path / "t.json"
    assert main(["calibrate", str(logs), "--out", str(out)]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("2 runs; 1 would alarm")
    assert second == "left out, too short to be judged: c"
    assert read_thresholds(out).provenance["too_short"] == ["c"]
