"""Step times on two real ranks: the rank that stalls or is slow is named by both."""

import time

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rmetric.monitor import MonitorConfig
from tests.monitor.ranks import batch_of, on_ranks, records_of, train_on_rank, watched

PATIENT = MonitorConfig(join_seconds=10.0, patience=10.0)
SHORT = MonitorConfig(join_seconds=10.0, patience=10.0, stall_seconds=0.5)
STEPS, STALLED = 44, 36


def wait_for_data(step, rank, model):
    """Rank 1, once; the clock of rank 0 shows nothing but its waiting."""
    if (rank, step) == (1, STALLED):
        time.sleep(1.0)


def sharded(model):
    fully_shard(model[0])
    return fully_shard(model)


@pytest.mark.parametrize("make", [DistributedDataParallel, sharded])
def test_both_ranks_name_the_rank_whose_data_stalled(tmp_path, make):
    settings = dict(wrap=make, before=wait_for_data, steps=STEPS, ranks=2)
    results = on_ranks(train_on_rank, watched(tmp_path, SHORT), **settings)
    for rank, result in enumerate(results):
        assert result["usable"]
        found = [a for a in result["alerts"] if a.source in ("stall", "slow_rank")]
        [alert] = [a for a in found if a.step == STALLED]
        assert (alert.source, alert.rank) == ("stall", 1)
        assert "waiting for data on rank 1" in alert.reason
        [stalled] = [r for r in records_of(tmp_path, rank) if r.step == STALLED]
        assert stalled.step_seconds > 0.9
        if rank == 1:
            assert stalled.data_wait_seconds > 0.9
        elif make is DistributedDataParallel:
            assert stalled.exchange_seconds > 0.9  # it waited for the other's gradient
            assert stalled.forward_backward_seconds < 0.5


def slow_pass(step, rank, loss, monitor):
    if rank == 1:
        time.sleep(0.06)
    return loss


def test_a_rank_that_is_persistently_slow_is_named_by_both(tmp_path):
    make = watched(tmp_path, PATIENT)
    for result in on_ranks(train_on_rank, make, at=slow_pass, steps=48, ranks=2):
        assert result["usable"]
        [alert] = [a for a in result["alerts"] if a.source == "slow_rank"]
        assert alert.rank == 1
        assert "mostly in forward and backward" in alert.reason


def evaluating(rank, who_is_slow, context, mode):
    """Rank 0 evaluates the unwrapped model before every step, which takes 40 ms."""

    def after(step, rank, model):
        if rank == 0:
            with context():
                model.module.train(mode)(batch_of(rank, step)[0])
                time.sleep(0.04)
                model.module.train()

    at = None if who_is_slow is None else slow_pass
    result = train_on_rank(rank, watched(None, PATIENT), at=at, after=after, steps=48)
    assert result["usable"]
    return [a.rank for a in result["alerts"] if a.source == "slow_rank"]


@pytest.mark.parametrize("who_is_slow", [None, 1])
@pytest.mark.parametrize("way", [(torch.no_grad, False), (torch.inference_mode, True)])
def test_a_rank_that_evaluates_is_not_slow_and_the_slow_one_is_named(way, who_is_slow):
    named = [] if who_is_slow is None else [who_is_slow]
    assert on_ranks(evaluating, who_is_slow, *way, ranks=2) == [named, named]
