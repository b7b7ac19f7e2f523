"""Several ranks, in processes of their own: what one of them sees reaches all, and nobody waits."""

import logging
import os
import signal
import threading
import time
from functools import partial
from math import inf, isfinite, nan, prod

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rmetric.monitor import MonitorConfig
from rmetric.monitor.actions import SkipStep, Stop
from rmetric.monitor.actions.action import Action
from tests.monitor.ranks import (
    batch_of,
    on_ranks,
    own_gradient,
    plain_model,
    records_of,
    train_on_rank,
    watched,
)
from tests.monitor.training import Recorder, flat_weights, squared_error

EVERY_STEP = MonitorConfig(workers_every=1, join_seconds=10.0)
BUCKET_VIEW = partial(DistributedDataParallel, gradient_as_bucket_view=True)


def healthy(rank, folder, settings):
    without = train_on_rank(rank, **settings)
    seen = train_on_rank(rank, watched(folder), keep_own=True, **settings)
    return seen | {"without": without["weights"]}


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (4, {}),
        (3, {"wrap": BUCKET_VIEW}),
        (4, {"micro": 2}),
        (3, {"micro": 2, "wrap": BUCKET_VIEW, "hook": True}),
    ],
)
def test_each_workers_own_gradient_is_known_to_all_ranks(tmp_path, ranks, settings):
    results = on_ranks(healthy, tmp_path, settings, ranks=ranks)
    own = torch.tensor([result["own"] for result in results])  # (ranks, steps, weights)
    mean = own.mean(dim=0)
    cosines = torch.nn.functional.cosine_similarity(own, mean[None], dim=2)
    for rank, result in enumerate(results):
        assert result["weights"] == result["without"] == results[0]["weights"]
        assert result["usable"]
        assert not result["alerts"]
        records = records_of(tmp_path, rank)
        assert [r.step for r in records] == list(range(1, 13))
        rounding = 1e-2 if "hook" in settings else 1e-5
        for t, record in enumerate(records):
            assert record.worker_gradient_norms == pytest.approx(own[:, t].norm(dim=1).tolist())
            assert record.worker_gradient_cosines == pytest.approx(
                cosines[:, t].tolist(), abs=rounding
            )
            assert record.non_finite_gradients == 0
            assert record.gradient_norm == pytest.approx(mean[t].norm().item(), rel=rounding)


def nan_batch(step, rank, loss, monitor):
    return loss * nan if (rank, step) == (2, 8) else loss


def test_a_nan_of_one_rank_is_skipped_by_all_and_named_by_all(tmp_path):
    make = watched(tmp_path, actions=[SkipStep()])
    results = on_ranks(train_on_rank, make, at=nan_batch, steps=16)
    for rank, result in enumerate(results):
        assert result["weights"] == results[0]["weights"]
        assert all(map(isfinite, result["weights"]))
        [named] = [a for a in result["alerts"] if (a.source, a.rank) == ("non_finite", 2)][-1:]
        assert named.step == 8
        assert "its loss is nan" in named.reason
        assert "entries of its own gradient are not finite" in named.reason
        records = {r.step: r for r in records_of(tmp_path, rank)}
        assert records[8].update_norm is None or records[8].update_norm == 0.0
        others = [n for w, n in enumerate(records[8].worker_gradient_norms) if w != 2]
        assert all(map(isfinite, others))
        assert not isfinite(records[8].worker_gradient_norms[2])
        assert records[8].non_finite_gradients > 0
        assert {a.step for a in result["alerts"]} == {8}


def infinite_loss(step, rank, loss, monitor):
    return loss + inf if (rank, step) == (1, 8) else loss  # its gradient is fine


def test_what_only_one_rank_can_see_changes_no_step_and_is_acted_upon_together():
    actions = [Recorder(), Recorder(now=True, on_all_ranks=True), Recorder(on_all_ranks=True)]
    make = watched(actions=actions)
    results = on_ranks(train_on_rank, make, at=infinite_loss, steps=14, ask=True)
    for rank, result in enumerate(results):
        assert result["weights"] == results[0]["weights"]
        [alert] = result["alerts"]
        assert (alert.step, alert.source, alert.rank) == (8, "non_finite", 1)
        plain, now, together = result["calls"]
        assert now == []
        assert together == [(10, 8, "non_finite", 1)]
        at = 8 if rank == 1 else 9  # there at once, elsewhere when the message arrives
        assert plain == [(at, 8, "non_finite", 1)]


def fall_behind(step, rank, model):
    """Without any collective of the training, rank 1 falls behind by seconds and catches up."""
    if step in (21, 41):
        dist.barrier()
    if (rank, step) == (1, 10):
        time.sleep(3.0)


def keep_pace_again(step, rank, model):
    if step > 40:
        dist.barrier()


def test_messages_that_are_late_are_waited_for_once_and_the_exchange_recovers(tmp_path):
    course = dict(before=fall_behind, after=keep_pace_again, steps=60, seconds=120.0)
    make = watched(tmp_path, EVERY_STEP)
    results = on_ranks(train_on_rank, make, wrap=nn.Sequential, **course)
    for rank, result in enumerate(results):
        assert result["slowest"] < 2.0
        assert result["waited"] < 5.0
        assert not result["alerts"]
        records = records_of(tmp_path, rank)
        assert [r.step for r in records] == list(range(1, 61))
        with_workers = [r.step for r in records if r.worker_gradient_norms]
        assert set(range(52, 61)) <= set(with_workers)
        assert len(with_workers) < 60


def killed(step, rank, loss, monitor):
    if (rank, step) == (3, 6):
        os.kill(os.getpid(), signal.SIGKILL)
    return loss


def losing_a_rank(rank):
    monitors = []

    def make_monitor(model, optimizer):
        monitors.append(watched(config=EVERY_STEP, actions=[Stop()])(model, optimizer))
        return monitors[-1]

    try:
        train_on_rank(rank, make_monitor, at=killed)
    except RuntimeError as error:
        [monitor] = monitors
        began = time.monotonic()
        monitor.close()
        return time.monotonic() - began, str(error), list(monitor.alerts), monitor.usable
    return None


def test_a_rank_that_is_killed_leaves_no_monitor_hanging():
    *left, gone = on_ranks(losing_a_rank, lost=[3])
    assert gone is None
    for seconds, error, alerts, usable in left:
        assert error  # it is the training's own collective that ends the training
        assert seconds < 15.0
        assert usable
        assert {a.source for a in alerts} == {"exchange"}


def without_one(rank):
    config = MonitorConfig(workers_every=1, join_seconds=0.5)
    make_monitor = None if rank == 3 else watched(config=config, actions=[Stop(), SkipStep()])
    result = train_on_rank(rank, make_monitor, at=nan_batch, ask=True)
    group = dist.new_group([0, 1, 2, 3])  # works as if nothing had been
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    return result | {"sum": ones.item()}


def test_without_a_monitor_on_one_rank_the_others_watch_and_change_nothing():
    results = on_ranks(without_one)
    for rank, result in enumerate(results):
        assert result["taken"] == 12
        assert result["sum"] == 4.0
        assert result["slowest"] < 15.0
        if rank < 3:
            [report] = [a for a in result["alerts"] if a.source == "exchange"]
            assert "no monitor on rank 3" in report.reason
            assert {a.source for a in result["alerts"]} == {"exchange", "non_finite"}


def one_that_never_calls(rank):
    make_monitor = watched(config=EVERY_STEP, actions=[SkipStep()])
    if rank != 3:
        return train_on_rank(rank, make_monitor)
    monitor = make_monitor(plain_model(), None)
    result = train_on_rank(rank)
    assert monitor.wait_for_ranks(10.0)
    return result  # nor is it closed


def test_a_monitor_that_is_never_called_holds_up_nobody():
    results = on_ranks(one_that_never_calls)
    for result in results:
        assert result["weights"] == results[0]["weights"]
        assert result["slowest"] < 15.0
        assert result["closing"] < 15.0


def closed_at_once(rank):
    left = []
    for pause in (0.0, 0.01, 0.02, 0.04):
        monitor = watched()(plain_model(), None)
        time.sleep(pause * (rank + 1))
        monitor.close()
        left += [thread.name for thread in threading.enumerate() if "join" in thread.name]
    return left


def test_a_monitor_that_is_closed_at_once_leaves_no_thread_that_aborts_the_process():
    assert on_ranks(closed_at_once) == [[]] * 4


def fault_inside(step, rank, loss, monitor):
    if (rank, step) == (1, 4):
        monitor._rule_judge.rules = None
    return nan_batch(step, rank, loss, monitor)


def test_where_one_monitor_steps_aside_the_others_say_so_and_go_on():
    make = watched(config=EVERY_STEP, actions=[Stop()])
    results = on_ranks(train_on_rank, make, at=fault_inside)
    assert [result["usable"] for result in results] == [True, False, True, True]
    for rank, result in enumerate(results):
        assert result["taken"] == 12  # to stop without rank 1 would leave it hanging
        assert result["slowest"] < 15.0
        if rank != 1:
            [report] = [a for a in result["alerts"] if a.source == "exchange"]
            assert "the monitor of rank 1 was disabled" in report.reason


class FailsOnRank1(Recorder):
    def __call__(self, alert, monitor):
        super().__call__(alert, monitor)
        if monitor.rank == 1:
            raise OSError("no")


def nan_from_step_8(step, rank, loss, monitor):
    return loss * nan if step >= 8 else loss


@pytest.mark.parametrize("now", [True, False])
def test_a_joint_action_that_fails_on_one_rank_is_called_on_no_other_any_more(now):
    make = watched(actions=[FailsOnRank1(now=now, on_all_ranks=True)])
    results = on_ranks(train_on_rank, make, at=nan_from_step_8, steps=16, ranks=2)
    [first], [second] = (result["calls"] for result in results)
    assert len(second) == 1
    assert 1 <= len(first) <= 2  # the message takes a step
    [report] = [a for a in results[0]["alerts"] if a.source == "exchange"]
    assert "rank 1" in report.reason
    assert all(result["usable"] for result in results)


def resumed(rank, folder):
    states = []

    def save(step, rank, loss, monitor):
        if step == 7:
            states.append(monitor.state_dict())
        return loss

    def rewind(step, rank, loss, monitor):
        if step == 4:
            monitor.load_state_dict(states[0])
        return infinite_loss(step, rank, loss, monitor)

    train_on_rank(rank, watched(folder), at=save)
    make = watched(actions=[Recorder(on_all_ranks=True)])
    return states[0]["step"], train_on_rank(rank, make, at=rewind, steps=16)["calls"]


def test_a_loaded_state_finds_the_ranks_together_again(tmp_path):
    for step, [calls] in on_ranks(resumed, tmp_path):
        assert step == 6
        # The steps count on from 6 at the fourth: the eighth is number 11.
        assert calls == [(13, 11, "non_finite", 1)]


def sharded(rank, folder, shape):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])

    def train(make_monitor):
        model = plain_model()
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        monitor = make_monitor(model, optimizer) if make_monitor else None
        if monitor:
            monitor.wait_for_ranks(10.0)
        dist.barrier()
        seen = []
        for step in range(1, 9):
            optimizer.zero_grad()
            before = flat_weights(model)
            own = own_gradient(before, [batch_of(rank, step)])
            loss = squared_error(model, batch_of(rank, step))
            loss.backward()
            if monitor:
                monitor.check_before_step(loss)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor().item()
            if monitor and step > 6:  # as a loop does that clips through the monitor
                assert monitor.clip_grad_norm_(1e9).item() == norm
            optimizer.step()
            moved = (flat_weights(model) - before).norm().item()
            seen.append((norm, moved, own.norm().item()))
        if monitor:
            monitor.close()
            assert monitor.usable
        return flat_weights(model).tolist(), seen

    return train(None), train(watched(folder))


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_the_norms_of_a_sharded_model_are_those_of_the_whole(tmp_path, shape):
    results = on_ranks(sharded, tmp_path, shape, ranks=prod(shape))
    own_norms = [[step[2] for step in seen] for _, (_, seen) in results]
    for rank, ((plain, _), (weights, seen)) in enumerate(results):
        assert weights == plain
        records = records_of(tmp_path, rank)
        assert len(records) == 8
        for t, record in enumerate(records):
            norm, moved, _ = seen[t]
            assert record.gradient_norm == pytest.approx(norm, rel=1e-5)
            assert record.update_norm == pytest.approx(moved, rel=1e-4)
            assert record.worker_gradient_norms == pytest.approx([n[t] for n in own_norms])
            assert all(-1.01 < c < 1.01 for c in record.worker_gradient_cosines)


def sharded_monitor(rate=1e-2, **settings):
    from torch.distributed.fsdp import fully_shard

    model = plain_model()
    fully_shard(model)
    config = MonitorConfig(explosion_window=8, join_seconds=10.0, patience=10.0)
    monitor = watched(config=config, **settings)(model, torch.optim.SGD(model.parameters(), rate))
    monitor.wait_for_ranks(10.0)
    dist.barrier()
    return monitor


def sharded_losses(rank, monitor, steps):
    """Number and loss of each step, before its backward pass."""
    for step in range(1, steps + 1):
        monitor.model.zero_grad()
        yield step, squared_error(monitor.model, batch_of(rank, step))


def clipped_shards(rank):
    monitor = sharded_monitor()
    for _, loss in sharded_losses(rank, monitor, 4):
        loss.backward()
        norm = nn.utils.clip_grad_norm_(monitor.model.parameters(), 1e-3)
        monitor.check_before_step(loss, gradient_norm=norm)
        monitor.optimizer.step()
    monitor.close()
    return monitor.problem, monitor.last.gradient_norm, norm.full_tensor().item()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_norm_that_clipping_shards_returned_may_be_passed_on(ranks):
    for problem, seen, norm in on_ranks(clipped_shards, ranks=ranks):
        assert problem is None
        assert seen == pytest.approx(norm)


def sharded_explosion(rank):
    now, together = Recorder(now=True, on_all_ranks=True), Recorder(on_all_ranks=True)
    monitor = sharded_monitor(1e-9, actions=[now, together])
    for step, loss in sharded_losses(rank, monitor, 20):
        (loss * 1e4 if step in (11, 16) else loss).backward()
        norm = None
        if step == 16:
            norm = nn.utils.clip_grad_norm_(monitor.model.parameters(), 1.0)
        monitor.check_before_step(loss, gradient_norm=norm)
        monitor.optimizer.step()
    monitor.close()
    return now.calls, together.calls


def test_of_shards_a_step_is_judged_before_it_where_an_action_needs_that():
    for now, together in on_ranks(sharded_explosion, ranks=2):
        assert [call[1] for call in now] == [11, 16]
        assert [call[1] for call in together] == [11], "both are one episode"


def sharded_training(rank, actions, at, *, ask=False):
    """Twelve steps of a sharded model; rank 1 does `at(step, monitor)` before each check."""
    reports = []
    handler = logging.Handler()
    handler.emit = lambda record: reports.append(record.getMessage())
    logging.getLogger("rmetric").addHandler(handler)
    monitor = sharded_monitor(actions=actions)
    slowest, taken = 0.0, 0
    for step, loss in sharded_losses(rank, monitor, 12):
        loss.backward()
        if rank == 1:
            at(step, monitor)
        before = time.monotonic()
        verdict = monitor.check_before_step(loss)
        if verdict if ask else True:
            monitor.optimizer.step()
            taken += 1
        slowest = max(slowest, time.monotonic() - before)
    monitor.close()
    alerts = [alert.reason for alert in monitor.alerts if alert.source == "exchange"]
    logging.getLogger("rmetric").removeHandler(handler)
    return {
        "weights": flat_weights(monitor.model).tolist(),
        "slowest": slowest,
        "taken": taken,
        "alerts": alerts,
        "reports": reports,
    }


def closed_early(step, monitor):
    if step == 8:
        monitor.close()


def broken_inside(step, monitor):
    if step == 8:
        monitor._recorder.parameters = None
        monitor._recorder._shards._parameters = None


class Late(Action):
    needs_verdict_now = True  # on this rank alone


def leaving_a_sharded_run(rank):
    return [
        sharded_training(rank, [SkipStep()], closed_early),
        sharded_training(rank, [SkipStep()], broken_inside),
        sharded_training(rank, [], lambda *_: None, ask=True),
        sharded_training(
            rank, [Recorder(now=True, on_all_ranks=True), Late()][: 1 + rank], lambda *_: None
        ),
    ]


def test_a_monitor_that_leaves_a_sharded_run_holds_up_nobody_and_an_unknown_norm_is_reported():
    results = on_ranks(leaving_a_sharded_run, ranks=2, seconds=100.0)
    assert results[0][0]["weights"] == results[1][0]["weights"] == results[0][1]["weights"]
    for result, left in zip(results[0], ("closed", "broken", "asked", "one"), strict=True):
        assert result["taken"] == 12
        assert result["slowest"] < 20.0
        if left == "asked":
            [report] = [text for text in result["reports"] if "the model is sharded" in text]
            assert "gradient_norm=norm" in report
        elif left == "one":
            assert result["alerts"] == []
        else:
            assert any("the monitor of rank 1" in reason for reason in result["alerts"])
