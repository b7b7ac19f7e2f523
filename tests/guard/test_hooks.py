"""The guard in trainings: the page's loop, the monitor, the command, the Trainer, Megatron."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rmetric.cli.main import main
from rmetric.guard.checkpoints import Checkpoints, SavedCheckpoint
from rmetric.guard.megatron import TRACKER, guard_megatron, megatron_arguments
from rmetric.guard.monitor_action import AskGuard
from rmetric.guard.run_folder import RunFolder
from rmetric.guard.training_state import ModelState
from rmetric.monitor import Monitor
from tests.guard.test_checkpoints import flip
from tests.guard.test_suspect import a_guard
from tests.telemetry.fake_nvml import build, environment_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
LOOP, CALL = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_pages_loop_runs_and_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert LOOP.count("1001") == 1
    exec(LOOP.replace("1001", "151"), {})
    names = {path.name for path in Path("checkpoints").iterdir()}
    assert names == {"step-100", "step-150"}  # at the interval, and the last
    after = {}
    exec(LOOP.replace("1001", "251"), after)
    assert after["resumed"] == {"step": 150}
    assert after["step"] == after["guard"].last.step == 250


def test_the_pages_numbers_are_those_of_the_results():
    from benchmarks.checkpoints import STATED, tables

    report = json.loads((ROOT / "results" / "benchmarks" / "checkpoints.json").read_text())
    assert tables(report) in PAGE
    assert "products of its own numbers, not measurements" in PAGE
    for name, seconds in STATED.items():
        assert f"| {name} | " + " | ".join(f"{value:,} s" for value in seconds) in PAGE


def test_the_pages_arguments_for_megatron_are_those_of_the_function():
    arguments = " ".join(megatron_arguments("runs/7b/checkpoints", save_interval=500))
    assert arguments in " ".join(PAGE.split())
    with pytest.raises(ValueError, match="save_interval is 0"):
        megatron_arguments("x", save_interval=0)


def test_an_alert_of_the_monitor_saves_and_one_that_is_not_finite_keeps_the_one_before(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    state = lambda: {"training": ModelState(model, optimizer)}  # noqa: E731
    guard = a_guard(tmp_path, interval=10_000, state=state)
    actions = [AskGuard(guard, fatal=["non_finite"])]
    with Monitor(model, optimizer, actions=actions) as monitor:
        for step in range(1, 31):
            loss = model(torch.full((2, 4), 1.0 if step < 20 else torch.nan)).square().mean()
            loss.backward()
            monitor.check_before_step(loss)
            if step < 20:
                optimizer.step()
            optimizer.zero_grad()
            guard.step(step)
        assert {alert.source for alert in monitor.alerts} >= {"non_finite"}
    guard.close()
    assert isinstance(guard.last, SavedCheckpoint)
    assert guard.last.step >= 20
    assert Checkpoints(tmp_path, fingerprint="m").newest_good().step == guard.last.step
    assert len(list(tmp_path.iterdir())) == 1, "what lasts is asked for once"
    with pytest.raises(ValueError, match="fatal is 'non_finite'"):
        AskGuard(guard, fatal="non_finite")


GUARDED = """
import time
import torch
from rmetric.guard.checkpoints import Checkpoints
from rmetric.guard.guard import Guard
from rmetric.guard.policy import PolicyConfig
from rmetric.telemetry.risk import RiskConfig
from rmetric.telemetry.sources import GpuWatch

with GpuWatch(config=RiskConfig(interval=0.01)) as watch:
    assert watch.hardware.ready(30.0), watch.problem
    policy, saver = PolicyConfig(interval_steps=10_000), Checkpoints("checkpoints", fingerprint="m")
    guard = Guard(saver, policy=policy, state=lambda: {"w": torch.ones(2)}, telemetry=watch)
    for step in range(1, 1000):
        time.sleep(0.02)
        guard.step(step)
        if guard.last is not None:
            break
    guard.close()
"""


def test_a_gpu_that_falls_off_the_bus_is_reported_by_the_real_bindings(tmp_path):
    build(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", GUARDED], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env=os.environ | environment_of(tmp_path, [(5, 0, "xid", 79)], gpus=1),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "checkpoint requested by rule: GPU 0: Xid 79" in done.stderr
    assert len(list((tmp_path / "checkpoints").glob("step-*/good.json"))) == 1


def test_rmetric_save_leaves_a_request_that_a_training_answers(folder, tmp_path, capsys):
    guard = a_guard(folder.checkpoints, interval=10_000, folder=folder, asynchronous=True)
    command = ThreadPoolExecutor(1).submit(main, ["save", str(tmp_path), "--stop", "--wait", "30"])
    for step in range(1, 2000):
        time.sleep(0.01)
        guard.step(step)
        if guard.should_stop:
            break
    assert command.result() == 0
    guard.close()
    assert capsys.readouterr().out.splitlines() == [
        f"request 1 left in {tmp_path}",
        "request 1 is answered: the checkpoint is durable",
    ]
    assert (folder.checkpoints / f"step-{step}" / "good.json").exists()


def test_rmetric_save_does_not_take_a_withdrawn_request_for_a_checkpoint(folder, tmp_path, capsys):
    folder.beat(0, 1)
    command = ThreadPoolExecutor(1).submit(main, ["save", str(tmp_path), "--wait", "30"])
    while folder.request() is None:
        time.sleep(0.01)
    folder.withdraw()  # as a supervisor does that starts the training again
    assert command.result() == 1
    assert "request 1 is withdrawn" in capsys.readouterr().err


def test_rmetric_save_says_what_is_wrong(tmp_path, capsys):
    RunFolder(tmp_path).beat(0, 1)
    assert main(["save", str(tmp_path), "--now", "--reason", "driver", "--wait", "0.3"]) == 1
    assert "request 1 is not answered after 0.3 s" in capsys.readouterr().err
    entry = RunFolder(tmp_path).request()
    assert (entry.source, entry.reason, entry.fatal, entry.stop) == ("user", "driver", True, False)


@pytest.mark.parametrize(
    ("folder", "problem"),
    [
        ("", "the path is empty"),
        ("none", "is not a run folder: one with heartbeats/ of a training's guard or journal"),
        ("logs", "is not a run folder"),
        ("/", "is not a run folder"),
        ("/dev/null", "a device"),
        ("run", "the training ignores requests there"),
    ],
)
def test_a_request_is_left_in_no_folder_that_no_training_reads(
    tmp_path, monkeypatch, refused, folder, problem
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    RunFolder("run").beat(0, 1)
    (tmp_path / "run").chmod(0o777)  # other users can write it
    before = set(tmp_path.rglob("*"))
    assert problem in refused("save", folder).splitlines()[-1]
    assert set(tmp_path.rglob("*")) == before


def fatal(guard):
    guard.request("rule", "Xid 79", fatal=True)


def a_trainer(folder, at=99, ask=fatal, *, run=None, **settings):
    """A Trainer with a guard that is asked at the end of a step."""
    pytest.importorskip("transformers", minversion="4.50")
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    from rmetric.integrations.hugging_face import GuardCallback
    from tests.integrations.test_hugging_face import make_trainer

    class Asks(GuardCallback):
        def on_step_end(self, args, state, control, **more):
            if state.global_step == at:
                ask(self.guard)
            super().on_step_end(args, state, control, **more)

    settings = {"save_strategy": "steps", "save_steps": 100, "max_steps": 12} | settings
    callback = Asks(folder=run)
    trainer = make_trainer(folder, [callback], **settings)
    trainer.guard = lambda: callback.guard
    return trainer


def checkpoints_of(trainer):
    return sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*"))


def test_the_trainer_saves_when_it_is_asked_and_resumes_from_it(tmp_path):
    trainer = a_trainer(tmp_path, 5)
    trainer.train()
    assert checkpoints_of(trainer) == ["checkpoint-12", "checkpoint-5"]
    assert trainer.guard().policy.pending == {}
    straight = trainer.model.state_dict()
    again = a_trainer(tmp_path)
    again.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / "checkpoint-5"))
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, straight[name]), name


def test_the_pages_call_starts_at_the_first_launch_and_resumes_at_the_second(tmp_path):
    pytest.importorskip("transformers", minversion="4.50")
    from transformers import Trainer

    resumed = []

    class Recording(Trainer):
        def train(self, resume_from_checkpoint=None):
            resumed.append(resume_from_checkpoint)
            return super().train(resume_from_checkpoint=resume_from_checkpoint)

    for steps in (9, 12):
        made = a_trainer(tmp_path, save_steps=4, max_steps=steps)
        parts = {"model": made.model, "args": made.args, "data": made.train_dataset}
        exec(CALL, parts | {"Trainer": Recording, "__name__": "page"})
    assert resumed == [None, str(tmp_path / "out" / "checkpoint-9")]
    assert checkpoints_of(made) == [f"checkpoint-{step}" for step in (12, 4, 8, 9)]


def test_the_documented_resume_skips_damaged_checkpoints(tmp_path, caplog):
    from rmetric.integrations.hugging_face import newest_checkpoint

    assert newest_checkpoint(tmp_path / "none yet") is None
    trainer = a_trainer(tmp_path, save_steps=2)
    out = Path(trainer.args.output_dir)
    trainer.train()
    assert newest_checkpoint(str(out)) == str(out / "checkpoint-12")
    (out / "checkpoint-12" / "trainer_state.json").unlink()  # killed before the end
    weights = out / "checkpoint-10" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    flip(out / "checkpoint-8" / "optimizer.pt")
    (out / "checkpoint-6" / "model.safetensors").unlink()
    (out / "checkpoint-4" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}})
    )
    (out / "checkpoint-14").write_text("a file")
    (out / "checkpoint-16.not-finite").mkdir()
    assert newest_checkpoint(out) == str(out / "checkpoint-2")
    for step, problem in ((10, "cannot be read"), (8, "optimizer.pt"),
                          (6, "no weights"), (4, "00002.safetensors is missing")):  # fmt: skip
        assert re.search(rf"checkpoint-{step} is not resumed from: .*{problem}", caplog.text)
    shutil.rmtree(out / "checkpoint-2")
    assert newest_checkpoint(out) is None


@pytest.mark.parametrize("stops", [False, True])
def test_a_trainer_that_reached_its_end_says_so_and_one_that_was_stopped_does_not(tmp_path, stops):
    folder = RunFolder(tmp_path / "run")
    if stops:
        folder.ask("user", "that is enough", stop=True)
    trainer = a_trainer(tmp_path, run=folder)
    trainer.train()
    assert trainer.guard().should_stop == stops
    assert checkpoints_of(trainer) == [f"checkpoint-{trainer.state.global_step}"]
    assert (trainer.state.global_step < 12, folder.answered()) == (stops, int(stops))
    assert (folder.beats()[0].phase == "finished") != stops


def test_a_full_disk_does_not_end_the_trainer(tmp_path, errors):
    trainer = a_trainer(tmp_path, 3)
    save, tried = trainer._save_optimizer_and_scheduler, []

    def full(*args):
        tried.append(trainer.state.global_step)
        if len(tried) == 1:
            raise OSError(28, "No space left on device")
        return save(*args)

    trainer._save_optimizer_and_scheduler = full
    trainer.train()
    assert tried == [3, 12]
    assert "save of step 3 failed: OSError: [Errno 28] No space left on device" in errors.text
    assert checkpoints_of(trainer) == ["checkpoint-12"]


def test_weights_that_are_not_finite_are_put_out_of_the_trainers_sight(tmp_path, errors):
    def spoil(guard):
        with torch.no_grad():
            next(trainer.model.parameters())[0, 0] = torch.nan
        fatal(guard)

    trainer = a_trainer(tmp_path, 4, spoil, max_steps=6, save_steps=2)
    trainer.train()
    assert "checkpoint-2" in checkpoints_of(trainer)
    assert "checkpoint-4.not-finite" in checkpoints_of(trainer)
    assert "is not finite" in errors.text
    from rmetric.integrations.hugging_face_guard import _put_aside

    assert _put_aside(tmp_path / "checkpoint-5") is None
    from transformers.trainer_utils import get_last_checkpoint

    assert get_last_checkpoint(trainer.args.output_dir).endswith("checkpoint-2")


def test_a_training_that_breaks_off_gives_the_signals_back(tmp_path):
    def breaks(_guard):
        assert signal.getsignal(signal.SIGTERM) is not before, "the guard does not listen"
        raise RuntimeError("out of memory")

    before = signal.getsignal(signal.SIGTERM)
    trainer = a_trainer(tmp_path, 3, breaks)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_trainer_needs_an_interval(tmp_path):
    with pytest.raises(ValueError, match="save_strategy is"):
        a_trainer(tmp_path, save_strategy="no").train()


class Megatron:
    """The two functions that are followed, with the arguments of megatron-core 0.19.2."""

    __name__ = "megatron.training.training"

    def __init__(self, folder, *, interval=100, asynchronous=False):
        self.args = SimpleNamespace(
            save=str(folder), save_interval=interval, async_save=asynchronous
        )
        self.folder, self.saved, self.queue = folder, [], []
        folder.mkdir()

        def save_checkpoint_and_time(
            iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far,
            checkpointing_context, non_persistent_ckpt=False, train_data_iterator=None,
        ):  # fmt: skip
            assert (model, train_data_iterator) == ("model", "data")
            self.saved.append(iteration)
            self.queue.append(iteration)
            if not asynchronous:
                self.finish()

        def checkpoint_and_decide_exit(
            model, optimizer, opt_param_scheduler, iteration, num_floating_point_operations_so_far,
            checkpointing_context, train_data_iterator,
        ):  # fmt: skip
            if iteration % self.args.save_interval == 0:
                self.save_checkpoint_and_time(
                    iteration, model, optimizer, opt_param_scheduler,
                    num_floating_point_operations_so_far, checkpointing_context,
                    train_data_iterator=train_data_iterator,
                )  # fmt: skip
            return False

        def maybe_finalize_async_save(blocking=False, terminate=False):
            self.finish()

        maybe_finalize_async_save.__module__ = "fake_async_utils"
        sys.modules["fake_async_utils"] = SimpleNamespace(
            is_empty_async_queue=lambda: not self.queue
        )
        self.save_checkpoint_and_time = save_checkpoint_and_time
        self.checkpoint_and_decide_exit = checkpoint_and_decide_exit
        self.maybe_finalize_async_save = maybe_finalize_async_save

    def get_args(self):
        return self.args

    def finish(self):
        for iteration in self.queue:
            (self.folder / TRACKER).write_text(str(iteration))
        self.queue.clear()

    def train(self, first, last):
        for iteration in range(first, last + 1):
            if self.checkpoint_and_decide_exit(
                "model", "optimizer", "scheduler", iteration, 1e9, {}, "data"
            ):
                return iteration
        return None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_megatron_saves_when_it_is_asked_by_its_own_function(folder, tmp_path, asynchronous):
    megatron = Megatron(tmp_path / "ckpt", interval=20, asynchronous=asynchronous)
    guard_of = guard_megatron(megatron, folder=folder, signals={})
    assert guard_of() is None, "made in the training, when the ranks know each other"
    folder.ask("user", "before the upgrade", fatal=True)
    assert megatron.train(1, 5) is None
    assert megatron.saved == [1]
    megatron.finish()
    megatron.train(6, 29)
    megatron.finish()
    assert megatron.saved == [1, 20], "its regular saves count"
    assert folder.answered() == 1
    megatron.train(30, 31)
    assert guard_of().policy.durable_step == 20


def test_a_tracker_that_was_there_before_proves_nothing(folder, tmp_path):
    megatron = Megatron(tmp_path / "ckpt")
    (tmp_path / "ckpt" / TRACKER).write_text("90")  # training goes on from an older one
    megatron.finish = lambda: megatron.queue.clear()  # and a save that leaves no trace
    guard_of = guard_megatron(megatron, folder=folder, signals={})
    folder.ask("user", "before the upgrade", fatal=True)
    megatron.train(41, 43)
    assert megatron.saved == [41]
    assert folder.answered() == 0
    assert "says 90, not 41" in guard_of().problem


@pytest.mark.parametrize("asynchronous", [False, True])
def test_megatron_leaves_its_loop_when_the_checkpoint_is_there(folder, tmp_path, asynchronous):
    megatron = Megatron(tmp_path / "ckpt", asynchronous=asynchronous)
    guard_megatron(megatron, folder=folder, signals={signal.SIGUSR1: "save"})
    folder.ask("user", "enough", stop=True)
    assert megatron.train(41, 60) == 41
    assert megatron.saved == [41]
    assert folder.answered() == 1
    assert (tmp_path / "ckpt" / TRACKER).read_text() == "41"


def test_a_module_that_is_not_megatrons_is_refused():
    with pytest.raises(ValueError, match="has no checkpoint_and_decide_exit"):
        guard_megatron(json)
