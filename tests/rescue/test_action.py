"""Rescue in a plain loop: what comes back is what was, bit for bit."""

import json
import logging
import signal
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from rmetric.detectors.calibrated import CalibratedDetector
from rmetric.monitor.actions import restore
from rmetric.rescue import Rescue, RescueConfig
from rmetric.rescue.snapshot import Buffer
from rmetric.rescue.snapshot_keeper import SnapshotKeeper
from tests.rescue.trainings import (
    NANS,
    SMALL,
    STEPS,
    a_step,
    actions,
    bad,
    flat,
    make_loader,
    make_model,
    make_optimizer,
    parts,
    same,
    train,
)


class Stream(IterableDataset):
    """In another order at each pass, by the random state of its beginning."""

    def __iter__(self):
        data = make_loader().dataset
        return (data[i] for i in torch.randperm(len(data)).tolist())


WENT_BACK = ["leave_out", "leave_out", "leave_out", "go_back"]


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adamw"},
        {"optimizer": "sgd"},
        {"scaled": True},
        {"per_step": 2},
        {"where": "device"},
        {"where": "folder"},
        {"loader": DataLoader(Stream(), batch_size=4)},
        {"loader": DataLoader(Stream(), batch_size=4, num_workers=1)},
        {"loader": DataLoader(Stream(), batch_size=4), "per_step": 3},
    ],
    ids="-".join,
)
def test_a_run_that_went_back_is_the_run_that_never_went_further(settings, tmp_path):
    where = settings.pop("where", "host")
    where = tmp_path if where == "folder" else where
    twin = train(**settings)
    # Without the detector, which alarms at the last step of one of these noisy trainings.
    rescued = train(Rescue(SMALL, where=where), nans=NANS, evidence_of=bad(0), **settings)
    assert rescued["problem"] == ""
    assert actions(rescued) == WENT_BACK
    assert rescued["decisions"][-1]["to"] == 20
    assert rescued["taken"] == [*range(1, 27), *range(21, STEPS + 1)]
    assert same(rescued, twin)


def test_the_detectors_alarm_goes_back_to_before_its_onset():
    twin = train()
    rescued = train(Rescue(SMALL), evidence_of=bad(23, since=19))
    assert rescued["problem"] == ""
    [entry] = rescued["decisions"]
    assert (entry["action"], entry["step"], entry["to"]) == ("go_back", 23, 15)
    assert entry["repeated"] == 8
    assert entry["try"] == 1
    assert "went back from 23 to 15 because it is bad; 8 steps; try 1" in entry["reason"]
    assert same(rescued, twin)


def test_a_detector_that_went_back_to_the_first_steps_receives_what_came_before_the_evidence(
    monkeypatch,
):
    steps, update = [], CalibratedDetector.update

    def noted(detector, record):
        steps.append(record.step)
        return update(detector, record)

    monkeypatch.setattr(CalibratedDetector, "update", noted)
    config = RescueConfig(every=20, probation=5, far=20)
    rescued = train(Rescue(config), evidence_of=bad(15, since=12))
    assert [entry["to"] for entry in rescued["decisions"]] == [0]
    again = steps.index(1, 1)
    assert steps[again : again + 12] == [*range(1, 12), 1]


def test_the_cost_is_stated_before_the_first_step_and_memory_is_used_again(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "rmetric")
    stated, made, make = [], [], Buffer.__init__

    def counted(self, *args, **more):
        made.append(len(stated))
        make(self, *args, **more)

    def at(executed, step, model, optimizer):
        stated.append(sum("takes a snapshot of" in message for message in caplog.messages))

    monkeypatch.setattr(Buffer, "__init__", counted)
    train(Rescue(SMALL), at=at, steps=80)
    assert (stated[0], stated[-1]) == (1, 2)  # the second with the optimiser's state
    assert max(made) < 40


def test_bad_data_are_not_used_again():
    """Evidence that comes back is of the data: those of its steps are left out, none before."""
    batches = [(torch.full((4, 6), float(i)), torch.zeros(4, 1)) for i in range(90)]
    steps, used = [], []

    def at(executed, step, model, optimizer):
        steps.append(step)
        if executed == 1:
            model.register_forward_pre_hook(lambda _, args: used.append(int(args[0][0, 0])))

    evidence = bad(23, since=19, kind="data", times=3)
    rescued = train(Rescue(SMALL), loader=batches, evidence_of=evidence, at=at, steps=30)
    assert [entry["to"] for entry in rescued["decisions"]] == [15, 15, 15]
    # Five steps of evidence; twice as many to come, then four times.
    assert [entry["skipped"] for entry in rescued["decisions"]] == [None, [19, 33], [19, 43]]
    again = range(16, 25)
    assert steps == [*range(1, 25), *again, *again, *range(16, 31)]
    # The batch of step s is s - 1, and step 24 was at hand each time. In the third try steps 19
    # to 24 have the batches of 34 to 39; so the last one goes on after that of step 58.
    assert used[:24] == list(range(24))
    assert used[24:33] == list(range(15, 24))
    assert used[33:42] == [15, 16, 17, *range(33, 39)]
    assert used[42:] == [15, 16, 17, *range(58, 70)]


def test_weights_that_are_not_finite_are_not_kept(caplog):
    def at(executed, step, model, optimizer):
        if executed == 10:
            with torch.no_grad():
                model[0].weight[0, 0] = torch.nan

    rescued = train(Rescue(RescueConfig(every=5, probation=1, far=20)), at=at)
    assert actions(rescued) == WENT_BACK
    assert rescued["decisions"][-1]["to"] == 5
    assert sum("no snapshot of step 10" in r.message for r in caplog.records) == 1
    assert same(rescued, train())


@pytest.mark.parametrize("part", ["data", "scheduler", "memory"])
def test_a_rescue_that_fails_leaves_the_training_as_it_was(part, monkeypatch, caplog):
    rescue = Rescue(SMALL)
    loader = make_loader()

    def fail(*args, **kwargs):
        raise MemoryError("nothing is left")

    def at(executed, step, model, optimizer):
        if executed == 20 and part == "data":
            rescue.data.seek = fail
        if executed == 20 and part == "scheduler":
            rescue.scheduler.load_state_dict = fail

    if part == "memory":
        monkeypatch.setattr(SnapshotKeeper, "_reserve", fail)
    rescued = train(rescue, loader=loader, evidence_of=bad(23), at=at)
    twin = train()
    # The step at hand was left out for the return, and nothing else has happened.
    assert "nothing is left" in rescued["problem"]
    assert rescued["taken"] == list(range(1, STEPS + 1))
    assert rescued["usable"]
    reports = [r for r in caplog.records if "switched off" in r.message]
    assert len(reports) == 1
    if part == "memory":
        assert same(rescued, twin)
    else:
        assert rescued["random"] == twin["random"]
        assert rescued["rate"] == twin["rate"]


ALWAYS = RescueConfig(every=5, probation=5, far=20, budget=12, observe=2)


def lasting(detector, step):
    from rmetric.rescue.policy import Evidence

    if step < 23:
        return None
    return Evidence(step=step, since=22, kind="not_finite", words="it stays")


def until_held(rescue):
    """Evidence that stays until the run is held."""
    return lambda detector, step: None if rescue.held else lasting(detector, step)


def test_what_does_not_pass_is_held_at_the_weights_of_the_snapshot(tmp_path):
    log = tmp_path / "run.jsonl"
    rescue = Rescue(ALWAYS)
    held = train(rescue, evidence_of=lasting, log=log)
    assert actions(held)[-1] == "hold"
    step = rescue.held["step"]
    clean = train(steps=step)
    assert held["weights"] == clean["weights"]
    folder = tmp_path / "rescue-hold"
    verdict = json.loads((folder / "verdict.json").read_text())
    assert verdict["step"] == step
    assert "it stays" in verdict["reason"]
    model = make_model()
    optimizer = make_optimizer("adamw", model.parameters())
    saved = restore(folder, model, optimizer)
    assert saved["step"] == step
    assert flat(model) == clean["weights"]


def test_a_held_run_waits_for_the_file_and_goes_on(tmp_path):
    rescue = Rescue(ALWAYS, on_hold="wait", hold_folder=tmp_path)

    def wake():
        while not (tmp_path / "verdict.json").exists():
            time.sleep(0.01)
        (tmp_path / "go").touch()

    (tmp_path / "go").touch()  # of an earlier hold
    before = signal.getsignal(signal.SIGUSR1)
    threading.Thread(target=wake, daemon=True).start()
    outcome = train(rescue, evidence_of=until_held(rescue))
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["went_on"] == f"the file {tmp_path / 'go'}"
    assert actions(outcome)[-1] == "hold"
    assert outcome["taken"][-1] == STEPS
    assert same(outcome, train())
    assert signal.getsignal(signal.SIGUSR1) is before
    assert not (tmp_path / "go").exists()


def test_planned_settings_are_put_back_before_each_step():
    seen = []

    def at(executed, step, model, optimizer):
        if executed > 20:
            optimizer.param_groups[0]["betas"] = (0.5, 0.5)
            optimizer.param_groups[0]["lr"] = 1.0

    class Seen(Rescue):
        def _prepare_update(self):
            super()._prepare_update()
            group = self._monitor.optimizer.param_groups[0]
            seen.append((self._monitor.step, group["lr"], group["betas"]))

    rescued = train(Seen(SMALL), evidence_of=bad(23, since=21, kind="settings"), at=at)
    first, entry = rescued["decisions"]
    assert (first["action"], first["step"], first["settings"]) == ("set_back", 21, False)
    assert entry["settings"]
    assert entry["to"] == 20 or entry["to"] == 15
    after = seen[24:30]
    for step, rate, betas in after:
        assert rate == pytest.approx(1e-2 / (1 + 0.05 * (step - 1)))
        assert betas == (0.9, 0.999)


def test_a_training_set_back_by_hand_starts_anew():
    """Steps that go down without a return: older snapshots are of another course."""
    rescue = Rescue(SMALL)
    model, optimizer, monitor = parts(rescue)
    state = monitor.state_dict()
    for _step, batch in rescue.steps(make_loader(), 12):
        a_step(model, optimizer, monitor, batch)
    assert rescue.policy.state.snapshots[-1] == 10
    monitor.load_state_dict(state)
    rescue.boundary()
    assert rescue.policy.state.snapshots == [0]
    assert rescue.problem == ""
    monitor.close()
