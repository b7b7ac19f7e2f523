"""The same runs with four real processes: each its own worker, gradients gathered by gloo.

Every process holds the whole model, computes the gradient of its own micro-batch, receives the
others' and takes the same step. The records agree with those of one process to rounding.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from rmetric.readers.archive import run_from_line, run_to_line
from rmetric.records import Run
from studies.fault_lab.branches import train_seed
from studies.fault_lab.outcome import Definitions
from studies.fault_lab.spec import LabSpec
from studies.fault_lab.training import WORKERS, Batch, Settings, Training


class RankTraining(Training):
    def gradients(self, batch: Batch, settings: Settings) -> tuple[Tensor, Tensor]:
        mine = slice(dist.get_rank(), dist.get_rank() + 1)
        own = Batch(batch.tokens_WBT[mine], batch.labels_WBT[mine])
        gradient_1N, loss_1 = super().gradients(own, settings)
        gradients = [torch.empty_like(gradient_1N[0]) for _ in range(WORKERS)]
        losses = [torch.empty_like(loss_1[0]) for _ in range(WORKERS)]
        dist.all_gather(gradients, gradient_1N[0])
        dist.all_gather(losses, loss_1[0])
        return torch.stack(gradients), torch.stack(losses)


def train_seed_on_ranks(
    specs: Sequence[LabSpec], definitions: Definitions | None = None
) -> list[Run]:
    """As `branches.train_seed`, on four gloo processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, list(specs), definitions), nprocs=WORKERS)
        lines = (Path(folder) / "runs").read_bytes().splitlines()
    runs: list[Run] = []
    for line in lines:
        runs.append(run_from_line(line, runs[0] if runs else None))
    return runs


def _rank(
    rank: int, folder: str, specs: Sequence[LabSpec], definitions: Definitions | None
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORKERS
    )
    try:
        lines = [run_to_line(run) for run in train_seed(specs, definitions, RankTraining)]
        if rank == 0:
            (Path(folder) / "runs").write_bytes(b"".join(lines))
    finally:
        dist.destroy_process_group()
