"""The training loop: the same steps on every rank, whatever the layout."""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from math import isfinite, nan
from pathlib import Path
from typing import Any

from rmetric._util.strict_json import encode_line, parse_line
from rmetric.logs import record_to_json, start_line
from rmetric.metric import RMetricConfig
from rmetric.records import Record

# Read when CUDA's libraries are loaded: their results are to be the same each time.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record as reported

from rmetric.guard.checkpoints import Checkpoints, FailedSave
from rmetric.guard.guard import Guard
from rmetric.guard.training_state import ModelState
from studies.tiny_llama.data import rows_of
from studies.tiny_llama.parallel import Parallel, StepTotals
from studies.tiny_llama.settings import Injector, TrainingSettings

LOSSES = "losses.jsonl"
MONITORED = "monitor.jsonl"
#: Timeout of collectives; a supervisor detects a hang long before.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm is not finite; the weights were not updated."""


class CheckpointNotSavedError(RuntimeError):
    """All steps are done, but the last checkpoint is not durable."""


@reported
def train(settings: TrainingSettings, device: torch.device) -> None:
    """Train to the last step, or until a stop is requested."""
    prepare(settings, device)
    training = ReferenceTraining(settings, device)
    with training.guard:
        training.run()
    dist.destroy_process_group()  # not after an error: it would wait for ranks that are lost


def prepare(settings: TrainingSettings, device: torch.device) -> None:
    options = settings.options
    first = os.environ.get("RANK", "0") == "0"
    level = logging.INFO if first else logging.ERROR
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("rmetric").setLevel(level)
    torch.set_default_dtype(getattr(torch, options.precision))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(True, warn_only=True)
    else:
        torch.set_num_threads(options.threads)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def device_of(wanted: str) -> torch.device:
    """Device of this rank. Raises ValueError if there is no such GPU."""
    local, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and not found):
        return torch.device("cpu")
    if local >= found:
        raise ValueError(f"local rank {local} needs a GPU of its own, and {found} are to be seen")
    return torch.device("cuda", local)


class ReferenceTraining:
    """Model, optimiser, guard and log of one rank, resumed from the newest good checkpoint."""

    def __init__(self, settings: TrainingSettings, device: torch.device) -> None:
        self.settings, self.options, self.device = settings, settings.options, device
        self.rank = dist.get_rank()
        self.parallel = Parallel(settings.shape, settings.layout, self.options.seed, device)
        self.optimizer = torch.optim.AdamW(
            self.parallel.model.parameters(),
            lr=self.options.rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            foreach=False,  # parameters on different meshes do not go into one call
        )
        self.injector = Injector(settings.folder.path, settings.inject, self.rank)
        self.guard = self._make_guard()
        self.done = self._resumed()
        self.log = self._make_log() if self.rank == 0 else None
        self.monitor: Any = None
        if self.options.monitor:
            from rmetric.monitor import Monitor

            path = settings.folder.path / MONITORED
            model = self.parallel.model
            self.monitor = Monitor(
                model, self.optimizer, log=path, run_id="reference_training", audits=True
            )
        self._began = time.monotonic()

    def run(self) -> None:
        left = self.options.steps - self.done
        for step in range(self.done + 1, self.options.steps + 1):
            self.injector.before(step)
            self.step(step)
            self.done = step
            self.guard.step(step)
            if self.guard.should_stop:
                self._say(f"stopped after step {step}")
                break
            time.sleep(self.options.sleep)
        finished = self.done >= self.options.steps
        if finished and left > 0:
            ended = self.guard.save(self.done, "the training has reached its end")
            if isinstance(ended, FailedSave):
                raise CheckpointNotSavedError(
                    f"step {ended.step}, the last, is not saved: {ended.problem}"
                )
        if self.monitor is not None:
            self.monitor.close()
        if self.log is not None:
            self.log.close(self.done, finished=finished)
        self.guard.close(finished=finished)

    def step(self, step: int) -> StepTotals:
        """One step on the whole global batch; raises NonFiniteError before the update."""
        rate = rate_at(step, self.options.rate, self.options.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        part = self.parallel
        rows = rows_of(self.settings.data, step, part.first_sample, part.num_samples)
        batch = torch.from_numpy(rows).to(self.device)
        if self.monitor is not None:
            self.monitor.batch_ready(batch)
        loss = part.backward(batch)
        if self.injector.corrupts_gradient(step):
            self.parallel.gradients()[0].fill_(nan)
        totals = self.parallel.totals(loss)
        self._write(step, totals, rate)
        if self.monitor is not None:
            self.monitor.check_before_step(totals.loss, gradient_norm=totals.gradient_norm)
        if not (isfinite(totals.loss) and isfinite(totals.gradient_norm)):
            raise NonFiniteError(
                f"step {step}: the loss is {totals.loss}, the norm of the gradient "
                f"{totals.gradient_norm}"
            )
        self.parallel.clip(totals.gradient_norm, self.options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return totals

    def _make_guard(self) -> Guard:
        settings, options, layout = self.settings, self.options, self.settings.layout
        return Guard(
            Checkpoints(
                settings.folder.checkpoints,
                keep=options.keep,
                asynchronous=not options.synchronous,
                fingerprint=settings.fingerprint,
            ),
            policy=settings.policy,
            state=lambda: {"training": ModelState(self.parallel.model, self.optimizer)},
            about=lambda: {"layout": str(layout), "batch": layout.global_batch},
            folder=settings.folder,
            grace_seconds=options.grace,
        )

    def _resumed(self) -> int:
        """Last completed step of the loaded checkpoint, 0 without one; printed with the layout."""
        layout = self.settings.layout
        about = self.guard.resume()
        done = 0 if about is None else int(about["step"])
        where = f"after step {done}" if done else "from step 0"
        self._say(f"{layout} on {self.device.type}, {where}")
        before = layout.global_batch if about is None else about["batch"]
        if before != layout.global_batch:
            self._say(f"the global batch was {before} until now")
        return done

    def _make_log(self) -> LossLog:
        options = self.options
        about = {
            **self.settings.fingerprint,
            "model_type": "reference training",
            "total_training_steps": options.steps,
            "num_workers": self.settings.layout.data,
            "layout": str(self.settings.layout),
        }
        return LossLog(self.settings.folder.path / LOSSES, about, self.done)

    def _write(self, step: int, totals: StepTotals, rate: float) -> None:
        if self.log is not None:
            loss, norm = totals
            self.log.write(
                Record(step=step, training_loss=loss, gradient_norm=norm, learning_rate=rate)
            )
        if step % self.options.print_every == 0 or step == self.options.steps:
            self._say(
                f"step {step} of {self.options.steps}: loss {totals.loss:.4f}, gradient norm "
                f"{totals.gradient_norm:.3f}, {time.monotonic() - self._began:.1f} s"
            )

    def _say(self, words: str) -> None:
        if self.rank == 0:
            print(words, flush=True)


def rate_at(step: int, rate: float, warmup: int) -> float:
    """The learning rate of a step, from 1: a linear rise, then constant."""
    return rate * min(1.0, step / warmup) if warmup else rate


# -- the log of the losses

ENDS = ("EXPERIMENT_SUCCESS", "EXPERIMENT_FAILURE")


class LossLog:
    """Log in the format of docs/log_format.md, one line per step, written by one process.

    A run that resumes after step s truncates its log to s. Each line is written to the
    operating system before the step counts as done, so that it survives the process.
    """

    def __init__(self, path: Path, config: dict[str, Any], step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if step == 0 or not path.exists():
            first = start_line(config, "reference_training", RMetricConfig(), "FULL_METRIC")
            path.write_bytes(first)
        else:
            cut_back(path, step)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115

    def write(self, record: Record) -> None:
        self._file.write(encode_line(record_to_json(record)))

    def close(self, step: int, *, finished: bool) -> None:
        """Close the log after `step`; only a finished training gets a last line."""
        if finished:
            self._file.write(encode_line({"step": step, "event": ENDS[0]}))
        self._file.close()


def cut_back(path: Path, step: int) -> None:
    """Remove the lines of later steps, the last line and an incomplete line."""
    kept = 0
    with open(path, "rb") as file:
        for line in file:
            try:
                entry = parse_line(line)
            except ValueError:
                break
            if not line.endswith(b"\n") or entry["event"] in ENDS or entry.get("step", 0) > step:
                break
            kept += len(line)
    os.truncate(path, kept)
