"""Regressions that first users of the guard met."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rmetric.cli.main import main
from rmetric.guard.run_folder import RunFolder
from rmetric.guard.supervisor.summary import summarise, to_markdown


def test_what_a_training_without_heartbeats_achieved_is_unknown_and_not_nothing():
    lines = [
        {"time": 0.0, "event": "supervisor"},
        {"time": 1.0, "event": "launch", "launch": 1, "gpus": {"": [0]}, "words": "DP1"},
        {"time": 9.0, "event": "over", "outcome": "finished", "words": "", "code": 0},
    ]
    assert summarise(lines).ettr is None
    assert "ETTR unknown" in to_markdown(summarise(lines))


def test_the_summary_says_that_saves_fail_until_one_does_not():
    lines = [{"time": 0.0, "event": "launch", "launch": 1, "gpus": {"": [0]}, "words": "DP1"}]
    lines.append({"time": 1.0, "event": "not saved", "words": "step 50: no space"})
    assert "**the last save failed**: step 50: no space" in to_markdown(summarise(lines))
    lines.append({"time": 2.0, "event": "saved again", "words": ""})
    assert "the last save failed" not in to_markdown(summarise(lines))


TRAINING = """
import time
from rmetric.guard.run_folder import RunFolder
folder = RunFolder.of_environment()
for step, problem in enumerate(["", "no space", "no space", ""{more}]):
    folder.beat(0, step, problem=problem)
    time.sleep(0.25)
folder.beat(0, 9, "finished", problem=problem)
"""


@pytest.mark.long
@pytest.mark.parametrize(("more", "last"), [("", ""), (', "gone"', "gone")])
def test_the_supervisor_hears_of_a_failed_save_by_the_heartbeat(tmp_path, more, last):
    script = tmp_path / "training.py"
    script.write_text(TRAINING.replace("{more}", more))
    run = RunFolder(tmp_path / "run")
    # In a process of its own: the command takes every child of its process for the training's,
    # adopts the orphans and ends them all, also the fork server of other tests.
    command = [sys.executable, "-m", "rmetric", "supervise", str(run.path), "--poll-seconds=0.05"]
    done = subprocess.run([*command, "--", sys.executable, str(script)], check=False)
    assert done.returncode == (5 if last else 0)
    lines = [json.loads(line) for line in run.journal.read_text().splitlines()]
    told = [line["words"] for line in lines if line["event"] in ("not saved", "saved again")]
    assert told == ["no space", "", *filter(None, [last])]
    assert ("the last save failed" in run.summary.read_text()) == bool(last)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["supervise", str(tmp_path / "file" / "run"), "--", "true"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("asked", ["nothing", "stop"])
def test_a_trainer_that_reached_its_end_says_so_and_one_that_was_stopped_does_not(tmp_path, asked):
    from tests.guard.test_hooks import a_trainer, callback_that_asks

    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    if asked == "stop":
        run.ask("user", "that is enough", stop=True)
    callback = callback_that_asks(99, ask=None, folder=run)
    a_trainer(tmp_path, callback).train()
    assert callback.guard.should_stop == (asked == "stop")
    assert (run.beats()[0].phase == "finished") == (asked == "nothing")


def test_a_model_file_beside_us_has_a_name(tmp_path, monkeypatch):
    from rmetric.guard.planner.model_shape import ModelShape

    (tmp_path / "tiny-llama").mkdir()
    monkeypatch.chdir(tmp_path / "tiny-llama")
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "vocab_size": 100, "intermediate_size": 128, "model_type": "llama",
             "max_position_embeddings": 32}  # fmt: skip
    Path("config.json").write_text(json.dumps(shape))
    assert ModelShape.from_json(Path("config.json")).name == "tiny-llama"
