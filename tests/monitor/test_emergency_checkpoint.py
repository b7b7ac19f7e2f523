"""What was saved in an emergency brings the training back, and is never half of anything."""

import math
import os
import random
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from rmetric.logs import read_log
from rmetric.monitor import Monitor, MonitorConfig
from rmetric.monitor.actions import EmergencyCheckpoint, checkpoint_file, restore
from rmetric.monitor.alerts import Episode
from tests.monitor.training import alert, make_model, same_weights

STEPS, EXPLODES_AT = 24, 12


class Training:
    """A training whose every step draws from every generator there is on the host."""

    def __init__(self, folder, **settings):
        torch.manual_seed(3)
        np.random.seed(3)  # noqa: NPY002
        random.seed(3)
        self.model = make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.checkpoint = EmergencyCheckpoint(
            folder / "checkpoints",
            scheduler=self.scheduler,
            extra_state=lambda: {"batches": self.batches},
            **settings,
        )
        self.batches = 0
        self.monitor = Monitor(
            self.model,
            self.optimizer,
            log=folder / "run.jsonl",
            config=MonitorConfig(explosion_window=6, workers_every=0),
            actions=[self.checkpoint],
        )

    def resume(self, path):
        return restore(
            path, self.model, self.optimizer, scheduler=self.scheduler, monitor=self.monitor
        )

    def run(self, steps=STEPS, after=lambda step: None):
        for step in range(self.monitor.step + 1, steps + 1):
            self.optimizer.zero_grad()
            inputs = torch.randn(8, 6) * random.random() + float(np.random.rand())  # noqa: NPY002
            loss = self.model(inputs).square().mean() * (1e4 if step == EXPLODES_AT else 1.0)
            loss.backward()
            self.monitor.check_before_step(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.batches = step
            after(step)
        self.monitor.close()
        return self


def run_and_be_killed(folder):
    """In another process; the writer is waited for, as a training that takes longer would."""
    training = Training(folder)

    def after(step):
        if step == EXPLODES_AT:
            training.checkpoint.close()
        if step == EXPLODES_AT + 4:
            os.kill(os.getpid(), signal.SIGKILL)

    training.run(after=after)


def half_and_die(content, file):
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def plain_only(value):
    if isinstance(value, dict):
        return all(plain_only(inner) for inner in (*value, *value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(plain_only, value))
    return isinstance(value, torch.Tensor) or type(value) in checkpoint_file.PLAIN


def files(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def monitor():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    with Monitor(model, optimizer) as monitor:
        yield monitor


def save(checkpoint, monitor, step=5):
    monitor.step = monitor.weights_step = step
    checkpoint(alert(step), monitor)
    checkpoint.close()


class TestResume:
    def test_killed_and_resumed_gives_the_weights_of_the_uninterrupted_training(self, tmp_path):
        whole = Training(tmp_path / "whole").run()
        folder = tmp_path / "killed"
        code = (
            "from pathlib import Path; from tests.monitor.test_emergency_checkpoint import *; "
            f"torch.set_num_threads(1); run_and_be_killed(Path({str(folder)!r}))"
        )
        root = Path(__file__).parents[2]
        died = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True)
        assert died.returncode == -signal.SIGKILL, died.stderr.decode()
        assert files(folder / "checkpoints") == ["last_good", "step_00000011.pt"]

        resumed = Training(folder)
        restored = resumed.resume(folder / "checkpoints")
        assert restored["step"] == EXPLODES_AT - 1 == resumed.monitor.step
        assert restored["extra"] == {"batches": EXPLODES_AT - 1}
        assert restored["alert"]["source"] == "gradient_explosion"
        assert restored["left_out"] == {}
        resumed.run()
        assert same_weights(whole.model, resumed.model)
        assert whole.scheduler.state_dict() == resumed.scheduler.state_dict()
        losses = [
            [record.training_loss for record in read_log(tmp_path / name / "run.jsonl").records]
            for name in ("whole", "killed")
        ]
        assert losses[0] == losses[1]
        assert len(losses[0]) == STEPS

    def test_a_wrapped_model_and_a_bare_one_have_the_same_checkpoint(self, tmp_path):
        model = make_model()
        compiled = torch.compile(model, backend="eager")
        checkpoint = EmergencyCheckpoint(tmp_path)
        with Monitor(compiled) as monitor:
            save(checkpoint, monitor)
        other = make_model(seed=5)
        restore(tmp_path, torch.compile(other, backend="eager"))
        assert same_weights(model, other)

    @pytest.mark.parametrize("part", ["optimizer", "scheduler", "scaler"])
    def test_a_part_that_was_not_saved_is_named(self, tmp_path, part):
        model = make_model()
        with Monitor(model) as monitor:
            save(EmergencyCheckpoint(tmp_path), monitor)
        with pytest.raises(ValueError, match=f"holds no {part}"):
            restore(tmp_path, model, **{part: torch.optim.SGD(model.parameters(), lr=1.0)})

    def test_other_files_than_checkpoints_are_refused_in_words(self, tmp_path, monitor):
        model = monitor.model
        (tmp_path / "text.pt").write_text("hello")
        torch.save({"model": model.state_dict()}, tmp_path / "other.pt")
        torch.save({"format": model}, tmp_path / "code.pt")
        words = {".": "is neither a checkpoint", "none.pt": "neither a checkpoint nor"}
        words |= {"text.pt": "cannot be read", "code.pt": "cannot be read"}
        for name, problem in (words | {"other.pt": "is not a checkpoint of rmetric"}).items():
            with pytest.raises(ValueError, match=problem):
                restore(tmp_path / name, model)
        save(EmergencyCheckpoint(tmp_path), monitor)
        with pytest.raises(ValueError, match="does not fit this model"):
            restore(tmp_path, nn.Linear(2, 2))


class TestContent:
    def test_a_weights_only_load_finds_tensors_and_plain_values(self, tmp_path):
        training = Training(tmp_path).run()
        saved = torch.load(training.checkpoint.last_good, weights_only=True)
        assert plain_only(saved)
        parts = {"model", "optimizer", "scheduler", "monitor", "random", "extra", "alert", "step"}
        assert parts <= set(saved)
        assert saved["monitor"]["step"] == saved["step"] == EXPLODES_AT - 1

    def test_a_part_that_is_not_plain_is_left_out_and_the_rest_is_saved(
        self, tmp_path, monitor, caplog
    ):
        checkpoint = EmergencyCheckpoint(tmp_path, extra_state=lambda: {"sampler": object()})
        save(checkpoint, monitor)
        restored = restore(tmp_path, make_model())
        assert restored["extra"] is None
        assert "extra['sampler'] is a object" in restored["left_out"]["extra"]
        assert "is without extra" in caplog.text

    def test_tied_weights_are_saved_once(self, tmp_path):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding, self.head = nn.Embedding(256, 64), nn.Linear(64, 256, bias=False)
                self.head.weight = self.embedding.weight

        model = Tied()
        checkpoint = EmergencyCheckpoint(tmp_path)
        with Monitor(model) as monitor:
            save(checkpoint, monitor)
        assert checkpoint.last_good.stat().st_size < 1.5 * 256 * 64 * 4
        other = Tied()
        restore(tmp_path, other)
        assert torch.equal(other.head.weight, model.embedding.weight)


class TestOnlyWhatIsGood:
    def test_weights_that_are_not_finite_are_refused_and_the_last_good_is_named(
        self, tmp_path, monitor, caplog
    ):
        checkpoint = EmergencyCheckpoint(tmp_path, wait=1)
        save(checkpoint, monitor, step=5)
        with torch.no_grad():
            monitor.model[3].bias[2] = math.inf
        save(checkpoint, monitor, step=6)
        assert "step 6 is not saved: 3.bias is not finite" in caplog.text
        assert f"the last good one is {tmp_path / 'step_00000005.pt'}" in caplog.text
        assert checkpoint.problem is not None
        assert files(tmp_path) == ["last_good", "step_00000005.pt"]

    def test_an_optimiser_that_is_not_finite_is_refused(self, tmp_path, monitor, caplog):
        monitor.optimizer.state[monitor.model[0].weight]["exp_avg_sq"][0, 0] = math.nan
        save(EmergencyCheckpoint(tmp_path / "none"), monitor)
        assert "the optimiser's exp_avg_sq of 0.weight is not finite" in caplog.text
        assert "there is none yet" in caplog.text
        assert not (tmp_path / "none").exists()

    def test_a_mask_of_infinities_is_fine_and_a_buffer_with_nan_is_not(self, tmp_path, monitor):
        monitor.model.register_buffer("mask", torch.full((2,), -math.inf))
        checkpoint = EmergencyCheckpoint(tmp_path, wait=1)
        save(checkpoint, monitor, step=5)
        assert checkpoint.problem is None
        monitor.model.mask[0] = math.nan
        save(checkpoint, monitor, step=6)
        assert "mask is not finite" in checkpoint.problem

    def test_the_newest_are_kept_and_the_pointer_names_the_newest(self, tmp_path, monitor):
        (tmp_path / ".step_00000001.pt.part").write_text("left by a killed writer")
        checkpoint = EmergencyCheckpoint(tmp_path, keep=2, wait=1)
        for step in (90, 1090, 40, 1050):  # a training that was taken back to step 39
            save(checkpoint, monitor, step)
            assert checkpoint_file.last_good(tmp_path).name == f"step_{step:08d}.pt"
            checkpoint.ended(Episode(since=step, last=step, alerts=(alert(step),)), monitor)
        assert files(tmp_path) == ["last_good", "step_00000040.pt", "step_00001050.pt"]
        assert EmergencyCheckpoint(tmp_path).last_good == checkpoint.last_good

    def test_later_saves_of_an_alarm_that_lasts_do_not_evict_the_first(self, tmp_path, monitor):
        checkpoint = EmergencyCheckpoint(tmp_path, keep=1, wait=5)
        for step in range(10, 41):
            save(checkpoint, monitor, step)
        suspect = ["step_00000035.suspect.pt", "step_00000040.suspect.pt"]
        assert files(tmp_path) == ["last_good", "step_00000010.pt", *suspect]
        assert restore(tmp_path, make_model())["suspect"]["since"] == 10
        clean = restore(tmp_path / "step_00000010.pt", make_model())
        assert (clean["step"], clean["suspect"]) == (10, None)

    def test_a_step_that_is_reached_again_has_one_file(self, tmp_path, monitor):
        checkpoint = EmergencyCheckpoint(tmp_path, wait=1)
        for step in (10, 20, 20 - 1, 20):
            save(checkpoint, monitor, step)
        names = ["step_00000010.pt", "step_00000019.pt", "step_00000020.suspect.pt"]
        assert files(tmp_path) == ["last_good", *names]

    def test_the_first_rank_alone_saves_and_copies_generators(self, tmp_path, monkeypatch):
        monkeypatch.setattr(checkpoint_file, "rank", lambda: 1)
        checkpoint = EmergencyCheckpoint(tmp_path)
        with Monitor(make_model(), actions=[checkpoint]) as monitor:
            for _ in range(3):
                monitor.check_before_step(1.0)
            save(checkpoint, monitor)
        assert checkpoint._random == {}
        assert files(tmp_path) == []


@contextmanager
def disk_of(size):
    resource = pytest.importorskip("resource", reason="no limit can be set on this system")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestDisk:
    def test_a_full_disk_costs_the_checkpoint_and_not_the_last_good_one(
        self, tmp_path, monitor, caplog
    ):
        checkpoint = EmergencyCheckpoint(tmp_path, wait=1)
        save(checkpoint, monitor, step=5)
        with disk_of(2000):
            save(checkpoint, monitor, step=6)
        assert "cannot be written" in checkpoint.problem
        assert "the last good one is" in caplog.text
        assert files(tmp_path) == ["last_good", "step_00000005.pt"]
        assert restore(tmp_path, make_model())["step"] == 5
        save(checkpoint, monitor, step=7)
        assert checkpoint.problem is None

    def test_a_writer_that_is_killed_leaves_nothing_with_a_name(
        self, tmp_path, monitor, monkeypatch
    ):
        save(EmergencyCheckpoint(tmp_path), monitor, step=5)
        monkeypatch.setattr(checkpoint_file.torch, "save", half_and_die)
        if not (child := os.fork()):
            checkpoint_file.write_whole(tmp_path / "step_00000006.pt", {})
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        monkeypatch.undo()
        assert files(tmp_path) == [".step_00000006.pt.part", "last_good", "step_00000005.pt"]
        assert restore(tmp_path, make_model())["step"] == 5
