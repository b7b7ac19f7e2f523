"""`rmetric run`: our callback in programs that do not know of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from textwrap import dedent

import pytest

from tests.project.test_packaging import PROJECT

ROOT = Path(__file__).resolve().parents[2]
HUGGING_FACE = """
import sys
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.calls = nn.Linear(4, 1), 0
    def forward(self, inputs, labels):
        self.calls += 1
        loss = nn.functional.mse_loss(self.layer(inputs), labels)
        return {"loss": loss * float("nan") if self.calls == NAN else loss}

rows = [{"inputs": torch.randn(4), "labels": torch.randn(1)} for _ in range(64)]
arguments = TrainingArguments("out", max_steps=STEPS, per_device_train_batch_size=4, use_cpu=True,
                              report_to="none", save_strategy="no", disable_tqdm=True)
trainer = Trainer(Net(), arguments, train_dataset=rows, callbacks=CALLBACKS)
trainer.train()
names = [type(c).__name__ for c in trainer.callback_handler.callbacks]  # below: two ranks, one pipe
finite = all(bool(p.isfinite().all()) for p in trainer.model.parameters())
print(f"finite {finite} callbacks {names.count('HuggingFaceCallback')} ", end="")
"""
LIGHTNING = """
import torch
from PACKAGE import LightningModule, Trainer

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4)
trainer = Trainer(max_steps=6, accelerator="cpu", logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Net(), loader)
print("callbacks", sum(type(c).__name__ == "LightningCallback" for c in trainer.callbacks))
"""


def program(steps: int = 6, nan: int = 0, callbacks: str = "[]") -> str:
    names = {"STEPS": steps, "NAN": nan, "CALLBACKS": callbacks}
    text = HUGGING_FACE
    for name, value in names.items():
        text = text.replace(name, str(value))
    return text


@pytest.fixture
def python(tmp_path):
    """Run Python in an empty folder."""

    def start(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join([str(ROOT), variables.pop("PYTHONPATH", "")]).strip(os.pathsep)
        environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""} | variables
        return subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip

    return start


@pytest.fixture
def run(python):
    return partial(python, "-m", "rmetric", "run")


def put_package(folder: Path, name: str, trainer: str) -> None:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "__init__.py").write_text("")
    (folder / name / "trainer.py").write_text(trainer)


def steps_of(log: Path) -> list[int]:
    entries = map(json.loads, log.read_text().splitlines())
    return [entry["step"] for entry in entries if entry["event"] == "METRICS"]


def test_a_trainer_that_does_not_know_of_it_is_watched_and_rescued(run, tmp_path):
    script = program(steps=8, nan=4)
    plain = run("--no-audits", "--log", "a.jsonl", "--", sys.executable, "-c", script)
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout.split()[-4:] == ["finite", "False", "callbacks", "1"]
    assert steps_of(tmp_path / "a.jsonl") == [*range(1, 9)]
    rescued = run("--rescue", "--", sys.executable, "-c", script, RMETRIC_AUDITS="0")
    assert "finite True" in rescued.stdout, rescued.stderr
    assert f"rmetric: log {tmp_path / 'rmetric.jsonl'}, Rescue" in rescued.stderr
    assert "RESCUE" in (tmp_path / "rmetric.jsonl").read_text()


def test_a_trainer_that_has_the_callback_gets_no_second_one(run, tmp_path):
    import_ = "from rmetric import HuggingFaceCallback\n"
    script = import_ + program(callbacks="[HuggingFaceCallback('own.jsonl', audits=False)]")
    done = run("--", sys.executable, "-c", script)
    assert "callbacks 1" in done.stdout, done.stderr
    assert steps_of(tmp_path / "own.jsonl") == [*range(1, 7)]
    assert not (tmp_path / "rmetric.jsonl").exists()


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_by_either_name_is_watched_or_finds_the_entry_point_that_is_off_unless_set(
    run, python, tmp_path, package
):
    pytest.importorskip(package)
    script = LIGHTNING.replace("PACKAGE", package)
    done = run("--no-audits", "--", sys.executable, "-c", script)
    assert "callbacks 1" in done.stdout, done.stderr
    assert steps_of(tmp_path / "rmetric.jsonl") == [*range(1, 7)]
    (tmp_path / "rmetric.jsonl").unlink()
    entry = PROJECT["entry-points"][f"{package}.callbacks_factory"]["rmetric"]
    site = tmp_path / "site" / "of_this_test-1.dist-info"
    site.mkdir(parents=True)
    if not entry_points(group=f"{package}.callbacks_factory", name="rmetric"):  # not installed anew
        (site / "METADATA").write_text("Metadata-Version: 2.1\nName: of-this-test\nVersion: 1\n")
        (site / "entry_points.txt").write_text(f"[{package}.callbacks_factory]\na = {entry}\n")
    found = {
        switch: python("-c", script, PYTHONPATH=str(site.parent), RMETRIC_LIGHTNING=switch)
        for switch in ("0", "1", "yes")
    }
    assert [done.stdout.splitlines()[-1] for done in found.values()] == [
        "callbacks 0", "callbacks 1", "callbacks 0"
    ], found["1"].stderr  # fmt: skip
    assert steps_of(tmp_path / "rmetric.jsonl") == [*range(1, 7)]
    assert "RMETRIC_LIGHTNING is 'yes': 0 and 1 are accepted" in found["yes"].stderr


def test_the_ranks_of_torchrun_are_watched_and_the_first_one_logs(run, tmp_path):
    (tmp_path / "train.py").write_text(program())
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    done = run("--rescue", "--", *torchrun, "--nproc-per-node=2", "train.py", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("callbacks 1") == 2
    assert done.stderr.count("rmetric: log ") == 1
    assert steps_of(tmp_path / "rmetric.jsonl") == [*range(1, 7)]


def test_a_program_without_a_trainer_is_left_alone(run, tmp_path):
    script = "import sys; print({m.partition('.')[0] for m in sys.modules} & {'rmetric', 'torch'})"
    done = run("--rescue", "--", sys.executable, "-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "set()\n", "")
    assert [*tmp_path.iterdir()] == []


def test_the_hidden_sitecustomize_runs_with_its_own_path(run, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.path.append('added')")
    script = "import sys, sitecustomize; print(sitecustomize.__file__, 'added' in sys.path)"
    nested = ("--", sys.executable, "-m", "rmetric", "run", "--", sys.executable, "-c", script)
    for words in (nested[-4:], nested):
        done = run(*words, PYTHONPATH=str(tmp_path))
        assert done.stdout == f"{tmp_path / 'sitecustomize.py'} True\n", done.stderr


def test_it_finds_a_trainer_beside_another_program_of_its_kind(run, tmp_path):
    other = """
        import sys
        from importlib.util import find_spec
        class Finder:
            busy = False
            def find_spec(self, name, *_):
                if self.busy or name != "transformers.trainer": return None
                self.busy, spec = True, None
                try: spec = find_spec(name)
                finally: self.busy = False
                print("also found")
                return spec
        sys.meta_path.insert(0, Finder())
    """
    (tmp_path / "sitecustomize.py").write_text(dedent(other))
    put_package(tmp_path, "transformers", "class Trainer:\n  def train(self): 0\n")
    script = "from transformers.trainer import Trainer as t; print(t.train.__wrapped__.__name__, "
    script += "hasattr(t.train.__wrapped__, '__wrapped__'))"
    done = run("--", sys.executable, "-c", script, PYTHONPATH=str(tmp_path))
    assert done.stdout == "also found\ntrain False\n", done.stderr


def test_what_cannot_be_attached_costs_the_monitor_alone(run, tmp_path):
    trainer = "class Trainer:\n  def train(self): print('trained')\n"
    put_package(tmp_path, "transformers", trainer)
    script = "from transformers.trainer import Trainer; Trainer().train()"
    done = run("--", sys.executable, "-c", script)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "this training is not watched" in done.stderr
    put_package(tmp_path, "transformers", "print('no trainer')")
    done = run("--", sys.executable, "-c", "import transformers.trainer")
    assert (done.returncode, done.stdout) == (0, "no trainer\n")
    assert "nothing is watched in" in done.stderr


def test_exit_codes_and_signals_are_those_of_the_command(run, tmp_path):
    assert run("--", sys.executable, "-c", "raise SystemExit(7)").returncode == 7
    done = run("--", "no-such-program")
    assert (done.returncode, done.stderr) == (
        2, "error: no-such-program: No such file or directory\n"
    )  # fmt: skip
    handler = "import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: exit(9))\n"
    command = [sys.executable, "-c", f"{handler}print('ready', flush=True)\ntime.sleep(60)"]
    began = subprocess.Popen(
        [sys.executable, "-m", "rmetric", "run", "--", *command],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert began.stdout is not None
    assert began.stdout.readline() == b"ready\n"
    began.send_signal(signal.SIGUSR1)
    assert began.wait(30) == 9


@pytest.mark.parametrize(
    ("words", "variables", "problem"),
    [
        (["--webhook", "mailto:a"], {}, "--webhook must begin with http"),
        ([], {"RMETRIC_WEBHOOK": "mailto:a"}, "must begin with http"),
        ([], {"RMETRIC_RESCUE": "yes"}, "RMETRIC_RESCUE is 'yes': 0 and 1 are accepted"),
        (["--audits=-resume,modes"], {}, "['-resume', 'modes']: all names have a minus, or none"),
        ([], {"RMETRIC_AUDITS": "yes"}, "audits has 'yes': known are groups"),
    ],
)
def test_a_wrong_setting_is_2_before_anything_is_started(run, words, variables, problem):
    done = run(*words, "--", sys.executable, "-c", "print('started')", **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr
