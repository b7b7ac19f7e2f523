"""A rescue that holds or fails on two ranks: no rank is left behind; one process's hold folder."""

import json
import logging
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rmetric.guard.run_folder import FOLDER_VARIABLE, RunFolder
from rmetric.rescue import Rescue, RescueConfig
from rmetric.rescue import action as action_module
from rmetric.rescue import hold as hold_module
from rmetric.rescue.policy import Evidence
from tests.monitor.ranks import on_ranks
from tests.rescue.test_action import ALWAYS, lasting, until_held
from tests.rescue.trainings import SMALL, STEPS, actions, bad, same, train


def waits(rank, folder):
    """A run that is held until a signal to the second rank."""
    rescue = Rescue(ALWAYS, on_hold="wait", hold_folder=folder / "wait")
    before, verdict = signal.getsignal(signal.SIGUSR1), folder / "wait" / "verdict.json"

    def wake():
        while not verdict.exists() or signal.getsignal(signal.SIGUSR1) is before:
            time.sleep(0.02)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGUSR1)

    waker = threading.Thread(target=wake, daemon=True)
    if rank == 1:
        waker.start()
    outcome = train(rescue, kind="ddp", rank=rank, evidence_of=until_held(rescue))
    return outcome | {"why": json.loads(verdict.read_text())["went_on"]}


def exits(rank, folder):
    """What is there when a rank ends, with a first rank that is slow to write."""
    save = action_module.save_held

    def slowly(*args):
        if rank == 0:
            threading.Event().wait(0.5)
        return save(*args)

    action_module.save_held = slowly
    rescue = Rescue(ALWAYS, on_hold="exit", hold_folder=folder / "exit")
    try:
        train(rescue, kind="ddp", rank=rank, evidence_of=lasting)
    except SystemExit as ended:
        return {"code": ended.code, "there": sorted(p.name for p in (folder / "exit").iterdir())}
    finally:
        action_module.save_held = save
    return {"code": 0, "there": []}


def fails(rank):
    """Rank 1 alone fails, in a step before a snapshot is due."""

    def broken(detector, step):
        if rank == 1 and step == 18:  # its record is complete at the check of step 20
            raise MemoryError("nothing is left")

    return train(Rescue(SMALL), kind="ddp", rank=rank, evidence_of=broken)


def on_one_rank(rank, folder):
    hold_module._POLL_SECONDS = 0.02
    found = {"twin": train(kind="ddp", rank=rank)}
    found["waits"] = waits(rank, folder)
    found["exits"] = exits(rank, folder)
    found["fails"] = fails(rank)
    # Of one rank alone, at the last step whose record the ranks share before the end.
    late = bad(STEPS - 2, since=37) if rank == 1 else bad(0)
    found["late"] = train(Rescue(SMALL), kind="ddp", rank=rank, evidence_of=late)
    os.environ[FOLDER_VARIABLE] = str(folder / f"run of rank {rank}")
    rescue = Rescue(ALWAYS)
    train(rescue, kind="ddp", rank=rank, evidence_of=lasting)
    found["saved"] = rescue.held["saved"]
    return found


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("held")
    return on_ranks(on_one_rank, folder, ranks=2, seconds=400.0), folder


def test_both_ranks_wait_end_go_back_and_hold_together(launched):
    ranks, folder = launched
    for found in ranks:
        waits, ended, late = (found[name] for name in ("waits", "exits", "late"))
        assert waits["problem"] == ""
        assert actions(waits)[-1] == "hold"
        assert waits["why"] == "another rank goes on"  # the first one writes
        assert waits["taken"][-1] == STEPS
        assert same(waits, found["twin"])
        assert ended["code"] == 6
        assert "verdict.json" in ended["there"]
        assert any(name.endswith(".pt") for name in ended["there"])
        assert [(e["action"], e["step"], e["to"]) for e in late["decisions"]] == [
            ("go_back", STEPS, 30)  # the evidence may name its onset late
        ]
        assert same(late, found["twin"])
    [saved] = {found["saved"] for found in ranks}
    assert Path(saved).parent == RunFolder(folder / "run of rank 0").hold
    assert (Path(saved).parent / "verdict.json").exists()
    assert not (folder / "run of rank 1").exists()


def test_a_failure_on_one_rank_switches_all_off_and_hangs_none(launched):
    first, second = (found["fails"] for found in launched[0])
    assert first["problem"] == "the rescue of another rank is switched off"
    assert second["problem"].startswith("MemoryError")
    for outcome, found in zip((first, second), launched[0], strict=True):
        assert outcome["taken"] == list(range(1, STEPS + 1))
        assert same(outcome, found["twin"])


@pytest.mark.parametrize("chosen", [None, "chosen"])
def test_under_a_supervisor_the_hold_is_in_its_run_folder_or_the_chosen(
    tmp_path, monkeypatch, chosen
):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "run"))
    run, folder = RunFolder(tmp_path / "run"), chosen and tmp_path / chosen
    rescue = Rescue(ALWAYS, hold_folder=folder)
    train(rescue, evidence_of=lasting, log=tmp_path / "log" / "run.jsonl")
    assert Path(rescue.held["saved"]).parent == (folder or run.hold)
    if not chosen:
        assert "it stays" in run.held()
        assert rescue.held["saved"] in run.held()
    assert not (tmp_path / "log" / "rescue-hold").exists()


@pytest.mark.parametrize("late", [STEPS, STEPS - 1])
def test_an_alarm_at_the_last_step_goes_back_before_the_end(late):
    rescued = train(Rescue(SMALL), evidence_of=bad(late, since=34))
    assert [(e["action"], e["to"]) for e in rescued["decisions"]] == [("go_back", 30)]
    assert rescued["taken"] == [*range(1, STEPS + 1), *range(31, STEPS + 1)]
    assert same(rescued, train())


def test_the_end_of_a_stream_is_a_last_step_too():
    def stream():
        source = torch.Generator().manual_seed(5)
        for _ in range(34):
            yield torch.randn(4, 6, generator=source), torch.randn(4, 1, generator=source)

    rescued = train(Rescue(SMALL), loader=stream(), evidence_of=bad(34, since=33))
    assert [(e["action"], e["to"]) for e in rescued["decisions"]] == [("go_back", 25)]
    assert rescued["taken"] == [*range(1, 35), *range(26, 35)]
    assert rescued["weights"] == train(loader=stream(), steps=34)["weights"]


def test_an_alarm_that_lasts_to_the_end_is_reported(caplog):
    """No try is left, and the training ends before it could be held."""
    config = RescueConfig(every=5, probation=5, far=20, budget=1, observe=30)

    def lasts(detector, step):
        return bad(step, since=36)(detector, step) if step > 37 else None

    rescued = train(Rescue(config), evidence_of=lasts)
    assert rescued["decisions"] == []
    messages = [r.message for r in caplog.records if "during an alarm" in r.message]
    assert messages == [
        "rmetric: rescue: the training ended during an alarm (it is bad): do not trust its weights "
        "since step 36"
    ]


@pytest.mark.parametrize("tries", [0, 1])
def test_a_run_without_a_snapshot_of_before_its_fault_is_warned_once_that_rescue_gives_up(
    tries, caplog
):
    """As where the onset turns out to be older than what is kept."""
    rescue = Rescue(RescueConfig(every=5, probation=5, far=20, observe=5))

    def lasts(detector, step):
        if step <= 22:
            return None
        since = 22 if len(rescue.decisions) < tries else 0
        return Evidence(step=step, since=since, kind="no_update", words=f"{step} is bad")

    rescued = train(rescue, evidence_of=lasts)
    assert actions(rescued) == ["go_back"] * tries
    [message] = [each.message for each in caplog.records if "gives up" in each.message]
    assert message.endswith(" is bad, and no snapshot of before step 0 is kept")


def test_returns_for_the_same_reason_are_one_warning_until_the_hold(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    rescue = Rescue(replace(ALWAYS, budget=40), hold_folder=tmp_path)
    train(rescue, evidence_of=until_held(rescue))
    returns = [each for each in caplog.records if "rescue: went back" in each.message]
    reasons = [each.message.rpartition("; try ")[0] for each in returns]
    assert len(returns) > len(set(reasons)) > 0
    warned = [each for each in returns if each.levelno == logging.WARNING]
    assert len(warned) == len(set(reasons))
    assert f"its good weights are in {tmp_path}" in caplog.text
