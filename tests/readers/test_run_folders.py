"""Folders as trainers leave them: one run is one run, and nothing else is a failure."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rmetric._util.printed import coloured
from rmetric.cli import replay as command
from rmetric.cli.main import main
from rmetric.readers import find_logs
from rmetric.readers.run_folders import logs_among
from tests.cli.test_progress import Terminal

LOSSES = [3 - 0.05 * i for i in range(30)]


def state(steps: int) -> str:
    history = [{"step": i + 1, "loss": LOSSES[i], "epoch": i / 10} for i in range(steps)]
    return json.dumps({"global_step": steps, "log_history": history, "best_metric": None})


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


TABLE = "step,train_loss\n" + "".join(f"{i},{x}\n" for i, x in enumerate(LOSSES))
JSONL = "".join(json.dumps({"step": i, "loss": x}) + "\n" for i, x in enumerate(LOSSES))
EVENTS = b"\x18\x00\x00\x00\x00\x00\x00\x00\xa3\x7f\x4b\x22brain.Event:2"

FOLDERS: dict[str, tuple[dict[str, str | bytes], list[str]]] = {
    "hugging_face": (
        {
            "checkpoint-10/trainer_state.json": state(10),
            "checkpoint-10/model.safetensors": b"\x00" * 99,
            "checkpoint-10/optimizer.pt": b"PK\x03\x04",
            "checkpoint-10/config.json": '{"model_type": "moe", "router_aux_loss_coef": 0.001}',
            "checkpoint-10/tokenizer.json": '{"model": {"vocab": {"loss": 1}}}',
            "checkpoint-30/trainer_state.json": state(30),
            "checkpoint-30/rng_state.pth": b"\x80\x02",
            "checkpoint-30/training_args.bin": b"\x80\x02",
            "checkpoint-9/trainer_state.json": state(9),
            "config.json": '{"router_aux_loss_coef": 0.001}',
            "generation_config.json": "{}",
            "all_results.json": '{"train_loss": 2.1, "epoch": 3.0}',
            "train_results.json": '{"train_loss": 2.1}',
            "README.md": "| Training Loss | Epoch | Step |\n|---|---|---|\n| 2.9 | 1 | 10 |\n",
            "runs/Nov01_host/events.out.tfevents.1.host.1.0": EVENTS,
            "model-00001-of-00002.safetensors": b"\x00" * 99,
            "model.safetensors.index.json": '{"weight_map": {"loss": "a"}}',
        },
        ["checkpoint-30/trainer_state.json"],
    ),
    "hugging_face_finished": (
        {
            "trainer_state.json": state(30),
            "checkpoint-30/trainer_state.json": state(30),
            "checkpoint-20/trainer_state.json": state(20),
            "loss.png": b"\x89PNG",
        },
        ["trainer_state.json"],
    ),
    "two_runs_of_hugging_face": (
        {"a/checkpoint-5/trainer_state.json": state(5), "b/trainer_state.json": state(7)},
        ["a/checkpoint-5/trainer_state.json", "b/trainer_state.json"],
    ),
    "case_study": (
        {
            "tiny_NONE_s0.jsonl": JSONL,
            "tiny_LR_SPIKE_s0.jsonl": JSONL,
            "results.csv": "run,step,training_loss\n" + "".join(f"a,{i},2\n" for i in range(9)),
            "summary.json": '{"runs": [{"loss": 1.0, "step": 1}]}',
            "claims.md": "# loss 2.9 at step 3\n",
            "case_study.png": b"\x89PNG",
            "case_study.pdf": b"%PDF",
        },
        ["tiny_LR_SPIKE_s0.jsonl", "tiny_NONE_s0.jsonl"],
    ),
    "lightning": (
        {
            "lightning_logs/version_0/metrics.csv": TABLE,
            "lightning_logs/version_0/hparams.yaml": "loss: 1\nstep: 2\n",
            "lightning_logs/version_0/checkpoints/epoch=0-step=30.ckpt": b"PK\x03\x04",
            "lightning_logs/version_0/events.out.tfevents.1.host.1.0": EVENTS,
            "lightning_logs/version_1/metrics.csv": TABLE,
        },
        ["lightning_logs/version_0/metrics.csv", "lightning_logs/version_1/metrics.csv"],
    ),
    "wandb": (
        {
            "wandb/debug.log": "2026-11-01 step 1 loss 2.0\n",
            "wandb/run-20261101_101010-abc12345/run-abc12345.wandb": b":W&B\xe1\xbe\x00",
            "wandb/run-20261101_101010-abc12345/files/output.log": "".join(
                f"step {i} loss {x}\n" for i, x in enumerate(LOSSES)
            ),
            "wandb/run-20261101_101010-abc12345/files/config.yaml": "loss:\n  value: 1\n",
            "wandb/run-20261101_101010-abc12345/files/wandb-summary.json": '{"loss": 1.2}',
            "wandb/run-20261101_101010-abc12345/files/wandb-metadata.json": '{"program": "loss"}',
            "wandb/run-20261101_101010-abc12345/files/requirements.txt": "torch==2.0\n",
            "wandb/run-20261101_101010-abc12345/files/media/table/loss.table.json": '{"a": [[1]]}',
            "wandb/run-20261101_101010-abc12345/logs/debug.log": "step 1 loss 3\n",
        },
        ["wandb/run-20261101_101010-abc12345/files/output.log"],
    ),
    "wandb_with_history": (
        {
            "run-20201101_101010-abc12345/files/wandb-history.jsonl": JSONL,
            "run-20201101_101010-abc12345/files/output.log": "step 1 loss 2\n",
        },
        ["run-20201101_101010-abc12345/files/wandb-history.jsonl"],
    ),
    "collection": (
        {"a.csv": TABLE, "deep/b.jsonl": JSONL, "deep/trainer_state.json": state(9)},
        ["a.csv", "deep/b.jsonl", "deep/trainer_state.json"],
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_logs_of_a_folder_are_its_runs(tmp_path, name):
    files, wanted = FOLDERS[name]
    write(tmp_path, files)
    found = [path.relative_to(tmp_path).as_posix() for path in find_logs([tmp_path])]
    assert found == wanted
    every = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    split = logs_among(every, tmp_path)
    assert sorted([*split.logs, *split.rest]) == every, "none is lost, none counted twice"


def test_one_checkpoint_alone_is_its_run(tmp_path):
    write(tmp_path, FOLDERS["hugging_face"][0])
    found = find_logs([tmp_path / "checkpoint-10"])
    assert found == [tmp_path / "checkpoint-10" / "trainer_state.json"]


def test_what_is_named_is_read_whatever_it_is_called(tmp_path):
    write(tmp_path, {"results.csv": TABLE, "summary.json": "{}", "a.jsonl": JSONL})
    assert find_logs([tmp_path / "results.csv"]) == [tmp_path / "results.csv"]
    assert find_logs([str(tmp_path / "*.csv")]) == [tmp_path / "results.csv"]


def test_a_folder_of_weights_alone_is_one_error(tmp_path, capsys):
    write(tmp_path, {"model.safetensors": b"\x00", "run.wandb": b"\x00"})
    assert main(["replay", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "no log among 2 files" in error
    assert error.count("\n") == 1


def test_the_default_folder_never_loses_the_index_of_other_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"a.csv": TABLE, "b.csv": TABLE, "c.csv": TABLE})

    def sources(folder: str) -> list[str]:
        with open(tmp_path / "results" / folder / "index.csv", newline="") as file:
            return [row["source"] for row in csv.DictReader(file)]

    def replay(*paths: str) -> str:
        assert main(["replay", *paths, "--plots", "none"]) == 0
        return capsys.readouterr().err

    assert replay("a.csv") == ""
    printed = replay("b.csv")
    assert printed == "results/replay holds other runs: the results go to results/replay-2\n"
    assert (sources("replay"), sources("replay-2")) == (["a.csv"], ["b.csv"])
    assert replay("a.csv") == "", "the same log again is its own index"
    replay("c.csv", "b.csv")
    assert sources("replay-2") == ["c.csv", "b.csv"], "it holds what was there"
    assert replay("b.csv").endswith("go to results/replay-3\n")
    assert replay("a.csv", "b.csv", "c.csv") == ""
    assert main(["replay", "b.csv", "--plots", "none", "--out", "results/replay"]) == 0
    assert sources("replay") == ["b.csv"], "a folder that is named is the user's"


def test_the_command_that_makes_a_page_again_runs_in_an_installed_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"a b.csv": TABLE.replace("train_loss", "ce")})
    assert main(["replay", "a b.csv", "--map", "loss=ce", "--out", "out"]) == 0
    page = (tmp_path / "out" / "a_b" / "report.html").read_text()
    line = html.unescape(re.search(r'<pre class="command">(.*?)</pre>', page)[1])
    python, *rest = shlex.split(line)
    assert python == "python"
    done = subprocess.run(
        [sys.executable, *rest, "--plots", "none"], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results" / "replay" / "a_b" / "report.html").is_file()


def curve(*tail: float) -> str:
    losses = [3 + 7 * 0.9**i + 0.01 * (i % 3) for i in range(100)] + list(tail)
    return "step,loss\n" + "".join(f"{i},{x}\n" for i, x in enumerate(losses))


RUNS = {
    "diverged": (curve(*[9.0] * 60), 3),
    "nan": (curve(*["nan"] * 9), 3),
    "spike": (curve(*[9.0] * 4, *[3.0] * 60), 4),
    "short": ("step,loss\n1,3\n2,2\n", 5),
    "healthy": (curve(), 0),
}


@pytest.mark.parametrize(
    ("names", "code"),
    [
        *(([name], code) for name, (_, code) in RUNS.items()),
        (["healthy", "short", "spike"], 4),
        (["spike", "diverged", "healthy", "broken"], 3),
        (["spike", "broken"], 1),
    ],
)
def test_exit_on_alarm_ends_a_replay_by_its_worst_verdict(tmp_path, monkeypatch, names, code):
    monkeypatch.chdir(tmp_path)
    texts = {name: text for name, (text, _) in RUNS.items()} | {"broken": "step,loss\n1,x\n"}
    write(tmp_path, {f"{name}.csv": texts[name] for name in names})
    paths = [f"{name}.csv" for name in names]
    given = ["replay", *paths, "--out", "out", "--plots", "none"]
    assert main([*given, "--exit-on-alarm"]) == code
    assert main(given) == (1 if "broken" in names else 0), "only where an option requires it"


def test_the_terminal_has_colours_only_where_it_shows_them(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert coloured("DIVERGED", "bad", Terminal()) == "\x1b[31;1mDIVERGED\x1b[0m"
    assert coloured("DIVERGED", "bad", io.StringIO()) == "DIVERGED"
    monkeypatch.setenv("NO_COLOR", "1")
    assert coloured("DIVERGED", "bad", Terminal()) == "DIVERGED"
    assert command.VERDICT_CODES == {"bad": 3, "warning": 4, "unknown": 5}
