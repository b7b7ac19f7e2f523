"""The training loop: plain PyTorch, with the monitor in it and a fault where one is due."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rmetric.metric import RMetricConfig
from rmetric.monitor.config import MonitorConfig
from rmetric.monitor.monitor import Monitor
from studies.case_study.blocks import Batch, Blocks
from studies.case_study.faults import Fault
from studies.case_study.hardware import Hardware
from studies.case_study.recipe import Recipe
from studies.case_study.settings import IGNORED, Settings

MAX_NORM = 1.0
TIMED_STEPS = 20  # whose median is what a step costs
#: Every worker at every step, as the paper has it; the R-Metric's settings of its case study.
MONITOR = MonitorConfig(metric=RMetricConfig.case_study(), workers_every=1)


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is trained on and evaluated on; `vocabulary` is the number of tokens."""

    training: Blocks
    held_out: Blocks
    vocabulary: int


class Unwatched:
    """Stands where the monitor stands, and only clips: what a step costs without it."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)

    def micro_batch(self, loss: Tensor) -> None:
        """Nothing is measured."""

    def check_before_step(self) -> None:
        """Nothing is checked."""

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self._parameters, max_norm)


class Training:
    """One run: `make_step()` and `evaluate()`, from where it is.

    The state after a step depends on the settings and the step alone, whatever was
    trained before and however often it was stopped: batches, dropout and a
    fault's chance are drawn anew for each step from the seed.

    Args:
        model: prepared for `recipe`; its weights are changed in place.
        fault: None for the control.
        hardware: the source of hardware events; None where none are logged.
        log, run_id, about: of the monitor's log.

    Attributes:
        step: steps made so far.
        num_alerts: times that R rose above its threshold.
        seconds: spent on steps and evaluations, and inside the monitor's calls.
        last_seconds: of each of the last steps.
    """

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        settings: Settings,
        data: Data,
        fault: Fault | None,
        *,
        hardware: Hardware | None,
        log: Path,
        run_id: str,
        about: dict[str, Any],
    ) -> None:
        self.model, self.recipe, self.settings, self.data = model, recipe, settings, data
        self.fault, self.log = fault, log
        self.step, self.num_alerts, self._alarmed = 0, 0, False
        self.seconds = {"steps": 0.0, "evaluations": 0.0, "monitor": 0.0}
        self.last_seconds: deque[float] = deque(maxlen=TIMED_STEPS)
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._highest_rate = settings.learning_rate or recipe.learning_rate
        self.optimizer = torch.optim.AdamW(
            self._trained.values(),
            lr=self._highest_rate,
            weight_decay=0.0,
            fused=recipe.device == "cuda",  # the other forms copy all weights at every step
        )
        self._scaler = torch.amp.GradScaler(recipe.device, enabled=recipe.scales_loss)
        self._worker: int | None = None
        # Before the monitor's own hooks, so that it sees what the fault has done.
        self._hooks = self._let_fault_strike()
        self.monitor = Monitor(
            model,
            self.optimizer,
            log=log,
            run_id=run_id,
            config=MONITOR,
            scaler=self._scaler if recipe.scales_loss else None,
            hardware=hardware,
            about=about,
        )

    def make_step(self) -> None:
        """One step, under the monitor."""
        seconds = self._timed_step(self.monitor)
        self.seconds["steps"] += seconds
        self.last_seconds.append(seconds)
        self._count_alerts()

    def seconds_unwatched(self, number: int) -> list[float]:
        """Time more steps without the monitor, which must be closed; they count for nothing."""
        unwatched = Unwatched(self._trained.values())
        return [self._timed_step(unwatched) for _ in range(number)]

    def _timed_step(self, watch: Monitor | Unwatched) -> float:
        began = time.perf_counter()
        self._step(watch)
        if self.recipe.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def _step(self, watch: Monitor | Unwatched) -> None:
        step = self.step + 1
        torch.manual_seed(int(self._generator(step).integers(2**62)))
        self._prepare(step)
        for worker in range(self.settings.micro_batches):
            self._worker = worker
            loss = self._loss(self._batch(step, worker))
            self._scaler.scale(loss / self.settings.micro_batches).backward()
            watch.micro_batch(loss)
        self._worker = None
        self._scaler.unscale_(self.optimizer)
        watch.check_before_step()
        watch.clip_grad_norm_(MAX_NORM)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step = step

    @torch.no_grad()
    def evaluate(self) -> float:
        """Loss on the held-out sequences, nats per learnt token."""
        began = time.perf_counter()
        self.model.eval()
        losses, weights = [], []
        for batch in self.data.held_out.in_order(self.settings.micro_batch_size):
            losses.append(self._loss(batch))
            weights.append(int((batch.labels_BL[:, 1:] != IGNORED).sum()))
        self.model.train()
        of_all = torch.stack(losses).double() * torch.tensor(weights, device=losses[0].device)
        loss = float(of_all.sum()) / sum(weights)
        self.monitor.evaluated(loss)
        self.seconds["evaluations"] += time.perf_counter() - began
        return loss

    def state_dict(self) -> dict[str, Any]:
        """All that the steps to come depend on."""
        return {
            "step": self.step,
            "alerts": [self.num_alerts, self._alarmed],
            "weights": {name: weights.detach() for name, weights in self._trained.items()},
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "monitor": self.monitor.state_dict(),
            "seconds": self.seconds | {"monitor": self._monitor_seconds},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the step of that state."""
        self.step = state["step"]
        self.num_alerts, self._alarmed = state["alerts"]
        for name, weights in self._trained.items():
            weights.detach().copy_(state["weights"][name])
        self.optimizer.state.clear()  # or the device would hold it twice for a moment
        self.optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])
        self.monitor.load_state_dict(state["monitor"])
        self.seconds = dict(state["seconds"])

    def close(self) -> None:
        """End the log and take all hooks off the model."""
        self.seconds["monitor"] = self._monitor_seconds
        self.monitor.close()
        for hook in self._hooks:
            hook.remove()

    @property
    def _monitor_seconds(self) -> float:
        return self.seconds["monitor"] + self.monitor.seconds

    def _count_alerts(self) -> None:
        alarm = self.monitor.metric.alarm
        self.num_alerts += alarm and not self._alarmed
        self._alarmed = alarm

    def _prepare(self, step: int) -> None:
        """The learning rate of this step, and what the fault does to the state before it."""
        rate = self.settings.scheduled_rate(step, self._highest_rate)
        if self.fault is not None and self.fault.acts(step):
            rate = self.fault.learning_rate(step, rate)
            if step == self.fault.onset:
                with torch.no_grad():
                    self.fault.state(self.model, self.optimizer, self._generator(step, 0))
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _batch(self, step: int, worker: int) -> Batch:
        number = (step - 1) * self.settings.micro_batches + worker
        batch = self.data.training.batch(number, self.settings.micro_batch_size)
        if self.fault is not None and self.fault.acts(step):
            chance = self._generator(step, 1, worker)
            batch = self.fault.batch(batch, self.data.vocabulary, chance)
        return batch

    def _loss(self, batch: Batch) -> Tensor:
        tokens, labels = (torch.from_numpy(part).to(self.recipe.device) for part in batch)
        with torch.autocast(self.recipe.device, self.recipe.dtype, enabled=self.recipe.mixed):
            return self.model(input_ids=tokens, labels=labels).loss

    def _let_fault_strike(self) -> list[Any]:
        if self.fault is None or not self.fault.strikes_gradients:
            return []
        return [
            weights.register_hook(partial(self._strike, number))
            for number, weights in enumerate(self._trained.values())
        ]

    def _strike(self, number: int, gradient: Tensor) -> Tensor | None:
        """What the fault makes of one micro-batch's gradient of one weight tensor."""
        step = self.step + 1
        if self.fault is None or self._worker is None or not self.fault.acts(step):
            return None
        chance = self._generator(step, 2, self._worker, number)
        return self.fault.gradient(gradient, self._worker, chance)

    def _generator(self, *numbers: int) -> np.random.Generator:
        return np.random.default_rng([self.settings.seed, *numbers])


@contextmanager
def own_randomness() -> Iterator[None]:
    """Inside, torch's global random state may be used; outside, nothing of it is seen."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield
