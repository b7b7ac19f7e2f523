"""Resumes that lost one part, in each program that can lose it: the table names that part."""

import copy
import json
import shutil
from functools import cache, partial
from itertools import product

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # noqa: E402

from rmetric.monitor import Monitor  # noqa: E402
from tests.audits.test_audits import WORDS, Model, batches  # noqa: E402

#: What is lost -> the row that says so, and its present value where that is the same everywhere.
PARTS = {
    "nothing": (),
    "moments": ("moments", "lost, 0"),
    "step counts": ("optimizer step", "0"),
    "rate": ("rate", "0.02"),
    "scheduler": ("scheduler", "step 0"),
    "scaler": ("scaler", "2"),
    "random states": ("random states", "other ones"),
    "data again": ("data", "batch 0"),
    "data skipped": ("data", "batch 6"),
    "weights": ("weights", ""),
    "EMA": ("EMA", ""),
}
#: The program never has that part on a CPU, or never saves it.
CANNOT = {
    ("scaler", "trainer"): "half precision with a scaler needs a GPU there",
    ("scaler", "lightning"): "half precision with a scaler needs a GPU there",
    ("random states", "lightning"): "its checkpoints hold none: they differ in each resume",
}
SAVED, STEPS = 4, 8


def lose(part, optimizer, scheduler, scaler=None):
    """Change what a checkpoint holds."""
    for state in optimizer["state"].values():
        if part == "moments":
            state["exp_avg"].zero_(), state["exp_avg_sq"].zero_()
        if part == "step counts":
            state["step"].zero_()
    if part == "rate":
        optimizer["param_groups"][0]["lr"] = 2e-2
    if part == "scheduler":
        scheduler["last_epoch"] = 0
    if part == "scaler":
        scaler["scale"] = 2.0


def rows_of(monitor):
    [found] = [f for f in monitor.findings if "restored" in f.kind]
    assert {f.kind for f in monitor.findings if f.severity == "error"} <= {"not_restored"}
    return {row["part"]: (row["was"], row["now"]) for row in found.rows if not row["equal"]}


def plain(folder, part, rank=None):
    """A loop of its own; under DistributedDataParallel with a rank."""
    torch.manual_seed(0)
    model = Model() if rank is None else torch.nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with Monitor(
        model, optimizer, scaler=scaler, log=folder / "run-{rank}.jsonl", audits=True
    ) as monitor:
        monitor.schedulers, step, path = [scheduler], 0, folder / f"{rank}.pt"
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        parts = (model, optimizer, scheduler, scaler, average)
        # A dict of tensors is as good as the module.
        monitor.ema = average if rank is None else dict(average.state_dict())
        if part is not None:
            step, states, older, random, kept = torch.load(path)
            lose(part, *states[1:4])
            states[0] = older if part == "weights" else states[0]
            for one, state in zip(parts, states, strict=True):
                if (one, part) != (average, "EMA"):
                    one.load_state_dict(state)
            if part == "EMA":
                average.module.load_state_dict(model.state_dict())
            monitor.load_state_dict(json.loads(kept))
            if part != "random states":
                torch.set_rng_state(random)
        data = batches(60, seed=rank or 0)
        begin = {"data again": 0, "data skipped": step + 2}.get(part, step)
        for step, tokens in enumerate(data[begin : begin + STEPS - step], step + 1):
            monitor.batch_ready(tokens)
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits.float(), tokens[:, 1:].flatten())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            monitor.check_before_step(loss)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            if step == 2 and part is None:
                older = copy.deepcopy(model.state_dict())
            if step == SAVED and part is None:
                states = [one.state_dict() for one in parts]
                kept = json.dumps(monitor.state_dict())
                torch.save((step, states, older, torch.get_rng_state(), kept), path)
    return monitor


def on_rank(rank, folder, parts):
    plain(folder, None, rank)
    return {part: rows_of(plain(_copy(folder, part), part, rank)) for part in parts}


def _copy(folder, part):
    return shutil.copytree(folder, folder.parent / f"{folder.name}-{part}", dirs_exist_ok=True)
