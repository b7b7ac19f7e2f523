"""Rescue where the loop around it does not fit: one clear message, and the training goes on."""

import logging
import os
import re

import pytest
import torch

from rmetric.rescue import Rescue
from tests.rescue.test_data import Stateful
from tests.rescue.trainings import NANS, SMALL, a_step, actions, bad, make_loader, parts, train


def messages(caplog, part):
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


def test_a_loop_that_never_calls_it_between_two_steps_is_reported_once(caplog):
    rescue = Rescue(SMALL)
    model, optimizer, monitor = parts(rescue)
    for _epoch in range(2):
        for batch in make_loader():
            a_step(model, optimizer, monitor, batch)
    monitor.close()
    [found] = messages(caplog, "cannot go back")
    assert "rescue.steps" in found


def test_a_rescue_that_no_monitor_has_is_reported_once(caplog):
    rescue = Rescue(SMALL)
    monitor = parts()[2]
    steps = [step for step, batch in rescue.steps(make_loader(), 7)]
    monitor.close()
    assert steps == [*range(1, 8)]
    [found] = messages(caplog, "no monitor")
    assert "actions=[rescue]" in found


@pytest.mark.parametrize("state", ["open", "closed", "disabled"])
def test_a_loop_that_checks_nothing_is_ended_at_its_second_batch_unless_nothing_is_monitored(state):
    rescue = Rescue(SMALL)
    monitor = parts(rescue)[2]
    if state == "closed":
        monitor.close()
    elif state == "disabled":
        monitor.disable("a test", OSError("it is broken"))
    steps = rescue.steps(make_loader(), 7)
    if state != "open":
        assert [step for step, batch in steps] == [*range(1, 8)]
        return
    assert next(steps)[0] == 1
    with pytest.raises(RuntimeError, match=r"handed out step 1 and .* monitor\.check_before_step"):
        next(steps)
    monitor.close()


@pytest.mark.parametrize(
    ("checked", "ends"),
    [(lambda n: n % 3, True), (lambda n: n <= 5, False), (lambda n: n <= 5 or n > 60, True)],
    ids=["a third left out", "no longer", "sixty left out at once"],
)
def test_a_loop_may_leave_batches_out_and_has_an_end(checked, ends):
    rescue = Rescue(SMALL)
    model, optimizer, monitor = parts(rescue)
    taken, number = [], 0

    def run():
        nonlocal number
        for number, (step, batch) in enumerate(rescue.steps(make_loader(), 20), start=1):
            if checked(number):
                taken.append(step)
                a_step(model, optimizer, monitor, batch)

    if ends:
        run()
        assert taken == [*range(1, 21)]
    else:
        with pytest.raises(RuntimeError, match="handed out step 6 and the monitor did not check"):
            run()
        assert number < 200
    monitor.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": {"every": 5}}, "config is {'every': 5}: a RescueConfig"),
        ({"where": "Gpu"}, "where is 'Gpu': host, device or a folder"),
        ({"scheduler": "cosine"}, "scheduler 0 is 'cosine': it has no state_dict"),
        ({"scheduler": torch.optim.lr_scheduler.StepLR}, "scheduler 0 is <class .*StepLR'>"),
        ({"extra": {"best": 3.0}}, r"extra\['best'\] is 3.0: it has no state_dict"),
        ({"extra": [1]}, r"extra is \[1\]: a mapping"),
        ({"extra": {"scaler": 3.0}}, r"extra\['scaler'\]: this name is the rescue's own"),
        ({"on_hold": "sleep"}, "on_hold is 'sleep': stop, exit, wait are accepted"),
        ({"hold_seconds": "60"}, "hold_seconds is '60'"),
        ({"loader": list}, "loader is <class 'list'>: it cannot be iterated"),
        ({"total": 5.5}, "total is 5.5"),
        ({"per_step": 0}, "per_step is 0"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_at_the_call(arguments, message):
    """Of `Rescue`, and of its `steps`."""
    of_steps = {"loader": [], "total": 5, "per_step": 1}
    own = {name: value for name, value in arguments.items() if name not in of_steps}
    with pytest.raises(ValueError, match=message):
        Rescue(**own).steps(**of_steps | arguments)


@pytest.mark.parametrize(
    ("count", "nans", "words"),
    [
        (40, NANS, None),  # the batches of repeated steps come again
        (33, (), "step 33 of 40 with the data: 7 steps are missing"),
        (0, (), "step 0 of 40 with the data: 40 steps are missing"),
    ],
)
@pytest.mark.parametrize("per_step", [1, 2])
@pytest.mark.parametrize("kind", [iter, list])
def test_steps_that_the_data_leave_out_are_reported(kind, per_step, count, nans, words, caplog):
    """A list is iterated again, and so has an end only where it is empty."""
    batches = [batch for _ in range(5) for batch in make_loader()][: count * per_step]
    train(Rescue(SMALL), nans=nans, loader=kind(batches), per_step=per_step)
    if kind is list and batches:
        words = None
    found = messages(caplog, "with the data:")
    assert [bool(re.search(words, message)) for message in found] == ([True] if words else [])


class RestoresItself(Stateful):
    """A loader with a state; where it is `wrong`, of its place and not of its random numbers."""

    def __init__(self, wrong=False):
        self.batches, self.wrong = [*make_loader()], wrong
        self.generator = torch.Generator().manual_seed(1)

    def __iter__(self):
        for inputs, labels in super().__iter__():
            noise = torch.randn(inputs.shape, generator=self.generator)
            yield inputs + noise if self.wrong else inputs, labels


@pytest.mark.parametrize("restores_itself", [False, True])
@pytest.mark.parametrize("per_step", [1, 2])
def test_the_batches_that_are_left_out_are_named_and_saved(per_step, restores_itself, tmp_path):
    """Those that were drawn by then; an epoch has 18."""
    evidence = bad(23, since=20, kind="data", times=2)
    log, loader = tmp_path / "run.jsonl", RestoresItself() if restores_itself else None
    outcome = train(
        Rescue(SMALL), evidence_of=evidence, per_step=per_step, steps=30, log=log, loader=loader
    )
    first, second = outcome["decisions"]
    assert "skipped" not in first["data"]
    assert second["skipped"][0] == 20
    last = 24 * per_step - 1  # step 24 was at hand
    numbers = range(19 * per_step, last + 1)
    named = [n for part in second["data"]["skipped"] for n in range(
        18 * part["epoch"] + part["batches"][0], 18 * part["epoch"] + part["batches"][1] + 1
    )]  # fmt: skip
    assert named == [*numbers]
    saved = torch.load(second["data"]["file"], weights_only=True)
    assert [18 * batch["epoch"] + batch["batch"] for batch in saved] == [*numbers]


def test_a_monitor_that_breaks_in_mid_run_leaves_the_loop_its_end():
    rescue = Rescue(SMALL)
    model, optimizer, monitor = parts(rescue)
    steps = []
    for step, batch in rescue.steps(make_loader(), 30):
        steps.append(step)
        a_step(model, optimizer, monitor, batch)
        if step == 9:
            monitor.disable("a test", OSError("it is broken"))
    assert steps == [*range(1, 31)]


@pytest.mark.parametrize("at", [0, 12])
def test_a_resumed_loop_reports_where_its_data_begin(at, caplog):
    model, optimizer, monitor = parts()
    for _step, batch in Rescue(SMALL).steps(make_loader(), at):
        a_step(model, optimizer, monitor, batch)
    state = monitor.state_dict()
    rescue = Rescue(SMALL)
    model, optimizer, monitor = parts(rescue)
    monitor.load_state_dict(state)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="rmetric"):
        assert next(iter(rescue.steps(make_loader(), 40)))[0] == at + 1
    found = messages(caplog, "first batch of the loader")
    assert [f"step {at + 1}" in message for message in found] == [True] * bool(at)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_loader_that_comes_back_with_other_data_is_reported_once(wrong, caplog):
    nans = [*NANS, *range(37, 41)]
    outcome = train(Rescue(SMALL), nans=nans, loader=RestoresItself(wrong))
    assert actions(outcome).count("go_back") == 2
    assert len(messages(caplog, "other data")) == wrong


def test_a_log_that_is_no_file_is_not_written(tmp_path, caplog):
    """A return replaces the log: it must never replace a device or a pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    outcome = train(Rescue(SMALL), nans=NANS, log=pipe)
    assert outcome["problem"] == ""
    assert outcome["usable"]
    assert actions(outcome)[-1] == "go_back"
    assert pipe.is_fifo()
    [found] = messages(caplog, "cannot be written")
    assert "it is not a file" in found
