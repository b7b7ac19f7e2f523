"""The guard: whoever asks, all ranks save the same step; a save never ends the training."""

import os
import signal
import time
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from rmetric.guard.checkpoints import Checkpoints, FailedSave, SavedCheckpoint
from rmetric.guard.guard import Guard
from rmetric.guard.policy import PolicyConfig
from rmetric.guard.run_folder import RunFolder
from rmetric.guard.training_state import ModelState, random_values, set_random_values
from rmetric.telemetry.lines import GpuVerdict
from tests.monitor.ranks import on_ranks


class Saver:
    """Saves nothing, and keeps what was requested; a save ends by `end`."""

    saves_later = False

    def __init__(self, *, at_once=True, fails=0):
        self.began, self.requests, self.at_once, self.fails = [], [], at_once, fails
        self.done = None

    def begin(self, step, state, about=None, *, own=None, request=0, problem=""):
        self.began.append(step)
        self.requests.append(request)
        self.problem = problem
        if self.at_once:
            self.end()

    def end(self):
        step = self.began[-1]
        if self.problem or self.fails > 0:
            self.fails -= 1
            self.done = FailedSave(step=step, problem=self.problem or "the disk is full")
        else:
            times = dict(blocking_seconds=0.1, durable_seconds=0.5, seconds=1.0)
            self.done = SavedCheckpoint(step=step, path=None, **times)

    def poll(self):
        done, self.done = self.done, None
        return done

    def wait(self, timeout=None):
        if self.done is None and timeout is None:
            self.end()
        return self.poll()


def a_guard(saver=None, *, interval=100, **settings):
    settings = {"signals": {}, "state": dict, "clock": Mock(return_value=1e6)} | settings
    return Guard(saver or Saver(), policy=PolicyConfig(interval_steps=interval), **settings)


def run(guard, steps, *, seconds=1.0, at=lambda step: None):
    for step in steps:
        guard._clock.return_value += seconds
        at(step)
        guard.step(step)
        if guard.should_stop:
            return step
    return None


def killed(at_step, name):
    return lambda step: step == at_step and os.kill(os.getpid(), getattr(signal, name))


def test_it_saves_at_each_interval_and_nothing_is_copied_in_between():
    copies = []
    guard = a_guard(interval=10, state=lambda: copies.append(1) or {})
    run(guard, range(1, 36))
    assert guard.checkpoints.began == [10, 20, 30]
    assert len(copies) == 3


@pytest.mark.parametrize(("fatal", "saved"), [(False, 25), (True, 6)])
def test_a_request_waits_for_the_gap_and_a_fatal_one_does_not(fatal, saved):
    guard = a_guard()
    run(guard, range(1, 6))
    guard.request("risk", "GPU 3 at 0.97", fatal=fatal)
    run(guard, range(6, 60))
    assert guard.checkpoints.began == [saved]


def test_a_save_that_fails_is_tried_again_and_the_training_goes_on(errors):
    guard = a_guard(Saver(fails=2), interval=10)
    assert run(guard, range(1, 60)) is None
    assert guard.checkpoints.began[:3] == [10, 21, 42]  # ten seconds later, then twenty
    assert errors.text.count("failed: the disk is full") == 2
    assert guard.problem == ""


def test_a_state_that_cannot_be_had_is_a_save_that_fails():
    def broken():
        raise RuntimeError("out of memory")

    guard = a_guard(interval=10, state=broken)
    run(guard, range(1, 15))
    assert guard.problem == "state cannot be read: RuntimeError: out of memory"


def test_a_request_in_the_folder_is_answered_when_it_is_durable(folder):
    saver = Saver(at_once=False)
    guard = a_guard(saver, folder=folder)
    assert folder.ask("user", "before the upgrade", fatal=True) == 1
    run(guard, range(1, 5))
    assert saver.began == [1]
    assert saver.requests == [1]
    assert folder.answered() == 0, "it is not durable yet"
    assert folder.ask("user", "once more", fatal=True) == 2
    saver.end()
    run(guard, range(5, 9))
    assert folder.answered() == 1
    assert saver.began == [1, 6]
    saver.end()
    run(guard, range(9, 12))
    assert folder.answered() == 2
    assert not guard.should_stop


def test_a_user_who_stops_gets_a_durable_checkpoint_first(folder):
    guard = a_guard(folder=folder)
    folder.ask("user", "enough", stop=True)
    assert run(guard, range(1, 50)) == 1
    assert guard.checkpoints.began == [1]
    assert folder.answered() == 1
    failing = Saver(fails=1)
    guard = a_guard(failing, folder=folder)
    folder.ask("user", "enough", stop=True)
    assert run(guard, range(1, 50)) == failing.began[1]
    assert failing.began[1] - failing.began[0] == 10, "it waits for one that is durable"


def test_a_request_of_an_odd_source_is_taken_for_the_users(folder):
    folder.request_file.write_text(
        '{"number": 4, "source": "cron", "reason": "nightly", "fatal": true}'
    )
    run(guard := a_guard(folder=folder), range(1, 3))
    assert guard.checkpoints.requests == [4]
    assert folder.answered() == 4


def test_the_folder_is_looked_at_once_a_second(tmp_path):
    looked = []

    class Counted(RunFolder):
        def request(self):
            looked.append(1)

    run(a_guard(folder=Counted(tmp_path)), range(1, 101), seconds=0.05)
    assert 5 <= len(looked) <= 6


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_is_received(name):
    before = signal.getsignal(getattr(signal, name))
    policy, saver = PolicyConfig(interval_steps=100, least_gap=0.0), Saver()
    guard = Guard(saver, policy=policy, state=dict, clock=Mock(return_value=1e6))
    stopped = run(guard, range(1, 20), at=killed(5, name))
    assert saver.began == [5]
    assert stopped == (5 if name == "SIGTERM" else None)
    guard.close()
    assert signal.getsignal(getattr(signal, name)) is before


def test_a_handler_that_is_displaced_is_named_and_comes_back(caplog):
    def requeue(number, frame):
        raise AssertionError("it was called")

    before = signal.signal(signal.SIGUSR2, requeue)
    try:
        guard = a_guard(signals={signal.SIGUSR2: "save"})
        assert "the guard handles SIGUSR2 instead of " in caplog.text
        assert "requeue" in caplog.text
        os.kill(os.getpid(), signal.SIGUSR2)
        guard.close()
        assert signal.getsignal(signal.SIGUSR2) is requeue
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_after_a_signal_the_training_ends_in_time_even_if_it_cannot_be_saved(errors):
    guard = a_guard(Saver(fails=99), grace_seconds=25.0, signals={signal.SIGUSR2: "stop"})
    stopped = run(guard, range(1, 99), at=killed(5, "SIGUSR2"))
    guard.close()
    assert guard.checkpoints.began == [5, 15], "tried, and tried again"
    assert stopped == 30
    assert "grace period is over" in errors.text


def verdict(level, gpu=3):
    return GpuVerdict(gpu=gpu, time=0.0, level=level, reasons=("row remap failed",))


def source(verdicts):
    """Verdicts by a function, as a source of telemetry has them: judged when it is polled."""
    latest = {}
    poll = lambda: latest.update({v.key: v for v in verdicts()})  # noqa: E731
    return SimpleNamespace(poll=poll, verdicts=lambda: latest)


def test_telemetry_asks_once_for_what_lasts_and_again_for_what_is_fatal():
    saver, seen = Saver(), {"level": "healthy"}
    telemetry = source(lambda: [verdict("healthy", 1), verdict(seen["level"])])
    guard = a_guard(saver, interval=1000, telemetry=telemetry)
    run(guard, range(1, 300))
    assert saver.began == []
    seen["level"] = "risk"
    run(guard, range(300, 900))
    assert saver.began == [300]
    seen["level"] = "fatal"
    run(guard, range(900, 1290))
    assert saver.began == [300, 900]


def test_telemetry_that_raises_is_logged_once_and_polled_again(errors):
    def broken():
        if guard._clock() < 1e6 + 12:
            raise OSError("the driver is gone")
        return [verdict("fatal")]

    guard = a_guard(interval=10, telemetry=source(broken))
    run(guard, range(1, 15))
    assert guard.checkpoints.began == [10, 12]
    assert errors.text.count("the driver is gone") == 1


def test_it_beats_at_most_once_a_second(folder):
    beats = []
    folder.beat = lambda rank, step, phase, **more: beats.append((step, phase))
    guard = a_guard(folder=folder, interval=6)
    run(guard, range(1, 11), seconds=0.25)
    guard.close(finished=True)
    assert beats == [
        (0, "starting"),
        (1, "training"),  # a change of phase is reported at once
        (5, "training"),
        (6, "saving"),
        (6, "training"),
        (10, "training"),
        (10, "saving"),
        (10, "training"),
        (10, "saving"),  # waits
        (10, "finished"),
    ]


@pytest.mark.parametrize(
    ("ends", "phase"), [("", "finished"), ("stops", "training"), ("fails", "training")]
)
def test_a_block_that_ends_has_finished_unless_it_was_to_stop_or_failed(folder, ends, phase):
    with suppress(ZeroDivisionError), a_guard(folder=folder) as guard:
        run(guard, range(1, 4), at=lambda step: 1 // (3 - step) if ends == "fails" else None)
        guard.should_stop = ends == "stops"
    assert folder.beats()[0].phase == phase


def test_a_folder_needs_a_fingerprint_and_settings_are_named(tmp_path):
    with pytest.raises(ValueError, match="source is 'wind'"):
        a_guard().request("wind", "strong")
    for since in (-1, 1.5, True, "3"):
        with pytest.raises(ValueError, match=r"since is .*: it must be a step"):
            a_guard().request("alarm", "loss", since=since)
    with pytest.raises(ValueError, match="needs a fingerprint"):
        a_guard(tmp_path)
    with pytest.raises(ValueError, match="checkpoints is None"):
        Guard(policy=PolicyConfig(interval_steps=1), state=dict, signals={})
    with pytest.raises(ValueError, match="check_every is 0"):
        a_guard(check_every=0)
    with pytest.raises(ValueError, match="grace_seconds is 0"):
        a_guard(grace_seconds=0)
    with pytest.raises(ValueError, match="signals has \\['halt'\\]"):
        a_guard(signals={signal.SIGUSR2: "halt"})


@pytest.mark.parametrize("calls", [range(0), range(1, 3), range(1, 4)])
@pytest.mark.parametrize(("finished", "fails"), [(False, 0), (True, 0), (True, 1)])
def test_a_training_that_finishes_saves_its_last_step_once(calls, finished, fails):
    guard = a_guard(Saver(fails=fails), interval=3)
    run(guard, calls)
    guard.close(finished=finished)
    assert guard.checkpoints.began == {0: [], 2: [2] * finished, 3: [3] * (1 + fails)}[len(calls)]


@pytest.mark.parametrize("writable", [True, False])
def test_a_request_answered_just_before_a_kill_is_noted_on_the_way_back(folder, caplog, writable):
    checkpoints = Checkpoints(folder.checkpoints, fingerprint="m")
    checkpoints.begin(5, {"w": torch.ones(2)}, request=3)
    assert isinstance(checkpoints.wait(30.0), SavedCheckpoint)
    if not writable:
        folder.answered_file.mkdir()  # as good as a full disk
    guard = Guard(
        policy=PolicyConfig(interval_steps=100), folder=folder, fingerprint="m",
        state=lambda: {"w": torch.ones(2)}, signals={},
    )  # fmt: skip
    assert guard.resume() == {"step": 5}
    assert folder.answered() == (3 if writable else 0)
    assert ("answer to request 3 cannot be written" in caplog.text) != writable


@pytest.mark.parametrize(
    "harmless",
    [{}, {"TORCHELASTIC_USE_AGENT_STORE": "False"},  # by the variable that the warning names
     {"TORCHELASTIC_MAX_RESTARTS": "0"}, {"WORLD_SIZE": "1"}],
)  # fmt: skip
def test_restarts_on_torchruns_own_store_are_named_where_the_guard_begins(
    monkeypatch, caplog, harmless
):
    """They hang now and then, whoever trains: each rank may meet the addresses of dead ones."""
    torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    for name, value in (torchrun | {"WORLD_SIZE": "2"} | harmless).items():
        monkeypatch.setenv(name, value)
    a_guard()
    remedy = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and start it with --standalone"
    assert [remedy in warning for warning in caplog.messages] == ([] if harmless else [True])


def training(rank, folder, steps, *, at=None, interval=1000, pause=0.01):
    """A small data-parallel training under the guard; `at(step, rank, guard)` before each end."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run_folder = RunFolder(folder)
    guard = Guard(
        Checkpoints(run_folder.checkpoints, fingerprint="tiny"),
        policy=PolicyConfig(interval_steps=interval, least_gap=0.0),
        state=lambda: {"training": ModelState(model, optimizer)},
        own=random_values,
        folder=run_folder,
    )
    resumed = guard.resume()
    if resumed and guard.own_values:
        set_random_values(guard.own_values)
    start, saves, losses = (resumed or {"step": 0})["step"], [], []
    begin = guard.checkpoints.begin
    guard.checkpoints.begin = lambda step, *a, **k: (saves.append(step), begin(step, *a, **k))
    step = start
    for step in range(start + 1, steps + 1):
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        time.sleep(pause)
        if at:
            at(step, rank, guard)
        guard.step(step)
        if guard.should_stop:
            break
    guard.close()
    return {
        "start": start,
        "last": step,
        "saves": saves,
        "losses": losses,
        "good": guard.last.step if isinstance(guard.last, SavedCheckpoint) else None,
    }


def different_times(rank, folder):
    def at(step, rank, guard):
        time.sleep(0.02 * ((step * 7 + rank * 3) % 4))
        if step % 5 == rank:
            guard.request("user", f"rank {rank} at {step}", fatal=True)

    return training(rank, folder, 30, at=at, pause=0.0)["saves"]


def test_ranks_whose_saves_end_at_different_times_stay_together(tmp_path):
    saves = on_ranks(different_times, tmp_path, ranks=4)
    assert len(saves[0]) >= 3
    assert saves == [saves[0]] * 4


def terminated(rank, folder, who):
    def at(step, rank, guard):
        if step == 5 and rank == who:
            guard.request("user", "a save to be in the middle of", fatal=True)
        if step == 6 and rank == who:
            assert guard.checkpoints.in_flight, "no save is under way"
            os.kill(os.getpid(), signal.SIGTERM)

    if rank == 0:  # the first save lasts until after the signal
        from rmetric.guard import dcp as module

        quick = module.non_finite
        module.non_finite = lambda *a, **k: time.sleep(0.4) or quick(*a, **k)
    return training(rank, folder, 500, at=at)


@pytest.mark.parametrize("who", [0, 1])
def test_sigterm_in_the_middle_of_a_save_makes_a_last_one_and_ends_all_ranks(tmp_path, who):
    for result in on_ranks(terminated, tmp_path, who, ranks=2):
        assert result["saves"] == [5, 6]
        assert result["last"] == result["good"] == 6
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-5", "step-6"]


def killed_in_its_second_save(rank, folder):
    def at(step, rank, guard):
        if rank == 1 and isinstance(guard.last, SavedCheckpoint) and guard.checkpoints.in_flight:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        training(rank, folder, 500, at=at, interval=4)
    except RuntimeError as error:
        return str(error)
    return "nothing happened"


def test_a_killed_rank_ends_the_others_at_once_and_the_next_start_gives_the_same_losses(tmp_path):
    killed = on_ranks(killed_in_its_second_save, tmp_path / "cut", ranks=2, lost=(1,))
    assert killed[1] is None
    assert killed[0] != "nothing happened"
    durable = [
        int(path.name.split("-")[1])
        for path in (tmp_path / "cut").glob("*/step-?*")
        if not path.name.endswith(".part")
    ]
    steps = max(durable) + 8
    again = on_ranks(training, tmp_path / "cut", steps, ranks=2)
    whole = on_ranks(training, tmp_path / "whole", steps, ranks=2)
    for before, after in zip(whole, again, strict=True):
        assert after["start"] == max(durable)
        assert after["losses"] == before["losses"][after["start"] :]


def disagreed(rank, folder):
    torch.manual_seed(0)
    saver = Saver(fails=1 if rank else 0)
    guard = a_guard(saver, folder=RunFolder(folder))
    guard.step(1)
    first = guard.save(1)
    second = guard.save(1)
    return type(first).__name__, type(second).__name__, saver.began


def test_ranks_that_saw_a_save_end_otherwise_still_do_the_same(tmp_path):
    for result in on_ranks(disagreed, tmp_path, ranks=2):
        assert result == ("FailedSave", "SavedCheckpoint", [1, 1])
