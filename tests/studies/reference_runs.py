"""Runs of the reference training in real ranks, and the same training written plainly."""

import json

import torch
import torch.distributed as dist
from torch.nn import functional

from studies.common.llama import Llama, initialise
from studies.tiny_llama.data import rows_of
from studies.tiny_llama.settings import parser, settings_of

#: Every layout of up to 4 ranks divides it.
SMALL = [
    *("--layers=2", "--heads=4", "--kv-heads=2", "--hidden=32", "--sequence=16"),
    *("--vocabulary=61", "--batch=12", "--micro-batch=3", "--rate=0.01", "--warmup=3"),
    *("--steps=6", "--save-every=3", "--retry=0.1", "--print-every=1000"),
]


def settings(folder, *more, ranks=1):
    return settings_of(parser().parse_args([*SMALL, "--folder", str(folder), *more]), ranks)


def train_on(rank, folder, *layouts):
    """On one rank: train once under each layout, of `more` arguments, in a folder each."""
    from studies.tiny_llama.loop import ReferenceTraining

    for name, more in layouts:
        setup = settings(folder / name, *more, ranks=dist.get_world_size())
        torch.set_default_dtype(getattr(torch, setup.options.precision))
        training = ReferenceTraining(setup, torch.device("cpu"))
        with training.guard:
            training.run()
        dist.barrier()
    return training.done


def losses_of(folder):
    """step -> (loss, gradient norm) in the log of a run; each step stands there once."""
    entries = [json.loads(line) for line in (folder / "losses.jsonl").read_bytes().splitlines()]
    metrics = [entry for entry in entries if entry["event"] == "METRICS"]
    assert [entry["step"] for entry in metrics] == list(range(1, len(metrics) + 1))
    return {entry["step"]: (entry["training_loss"], entry["gradient_norm"]) for entry in metrics}


def plain_losses(setup):
    """The whole batch at once in one process, by torch's own loss, clipping and optimiser."""
    torch.set_default_dtype(getattr(torch, setup.options.precision))
    try:
        return list(_plain_steps(setup))
    finally:
        torch.set_default_dtype(torch.float32)


def _plain_steps(setup):
    options, model = setup.options, Llama(setup.shape)
    initialise(model, setup.shape, options.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    warmup = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min(1.0, (done + 1) / options.warmup)
    )
    for step in range(1, options.steps + 1):
        rows = torch.from_numpy(rows_of(setup.data, step, 0, options.batch))
        logits = model(rows[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        yield loss.item(), norm.item()
