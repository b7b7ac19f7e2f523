"""A training of real gloo ranks, of which one hangs in a chosen way at step 5: for torchrun.

python hanging_ranks.py stopped | loader | checkpoint | collective | lock
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from rmetric.guard.run_folder import RunFolder

AT, BAD = 5, 2


class Rows(Dataset):
    """Rows whose reading hangs, as that of a file on a server that is gone."""

    def __init__(self, hangs_at: int | None) -> None:
        self.hangs_at = hangs_at

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, at: int) -> torch.Tensor:
        if at == self.hangs_at:
            time.sleep(600)
        return torch.ones(8)


def save_checkpoint(model: nn.Module, path: Path) -> None:
    torch.save(model.state_dict(), path)


def update_statistics(lock: threading.Lock) -> None:
    with lock:
        pass


def main(way: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    rank, folder = dist.get_rank(), RunFolder.of_environment()
    pair = dist.new_group([0, BAD], timeout=timedelta(seconds=600))
    bad = rank == BAD
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
    optimizer, lock = torch.optim.SGD(model.parameters(), lr=0.01), threading.Lock()
    hangs_at = AT if bad and way == "loader" else None
    rows = iter(DataLoader(Rows(hangs_at), batch_size=1, num_workers=1, prefetch_factor=2))
    folder.beat(rank, 0, "starting")
    for step in range(1, 1000):
        batch = next(rows)
        if bad and step == AT:
            if way == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if way == "checkpoint":
                pipe = folder.path / "checkpoint.pt"
                os.mkfifo(pipe)  # a file server that takes no more: the open never returns
                save_checkpoint(model, pipe)
            if way == "collective":
                dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.ones(1), group=pair)
            if way == "lock":
                lock.acquire()
                update_statistics(lock)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        folder.beat(rank, step)
        if rank == 0:
            print(f"step {step} loss {float(loss):.4f}", flush=True)
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1])
