"""Faults of the split `blind`, each as a change of process state, as in `faults`."""

from __future__ import annotations

import math
import os
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from studies.diagnosis_benchmark.injected import parts
from studies.diagnosis_benchmark.injected.storage import shard_name

if TYPE_CHECKING:
    from studies.diagnosis_benchmark.injected.trainer import Trainer

Done = dict[str, Any]
#: Address space that is left where no thread can be started any more: less than a stack.
ROOM_BYTES = 1 << 20
#: Sockets that nobody answers, which must not be closed.
KEPT: list[socket.socket] = []


def _put(trainer: Trainer, stage: str, part: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """The part, in the place of what this stage calls next."""
    holder: Any
    holder, name = {
        "load data": (getattr(trainer, "loader", None), "read"),
        "train": (getattr(trainer, "loader", None), "next_batch"),
        "evaluate": (getattr(trainer, "loader", None), "next_batch"),
        "checkpoint": (trainer.model, "state_dict"),
    }[stage]
    made = part(getattr(holder, name), *given, **named)
    setattr(holder, name, made.run)
    return made


def _segmentation_fault(trainer: Trainer, stage: str) -> Done:
    _put(trainer, stage, parts.NativeCopy, 0)
    return {"address": 0}


def _heap_corruption(trainer: Trainer, stage: str) -> Done:
    _put(trainer, stage, parts.NativeBuffer, 24)
    return {"freed": "24 bytes behind what was given"}


def _bus_error(trainer: Trainer, stage: str) -> Done:
    path = trainer.output / f"cache_{trainer.rank:05d}.bin"
    _put(trainer, stage, parts.MappedCache, path)
    os.truncate(path, 0)
    return {"file": path.name}


def _early_exit(trainer: Trainer, stage: str) -> Done:
    _put(trainer, stage, parts.Deadline, time.monotonic(), 0, at_once=False)
    return {"code": 0}


def _silent_exit(trainer: Trainer, stage: str) -> Done:
    _put(trainer, stage, parts.Deadline, time.monotonic(), 3, at_once=True)
    return {"code": 3}


def _folder_gone(trainer: Trainer, stage: str) -> Done:
    trainer.output = trainer.output / os.environ["NODE_NAME"]
    return {"folder": trainer.output.name}


def _not_a_folder(trainer: Trainer, stage: str) -> Done:
    trainer.output = trainer.output / f"{os.environ['NODE_NAME']}_{trainer.rank}"
    trainer.output.write_bytes(b"")
    return {"file": trainer.output.name}


def _disk_full(trainer: Trainer, stage: str) -> Done:
    path = trainer.output / f"{trainer.config['checkpoint']['name']}_{trainer.rank:05d}.pt"
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/full")
    return {"file": path.name}


def _reread(trainer: Trainer) -> None:
    trainer.loader.place = len(trainer.loader.records)


def _shard_deleted(trainer: Trainer, stage: str) -> Done:
    trainer.loader.path.unlink()
    _reread(trainer)
    return {"shard": trainer.loader.path.name}


def _bad_disk(trainer: Trainer, stage: str) -> Done:
    # The kernel's own EIO: nothing is mapped at the start of a process's memory.
    trainer.loader.path.unlink()
    trainer.loader.path.symlink_to("/proc/self/mem")
    _reread(trainer)
    return {"shard": trainer.loader.path.name}


def _hidden_size(trainer: Trainer, stage: str) -> Done:
    trainer.config["model"]["hidden"] = 48
    return {"hidden": 48}


def _frozen_layer(trainer: Trainer, stage: str) -> Done:
    weight = trainer.model.embedding.weight
    weight.requires_grad_(False)
    weight.grad = None
    return {"frozen": "embedding"}


def _other_precision(trainer: Trainer, stage: str) -> Done:
    trainer.model.double()
    return {"precision": "float64"}


def _other_interval(trainer: Trainer, stage: str) -> Done:
    """It saves now and the others don't, or the other way round."""
    step = trainer.step or 1
    never = 10 * trainer.settings.steps
    every = step if step % trainer.settings.save_every else never
    trainer.settings = replace(trainer.settings, save_every=every)
    return {"save_every": every}


def _fewer_steps(trainer: Trainer, stage: str) -> Done:
    assert trainer.step is not None
    trainer.settings = replace(trainer.settings, steps=trainer.step)
    return {"steps": trainer.step}


def _lock(trainer: Trainer, stage: str) -> Done:
    _put(trainer, stage, parts.SharedIndex)
    return {"held": "by a thread that waits"}


def _empty_queue(trainer: Trainer, stage: str) -> Done:
    _put(trainer, stage, parts.Prefetcher)
    _shard_deleted(trainer, stage)
    return {"thread": "ends by an exception"}


def _endless_loop(trainer: Trainer, stage: str) -> Done:
    _put(trainer, stage, parts.Sampler, 2.0)
    return {"least": 2.0}


def _silent_service(trainer: Trainer, stage: str) -> Done:
    server = socket.create_server((os.environ["NODE_ADDRESS"], 0))
    KEPT.append(server)
    _put(trainer, stage, parts.Service, server.getsockname())
    return {"waits": "for an answer"}


def _group_alone(trainer: Trainer, stage: str) -> Done:
    trainer._loss = parts.GroupOfItsOwn(trainer._loss).run  # type: ignore[method-assign, assignment]
    return {"group": "of all ranks, which only this one makes"}


def _message_of_nobody(trainer: Trainer, stage: str) -> Done:
    trainer._loss = parts.Relay(trainer._loss).run  # type: ignore[method-assign, assignment]
    return {"waits": f"for rank {trainer.rank - 1}"}


def _cpu_time(trainer: Trainer, stage: str) -> Done:
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    limit = math.floor(used) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 10))
    _put(trainer, stage, parts.Sampler, 2.0)
    return {"limit_seconds": limit}


def _threads(trainer: Trainer, stage: str) -> Done:
    _put(trainer, stage, parts.Prefetcher)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, used + ROOM_BYTES))
    return {"room_bytes": ROOM_BYTES}


def _recursion(trainer: Trainer, stage: str) -> Done:
    """An index of its own, for the others read theirs at this moment."""
    loader = trainer.loader
    text = (loader.folder / "index.json").read_text()
    loader.folder = loader.folder / f"part_{trainer.rank}"
    loader.folder.mkdir()
    deep = 100_000
    entry = f'"{shard_name(trainer.rank)}.parts": {"[" * deep}{"]" * deep}'
    (loader.folder / "index.json").write_text(f"{text[:-1]}, {entry}}}")
    _reread(trainer)
    return {"depth": deep}


def _open_files(trainer: Trainer, stage: str) -> Done:
    """Leaks descriptors up to the limit."""
    held = [os.open("/dev/null", os.O_RDONLY)]
    limit = max(int(one.name) for one in Path("/proc/self/fd").iterdir()) + 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    _reread(trainer)
    return {"limit": limit, "leaked": len(held)}


def _infinite_gradient(trainer: Trainer, stage: str) -> Done:
    # More than a float of 32 bits can hold, where a gradient is not 0.
    trainer.model.head.weight.register_hook(lambda gradient: gradient * 1e30 * 1e30)
    return {"times": "1e60"}


def _wrong_rate(trainer: Trainer, stage: str) -> Done:
    trainer.config["rates"] = dict.fromkeys(trainer.config["rates"], 1e16)
    return {"rate": 1e16}


def _flipped_bit(trainer: Trainer, stage: str) -> Done:
    weight = trainer.model.body.weight.data.view(-1)
    weight[7:8].view(torch.int32).bitwise_xor_(1 << 22)
    return {"bit": 22, "of": "body.weight[7]"}


def _exploding_loss(trainer: Trainer, stage: str) -> Done:
    loader = trainer.loader
    loader.place = 0
    loader.records[2] = loader.records[2].split(" | ")[0] + " | 1e6"
    return {"weight": 1e6}


CHANGES: dict[str, Callable[[Trainer, str], Done]] = {
    "segmentation fault": _segmentation_fault,
    "heap corruption": _heap_corruption,
    "bus error": _bus_error,
    "early exit": _early_exit,
    "silent exit": _silent_exit,
    "folder gone": _folder_gone,
    "not a folder": _not_a_folder,
    "disk full": _disk_full,
    "shard deleted": _shard_deleted,
    "bad disk": _bad_disk,
    "hidden size": _hidden_size,
    "frozen layer": _frozen_layer,
    "other precision": _other_precision,
    "other interval": _other_interval,
    "fewer steps": _fewer_steps,
    "lock": _lock,
    "empty queue": _empty_queue,
    "endless loop": _endless_loop,
    "silent service": _silent_service,
    "group alone": _group_alone,
    "message of nobody": _message_of_nobody,
    "cpu time": _cpu_time,
    "threads": _threads,
    "recursion": _recursion,
    "open files": _open_files,
    "infinite gradient": _infinite_gradient,
    "wrong rate": _wrong_rate,
    "flipped bit": _flipped_bit,
    "exploding loss": _exploding_loss,
}
