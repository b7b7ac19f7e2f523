"""Faults that change the state of one process, or request an external action.

No frame of this module is on the stack when the process fails: the traceback is the trainer's.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from studies.diagnosis_benchmark.injected import blind_faults
from studies.diagnosis_benchmark.injected.plan import Plan
from studies.diagnosis_benchmark.injected.storage import BATCH, WIDTH
from studies.diagnosis_benchmark.injected.variants import variant_of

if TYPE_CHECKING:
    from studies.diagnosis_benchmark.injected.trainer import Trainer

GIGABYTE = 1 << 30
#: Of the model, to learn how long one takes now.
TRIAL_PASSES = 50


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
        done: dict[str, Any] = (
            {} if self.variant.outside else CHANGES[self.variant.name](trainer, stage)
        )
        self._say(event="onset", stage=stage, step=step, done=done, outside=self.variant.outside)
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


def _bad_value(trainer: Trainer, stage: str) -> dict[str, Any]:
    if stage == "load data":
        _rewrite(trainer, lambda text: text.replace(" ", " \ufffd", 1))
    else:
        trainer.loader.place = 0
        trainer.loader.records[1] = trainer.loader.records[1].replace(" ", " 1e", 1)
    return {"shard": trainer.loader.path.name}


def _rewrite(trainer: Trainer, change: Callable[[str], str]) -> None:
    """The shard with other records, as whoever prepared it would have written them."""
    import gzip
    import zlib

    loader = trainer.loader
    text = gzip.decompress(loader.path.read_bytes()).decode()
    packed = gzip.compress(change(text).encode(), mtime=0)
    loader.path.write_bytes(packed)
    # Another index for this rank alone: the others read theirs at this moment.
    index = json.loads((loader.folder / "index.json").read_text())
    index[loader.path.name]["crc32"] = zlib.crc32(packed)
    own = loader.folder / f"part_{loader.path.name[:11]}"
    own.mkdir()
    (own / "index.json").write_text(json.dumps(index))
    loader.folder, loader.path = own, loader.path.rename(own / loader.path.name)


def _missing_key(trainer: Trainer, stage: str) -> dict[str, Any]:
    section, key = {
        "initialise": ("model", "hidden"),
        "train": ("rates", f"phase_{(trainer.step or 0) // 4}"),
        "evaluate": ("evaluation", "batches"),
        "checkpoint": ("checkpoint", "name"),
    }[stage]
    del trainer.config[section][key]
    return {"key": key}


def _wrong_shape(trainer: Trainer, stage: str) -> dict[str, Any]:
    loader = trainer.loader
    loader.place = 0
    loader.records = ["7 " + record for record in loader.records]
    return {"width": "one more"}


def _out_of_range(trainer: Trainer, stage: str) -> dict[str, Any]:
    loader = trainer.loader
    loader.place = 0
    loader.records[0] = "50257 " + loader.records[0].split(" ", 1)[1]
    return {"token": 50257}


def _not_picklable(trainer: Trainer, stage: str) -> dict[str, Any]:
    trainer.extra_state = {"lock": threading.Lock()}
    return {"state": "a lock"}


def _file_too_large(trainer: Trainer, stage: str) -> dict[str, Any]:
    # Not for what is written to the log, which goes through a pipe.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    return {"limit_bytes": 4096}


def _stalled_loader(trainer: Trainer, stage: str) -> dict[str, Any]:
    trainer.loader.ready.clear()
    return {"waits": "for the storage"}


def _stuck_write(trainer: Trainer, stage: str) -> dict[str, Any]:
    path = trainer.output / f"{trainer.config['checkpoint']['name']}_{trainer.rank:05d}.pt"
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return {"waits": "for a reader of its file"}


def _other_order(trainer: Trainer, stage: str) -> dict[str, Any]:
    # It evaluates while the others train: collectives of other sizes meet.
    trainer.train_step = lambda step: trainer.evaluate(step)  # type: ignore[method-assign]
    return {"collective": "of the evaluation"}


def _slow_storage(trainer: Trainer, stage: str) -> dict[str, Any]:
    whole = statistics.median(trainer.step_seconds)
    trainer.loader.delay = min(12 * whole, 2.5)
    return {"delay": trainer.loader.delay, "usual_step": whole}


def _slow_compute(trainer: Trainer, stage: str) -> dict[str, Any]:
    whole = statistics.median(trainer.step_seconds)
    start = time.perf_counter()
    for _ in range(TRIAL_PASSES):
        trainer.model(torch.zeros(BATCH, WIDTH, dtype=torch.long))
    each = (time.perf_counter() - start) / TRIAL_PASSES
    trainer.passes = int(min(12 * whole, 1.5) / each) + 1
    return {"passes": trainer.passes, "usual_step": whole}


def _nan(trainer: Trainer, stage: str) -> dict[str, Any]:
    loader = trainer.loader
    loader.place = 0
    loader.records[2] = loader.records[2].split(" | ")[0] + " | nan"
    return {"weight": "nan"}


def _damaged_shard(trainer: Trainer, stage: str) -> dict[str, Any]:
    path = trainer.loader.path
    packed = bytearray(path.read_bytes())
    for place in range(len(packed) // 2, len(packed) // 2 + 8):
        packed[place] ^= 0xFF
    path.write_bytes(bytes(packed))
    trainer.loader.place = len(trainer.loader.records)
    return {"bytes_changed": 8}


def _cut_shard(trainer: Trainer, stage: str) -> dict[str, Any]:
    path = trainer.loader.path
    packed = path.read_bytes()
    path.write_bytes(packed[: len(packed) // 2])
    trainer.loader.place = len(trainer.loader.records)
    return {"bytes_left": len(packed) // 2}


def _address_space(trainer: Trainer, stage: str) -> dict[str, Any]:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + GIGABYTE // 4
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if stage == "load data":
        trainer.loader.buffer_bytes = GIGABYTE
    elif stage == "checkpoint":
        trainer.staging_bytes = GIGABYTE
    else:
        trainer.loader.copies = 1 << 20
    return {"limit_bytes": limit}


def _sockets(trainer: Trainer, *, store: bool) -> dict[str, Any]:
    """Shuts the process's connections down, both ways, as a network that is gone."""
    port = int(os.environ["MASTER_PORT"])
    shut = 0
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            if not entry.is_socket():
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as one:
                ends = {one.getsockname()[1], one.getpeername()[1]}
                if store or port not in ends:
                    one.shutdown(socket.SHUT_RDWR)
                    shut += 1
        except (OSError, IndexError):
            # Closed meanwhile, listening only, or no socket of the internet's.
            continue
    return {"sockets": shut}


CHANGES: dict[str, Callable[[Trainer, str], dict[str, Any]]] = {
    "bad value": _bad_value,
    "missing key": _missing_key,
    "wrong shape": _wrong_shape,
    "out of range": _out_of_range,
    "not picklable": _not_picklable,
    "file too large": _file_too_large,
    "stalled loader": _stalled_loader,
    "stuck write": _stuck_write,
    "other order": _other_order,
    "slow storage": _slow_storage,
    "slow compute": _slow_compute,
    "nan": _nan,
    "damaged shard": _damaged_shard,
    "cut shard": _cut_shard,
    "address space": _address_space,
    "all sockets": lambda trainer, stage: _sockets(trainer, store=True),
    "sockets of gloo": lambda trainer, stage: _sockets(trainer, store=False),
    **blind_faults.CHANGES,
}
