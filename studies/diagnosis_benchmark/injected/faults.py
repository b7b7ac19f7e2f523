"""Faults that change the state of one process, or request an external action.

No frame of this module is on the stack when the process fails: the traceback is the trainer's.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import resource
import socket
import statistics
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from studies.diagnosis_benchmark.injected import parts
from studies.diagnosis_benchmark.injected.plan import Plan
from studies.diagnosis_benchmark.injected.storage import BATCH, WIDTH
from studies.diagnosis_benchmark.injected.variants import variant_of

if TYPE_CHECKING:
    from studies.diagnosis_benchmark.injected.trainer import Trainer

GIGABYTE = 1 << 30
#: Of the model, to learn how long one takes now.
TRIAL_PASSES = 50
#: Address space that is left where no thread can be started any more: less than a stack.
ROOM_BYTES = 1 << 20
#: Sockets that nobody answers, which must not be closed.
KEPT: list[socket.socket] = []


class Fault:
    """The hooks of a trainer; on every rank but the faulty one they do nothing.

    Args:
        tell: descriptor to which the launcher listens, lines of JSON.
        answer: descriptor on which the launcher answers a request from outside.
    """

    def __init__(self, plan: Plan, *, faulty: bool, tell: int, answer: int) -> None:
        self.plan, self.faulty, self.tell, self.answer = plan, faulty, tell, answer
        self.variant = variant_of(plan.kind, plan.variant) if plan.faulty else None

    def at(self, stage: str, step: int | None, trainer: Trainer) -> None:
        if not self.faulty or self.variant is None or self.variant.environment:
            return
        if (stage, step) != (self.plan.stage, self.plan.step):
            return
        if not self.variant.outside:
            getattr(Change(trainer, stage), method_of(self.variant.name))()
        self._say(event="onset", stage=stage, step=step, outside=self.variant.outside)
        if self.variant.outside in ("kill", "stop"):
            os.read(self.answer, 1)

    def stepped(self, step: int, seconds: float) -> None:
        if self.faulty:
            self._say(event="step", step=step, seconds=seconds)

    def _say(self, **message: Any) -> None:
        os.write(self.tell, (json.dumps({"time": time.time(), **message}) + "\n").encode())


def wrong_environment(variant: str, variables: dict[str, str]) -> dict[str, str]:
    """The variables of the faulty rank's process."""
    changed = dict(variables)
    if variant == "variable missing":
        del changed["RANK"]
    elif variant == "wrong port":
        changed["MASTER_PORT"] = changed["UNUSED_PORT"]
    elif variant == "wrong rank":
        changed["RANK"] = str(int(changed["RANK"]) - 1)
    elif variant == "wrong world size":
        changed["WORLD_SIZE"] = str(int(changed["WORLD_SIZE"]) + 1)
    elif variant == "wrong version":
        changed["TOKENIZER_VERSION"] = "2.1.0"
    elif variant == "wrong data path":
        changed["DATA_DIR"] += "_v2"
    return changed


def method_of(variant: str) -> str:
    """Of `Change`."""
    return variant.replace(" ", "_")


class Change:
    """The changes of state: a method for each variant, by its name."""

    def __init__(self, trainer: Trainer, stage: str) -> None:
        self.trainer, self.stage = trainer, stage

    def _put(self, part: Callable[..., Any], *given: Any, **named: Any) -> None:
        """The part, in the place of what this stage calls next."""
        holder: Any
        holder, name = {
            "load data": (getattr(self.trainer, "loader", None), "read"),
            "checkpoint": (self.trainer.model, "state_dict"),
        }.get(self.stage, (getattr(self.trainer, "loader", None), "next_batch"))
        setattr(holder, name, part(getattr(holder, name), *given, **named).run)

    def _reread(self) -> None:
        self.trainer.loader.place = len(self.trainer.loader.records)

    def _edit_record(self, place: int, change: Callable[[str], str]) -> None:
        loader = self.trainer.loader
        loader.place = 0
        loader.records[place] = change(loader.records[place])

    @property
    def _own_checkpoint(self) -> Path:
        name = self.trainer.config["checkpoint"]["name"]
        path = self.trainer.output / f"{name}_{self.trainer.rank:05d}.pt"
        path.unlink(missing_ok=True)
        return path

    def _own_index(self, change: Callable[[str], str]) -> None:
        """Another index for this rank alone: the others read theirs at this moment."""
        loader = self.trainer.loader
        text = (loader.folder / "index.json").read_text()
        loader.folder = loader.folder / f"part_{self.trainer.rank}"
        loader.folder.mkdir()
        (loader.folder / "index.json").write_text(change(text))

    # -- exceptions

    def bad_value(self) -> None:
        if self.stage != "load data":
            self._edit_record(1, lambda record: record.replace(" ", " 1e", 1))
            return
        # The shard with another record, as whoever prepared it would have written it.
        path = self.trainer.loader.path
        text = gzip.decompress(path.read_bytes()).decode().replace(" ", " \ufffd", 1)
        packed = gzip.compress(text.encode(), mtime=0)

        def with_checksum(index: str) -> str:
            entries = json.loads(index)
            entries[path.name]["crc32"] = zlib.crc32(packed)
            return json.dumps(entries)

        path.write_bytes(packed)
        self._own_index(with_checksum)
        self.trainer.loader.path = path.rename(self.trainer.loader.folder / path.name)

    def missing_key(self) -> None:
        section, key = {
            "initialise": ("model", "hidden"),
            "train": ("rates", f"phase_{(self.trainer.step or 0) // 4}"),
            "evaluate": ("evaluation", "batches"),
            "checkpoint": ("checkpoint", "name"),
        }[self.stage]
        del self.trainer.config[section][key]

    def wrong_shape(self) -> None:
        loader = self.trainer.loader
        loader.place, loader.records = 0, ["7 " + record for record in loader.records]

    def out_of_range(self) -> None:
        self._edit_record(0, lambda record: "50257 " + record.split(" ", 1)[1])

    def not_picklable(self) -> None:
        self.trainer.extra_state = {"lock": threading.Lock()}

    def file_too_large(self) -> None:
        # Not for what is written to the log, which goes through a pipe.
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    # -- hangs and slow ranks

    def stalled_loader(self) -> None:
        self.trainer.loader.ready.clear()

    def stuck_write(self) -> None:
        os.mkfifo(self._own_checkpoint)

    def other_order(self) -> None:
        # It evaluates while the others train: collectives of other sizes meet.
        self.trainer.train_step = self.trainer.evaluate  # type: ignore[method-assign]

    def slow_storage(self) -> None:
        self.trainer.loader.delay = min(12 * statistics.median(self.trainer.step_seconds), 2.5)

    def slow_compute(self) -> None:
        start = time.perf_counter()
        for _ in range(TRIAL_PASSES):
            self.trainer.model(torch.zeros(BATCH, WIDTH, dtype=torch.long))
        each = (time.perf_counter() - start) / TRIAL_PASSES
        usual = statistics.median(self.trainer.step_seconds)
        self.trainer.passes = int(min(12 * usual, 1.5) / each) + 1

    # -- data, memory, network

    def nan(self) -> None:
        self._edit_record(2, lambda record: record.split(" | ")[0] + " | nan")

    def damaged_shard(self) -> None:
        path = self.trainer.loader.path
        packed = bytearray(path.read_bytes())
        for place in range(len(packed) // 2, len(packed) // 2 + 8):
            packed[place] ^= 0xFF
        path.write_bytes(bytes(packed))
        self._reread()

    def cut_shard(self) -> None:
        path = self.trainer.loader.path
        packed = path.read_bytes()
        path.write_bytes(packed[: len(packed) // 2])
        self._reread()

    def address_space(self) -> None:
        limit = _memory_used() + GIGABYTE // 4
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        if self.stage == "load data":
            self.trainer.loader.buffer_bytes = GIGABYTE
        elif self.stage == "checkpoint":
            self.trainer.staging_bytes = GIGABYTE
        else:
            self.trainer.loader.copies = 1 << 20

    def all_sockets(self) -> None:
        _shut_sockets(but_of_port=None)

    def sockets_of_gloo(self) -> None:
        _shut_sockets(but_of_port=int(os.environ["MASTER_PORT"]))

    # -- ends of the process

    def segmentation_fault(self) -> None:
        self._put(parts.NativeCopy, 0)

    def heap_corruption(self) -> None:
        self._put(parts.NativeBuffer, 24)

    def bus_error(self) -> None:
        path = self.trainer.output / f"cache_{self.trainer.rank:05d}.bin"
        self._put(parts.MappedCache, path)
        os.truncate(path, 0)

    def early_exit(self) -> None:
        self._put(parts.Deadline, time.monotonic(), 0, at_once=False)

    def silent_exit(self) -> None:
        self._put(parts.Deadline, time.monotonic(), 3, at_once=True)

    # -- storage

    def folder_gone(self) -> None:
        self.trainer.output = self.trainer.output / os.environ["NODE_NAME"]

    def not_a_folder(self) -> None:
        self.trainer.output /= f"{os.environ['NODE_NAME']}_{self.trainer.rank}"
        self.trainer.output.write_bytes(b"")

    def disk_full(self) -> None:
        self._own_checkpoint.symlink_to("/dev/full")

    def shard_deleted(self) -> None:
        self.trainer.loader.path.unlink()
        self._reread()

    def bad_disk(self) -> None:
        # The kernel's own EIO: nothing is mapped at the start of a process's memory.
        self.shard_deleted()
        self.trainer.loader.path.symlink_to("/proc/self/mem")

    # -- other code or settings on one rank

    def hidden_size(self) -> None:
        self.trainer.config["model"]["hidden"] = 48

    def frozen_layer(self) -> None:
        weight = self.trainer.model.embedding.weight
        weight.requires_grad_(False)
        weight.grad = None

    def other_precision(self) -> None:
        self.trainer.model.double()

    def other_interval(self) -> None:
        # It saves now and the others don't, or the other way round.
        step, settings = self.trainer.step or 1, self.trainer.settings
        every = step if step % settings.save_every else 10 * settings.steps
        self.trainer.settings = replace(settings, save_every=every)

    def fewer_steps(self) -> None:
        self.trainer.settings = replace(self.trainer.settings, steps=self.trainer.step or 1)

    # -- deadlocks

    def lock(self) -> None:
        self._put(parts.SharedIndex)

    def empty_queue(self) -> None:
        self._put(parts.Prefetcher)
        self.shard_deleted()

    def endless_loop(self) -> None:
        self._put(parts.Sampler, 2.0)

    def silent_service(self) -> None:
        KEPT.append(socket.create_server((os.environ["NODE_ADDRESS"], 0)))
        self._put(parts.Service, KEPT[-1].getsockname())

    def group_alone(self) -> None:
        group = parts.GroupOfItsOwn(self.trainer._loss)
        self.trainer._loss = group.run  # type: ignore[method-assign, assignment]

    def message_of_nobody(self) -> None:
        relay = parts.Relay(self.trainer._loss)
        self.trainer._loss = relay.run  # type: ignore[method-assign, assignment]

    # -- limits of the process

    def cpu_time(self) -> None:
        limit = math.floor(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 10))
        self._put(parts.Sampler, 2.0)

    def threads(self) -> None:
        self._put(parts.Prefetcher)
        limit = _memory_used() + ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def recursion(self) -> None:
        name, deep = self.trainer.loader.path.name, 100_000
        self._own_index(
            lambda index: f'{index[:-1]}, "{name}.parts": {"[" * deep}{"]" * deep}' + "}"
        )
        self._reread()

    def open_files(self) -> None:
        """Leaks descriptors up to the limit."""
        os.open("/dev/null", os.O_RDONLY)
        limit = max(int(one.name) for one in Path("/proc/self/fd").iterdir()) + 16
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        try:
            while True:
                os.open("/dev/null", os.O_RDONLY)
        except OSError:
            self._reread()

    # -- numerics

    def infinite_gradient(self) -> None:
        # More than a float of 32 bits can hold, where a gradient is not 0.
        self.trainer.model.head.weight.register_hook(lambda gradient: gradient * 1e30 * 1e30)

    def wrong_rate(self) -> None:
        self.trainer.config["rates"] = dict.fromkeys(self.trainer.config["rates"], 1e16)

    def flipped_bit(self) -> None:
        weight = self.trainer.model.body.weight.data.view(-1)
        weight[7:8].view(torch.int32).bitwise_xor_(1 << 22)

    def exploding_loss(self) -> None:
        self._edit_record(2, lambda record: record.split(" | ")[0] + " | 1e6")


def _memory_used() -> int:
    # Without a library call that starts a thread or takes memory of its own.
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _shut_sockets(*, but_of_port: int | None) -> None:
    """Shuts the process's connections down, both ways, as a network that is gone."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            if not entry.is_socket():
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if but_of_port not in (connection.getsockname()[1], connection.getpeername()[1]):
                    connection.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError):
            # Closed meanwhile, listening only, or no socket of the internet's.
            continue
