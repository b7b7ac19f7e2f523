"""The fault laboratory: no way of stopping it changes a byte, and bad input gets one sentence."""

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
from studies.fault_lab import campaign as campaigns
from studies.fault_lab import design, read_runs
from studies.fault_lab.branches import Definitions
from studies.fault_lab.campaign import SEAL, check_seal, describe
from studies.fault_lab.spec import LabSpec
from tests.studies.fault_lab.training import branch, control

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


def test_a_campaign_ends_in_a_manifest_and_archives_that_unpack_to_ordinary_logs(
    campaign, tmp_path
):
    manifest = json.loads((campaign / "archives" / "manifest.json").read_bytes())
    runs = [run for name in manifest["archives"] for run in read_runs(campaign / "archives" / name)]
    assert len(runs) == manifest["runs"] == len(contents(campaign / "runs"))
    assert {len(run.records) for run in runs if not run.truth.failed} == {12}
    assert {run.truth.failure_kind for run in runs if run.truth.failed} == {"non_finite"}
    digest = manifest["corpora_sha256"]["generated"]
    assert {run.config["corpus"]["sha256"] for run in runs} == {digest}
    assert manifest["versions"].keys() >= {"python", "torch", "transformers"}
    archive = campaign / "archives" / next(iter(manifest["archives"]))
    assert run_fault_lab.main(["--unpack", str(archive), "--out", str(tmp_path)]) == 0
    for run in read_runs(archive):
        back = read_log(tmp_path / f"{run.id}.jsonl")
        assert back.records == run.records
        assert back.truth == run.truth
        assert [found.id for found in replay_runs(tmp_path / f"{run.id}.jsonl")] == [run.id]


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


def test_one_run_and_its_twin_are_written_as_logs(tmp_path, capsys):
    options = "--fault INFINITE_GRADIENT --steps 12 --onset 5 --corpus generated"
    assert run_fault_lab.main([*options.split(), "--out", str(tmp_path)]) == 0
    truth = read_log(tmp_path / "seed000_INFINITE_GRADIENT.jsonl").truth
    assert (truth.failure_kind, truth.failure_step, truth.onset_step) == ("non_finite", 5, 5)
    assert read_log(tmp_path / "seed000.jsonl").truth.outcome in ("healthy", "failed")
    output = capsys.readouterr().out
    assert "non_finite at step 5" in output
    assert f"both logs are in {tmp_path}" in output


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--fault", "GREMLIN"], 2, "unknown fault 'GREMLIN': known are"),
        (["--only", "GREMLIN"], 2, "unknown fault 'GREMLIN': known are"),
        (["--steps", "0"], 2, "total_steps is 0"),
        (["--fault", "LR_SPIKE", "--onset", "500"], 2, "onset_step is 500"),
        (["--seeds", "0"], 2, "seeds is 0"),
        (["--corpus", "wiki"], 2, "unknown text 'wiki'"),
        (["--diverged", "1"], 2, "diverged_ratio is 1.0"),
        (["--unpack", "nothing.tar.xz"], 1, "nothing.tar.xz"),
        # The second set's design cannot be changed by options.
        (["--set", "second", "--seeds", "3"], 2, "--seeds is of the first set"),
        (["--set", "second", "--only", "LR_SPIKE"], 2, "--only is of the first set"),
        (["--set", "second", "--steps", "9"], 2, "--steps is of the first set"),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path, capsys, options, code, message):
    assert run_fault_lab.main([*options, "--out", str(tmp_path / "out")]) == code
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "out").exists()


def test_the_kept_archives_are_what_the_command_makes():
    """Whoever changes the registry or the design must train the campaign again."""
    data = ROOT / "studies/fault_lab/data"
    manifest = json.loads((data / "manifest.json").read_bytes())
    second = manifest["second"]
    for specs, of in ((design.campaign(), manifest), (design.second_campaign(), second)):
        described = describe(specs, Definitions())
        assert (of["specs_sha256"], of["runs"]) == (described["specs_sha256"], described["runs"])
        for name, entry in of["archives"].items():
            assert hashlib.sha256((data / name).read_bytes()).hexdigest() == entry["sha256"]
            ids = [spec.run_id for spec in specs if f"{spec.split}.tar.xz" == name]
            assert [run.id for run in read_runs(data / name)] == ids
    check_seal(design.second_campaign(), Definitions())
    sealed = json.loads(SEAL.read_bytes())
    assert second["definitions"] == sealed["definitions"]
    runs = {name.split(".")[0]: entry["runs"] for name, entry in second["archives"].items()}
    assert runs == sealed["runs"]


def test_a_folder_of_another_campaign_or_of_other_things_is_refused(campaign, tmp_path, capsys):
    before = contents(campaign / "runs")
    assert run_small(campaign, "--first-seed", "7") == 1
    assert "campaign.json is of another campaign" in capsys.readouterr().err
    assert contents(campaign / "runs") == before
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "thesis.tex").write_text("years of work")
    assert run_small(tmp_path) == 1
    assert "not empty and no campaign's" in capsys.readouterr().err


def few_runs() -> list[LabSpec]:
    base = control(steps=12, seed=1000, split="training2", optimizer="sgd")
    specs = [base, branch(base, "INFINITE_GRADIENT", onset=5)]
    return [*specs, control(steps=12, seed=1001, split="sealed2", optimizer="sgd")]


def test_the_command_trains_packs_and_counts_what_is_sealed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(design, "second_campaign", few_runs)
    monkeypatch.setattr(campaigns, "SEAL", tmp_path / "seal.json")
    archives = tmp_path / "archives"
    places = ["--out", str(tmp_path / "runs"), "--archives", str(archives)]
    options = ["--set", "second", "--jobs", "1", *places]
    assert run_fault_lab.main(options) == 1
    assert "seal.json is missing" in capsys.readouterr().err
    (tmp_path / "seal.json").write_text(json.dumps(describe(few_runs(), Definitions())))
    archives.mkdir()
    first = {"runs": 524, "archives": {"test.tar.xz": {}}}
    (archives / "manifest.json").write_text(json.dumps(first))
    for _ in range(2):  # the second time nothing is trained
        assert run_fault_lab.main(options) == 0
        output = capsys.readouterr().out
        assert "training2: 1 control not failed, 1 fault failed" in output
        assert "sealed2: 1 control not failed" in output
    manifest = json.loads((archives / "manifest.json").read_bytes())
    second = manifest.pop("second")
    assert manifest == first
    assert set(second["archives"]) == {"training2.tar.xz", "sealed2.tar.xz"}
    assert second["specs_sha256"] == describe(few_runs(), Definitions())["specs_sha256"]
    assert run_small(tmp_path, "--out", str(tmp_path / "first")) == 0
    manifest = json.loads((archives / "manifest.json").read_bytes())
    assert (manifest["second"], manifest["seeds"]) == (second, 2)
    monkeypatch.setattr(design, "second_campaign", lambda: few_runs()[:2])
    assert run_fault_lab.main(options) == 1
    assert "is of another specs_sha256" in capsys.readouterr().err
