"""One condition, one alarm: its onset is kept, and its end is reported."""

import json
import logging
from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rmetric.guard.monitor_action import AskGuard
from rmetric.monitor import Monitor, MonitorConfig
from rmetric.monitor.actions import EmergencyCheckpoint, SkipStep
from rmetric.monitor.alerts import MOST_ALERTS, Episodes, needs_call
from tests.monitor.training import (
    Recorder,
    alert,
    backward_passes,
    entries,
    make_model,
    nan_at,
    train,
    watched,
    weights,
)

SOURCES = ("non_finite", "gradient_explosion", "calibrated", "r_metric", "loss_z_score")


ALARMED = st.lists(st.sets(st.sampled_from(SOURCES)), max_size=60)


def play(episodes, alarmed, first=1):
    """Each step's sources raise an alert; returns the calls and the episodes that ended."""
    calls, ended = [], []
    for step, sources in enumerate(alarmed, start=first):
        for source in sorted(sources):
            taken, earlier, _ = episodes.take(alert(step, source))
            if needs_call(taken, earlier):
                calls.append((taken.since, step, source))
        ended += [(step, episode) for episode in episodes.end(step)]
    return calls, ended


def group(source):
    return "divergence" if source in SOURCES[:3] else source


@given(ALARMED, st.integers(1, 8))
def test_an_episode_begins_after_quiet_steps_and_ends_after_them(alarmed, gap):
    calls, ended = play(Episodes(gap), alarmed)
    for name in {group(source) for source in SOURCES}:
        bad = [step for step, now in enumerate(alarmed, start=1) if name in {group(s) for s in now}]
        onsets = [step for i, step in enumerate(bad) if i == 0 or step - bad[i - 1] > gap]
        assert sorted({since for since, _, s in calls if group(s) == name}) == onsets
        of_group = [(step, e) for step, e in ended if group(e.sources[0]) == name]
        for (step, episode), onset in zip(of_group, onsets, strict=False):
            assert episode.since == onset
            assert episode.last in bad
            assert step == episode.last + gap
            assert not [later for later in bad if episode.last < later < step]
        assert len(of_group) in (len(onsets), len(onsets) - 1)


@given(ALARMED, st.integers(1, 8))
def test_an_episode_makes_two_calls_at_most_and_the_second_is_severe(alarmed, gap):
    calls, _ = play(Episodes(gap), alarmed)
    by_episode = {}
    for since, _, source in calls:
        by_episode.setdefault((group(source), since), []).append(source)
    for sources in by_episode.values():
        assert len(sources) <= 2
        assert "non_finite" not in sources[:-1]
        if len(sources) == 2:
            assert sources[1] == "non_finite"


@given(ALARMED, st.integers(0, 60))
def test_a_resumed_run_raises_what_one_without_interruption_raises(alarmed, cut):
    straight = Episodes()
    expected = play(straight, alarmed)
    first, second = Episodes(), Episodes()
    before = play(first, alarmed[:cut])
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    after = play(second, alarmed[cut:], first=cut + 1)
    assert (before[0] + after[0], before[1] + after[1]) == expected
    assert second.open == straight.open


def test_the_onset_is_that_of_the_evidence_and_stays():
    episodes = Episodes()
    taken, _, _ = episodes.take(alert(40, "calibrated", since=33))
    assert taken.since == 33
    taken, _, is_new = episodes.take(alert(45))
    assert (taken.since, is_new) == (33, True)
    assert episodes.onset("gradient_explosion", 50) == 33
    assert episodes.onset("r_metric", 50) is None


def test_each_rank_is_noted_once_and_their_number_is_bounded():
    episodes = Episodes()
    new = [
        episodes.take(alert(step, rank=rank))[2] for step in (5, 6) for rank in range(MOST_ALERTS)
    ]
    assert new == [True] * MOST_ALERTS + [False] * MOST_ALERTS
    assert episodes.take(alert(6, rank=MOST_ALERTS))[2] is False
    assert len(episodes.open["divergence"].alerts) == MOST_ALERTS
    joined = [episodes.take(alert(7, "calibrated", rank=rank))[2] for rank in range(MOST_ALERTS)]
    assert joined == [True] + [False] * (MOST_ALERTS - 1)
    assert episodes.open["divergence"].sources == ("non_finite", "calibrated")
    assert len(episodes.open["divergence"].alerts) == MOST_ALERTS + 1


def test_a_source_that_lasts_without_alerts_keeps_its_episode_open():
    episodes = Episodes(gap=3)
    episodes.take(alert(10, "calibrated"))
    for step in range(11, 30):
        episodes.lasts("calibrated", step)
        episodes.lasts("gradient_explosion", step + 100)  # no part of it
        assert episodes.end(step) == []
    [over] = episodes.end(32)
    assert (over.since, over.last) == (10, 29)


def test_an_alarm_that_comes_again_at_repeated_steps_is_one_warning(tmp_path, caplog):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    caplog.set_level(logging.INFO)
    with Monitor(model, optimizer, log=tmp_path / "run.jsonl") as monitor:
        first = monitor.state_dict()
        for _ in range(4):
            for _, loss in backward_passes(model, 6, optimizer):
                monitor.check_before_step(loss * (nan if monitor.step == 4 else 1.0))
                optimizer.step()
            monitor.go_back(first)
    levels = [each.levelname for each in caplog.records if "non_finite: loss" in each.message]
    assert levels == ["WARNING"] + ["INFO"] * 3
    assert caplog.messages[-1].endswith("alarms that came again at repeated steps: 3 of non_finite")
    assert len(monitor.alerts) == 4


def test_an_action_that_needs_each_verdict_acts_at_each_bad_step():
    each, once = Recorder(now=True), Recorder()
    model = make_model()
    monitor = train(
        model, watched(each, once, SkipStep(limit=50)), steps=60, spoil=nan_at(first=13, last=40)
    )
    assert [a.step for a in each.alerts] == list(range(13, 41))
    assert {a.since for a in each.alerts} == {13}
    assert [a.step for a in once.alerts] == [13]
    assert all(w.isfinite().all() for w in weights(model))
    assert monitor.usable


def test_the_end_is_reported_once_and_the_next_episode_is_another_alarm(tmp_path, caplog):
    recorder = Recorder()
    log = tmp_path / "run.jsonl"
    with caplog.at_level(logging.INFO, logger="rmetric"):
        spoil = nan_at(13, 14, 15, 50)
        train(make_model(), watched(recorder, SkipStep(), log=log), steps=60, spoil=spoil)
    assert [a.step for a in recorder.alerts] == [13, 50]
    [over] = recorder.episodes
    assert (over.since, over.last, over.sources) == (13, 15, ("non_finite",))
    [line] = entries(log, "ALERT_ENDED")
    ended = {"step": 35, "since": 13, "last_step": 15, "sources": ["non_finite"]}
    assert line == {"event": "ALERT_ENDED"} | ended
    message = "step 35: the alarm since step 13 is over: nothing of non_finite after step 15"
    assert caplog.messages.count(message) == 1


class FakeGuard:
    def __init__(self):
        self.requests, self.ended = [], []
        self.last_step = 0

    def request(self, source, words, *, fatal, key, since, lasts):
        assert lasts
        self.requests.append((source, words.split(":")[0], fatal, key))

    def clear_alarm(self, key):
        self.ended.append(key)


def test_non_finite_values_after_an_explosion_are_a_second_call(tmp_path):
    recorder, own, guard = Recorder(), Recorder(on={"calibrated"}), FakeGuard()
    saving = EmergencyCheckpoint(tmp_path, wait=1, keep=9)

    def spoil(step, loss):
        return loss * nan if step >= 45 else loss * 1e6 if step >= 40 else loss

    actions = (recorder, own, saving, AskGuard(guard, fatal=["non_finite"]))
    monitor = train(make_model(), watched(*actions), steps=70, spoil=spoil)
    assert [(a.step, a.source, a.since) for a in recorder.alerts] == [
        (40, "gradient_explosion", 40),
        (45, "non_finite", 40),
    ]
    assert [a.source for a in own.alerts] == ["calibrated"]
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000039.pt"]
    assert guard.requests == [
        ("alarm", "step 40, rank 0", False, "alarm of gradient_explosion"),
        ("alarm", "step 45 (since step 40), rank 0", True, "alarm of non_finite"),
    ]
    sources = [a.source for a in monitor.alerts]
    assert sorted(sources) == ["calibrated", "gradient_explosion", "non_finite"]


@pytest.mark.parametrize(
    ("fatal", "called"),
    [
        ((), ["calibrated", "non_finite"]),
        (["gradient_explosion"], ["calibrated", "gradient_explosion"]),
        (["calibrated"], ["calibrated"]),
    ],
)
def test_a_fatal_source_that_joins_is_passed_on(fatal, called):
    guard = FakeGuard()
    monitor = train(make_model(), watched(AskGuard(guard, fatal=fatal)), steps=3)
    for step, source in enumerate(["calibrated", "gradient_explosion", "non_finite"], start=4):
        monitor._delivery.deliver(alert(step, source))
    assert [key.removeprefix("alarm of ") for *_, key in guard.requests] == called
    assert [key.removeprefix("alarm of ") for *_, is_fatal, key in guard.requests if is_fatal] == [
        *fatal
    ]


def test_a_training_resumed_from_the_emergency_checkpoint_keeps_the_alarm_in_its_log(tmp_path):
    """The step of the alarm is made again: its line was cut off with the steps after the state."""
    log, recorder, states = tmp_path / "run.jsonl", Recorder(), []

    class Saves(Recorder):
        def __call__(self, alert, monitor):
            states.append(monitor.state_dict())

    train(make_model(), watched(Saves(now=True), log=log), steps=25, spoil=nan_at(first=13))
    assert states[0]["step"] == 12
    with Monitor(make_model(), actions=[recorder], log=log) as resumed:
        resumed.load_state_dict(states[0])
        for _ in range(3):
            resumed.check_before_step(nan, gradient_norm=nan)
    assert recorder.alerts == []
    assert [e["step"] for e in entries(log, "ALERT")] == [13]


def test_overflows_of_a_scaler_begin_with_the_first():
    recorder = Recorder()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    config = MonitorConfig(detectors=())
    with Monitor(nn.Linear(2, 1), scaler=scaler, config=config, actions=[recorder]) as monitor:
        for step in range(1, 30):
            monitor.check_before_step(1.0, gradient_norm=inf if step >= 5 else 1.0)
    assert [(a.step, a.since) for a in recorder.alerts] == [(14, 5)]


def test_an_alarm_of_the_calibrated_detector_has_the_onset_of_its_evidence():
    recorder = Recorder()
    with Monitor(make_model(), actions=[recorder]) as monitor:
        for step in range(1, 90):
            monitor.check_before_step(2.0 + 0.01 * (step % 3) + 2.0 * (step >= 60))
    [only] = recorder.alerts
    assert (only.source, only.step, only.since) == ("calibrated", 62, 60)
