"""Consistency checks that a training runs on itself where its settings ask for them."""

from __future__ import annotations

import math
import statistics
import zlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from studies.diagnosis_benchmark.injected.trainer import Trainer

#: Mean losses that are remembered, and by how many times their median one is a spike.
REMEMBERED = 5
SPIKE = 50.0


def gradients(trainer: Trainer) -> None:
    """Before they are reduced, when it still shows whose they are."""
    parts = [one.grad.norm() for one in trainer.model.parameters() if one.grad is not None]
    norm = float(torch.stack(parts).norm())
    if not math.isfinite(norm):
        raise FloatingPointError(
            f"rank {trainer.rank}: norm of the local gradients is {norm} at step {trainer.step}"
        )


def spike(trainer: Trainer, mean: float, own: float) -> None:
    past = trainer.losses[-REMEMBERED:]
    trainer.losses.append(mean)
    if len(past) == REMEMBERED and mean > SPIKE * statistics.median(past):
        times = mean / statistics.median(past)
        raise RuntimeError(
            f"mean loss {mean:.4g} at step {trainer.step} is {times:.0f} times the usual, "
            f"this rank's is {own:.4g}"
        )


def parameters(trainer: Trainer) -> None:
    """By a checksum of each rank's; who is alone is told where the settings say so."""
    flat = trainer._flat([one.data for one in trainer.model.parameters()])
    mine = torch.tensor([zlib.crc32(flat.numpy().tobytes())])
    found = [torch.zeros_like(mine) for _ in range(trainer.world)]
    dist.all_gather(found, mine)
    sums = [int(one) for one in found]
    usual = statistics.mode(sums)
    others = {rank: one for rank, one in enumerate(sums) if one != usual}
    if not others:
        if trainer.rank == 0:
            trainer.log.info("parameters agree on all ranks: crc32 %08x", usual)
        return
    said = "are not the same on all ranks"
    if trainer.settings.parameter_check == "names":
        which = ", ".join(f"rank {rank} has {one:08x}" for rank, one in others.items())
        said = f"differ: {which}, the others {usual:08x}"
    raise RuntimeError(f"parameters of step {trainer.step} {said}")
