"""What the case study says to what it cannot do: one line, exit code 2, no traceback."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import torch

from tests.studies.case_study.runs import mini, run

ROOT = Path(__file__).parents[3]
WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


def refused(*arguments: str | Path) -> str:
    """The one line of an error; nothing else may stand on standard error."""
    result = run(*arguments)
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    return result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps is 0: at least 1"),
        (["--onset", "401"], "--onset is 401: it must be from 1 to the last step, 400"),
        (["--eval-every", "900"], "--eval-every is 900: it must be at most --steps, 400"),
        (["--learning-rate", "nan"], "--learning-rate is nan"),
        (["--sequence-length", "2"], "--sequence-length is 2: at least 8"),
        (["--seed", "-1"], "--seed is -1"),
        (["--fault", "meteor"], "--fault METEOR: known are LR_SPIKE, "),
        (["--fault", "data_corruption:2"], "--fault DATA_CORRUPTION:2: the severity of "),
        (["--fault", "lr_spike:nan"], "must be a number from 0 to inf, as in LR_SPIKE:15"),
        (["--fault", "lr_spike,lr_spike:15"], "LR_SPIKE is in it twice"),
        (["--float16"], "--float16: a processor computes in float32"),
        pytest.param(["--device", "cuda"], "finds no usable GPU", marks=WITHOUT_CUDA),
    ],
)
def test_a_number_out_of_range_is_named_with_its_range(options, message, tmp_path):
    assert message in refused("--tiny", "--device", "cpu", "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_model_says_what_it_lacks(model, dataset, tmp_path):
    folder = tmp_path / "model"
    assert "there is no such file or folder" in refused(*mini(folder, dataset, tmp_path / "out"))
    folder.mkdir()
    assert "config.json" in refused(*mini(folder, dataset, tmp_path / "out"))
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    assert "it has no tokenizer" in refused(*mini(folder, dataset, tmp_path / "out"))
    (folder / "tokenizer.json").write_text("{")
    assert "line 1 column 2" in refused(*mini(folder, dataset, tmp_path / "out"))
    (folder / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    (folder / "pytorch_model.bin").write_bytes(b"pickled, and not read")
    error = refused(*mini(folder, dataset, tmp_path / "out"))
    assert "no file named model.safetensors" in error
    (folder / "model.safetensors").write_bytes(b"{")
    assert "header too small" in refused(*mini(folder, dataset, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def with_config(model: Path, folder: Path, **changes: object) -> Path:
    """A copy of the model, some of its configuration changed."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_with_its_own_code_or_the_tokenizer_of_another_is_refused(model, dataset, tmp_path):
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    folder = with_config(model, tmp_path / "own", **own)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    refused(*mini(folder, dataset, tmp_path / "out"))
    assert not (tmp_path / "ran").exists()
    folder = with_config(model, tmp_path / "fewer", vocab_size=200)
    error = refused(*mini(folder, dataset, tmp_path / "out"))
    assert f"{folder}: its tokenizer gives token 256 and the model knows 200: they do not" in error


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"id": 1, "title": "x"}\n', "found id, title; accepted are instruction"),
        ("a.jsonl", '{"text": "x"}\n{"text"\n', "JSON parse error"),
        ("a.jsonl", "", "it is empty or cannot be read"),
        ("a.txt", "x", ".txt is not known; accepted are .jsonl, .json, .csv, .parquet"),
        ("a.parquet", "x", "Parquet file size is 1 bytes"),
        ("a.jsonl", '{"text": "x"}\n', "do not fill"),
        ("a.jsonl", '{"messages": "x"}\n', "each message has a role and a content"),
    ],
)
def test_a_dataset_that_cannot_be_used_says_why(model, tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    error = refused("--model", model, "--dataset", path, "--out", tmp_path / "out",
                    "--sequence-length", "32")  # fmt: skip
    assert f"--dataset {path}" in error
    assert message in error


def test_a_folder_with_something_else_in_it_is_left_alone(model, dataset, tmp_path):
    (tmp_path / "thesis.txt").write_text("x")
    assert "it is not an empty folder" in refused(*mini(model, dataset, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_results_that_cannot_be_written_are_exit_code_1(model, dataset, tmp_path):
    (tmp_path / "file").write_text("x")
    result = run(*mini(model, dataset, tmp_path / "file" / "out"))
    assert result.code == 1
    assert result.err.startswith("error: the results cannot be written: ")
    assert str(tmp_path / "file" / "out") in result.err


def test_without_a_network_it_says_what_to_fetch(model, dataset, tmp_path, monkeypatch):
    for where in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(where, "HF_HUB_OFFLINE", True)
    error = refused("--model", "a/b", "--dataset", dataset, "--device", "cpu")
    assert "couldn't find them in the cached files" in error
    assert "hf download a/b --local-dir FOLDER; here: --model FOLDER; --tiny needs none" in error
    out = tmp_path / "out"
    error = refused("--model", model, "--dataset", "a/b", "--sequence-length", "32", "--out", out)
    assert "hf download a/b --repo-type dataset --local-dir FOLDER; here: --dataset FOLDER" in error
    assert not out.exists()


def test_help_does_not_pay_for_torch():
    code = (
        "import sys, run_case_study\n"
        "try: run_case_study.main(['--help'])\n"
        "except SystemExit: print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "--micro-batch-size" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
