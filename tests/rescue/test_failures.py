"""Rescue when something of its own goes wrong: the training goes on, and nothing good is lost."""

import json
import os
import signal

import pytest
import torch
from torch import nn

from rmetric.monitor import Monitor
from rmetric.monitor.actions import restore
from rmetric.rescue import Rescue, RescueConfig, hold
from rmetric.rescue import action as action_module
from rmetric.rescue.disk import SnapshotFolder
from rmetric.rescue.snapshot_keeper import SnapshotKeeper
from tests.rescue.test_action import ALWAYS, lasting
from tests.rescue.trainings import (
    NANS,
    SMALL,
    STEPS,
    a_step,
    actions,
    bad,
    instead_of_detector,
    make_loader,
    make_model,
    make_optimizer,
    parts,
    same,
    seed,
    train,
)


def fail(*args, **kwargs):
    raise OSError("the disk is full")


def test_the_verdict_is_written_where_the_weights_cannot_be(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(action_module, "save_held", fail)
    with pytest.raises(SystemExit):
        train(Rescue(ALWAYS, on_hold="exit", hold_folder=tmp_path), evidence_of=lasting)
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert "saved" not in verdict
    assert "the held weights are not saved: the disk is full" in caplog.text


def test_held_weights_are_saved_without_a_part_that_cannot_be(tmp_path):
    class Odd:
        def state_dict(self):
            return {"function": fail}

        def load_state_dict(self, state):
            pass

    rescue = Rescue(ALWAYS, hold_folder=tmp_path, extra={"odd": Odd()})
    train(rescue, evidence_of=lasting)
    model = make_model()
    found = restore(tmp_path, model, make_optimizer("adamw", model.parameters()))
    assert found["step"] == rescue.held["step"]
    assert list(found["left_out"]) == ["odd"]
    assert "function" in found["left_out"]["odd"]


WAITING = RescueConfig(every=5, probation=5, far=20, observe=1, remedies=("leave_out", "hold"))


@pytest.mark.parametrize("full", [False, True])
def test_after_a_wait_the_training_goes_on_with_the_same_policy(
    full, tmp_path, monkeypatch, caplog
):
    """The hold is at 20; the snapshots of 25 and 30 are of the course that was left.

    A verdict that cannot be written after the wait costs no rescue.
    """
    write = hold.write_whole

    def write_first(path, content):
        (fail if full and b"went_on" in content else write)(path, content)

    monkeypatch.setattr(hold, "write_whole", write_first)
    (tmp_path / "go").touch()  # of an earlier hold
    rescue = Rescue(WAITING, on_hold="wait", hold_seconds=0.0, hold_folder=tmp_path)
    evidence, policies = bad(32, since=23, kind="not_finite"), set()

    def at(executed, step, model, optimizer):
        policies.add(id(rescue.policy))

    outcome = train(rescue, evidence_of=evidence, at=at)
    assert [(e["action"], e["to"]) for e in outcome["decisions"]] == [("hold", 20)]
    assert len(policies) == 1
    assert outcome["problem"] == ""
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict.get("went_on") == (None if full else "0 seconds are over")
    assert ("the disk is full" in caplog.text) == full
    assert same(outcome, train())


def test_a_signal_right_after_the_verdict_ends_the_wait(tmp_path, monkeypatch):
    """Somebody may wait for the file and send the signal at once."""
    write, early = action_module.save_verdict, []

    def save_and_signal(folder, verdict):
        write(folder, verdict)
        if not early:
            early.append(True)
            os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(action_module, "save_verdict", save_and_signal)
    before = signal.signal(signal.SIGUSR1, lambda *_: None)  # else an early one ends the process
    try:
        rescue = Rescue(WAITING, on_hold="wait", hold_seconds=5.0, hold_folder=tmp_path)
        train(rescue, evidence_of=bad(32, since=23, kind="not_finite"))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert json.loads((tmp_path / "verdict.json").read_text())["went_on"] == "SIGUSR1"


def test_a_micro_batch_that_stands_out_is_no_rank():
    """In a single process the workers of the records are the micro-batches of a step."""
    evidence = bad(23, since=19, kind="worker", worker=0)
    rescued = train(Rescue(SMALL), per_step=2, evidence_of=evidence)
    assert rescued["problem"] == ""
    [entry] = rescued["decisions"]
    assert entry["workers"] == []
    assert same(rescued, train(per_step=2))


def test_a_failed_write_beside_another_failure_does_not_end_the_training(
    tmp_path, monkeypatch, caplog
):
    """The write of the newest snapshot fails in the background, and then the return."""

    def at(executed, step, model, optimizer):
        if executed == 5:
            monkeypatch.setattr(SnapshotFolder, "_write", fail)
            monkeypatch.setattr(SnapshotKeeper, "_check_fits", fail)

    config = RescueConfig(every=5, probation=1, far=20)
    rescued = train(Rescue(config, where=tmp_path), evidence_of=bad(7), at=at)
    assert "the disk is full" in rescued["problem"]
    assert rescued["taken"] == list(range(1, STEPS + 1))
    assert sum("switched off" in r.message for r in caplog.records) == 1
    assert not list(tmp_path.glob("*/step-*"))


def test_a_folder_of_the_user_beside_the_snapshots_is_kept(tmp_path):
    own = tmp_path / "rank-0" / "weights.pt"
    own.parent.mkdir()
    own.touch()
    rescued = train(Rescue(SMALL, where=tmp_path), evidence_of=bad(23), steps=30)
    assert actions(rescued) == ["go_back"]
    assert own.exists()


class Scaled(nn.Module):
    """A linear layer with a factor that is neither parameter nor buffer."""

    def __init__(self):
        super().__init__()
        self.inner, self.factor = nn.Linear(6, 1), 1.0

    def forward(self, inputs):
        if self.training:
            self.factor *= 0.99
        return self.factor * self.inner(inputs)

    def get_extra_state(self):
        return {"factor": self.factor}

    def set_extra_state(self, state):
        self.factor = state["factor"]


def of_two_parts(rescue=None, nans=(), steps=30):
    """An optimiser of more than the model, and a module with a state of its own."""
    torch.manual_seed(0)
    model, head = Scaled(), nn.Linear(1, 1)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=0.01)
    batches = (rescue or Rescue()).steps(make_loader(), steps)
    seed()
    monitor = rescue and Monitor(model, optimizer, actions=[rescue])
    for executed, (_, (inputs, labels)) in enumerate(batches, 1):
        loss = nn.functional.mse_loss(head(model(inputs)), labels)
        (loss * torch.nan if executed in nans else loss).backward()
        if monitor is not None:
            monitor.check_before_step(loss)
        optimizer.step()
        optimizer.zero_grad()
    if monitor is not None:
        monitor.close()
    weights = [p.tolist() for part in (model, head) for p in part.parameters()]
    return weights, model.factor


def test_all_that_the_optimiser_moves_and_a_modules_own_state_come_back():
    rescue = Rescue(SMALL)
    assert of_two_parts(rescue, NANS) == of_two_parts()
    assert [e["action"] for e in rescue.decisions][-1] == "go_back"


def test_a_training_of_other_groups_is_left_as_it_is():
    """A group of the optimiser that came after the snapshot has no place in it."""
    kept, rescue = {}, Rescue(SMALL)

    def at(executed, step, model, optimizer):
        if executed == 21:
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
            for of_groups in (rescue.scheduler.lr_lambdas, rescue.scheduler.base_lrs):
                of_groups.append(of_groups[0])
        if executed == 24:
            kept["before"] = [p.tolist() for p in model.parameters()]
        if executed == 25:
            kept["after"] = [p.tolist() for p in model.parameters()]

    rescued = train(rescue, evidence_of=bad(23), at=at, steps=30, optimizer="sgd")
    assert "does not fit" in rescued["problem"]
    assert kept["before"] == kept["after"]


def one_training(rescue, steps, state=None):
    model, optimizer, monitor = parts(rescue)
    if state is not None:
        monitor.load_state_dict(state)
    for _, batch in rescue.steps(make_loader(), steps):
        a_step(model, optimizer, monitor, batch)
    state = monitor.state_dict()
    monitor.close()
    return state


def test_an_action_may_follow_one_training_after_the_other():
    """Snapshots of the first are gone: the second never goes back to them."""
    rescue = Rescue(SMALL)
    state = one_training(rescue, 20)
    with instead_of_detector(bad(22, since=21)):
        one_training(rescue, 40, state)
    assert rescue.problem == ""
    assert [e["to"] for e in rescue.decisions] == [20]
