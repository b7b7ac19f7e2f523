"""Every script in examples/ runs as it stands, in an empty folder and without the network."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"
#: Script -> the packages that it needs, and what its output ends with.
SCRIPTS = {
    "plain_loop": (["torch"], r"step 100, rank 0: learning_rate: (.|\n)*100 steps, 1 alarms\n$"),
    "trainer": (["torch", "transformers"], r"step 10: loss \d\.\d+, gradient norm \d+\.\d+\n$"),
    "lightning_trainer": (["lightning"], r"step 20: loss \d\.\d+, gradient norm \d+\.\d+\n$"),
    "rescue": (
        ["torch", "transformers"],
        r"(step 15\d: go_back to \d+\n){2}  skipped batches 150 to (.|\n)*250 steps, .* 0\.\d+\n$",
    ),
    "audit": (["torch"], r"step 3: stale_optimizer: (.|\n)*step 6: scheduler_too_often: (.|\n)*"),
    "watch": ([], r"ALARM   of simulated: step 25\d\d: (.|\n)*500 records, [1-9] alarms\n$"),
    "diagnose": ([], r"^FAILED(.|\n)*outcome failed, cause cuda_out_of_memory, actor user\n$"),
    "own_detector": ([], r"AboveBest     F1 1\.00, 0 false alarms\n(.*\n)*loss_z_score  F1 .*\n$"),
}


def run(script: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ
        | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )


def test_every_script_is_listed_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(SCRIPTS)
    assert len(SCRIPTS) <= 8


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs(name, tmp_path):
    packages, expected = SCRIPTS[name]
    for package in packages:
        pytest.importorskip(package)
    done = run(FOLDER / f"{name}.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(expected, done.stdout), done.stdout


@pytest.mark.parametrize("name", ["plain_loop", "trainer"])
def test_a_training_script_runs_in_this_process(name, tmp_path, monkeypatch, capsys):
    packages, expected = SCRIPTS[name]
    for package in packages:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert re.search(expected, capsys.readouterr().out)


def test_watch_and_diagnose_read_what_they_are_given(tmp_path):
    (tmp_path / "loss.csv").write_text("step,loss\n" + "".join(f"{i},2.0\n" for i in range(1, 20)))
    assert run(FOLDER / "watch.py", tmp_path, "loss.csv").stdout == "19 records, 0 alarms\n"
    (tmp_path / "train.log").write_text("step 1 loss 2.5\nTraining finished successfully.\n")
    done = run(FOLDER / "diagnose.py", tmp_path, "train.log")
    assert done.returncode == 0
    assert "outcome failed" not in done.stdout


def test_the_notebook_is_committed_without_outputs():
    cells = json.loads((FOLDER / "table3_figure4.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)


def test_the_notebook_runs_from_the_logs_to_table_3_and_figure_4(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(FOLDER / "table3_figure4.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    assert "720 logs" in text
    assert "differing cells: 0" in text
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"image/png", "text/html"} <= kinds
