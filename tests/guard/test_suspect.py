"""What is saved during an alarm is suspect: it never costs a clean checkpoint."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rmetric._util.open_alarms import OpenAlarms
from rmetric.guard.checkpoint_dir import candidates
from rmetric.guard.checkpoints import Checkpoints
from rmetric.guard.guard import Guard
from rmetric.guard.monitor_action import AskGuard
from rmetric.guard.policy import PolicyConfig, SuspectMark, surplus, suspects_of
from rmetric.guard.training_state import ModelState
from rmetric.monitor import Monitor
from rmetric.monitor.alerts import Alert
from tests.monitor.ranks import on_ranks

DIVERGES_AT = 64


def a_guard(checkpoints, *, keep=3, interval=10, state=None, asynchronous=False, **settings):
    settings = {"signals": {}, "alarm_steps": 1000} | settings
    return Guard(
        Checkpoints(checkpoints, fingerprint="m", asynchronous=asynchronous, keep=keep),
        policy=PolicyConfig(interval_steps=interval, least_gap=0.0, most_per_hour=1000),
        state=state or (lambda: {"w": torch.ones(2)}),
        **settings,
    )


def kept(folder):
    """Step -> onset of the alarm it was saved in; None for a clean one."""
    found, problems = candidates(Path(folder))
    assert not problems
    found.sort(key=lambda save: save.step)
    return {save.step: save.suspect and save.suspect.since for save in found}


def run(guard, steps, at=lambda step: None):
    for step in steps:
        at(step)
        guard.step(step)


class Training:
    """A regression whose learning rate becomes too large; its loss grows and stays finite."""

    def __init__(self, folder):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.guard = a_guard(
            folder, state=lambda: {"training": ModelState(self.model, self.optimizer)}
        )

    def run(self, steps):
        data = torch.randn(512, 4, generator=torch.Generator().manual_seed(1))
        with Monitor(self.model, self.optimizer, actions=[AskGuard(self.guard)]) as monitor:
            for step in steps:
                batch = data[8 * step % 504 :][:8]
                loss = (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()
                loss.backward()
                monitor.check_before_step(loss)
                for group in self.optimizer.param_groups:
                    group["lr"] = 1.2 if step >= DIVERGES_AT else 0.01
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.guard.step(step)
                # A user's own rule: it alarms every third step.
                if step > DIVERGES_AT and step % 3 == 0:
                    self.guard.request("alarm", f"loss at step {step}", since=DIVERGES_AT)
        self.guard.close()
        return monitor


def test_the_last_checkpoint_before_a_divergence_stays_and_is_what_trusted_resume_loads(
    tmp_path, caplog
):
    training = Training(tmp_path)
    monitor = training.run(range(1, 96))
    assert {alert.step for alert in monitor.alerts}, "the monitor's own alarms ask, too"
    found = kept(tmp_path)
    assert [step for step, since in found.items() if since is None][-1] == 60
    assert len([step for step, since in found.items() if since is not None]) == 2
    resumed = Training(tmp_path)
    newest = resumed.guard.resume()["step"]
    assert newest > DIVERGES_AT
    assert f"step-{newest} is suspect since step " in caplog.text
    assert f"the newest clean one is {tmp_path / 'step-60'}" in caplog.text
    resumed = Training(tmp_path)
    assert resumed.guard.resume(trusted_only=True)["step"] == 60
    assert resumed.model.weight.abs().max() < 2.0


def test_an_alarm_of_the_monitor_makes_the_state_behind_its_first_bad_loss_suspect(tmp_path):
    guard = a_guard(tmp_path, interval=5)
    monitor = Monitor(nn.Linear(2, 1))
    ask = AskGuard(guard)

    def at(step):
        monitor.step = step
        if step == 17:
            ask(Alert(step=16, source="calibrated", reason="loss 9.1"), monitor)
        if step == 26:
            ask.ended(SimpleNamespace(sources=("calibrated",)), monitor)

    run(guard, range(1, 31), at)
    monitor.close()
    assert kept(tmp_path) == {5: None, 10: None, 17: 15, 22: 15, 27: None}


@pytest.mark.parametrize(("ahead", "since"), [(-1, 40), (0, 40), (500, 540), (-2, 38)])
def test_the_steps_of_a_monitor_and_a_guard_may_be_numbered_differently(ahead, since):
    onsets = []
    monitor = Monitor(nn.Linear(2, 1))
    monitor.step = 45
    ask = lambda *_, since, **__: onsets.append(since)  # noqa: E731
    guard = SimpleNamespace(last_step=45 + ahead, request=ask)
    AskGuard(guard)(Alert(step=41, source="calibrated", reason="loss"), monitor)
    monitor.close()
    assert onsets == [since]


def test_saves_at_the_interval_are_suspect_until_the_alarm_is_cleared(tmp_path, caplog):
    guard = a_guard(tmp_path)

    def at(step):
        if step == 35:
            guard.request("alarm", "loss", key="loss", since=32)
        if step == 55:
            guard.clear_alarm("another")
        if step == 75:
            guard.clear_alarm("loss")

    run(guard, range(1, 112), at)
    assert kept(tmp_path) == {30: None, 55: 32, 65: 32, 85: None, 95: None, 105: None}
    assert "the alarm is over" in caplog.text


def test_an_alarm_that_is_not_repeated_is_over(tmp_path):
    guard = a_guard(tmp_path, alarm_steps=15, keep=9)
    guard.request("alarm", "spike", since=1)
    run(guard, range(1, 41))
    assert kept(tmp_path) == {1: 1, 11: 1, 21: None, 31: None}


def test_resumed_from_a_suspect_one_it_stays_suspect(tmp_path):
    guard = a_guard(tmp_path)
    guard.request("alarm", "spike", since=12)
    run(guard, range(1, 25))
    again = a_guard(tmp_path)
    assert again.resume()["step"] == 21
    run(again, range(22, 34))
    assert again.last.step == 31
    assert again.last.good.suspect == SuspectMark(since=12, reason="spike")


def test_rolled_back_to_a_clean_one_it_is_clean_and_takes_nothing_of_the_other_course(tmp_path):
    guard = a_guard(tmp_path)
    run(guard, range(1, 31))
    guard.request("alarm", "spike", since=25)
    run(guard, range(31, 36))
    again = a_guard(tmp_path)
    assert again.resume(trusted_only=True)["step"] == 20
    run(again, range(21, 31))
    assert kept(tmp_path) == {10: None, 20: None, 30: None, 32: 25}, "30 was reached again"
    again.request("alarm", "spike", since=28)
    run(again, range(31, 34))
    assert kept(tmp_path) == {10: None, 20: None, 30: 28, 32: 28}


def test_the_environment_says_what_to_resume_from(tmp_path, monkeypatch):
    guard = a_guard(tmp_path)
    run(guard, range(1, 21))
    guard.request("alarm", "spike", since=20)
    run(guard, range(21, 24))
    monkeypatch.setenv("RMETRIC_RESUME", "clean")
    assert a_guard(tmp_path).resume()["step"] == 10
    assert a_guard(tmp_path).resume(trusted_only=False)["step"] == 22
    monkeypatch.setenv("RMETRIC_RESUME", "oldest")
    with pytest.raises(ValueError, match="RMETRIC_RESUME is 'oldest': it must be of newest, clean"):
        a_guard(tmp_path).resume()


def on_one_rank(rank, folder):
    guard = a_guard(folder, keep=2)

    def at(step):
        if rank == 1 and step == 23:
            guard.request("alarm", "rank 1 diverges", since=18, key="loss")
        if rank == 2 and step == 24:
            guard.request("alarm", "later", since=22)
        if rank == 1 and step == 42:
            guard.clear_alarm()

    run(guard, range(1, 61), at)


def test_the_earliest_onset_of_any_rank_counts(tmp_path):
    on_ranks(on_one_rank, tmp_path, ranks=3)
    found, _ = candidates(tmp_path)
    marks = {save.step: save.suspect for save in found}
    assert marks[10] is None
    assert {mark.since for mark in marks.values() if mark} == {22}, "that of rank 2 is still open"
    assert {mark.reason for mark in marks.values() if mark} == {"later"}
    assert min(step for step, mark in marks.items() if mark) >= 42


MARKS = st.none() | st.builds(SuspectMark, since=st.integers(0, 50), reason=st.just("x"))
FOUND = st.lists(st.tuples(st.integers(0, 60), MARKS), min_size=1, max_size=12)


class FakeCheckpoint:
    def __init__(self, step, suspect):
        self.step, self.suspect = step, suspect


@given(FOUND, st.integers(1, 4), st.integers(1, 3), st.sets(st.integers(0, 11)))
def test_each_kind_has_its_own_quota(found, keep, keep_suspect, damaged):
    found = [FakeCheckpoint(*each) for each in found]
    bad = [save for n, save in enumerate(found) if n in damaged]
    gone = surplus(found, keep=keep, keep_suspect=keep_suspect, damaged=bad)
    left = [save for save in found if save not in gone]
    clean = [save for save in found if save.suspect is None]
    whole = [save for save in clean if save not in bad]
    assert found[0] in left
    assert all(save in left for save in whole[:keep]), "whatever suspects there are"
    assert keep <= sum(save in left for save in clean) <= keep + 2 or len(clean) < keep
    suspects = [save for save in found if save.suspect is not None]
    assert min(keep_suspect, len(suspects)) <= sum(save in left for save in suspects)
    assert sum(save in left for save in suspects) <= keep_suspect + 1
    if clean and clean[0] in whole:  # more suspects change nothing
        more = [FakeCheckpoint(99, SuspectMark(since=1, reason="x")) for _ in range(5)]
        gone = surplus([*more, *found], keep=keep, keep_suspect=keep_suspect, damaged=bad)
        assert all(save not in gone for save in whole[:keep])


@given(FOUND, st.integers(0, 60), st.integers(0, 60))
def test_only_ancestors_from_the_onset_on_become_suspect(found, since, step):
    found = [FakeCheckpoint(*each) for each in found]
    marked = suspects_of(found, since=since, step=step)
    for save in marked:
        assert save.suspect is None
        assert since <= save.step <= step
    steps = [save.step for save in marked]
    assert steps == sorted(set(steps), reverse=True), "a course of training goes one way"
    if all(a.step > b.step for a, b in pairwise(found)):
        meant = [save for save in found if since <= save.step <= step and save.suspect is None]
        assert marked == meant


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.sampled_from(["open", "end"])),
        max_size=20,
    ),
    st.integers(1, 5),
)
def test_the_earliest_open_alarm_counts(events, quiet):
    alarms, meant = OpenAlarms(quiet), {}
    for step, (key, since, kind) in enumerate(events):
        if kind == "end":
            alarms.end(key)
            meant.pop(key, None)
        else:
            alarms.open(key, since, "x", step=step)
            before = meant.get(key)
            lives = before is not None and step - before[1] < quiet
            meant[key] = (min(since, before[0]) if lives else since, step)
        open_now = [onset for onset, at in meant.values() if step - at < quiet]
        found = alarms.earliest(step)
        assert (found and found.since) == (min(open_now) if open_now else None)


def test_the_trainers_rotation_keeps_the_last_checkpoints_before_an_alarm(tmp_path, monkeypatch):
    from rmetric.integrations.hugging_face import newest_checkpoint
    from tests.guard.test_hooks import a_trainer, checkpoints_of

    def alarm(guard):
        guard.request("alarm", "loss 9.1", since=8)

    settings = {"save_steps": 3, "save_total_limit": 2, "max_steps": 24}
    trainer = a_trainer(tmp_path, 10, alarm, **settings)
    folder = Path(trainer.args.output_dir)
    assert newest_checkpoint(folder) is None
    trainer.train()
    assert trainer.args.save_total_limit == 2
    assert checkpoints_of(trainer) == [f"checkpoint-{step}" for step in (21, 24, 6)]
    assert newest_checkpoint(folder) == str(folder / "checkpoint-24")
    monkeypatch.setenv("RMETRIC_RESUME", "clean")
    clean = newest_checkpoint(folder)
    assert clean == str(folder / "checkpoint-6")
    again = a_trainer(tmp_path, **settings)
    again.train(resume_from_checkpoint=clean)
    assert again.state.global_step == 24
    assert checkpoints_of(again) == [f"checkpoint-{step}" for step in (21, 24)]
    assert newest_checkpoint(folder) == str(folder / "checkpoint-24"), "it is clean now"
