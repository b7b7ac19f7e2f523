"""The fault laboratory: no way of stopping it changes a byte, and bad input gets one sentence."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the laboratory trains with torch")
pytest.importorskip("transformers", reason="the laboratory's models are those of transformers")

from rmetric.logs import read_log
from rmetric.readers import read_runs as replay_runs
from studies.fault_lab import __main__ as run_fault_lab
from studies.fault_lab import read_runs

ROOT = Path(__file__).resolve().parents[3]
SMALL = ["--seeds", "2", "--steps", "12", "--corpus", "generated", "--jobs", "1"]
SMALL += ["--only", "INFINITE_GRADIENT", "BATCH_SIZE_DOWN"]


def run_small(out: Path, *changes: str) -> int:
    places = ["--out", str(out / "runs"), "--archives", str(out / "archives")]
    return run_fault_lab.main([*SMALL, *places, *changes])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("seed*.json"))}


@pytest.fixture(scope="module")
def campaign(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("campaign")
    assert run_small(out) == 0
    return out


def test_a_campaign_ends_in_archives_and_a_manifest(campaign):
    manifest = json.loads((campaign / "archives" / "manifest.json").read_bytes())
    runs = [run for name in manifest["archives"] for run in read_runs(campaign / "archives" / name)]
    assert len(runs) == manifest["runs"] == len(contents(campaign / "runs"))
    assert {len(run.records) for run in runs if not run.truth.failed} == {12}
    assert {run.truth.failure_kind for run in runs if run.truth.failed} == {"non_finite"}
    assert {run.config["corpus"]["sha256"] for run in runs} == {
        manifest["corpora_sha256"]["generated"]
    }
    assert manifest["versions"].keys() >= {"python", "torch", "transformers"}


@pytest.mark.slow
def test_a_campaign_that_was_killed_ends_with_the_same_bytes(start, campaign, tmp_path):
    out = tmp_path / "runs"
    command = [sys.executable, "-m", "studies.fault_lab", *SMALL]
    command += ["--out", str(out), "--archives", str(tmp_path / "archives")]
    process = start(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(contents(out)) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    whole = contents(campaign / "runs")
    left = contents(out)
    assert len(left) < len(whole)
    assert left.items() <= whole.items()  # a file with its name is whole
    assert run_small(tmp_path) == 0
    assert contents(out) == whole
    for path in (campaign / "archives").glob("*.xz"):
        assert (tmp_path / "archives" / path.name).read_bytes() == path.read_bytes()


def test_a_finished_campaign_trains_nothing_again(campaign):
    times = {p: p.stat().st_mtime_ns for p in (campaign / "runs").glob("seed*.json")}
    assert run_small(campaign) == 0
    assert {p: p.stat().st_mtime_ns for p in times} == times


def test_unpacked_runs_are_ordinary_logs(campaign, tmp_path):
    archive = next((campaign / "archives").glob("*.xz"))
    assert run_fault_lab.main(["--unpack", str(archive), "--out", str(tmp_path)]) == 0
    for run in read_runs(archive):
        back = read_log(tmp_path / f"{run.id}.jsonl")
        assert back.records == run.records
        assert back.truth == run.truth
        assert [found.id for found in replay_runs(tmp_path / f"{run.id}.jsonl")] == [run.id]


def test_one_run_and_its_twin_are_written_as_logs(tmp_path, capsys):
    options = [
        "--fault",
        "INFINITE_GRADIENT",
        "--steps",
        "12",
        "--onset",
        "5",
        "--corpus",
        "generated",
    ]
    assert run_fault_lab.main([*options, "--out", str(tmp_path)]) == 0
    truth = read_log(tmp_path / "seed000_INFINITE_GRADIENT.jsonl").truth
    assert (truth.failure_kind, truth.failure_step, truth.onset_step) == ("non_finite", 5, 5)
    assert read_log(tmp_path / "seed000.jsonl").truth.outcome in ("healthy", "failed")
    said = capsys.readouterr().out
    assert "non_finite at step 5" in said
    assert f"both logs are in {tmp_path}" in said


def test_the_list_names_every_fault(capsys):
    from studies.fault_lab.faults import FAULTS

    assert run_fault_lab.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in FAULTS)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--fault", "GREMLIN"], 2, "unknown fault 'GREMLIN': known are"),
        (["--only", "GREMLIN"], 2, "unknown fault 'GREMLIN': known are"),
        (["--steps", "0"], 2, "total_steps is 0"),
        (["--fault", "LR_SPIKE", "--steps", "0"], 2, "total_steps is 0"),
        (["--fault", "LR_SPIKE", "--onset", "500"], 2, "onset_step is 500"),
        (["--fault", "LR_SPIKE", "--onset", "0"], 2, "onset_step is 0"),
        (["--fault", "LR_SPIKE", "--architecture", "gpt"], 2, "unknown architecture 'gpt'"),
        (["--fault", "EXPERT_FAILURE"], 2, "acts on mixtral only"),
        (["--seeds", "0"], 2, "seeds is 0"),
        (["--corpus", "wiki"], 2, "unknown text 'wiki'"),
        (["--diverged", "1"], 2, "diverged_ratio is 1.0"),
        (["--unpack", "nothing.tar.xz"], 1, "nothing.tar.xz"),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path, capsys, options, code, message):
    assert run_fault_lab.main([*options, "--out", str(tmp_path / "out")]) == code
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_the_kept_archives_are_what_the_command_makes():
    """Whoever changes the registry or the design must train the campaign again."""
    from studies.fault_lab.campaign import describe
    from studies.fault_lab.design import campaign as design
    from studies.fault_lab.outcome import Definitions

    manifest = json.loads((ROOT / "studies/fault_lab/data" / "manifest.json").read_bytes())
    described = describe(design(), Definitions())
    assert manifest["specs_sha256"] == described["specs_sha256"]
    assert manifest["runs"] == described["runs"]
    for name, entry in manifest["archives"].items():
        content = (ROOT / "studies/fault_lab/data" / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["sha256"]


def test_the_folder_of_another_campaign_is_refused(campaign, capsys):
    before = contents(campaign / "runs")
    assert run_small(campaign, "--first-seed", "7") == 1
    said = capsys.readouterr().err
    assert "campaign.json is of another campaign" in said
    assert contents(campaign / "runs") == before


def test_a_folder_that_holds_other_things_is_refused(tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "thesis.tex").write_text("years of work")
    assert run_small(tmp_path) == 1
    assert "not empty and no campaign's" in capsys.readouterr().err
