"""A training of real gloo ranks, of which rank 2 hangs in a chosen way at step 5: for torchrun.

python hanging_ranks.py stopped | loader | checkpoint | collective | lock
"""

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from rmetric.guard.run_folder import RunFolder

FOREVER = timedelta(seconds=600)


class Rows(list):
    """Rows of which one is on a server that is gone."""

    def __getitem__(self, at):
        time.sleep(600 if super().__getitem__(at) else 0)
        return torch.ones(8)


def save_checkpoint(model, path):
    torch.save(model.state_dict(), path)


def update_statistics(lock):
    with lock:
        pass


def hang(way, model, folder, pair):
    if way == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if way == "checkpoint":
        os.mkfifo(folder.path / "checkpoint.pt")  # which nobody reads: it cannot be opened
        save_checkpoint(model, folder.path / "checkpoint.pt")
    if way == "collective":
        dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.ones(1), group=pair)
    if way == "lock":
        lock = threading.Lock()
        lock.acquire()
        update_statistics(lock)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=FOREVER)
    rank, folder = dist.get_rank(), RunFolder.of_environment()
    pair = dist.new_group([0, 2], timeout=FOREVER)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
    gone = 5 if (rank, sys.argv[1]) == (2, "loader") else None
    rows = iter(DataLoader(Rows(at == gone for at in range(100)), batch_size=1, num_workers=1))
    folder.beat(rank, 0, "starting")
    for step in range(1, 100):
        batch = next(rows)
        if (rank, step) == (2, 5):
            hang(sys.argv[1], model, folder, pair)
        loss = model(batch).square().mean()
        loss.backward()
        dist.all_reduce(loss.detach())
        folder.beat(rank, step)
        if rank == 0:
            print(f"step {step} loss {float(loss):.4f}", flush=True)
        time.sleep(0.05)
