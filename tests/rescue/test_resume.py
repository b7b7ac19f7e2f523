"""A restarted process: what its rescue goes on with, from the monitor's own state."""

import json
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rmetric.monitor import Monitor
from rmetric.rescue import Rescue, RescueConfig
from rmetric.rescue.policy import Evidence
from tests.rescue.test_data import Course, Stateful
from tests.rescue.trainers import Planted, hugging_face
from tests.rescue.trainings import SMALL, bad, instead_of_detector, make_model, make_optimizer, seed

#: Batches of one number each.
NUMBERED = [(torch.full((4, 6), float(i)), torch.zeros(4, 1)) for i in range(60)]


class RestoresItself(Stateful):
    batches = NUMBERED


def run(rescue, loader, steps, *, stop=None, state=None, evidence=None, at=None, make=None):
    """Train; the monitor's state as its checkpoint would hold it, and the batches used."""
    model = make_model()
    optimizer = (make or partial(make_optimizer, "adamw"))(model.parameters())
    seed()
    monitor = Monitor(model, optimizer, actions=[rescue])
    if state is not None:
        monitor.load_state_dict(json.loads(json.dumps(state)))
    used = []
    with instead_of_detector(evidence or bad(0)):
        for step, (inputs, labels) in rescue.steps(loader, steps):
            used.append((step, int(inputs[0, 0])))
            if at is not None:
                at(step, optimizer)
            loss = nn.functional.mse_loss(model(inputs / 60), labels)
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
            optimizer.zero_grad()
            if step == stop:
                break
        state = monitor.state_dict()
        rates = [group["lr"] for group in optimizer.param_groups]
        monitor.close()
    assert rescue.problem == ""
    return {"state": state, "used": used, "rates": rates}


def test_the_used_budget_lasts_over_a_restart():
    """Each return costs 8 steps; of 10, one is allowed, in whatever process."""
    config = RescueConfig(every=5, probation=5, far=20, budget=10, share=0.0, quiet=1, observe=1)
    first = run(Rescue(config), NUMBERED, 60, stop=30, evidence=bad(23, since=19))
    assert first["state"]["actions"]["Rescue"]["policy"]["repeated"] == 8
    second = Rescue(config)
    run(second, NUMBERED, 60, state=first["state"], evidence=bad(48, since=44))
    assert [e["action"] for e in second.decisions] == []
    blank = Rescue(config)
    run(blank, NUMBERED, 60, evidence=bad(48, since=44))
    assert [e["action"] for e in blank.decisions] == ["go_back"]


def test_no_snapshot_is_taken_of_weights_within_an_incident():
    first = Rescue(SMALL)
    state = run(first, NUMBERED, 60, stop=25, evidence=bad(23, since=19))["state"]
    assert first.policy.state.incident is not None
    second = Rescue(SMALL)
    taken = []

    def at(step, optimizer):
        taken.append((step, list(second.policy.state.snapshots)))

    run(second, NUMBERED, 60, state=state, at=at)
    kept = dict(taken)
    # The last evidence is of step 23; 20 steps without any end the incident, seen one step later.
    assert kept[26] == kept[44] == []
    assert kept[46] == [45]


@pytest.mark.parametrize("ranks", [1, 4])
def test_workers_stay_out_on_probation_if_the_ranks_are_the_same(ranks):
    """The state is that of a run on four ranks; this process sees as many, or one."""
    first = Rescue(SMALL)
    state = run(first, NUMBERED, 60, stop=10)["state"]
    of_rescue = state["actions"]["Rescue"]
    of_rescue["policy"]["out"] = [[2, 120, 100], [3, -1, 200]]
    of_rescue["ranks"] = 4
    second = Rescue(SMALL)
    model = make_model()
    monitor = Monitor(model, make_optimizer("sgd", model.parameters()), actions=[second])
    second._workers.ranks = ranks
    monitor.load_state_dict(state)
    out = {2: (120, 100), 3: (-1, 200)} if ranks == 4 else {}
    assert second.policy.state.out == out
    assert second.policy.workers_out == ((2,) if ranks == 4 else ())
    monitor.close()


def test_a_hold_is_over_in_the_next_process():
    """Its checkpoint has the weights of the snapshot: the next evidence is a new incident."""
    from tests.rescue.test_action import ALWAYS, lasting

    rescue = Rescue(ALWAYS, on_hold="wait", hold_seconds=0.0)
    model = make_model()
    monitor = Monitor(model, make_optimizer("sgd", model.parameters()), actions=[rescue])
    rescue.policy.state.held = True
    rescue.policy._respond(lasting(None, 30))
    state = monitor.state_dict()
    monitor.load_state_dict(state)
    assert not rescue.policy.state.held
    assert rescue.policy.state.incident is None
    monitor.close()


def skipping(loader, stop):
    """A run that leaves data out at its second return, and stops; the last step that it made."""
    evidence = bad(23, since=21, kind="data", times=2)
    rescue = Rescue(SMALL)
    found = run(rescue, loader, 60, stop=stop, evidence=evidence)
    assert [e["skipped"] for e in rescue.decisions] == [None, [21, 29]]
    return found


def test_batches_that_are_left_out_stay_out_in_the_next_process():
    """The loader begins its epoch anew, as one without a state does: the same batches are out."""
    state = skipping(NUMBERED, 40)["state"]
    assert state["actions"]["Rescue"]["data"] == {"epoch": 0, "batch": 0, "left_out": [[20, 29]]}
    again = run(Rescue(SMALL), NUMBERED, 70, state=state)["used"]
    assert [batch for _, batch in again] == [*range(20), *range(29, 39)]


def test_a_loader_that_restores_itself_leaves_out_what_is_to_come():
    def at_step_2(loader):
        course = Course(loader)
        used = [int(course.of_step(step)[0][0][0, 0]) for step in (1, 2)]
        course.data.at_boundary(2)
        return course, used

    course, used = at_step_2(RestoresItself())
    assert used == [0, 1]
    course.data.left_out = [(3, 6)]
    state = course.data.resume_state()
    assert state == {"epoch": 0, "batch": 2, "left_out": [[1, 4]]}
    resumed = RestoresItself()
    resumed.load_state_dict(course.data.loader.state_dict())
    after = Course(resumed)
    after.data.resume(state)
    assert [int(after.of_step(step)[0][0][0, 0]) for step in (1, 2, 3)] == [2, 6, 7]


def test_the_epoch_goes_on_where_the_sampler_orders_by_it():
    class Ordered(torch.utils.data.Sampler):
        epochs = ()

        def set_epoch(self, epoch):
            self.epochs = (*self.epochs, epoch)

        def __iter__(self):
            return iter(range(8))

        def __len__(self):
            return 8

    data = TensorDataset(torch.zeros(8, 6), torch.zeros(8, 1))
    first, second = Ordered(), Ordered()
    state = run(Rescue(SMALL), DataLoader(data, 4, sampler=first), 7)["state"]
    run(Rescue(SMALL), DataLoader(data, 4, sampler=second), 9, state=state)
    assert first.epochs == (0, 1, 2, 3)
    assert second.epochs[0] == 3


def test_the_trainer_resumes_without_the_batches_that_were_left_out(monkeypatch, tmp_path):
    """From a checkpoint after the stretch, with which the Trainer counts the batches by steps."""
    planted = Evidence(step=23, since=21, kind="data", words="planted")
    monkeypatch.setattr("rmetric.rescue.judgement.evidence_of", Planted([planted, planted]))
    settings = {"save_strategy": "steps", "save_steps": 27}
    first = Rescue(SMALL)
    found = hugging_face(tmp_path, [first], **settings)
    # Step 21 has the batch of step 30: the second epoch's batches 2 to 10 are left out.
    assert [e["skipped"] for e in first.decisions] == [None, [21, 29]]
    monkeypatch.setattr("rmetric.rescue.judgement.evidence_of", Planted([]))
    second = Rescue(SMALL)
    resumed = hugging_face(
        tmp_path / "resumed", [second], resume=str(found.folder / "checkpoint-27"), **settings
    )
    plain = hugging_face(tmp_path / "plain")
    # Step 28 is the tenth of its epoch: batch 9, and 10, would come next; both are left out.
    rest = [plain.seen[i] for i in range(18 + 11, 36)]
    assert resumed.seen[: len(rest)] == rest
    assert resumed.steps == 54


def test_planned_settings_are_set_after_a_restart_too():
    """The checkpoint's optimiser has the wrong rate: it comes from what the rescue kept."""

    def wrong(step, optimizer):
        if step > 20:
            optimizer.param_groups[0]["lr"] = 1.0
            optimizer.param_groups[0]["betas"] = (0.5, 0.5)

    found = bad(23, since=21, kind="settings")
    state = run(Rescue(SMALL), NUMBERED, 60, stop=30, evidence=found, at=wrong)["state"]
    second, seen = Rescue(SMALL), []
    prepare = second._prepare_update

    def seen_after():
        prepare()
        group = second._monitor.optimizer.param_groups[0]
        seen.append((group["lr"], group["betas"]))

    second._prepare_update = seen_after
    wrongly = partial(torch.optim.AdamW, lr=1.0, betas=(0.5, 0.5))
    run(second, NUMBERED, 40, state=state, at=wrong, make=wrongly)
    assert len(seen) == 10
    assert set(seen) == {(1e-2, (0.9, 0.999))}


def test_a_loader_that_restores_itself_goes_on_behind_the_end_of_an_epoch():
    loader = RestoresItself()
    state = run(Rescue(SMALL), loader, 120, stop=60)["state"]
    second = RestoresItself()
    second.load_state_dict(loader.state_dict())
    used = run(Rescue(SMALL), second, 120, state=state)["used"]
    assert used == [(61 + at, at) for at in range(60)]
