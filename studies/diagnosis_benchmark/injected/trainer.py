"""A small data-parallel training over gloo with realistic logs and no fault code.

`Hooks` are called at each point of the training, as trainer callbacks are. A fault changes the
trainer's state in a hook.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import socket
import statistics
import time
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroupGloo, distributed_c10d

from studies.diagnosis_benchmark.injected.logs import step_line
from studies.diagnosis_benchmark.injected.plan import Settings
from studies.diagnosis_benchmark.injected.storage import BATCH, VOCABULARY, WIDTH, Loader

VERSION = "2.4.1"
#: Mean losses that are remembered, and by how many times their median one is a spike.
REMEMBERED, SPIKE = 5, 50.0
#: torch takes no options for gloo from its callers, though the constructor has them.
TORCH: Any = distributed_c10d
GLOO: Any = ProcessGroupGloo


class Hooks(Protocol):
    def at(self, stage: str, step: int | None, trainer: Trainer) -> None: ...

    def stepped(self, step: int, seconds: float) -> None: ...


class Model(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.body = nn.Linear(8 * WIDTH, hidden)
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(self.embedding(tokens).flatten(1))))


class Trainer:
    """One rank of the training; the variables of its process say which."""

    def __init__(
        self, settings: Settings, noise: dict[str, Any], log: logging.Logger, hooks: Hooks
    ) -> None:
        self.settings, self.noise, self.log, self.hooks = settings, noise, log, hooks
        self.step: int | None = None
        self.output = Path(os.environ["OUTPUT_DIR"])
        self.staging_bytes, self.passes = 1 << 16, 1
        self.extra_state: dict[str, Any] = {}
        self.own_seconds: list[float] = []
        self.step_seconds: list[float] = []
        self.losses: list[float] = []
        self.config: dict[str, Any] = {
            "model": {"hidden": 32},
            "rates": {f"phase_{number}": 0.01 / (number + 1) for number in range(64)},
            "evaluation": {"batches": 2},
            "checkpoint": {"name": "shard"},
        }

    def main(self) -> None:
        """Raises what ends the training, SystemExit where it has been logged."""
        try:
            self.run()
        except Exception:
            if not self.settings.caught:
                raise
            self.log.exception("training failed at step %s", self.step)
            raise SystemExit(1) from None

    def run(self) -> None:
        self.launch()
        self.initialise()
        self.load_data()
        self.train()
        self.log.info("training finished after %d steps", self.settings.steps)
        dist.destroy_process_group()
        if self.rank == 0:
            self.log.info("all done, results are in %s", self.output)

    def launch(self) -> None:
        variables = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        said = " ".join(f"{name}={os.environ.get(name, '-')}" for name in variables)
        node = os.environ["NODE_NAME"]
        if self.settings.addresses:
            node += f" ({os.environ['NODE_ADDRESS']})"
        self.log.info("starting on %s pid %d: %s", node, os.getpid(), said)
        versions = platform.python_version(), torch.__version__, torch.get_num_threads()
        self.log.info("python %s, torch %s, threads %d", *versions)
        rank = int(os.environ.get("RANK", -1))
        if self.noise["error_on_all"]:
            self.log.error("flash_attn is not installed, falling back to the default attention")
        if self.noise["error_on"] == rank:
            self.log.error("cannot read /sys/class/infiniband: no such file, assuming ethernet")
        if self.noise["warning_on_all"]:
            warnings.warn("the option 'fused_kernels' is deprecated and ignored", stacklevel=1)

    def initialise(self) -> None:
        version = os.environ.get("TOKENIZER_VERSION")
        if version != VERSION:
            raise RuntimeError(f"tokenizer {VERSION} is required, found {version}")
        own = os.environ["NODE_ADDRESS"] if self.settings.addresses else ""
        with bound_to(own):
            dist.init_process_group("gloo", timeout=timedelta(seconds=self.settings.init_timeout))
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.log.info(
            "process group initialised: backend gloo, rank %d, world size %d", self.rank, self.world
        )
        # Long for those who start late, short once all are there.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self.settings.timeout))
        self.hooks.at("initialise", None, self)
        torch.manual_seed(0)
        self.model = Model(self.config["model"]["hidden"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        dist.broadcast(self._flat([one.data for one in self.model.parameters()]), 0)
        count = sum(one.numel() for one in self.model.parameters())
        self.log.info("model built: %d parameters", count)
        if self.rank == 0:
            for name, one in self.model.named_parameters():
                self.log.info("  %s %s", name, tuple(one.shape))
            self.log.info("config: %s", {key: self.config[key] for key in ("model", "evaluation")})

    def load_data(self) -> None:
        folder = Path(os.environ["DATA_DIR"])
        self.log.info("loading dataset from %s", folder)
        self.loader = Loader(folder, self.rank, checksums=self.settings.checksums)
        self.hooks.at("load data", None, self)
        self.log.info("dataset loaded: %d records in %s", self.loader.read(), self.loader.path.name)
        dist.barrier()

    def train(self) -> None:
        if self.rank == 0:
            self.log.info("start training for %d steps", self.settings.steps)
        step = 0
        while step < self.settings.steps:
            self.step = step = step + 1
            self._noise()
            self.train_step(step)
            if step % self.settings.evaluate_every == 0:
                self.evaluate(step)
            if step % self.settings.save_every == 0:
                self.save_checkpoint(step)

    def train_step(self, step: int) -> None:
        self.hooks.at("train", step, self)
        start = time.perf_counter()
        tokens, weights = self.loader.next_batch()
        loaded = time.perf_counter()
        loss = self._loss(tokens, weights)
        if self.settings.nan_check == "local" and not math.isfinite(loss.item()):
            raise FloatingPointError(f"loss is {loss.item()} at step {step} on rank {self.rank}")
        loss.backward()
        if self.settings.gradient_check:
            self._check_gradients()
        own = time.perf_counter()
        mean, norm = self._reduce(loss)
        end = time.perf_counter()
        rate = self.config["rates"][f"phase_{step // 4}"]
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self._say_step(step, loss.item(), mean, rate, norm, start, loaded, own, end)
        if not math.isfinite(mean):
            raise FloatingPointError(
                f"mean loss is {mean} at step {step}, this rank's is {loss.item()}"
            )
        if self.settings.spike_guard:
            self._check_spike(mean, loss.item())

    def _loss(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for _ in range(self.passes):
            logits = self.model(tokens)
        each = nn.functional.cross_entropy(logits, tokens[:, 0], reduction="none")
        return (each * weights).mean()

    def _reduce(self, loss: torch.Tensor) -> tuple[float, float]:
        """Mean loss and norm of the gradients, which are the means of all ranks then."""
        parts = [one.grad for one in self.model.parameters() if one.grad is not None]
        flat = torch.cat([self._flat(parts), loss.detach().reshape(1)])
        dist.all_reduce(flat)
        flat /= self.world
        place = 0
        for part in parts:
            part.copy_(flat[place : place + part.numel()].view_as(part))
            place += part.numel()
        return float(flat[-1]), float(flat[:-1].norm())

    @staticmethod
    def _flat(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.reshape(-1) for part in parts])

    def _say_step(
        self, step: int, own_loss: float, mean: float, rate: float, norm: float, start: float,
        loaded: float, own: float, end: float,
    ) -> None:  # fmt: skip
        settings, mine = self.settings, own - start
        if self._says_steps():
            loss = own_loss if settings.step_lines == "all" else mean
            self.log.info(step_line(settings.style, step=step, steps=settings.steps, loss=loss,
                                    rate=rate, norm=norm, seconds=end - start,
                                    samples=step * BATCH * self.world))  # fmt: skip
        if settings.timings:
            parts = (1e3 * (loaded - start), 1e3 * (own - loaded), 1e3 * (end - own))
            said = "data %.1f | forward-backward %.1f | all-reduce %.1f" % parts  # noqa: UP031
            self.log.info("time (ms) of step %d: %s", step, said)
        usual = statistics.median(self.own_seconds) if len(self.own_seconds) > 4 else math.inf
        if settings.watchdog and mine > max(4 * usual, 0.05):
            self.log.warning(
                "step %d took %.3f s before the all-reduce, usual are %.3f s", step, mine, usual
            )
        self.own_seconds.append(mine)
        self.step_seconds.append(end - start)
        self.hooks.stepped(step, mine)

    def _says_steps(self) -> bool:
        by = {"first": self.rank == 0, "last": self.rank == self.world - 1, "all": True}
        return by[self.settings.step_lines]

    def evaluate(self, step: int) -> None:
        self.hooks.at("evaluate", step, self)
        if self.rank == 0:
            self.log.info("evaluation at step %d starts", step)
        with torch.no_grad():
            count = self.config["evaluation"]["batches"]
            losses = [self._loss(*self.loader.next_batch()) for _ in range(count)]
            total = torch.stack(losses).mean()
        dist.all_reduce(total)
        if self._says_steps():
            mean = total.item() / self.world
            self.log.info("evaluation at step %d: validation loss %.4f", step, mean)
        if self.settings.parameter_check:
            self._check_parameters()

    def save_checkpoint(self, step: int) -> None:
        """Each rank saves a shard, rank 0 says when all have."""
        self.hooks.at("checkpoint", step, self)
        start = time.perf_counter()
        staging = torch.empty(self.staging_bytes, dtype=torch.uint8)
        name = f"{self.config['checkpoint']['name']}_{self.rank:05d}.pt"
        state = {"model": self.model.state_dict(), "step": step, **self.extra_state}
        with open(self.output / name, "wb") as file:
            torch.save(state, file)
        del staging
        dist.barrier()
        if self.rank == 0 or self.settings.step_lines == "all":
            took = time.perf_counter() - start
            self.log.info("checkpoint of step %d saved to %s in %.2f s", step, self.output, took)

    # Checks of its own consistency, where the settings ask for them.

    def _check_gradients(self) -> None:
        # Before they are reduced, when it still shows whose they are.
        parts = [one.grad.norm() for one in self.model.parameters() if one.grad is not None]
        norm = float(torch.stack(parts).norm())
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"rank {self.rank}: norm of the local gradients is {norm} at step {self.step}"
            )

    def _check_spike(self, mean: float, own: float) -> None:
        past = self.losses[-REMEMBERED:]
        self.losses.append(mean)
        if len(past) == REMEMBERED and mean > SPIKE * statistics.median(past):
            times = mean / statistics.median(past)
            raise RuntimeError(
                f"mean loss {mean:.4g} at step {self.step} is {times:.0f} times the usual, "
                f"this rank's is {own:.4g}"
            )

    def _check_parameters(self) -> None:
        """By a checksum of each rank's; who is alone is told where the settings say so."""
        flat = self._flat([one.data for one in self.model.parameters()])
        mine = torch.tensor([zlib.crc32(flat.numpy().tobytes())])
        found = [torch.zeros_like(mine) for _ in range(self.world)]
        dist.all_gather(found, mine)
        sums = [int(one) for one in found]
        usual = statistics.mode(sums)
        others = {rank: one for rank, one in enumerate(sums) if one != usual}
        if not others:
            if self.rank == 0:
                self.log.info("parameters agree on all ranks: crc32 %08x", usual)
            return
        said = "are not the same on all ranks"
        if self.settings.parameter_check == "names":
            which = ", ".join(f"rank {rank} has {one:08x}" for rank, one in others.items())
            said = f"differ: {which}, the others {usual:08x}"
        raise RuntimeError(f"parameters of step {self.step} {said}")

    def _noise(self) -> None:
        if [self.rank, self.step] in self.noise["retries"]:
            self._push_metrics("metrics server")
        if [self.rank, self.step] in self.noise["tracebacks"]:
            try:
                socket.create_connection(("127.0.0.1", 9), timeout=1)
            except OSError:
                self.log.warning("could not push telemetry, going on without it", exc_info=True)

    def _push_metrics(self, server: str) -> None:
        """The port of the first attempt refuses, as a server that restarts does."""
        for attempt in (1, 2):
            try:
                if attempt == 1:
                    socket.create_connection(("127.0.0.1", 9), timeout=1)
                self.log.info("%s answered at attempt %d", server, attempt)
            except OSError as error:
                self.log.warning("%s: %s (attempt %d of 3), retrying", server, error, attempt)


@contextmanager
def bound_to(address: str) -> Iterator[None]:
    """Process groups made meanwhile listen at `address`; "" leaves it to torch.

    Who connects has the address that the kernel gives it, on one machine 127.0.0.1.
    """

    class Bound(ProcessGroupGloo):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            options = GLOO._Options()
            options._timeout = timeout
            options._devices = [ProcessGroupGloo.create_device(hostname=address)]
            options._threads = 2
            super().__init__(store, rank, size, options)

    TORCH.ProcessGroupGloo = Bound if address else ProcessGroupGloo
    try:
        yield
    finally:
        TORCH.ProcessGroupGloo = ProcessGroupGloo
