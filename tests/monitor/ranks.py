"""Real processes with a real gloo group: what the tests of several ranks run in."""

import multiprocessing
import time
import traceback
from datetime import timedelta
from functools import partial

import torch
import torch._dynamo  # the first optimiser would bring it in, on each rank anew
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from rmetric.logs import read_log
from rmetric.monitor import Monitor, MonitorConfig  # imported once, before the ranks are forked
from tests.monitor.training import FEATURES, ROWS, Recorder, flat_weights, squared_error

torch.set_num_threads(1)

#: No message counts as late, however busy the machine.
PATIENT = MonitorConfig(workers_every=1, join_seconds=10.0, patience=10.0)


def watched(log=None, config=PATIENT, **settings):
    """For `train_on_rank`, with a file for each rank."""
    path = None if log is None else log / "rank{rank}.jsonl"
    return partial(Monitor, log=path, config=config, **settings)


def records_of(folder, rank):
    return read_log(folder / f"rank{rank}.jsonl").records


def on_ranks(function, *args, ranks=4, seconds=40.0, lost=(), **settings):
    """What `function(rank, *args, **settings)` returns on each rank, each in its own process.

    A rank in `lost` may end as it likes and gives None; every other one must
    return, in time, and its process must end by itself without an error.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.monitor.ranks"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(
            target=_rank,
            args=(partial(function, r, *args, **settings), r, ranks, store.port, pipes[r][1]),
        )
        for r in range(ranks)
    ]
    try:
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()
        until = time.monotonic() + seconds  # from when the imports of all are done
        results = [None] * ranks
        for rank, (receiver, _) in enumerate(pipes):
            if rank in lost:
                continue
            assert receiver.poll(max(0.0, until - time.monotonic())), f"rank {rank} hangs"
            fine, results[rank] = receiver.recv()
            assert fine, f"rank {rank}: {results[rank]}"
        for rank, process in enumerate(processes):
            if rank not in lost:
                process.join(max(1.0, until - time.monotonic()))
                assert process.exitcode == 0, f"rank {rank} ended with {process.exitcode}"
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(function, rank, ranks, port, sender):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=20)
    )
    try:
        sender.send((True, function()))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    if dist.is_initialized():
        dist.destroy_process_group()


def plain_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 15), nn.Linear(15, 1))


def batch_of(rank, step, micro=0):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    inputs = torch.randn(ROWS, FEATURES, generator=generator)
    return inputs, torch.randn(ROWS, 1, generator=generator)


def own_gradient(weights, batches):
    """Of this rank alone, by a copy that no hook sits on."""
    copy = plain_model()
    nn.utils.vector_to_parameters(weights, copy.parameters())
    for batch in batches:
        (squared_error(copy, batch) / len(batches)).backward()
    return torch.cat([p.grad.flatten() for p in copy.parameters()])


def train_on_rank(
    rank,
    make_monitor=None,
    *,
    steps=12,
    micro=1,
    wrap=DistributedDataParallel,
    hook=False,
    before=None,
    at=None,
    after=None,
    ask=False,
    keep_own=False,
):
    """A small training of the model that `wrap` gives; what came of it, as plain values.

    `at(step, rank, loss, monitor)` runs between forward and backward and returns the loss,
    `before` and `after` with (step, rank, model) at both ends of a step.
    """
    model = wrap(plain_model())
    if hook:  # of the user's own: half precision on the way
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = make_monitor(model, optimizer) if make_monitor else None
    actions = [*monitor._delivery.actions] if monitor else []  # also one that fails
    if monitor is not None:
        monitor.wait_for_ranks(10.0)
    dist.barrier()
    own, taken, waits = [], 0, []
    for step in range(1, steps + 1):
        if before:
            before(step, rank, model)
        optimizer.zero_grad()
        batches = [batch_of(rank, step, m) for m in range(micro)]
        if keep_own:
            own.append(own_gradient(flat_weights(model), batches).tolist())
        for batch in batches[:-1]:
            with model.no_sync():
                (squared_error(model, batch) / micro).backward()
        loss = squared_error(model, batches[-1])
        loss = at(step, rank, loss, monitor) if at else loss
        (loss / micro).backward()
        began = time.monotonic()
        go_on = monitor.check_before_step(loss) if monitor else True
        waits.append(time.monotonic() - began)
        if go_on or not ask:
            optimizer.step()
        if after:
            after(step, rank, model)
        taken = step
        if monitor is not None and monitor.should_stop:
            break
    began = time.monotonic()
    if monitor is not None:
        monitor.close()
    return {
        "weights": flat_weights(model).tolist(),
        "own": own,
        "taken": taken,
        "slowest": max(waits),
        "waited": sum(waits),
        "closing": time.monotonic() - began,
        "calls": [action.calls for action in actions if isinstance(action, Recorder)],
        "alerts": list(monitor.alerts) if monitor else [],
        "findings": list(monitor.findings) if monitor else [],
        "usable": monitor is None or monitor.usable,
    }
