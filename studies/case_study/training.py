"""One run on the Trainer of transformers, with the monitor's callback and maybe a fault."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState

from rmetric.integrations.hugging_face import RMetricCallback
from rmetric.integrations.hugging_face_trainer import RMetricState
from rmetric.metric import RMetricConfig
from rmetric.monitor.config import MonitorConfig
from rmetric.monitor.monitor import Monitor
from rmetric.monitor.step_recorder import Hardware
from rmetric.records import HardwareEvent
from studies.case_study.data import Batch, Data
from studies.case_study.faults import Fault
from studies.case_study.plan import Recipe
from studies.case_study.settings import IGNORED, CaseStudyError, Settings

#: Last steps whose median is what a step costs; as many are made without the monitor.
TIMED_STEPS, TIMED_SHARE = 20, 0.125
#: Every worker at every step, as the paper has it; the R-Metric's settings of its case study.
MONITOR = MonitorConfig(metric=RMetricConfig.case_study(), workers_every=1)


class NoHardware:
    """A machine whose hardware reports nothing; λ is 0 on it, and known to be."""

    def poll(self) -> tuple[HardwareEvent, ...]:
        return ()

    def close(self) -> None:
        """Nothing to end."""


def hardware_of(device: str) -> tuple[Hardware | None, str]:
    """The source of hardware events on `device`, ``cuda`` or ``cpu``, and what it is in words.

    None where there is a GPU that cannot be asked: then nothing is logged of it,
    which is not the same as nothing having happened.
    """
    if device == "cpu":
        return NoHardware(), "no GPU: no hardware events, λ is 0"
    from rmetric.telemetry.nvml import NvmlEvents

    uuid = str(torch.cuda.get_device_properties(0).uuid)
    events = NvmlEvents(devices=[f"GPU-{uuid}"])
    if events.ready():
        return events, "NVML: Xids, ECC errors, row remaps, throttling, temperature"
    problem = events.problem
    events.close()
    return None, f"λ is not logged: {problem}"


def readings_of(hardware: Hardware | None) -> list[dict[str, Any]]:
    """What the GPU says of itself now, by names with their units; empty without one."""
    readings: Sequence[Any] = getattr(hardware, "readings", tuple)()
    return [
        {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in asdict(reading).items()
            if value is not None
        }
        for reading in readings
    ]


@dataclass(frozen=True, kw_only=True)
class MicroBatches(Dataset[dict[str, Tensor]]):
    """The micro-batches of the steps after `after`, in order, as the fault leaves them.

    Each depends on the settings and its own number alone.
    """

    data: Data
    settings: Settings
    fault: Fault | None
    after: int = 0

    def __len__(self) -> int:
        return (self.settings.max_steps - self.after) * self.settings.micro_batches

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number = self.after * self.settings.micro_batches + index
        batch = self.data.training.batch(number, self.settings.micro_batch_size)
        before, worker = divmod(number, self.settings.micro_batches)
        step = before + 1
        if self.fault is not None and self.fault.acts(step):
            chance = generator_of(self.settings, step, 1, worker)
            batch = self.fault.batch(batch, self.data.vocabulary, chance)
        return inputs_of(batch)


def inputs_of(batch: Batch) -> dict[str, Tensor]:
    return {
        "input_ids": torch.from_numpy(batch.tokens_BL),
        "labels": torch.from_numpy(batch.labels_BL),
    }


def generator_of(settings: Settings, *numbers: int) -> np.random.Generator:
    return np.random.default_rng([settings.seed, *numbers])


def own_randomness() -> AbstractContextManager[None]:
    """Inside, torch's global random state may be used; outside, nothing of it is seen."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()))


class CaseStudyTrainer(Trainer):
    """The Trainer, with a step that is the mean of its micro-batches, and an evaluation per token.

    The Trainer's own step weighs each token alike, so a micro-batch with few of them would be
    no worker of data-parallel training; its own evaluation is a mean over batches.
    """

    model_wrapped: Any
    eval_dataset: Any
    optimizer: Any

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.model_accepts_loss_kwargs = False
        self.remove_callback(PrinterCallback)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Loss on the held-out sequences, nats per learnt token."""
        began, model, losses, learnt = time.perf_counter(), self.model_wrapped, [], []
        model.eval()
        with torch.no_grad():
            for batch in self.eval_dataset:
                inputs = {name: part.to(self.args.device) for name, part in batch.items()}
                losses.append(model(**inputs).loss.double())
                learnt.append((inputs["labels"][:, 1:] != IGNORED).sum())
        loss_N, learnt_N = torch.stack(losses), torch.stack(learnt)
        loss = float((loss_N * learnt_N).sum() / learnt_N.sum())
        metrics = {"eval_loss": loss, "eval_seconds": time.perf_counter() - began}
        handler = self.callback_handler
        self.control = handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class StepClock(TrainerCallback):
    """Seconds of each step: of all, and of the last ones one by one."""

    def __init__(self, of_steps: int) -> None:
        timed = min(TIMED_STEPS, max(1, int(TIMED_SHARE * of_steps)))
        self.total, self.last = 0.0, deque[float](maxlen=timed)
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.last.append(time.perf_counter() - self._began)
        self.total += self.last[-1]


class Training(TrainerCallback):
    """One run: `train()` from where it is to the end.

    The state after a step depends on the settings and the step alone, whatever was
    trained before and however often it was stopped: batches, dropout and a
    fault's chance are drawn anew for each step from the seed.

    Args:
        model: prepared for `recipe`; its weights are changed in place.
        recipe, settings, data: as planned, asked for and read.
        fault: None for the control.
        hardware: the source of hardware events; None where none are logged.
        log, run_id, about: of the monitor's log.
        before_step: called with the number of steps made, before the next one begins.
        after_step: called with what a progress bar shows.

    Attributes:
        step: steps made so far.
        readings: of the hardware, at the last evaluation.
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
        before_step: Callable[[int], None] = lambda step: None,
        after_step: Callable[[dict[str, str]], None] = lambda shown: None,
    ) -> None:
        self.model, self.settings, self.data, self.fault = model, settings, data, fault
        self.log, self.step, self.num_alerts, self._alarmed = log, 0, 0, False
        self.seconds = {"steps": 0.0, "evaluations": 0.0, "monitor": 0.0}
        self.clock = StepClock(settings.max_steps)
        self._before_step, self._after_step = before_step, after_step
        self._highest_rate = settings.learning_rate or recipe.learning_rate
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._worker = 0
        self._state: dict[str, Any] | None = None  # to go on from, until it is taken up
        self._validation_loss: float | None = None
        self.readings: list[dict[str, Any]] = []
        self._hardware = hardware
        self._watch = RMetricCallback(
            log, config=MONITOR, hardware=hardware, run_id=run_id, about=about
        )
        self.trainer = CaseStudyTrainer(
            model=model,
            args=arguments_of(recipe, settings, self._highest_rate, log.parent),
            eval_dataset=[*map(inputs_of, data.held_out.in_order(settings.micro_batch_size))],
            data_collator=lambda batches: batches[0],
            # The fault's hooks come before the monitor's, which must see what it has done.
            callbacks=[self, self.clock, self._watch],
        )

    @property
    def monitor(self) -> Monitor:
        assert self._watch.monitor is not None
        return self._watch.monitor

    def train(self, state: dict[str, Any] | None = None) -> None:
        """Go on after the step of `state`, or begin; raises CaseStudyError without the monitor."""
        self._state, self.step = state, state["step"] if state else 0
        self.trainer.train_dataset = MicroBatches(
            data=self.data, settings=self.settings, fault=self.fault, after=self.step
        )
        hooks = self._let_fault_strike()
        try:
            self.trainer.train()
        finally:
            for hook in hooks:
                hook.remove()
        self.seconds = self._seconds_so_far()
        if not self.monitor.usable:
            raise CaseStudyError(f"the monitor was disabled: {self.monitor.problem}")

    def cost(self) -> dict[str, float]:
        """What a step costs with the monitor and without, as medians; the training must be over.

        The steps without it are made for this, after the last: whatever the monitor
        does to a step, the hooks in the backward pass included, is the difference.
        """
        trainer, alone = self.trainer, StepClock(self.settings.max_steps)
        for callback in (self, self.clock, self._watch):
            trainer.remove_callback(callback)
        trainer.add_callback(alone)
        trainer.args.max_steps, trainer.args.eval_strategy = len(self.clock.last), "no"
        trainer.train()
        watched, unwatched = median(self.clock.last), median(alone.last)
        return {
            "seconds_per_step": watched,
            "seconds_per_step_without_monitor": unwatched,
            "monitoring_percent": 100 * (watched / unwatched - 1),
            "timed_steps": len(self.clock.last),
            "percent_of_time_inside_monitor_calls": (
                100 * self.seconds["monitor"] / self.seconds["steps"]
            ),
            "minutes_training": self.seconds["steps"] / 60,
            "minutes_evaluating": self.seconds["evaluations"] / 60,
        }

    def state_dict(self) -> dict[str, Any]:
        """All that the steps to come depend on; between two steps."""
        scaler = self.trainer.accelerator.scaler
        return {
            "step": self.step,
            "alerts": [self.num_alerts, self._alarmed],
            "weights": {name: weights.detach() for name, weights in self._trained.items()},
            "optimizer": self.trainer.optimizer.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else {},
            "monitor": self.monitor.state_dict(),
            "seconds": self._seconds_so_far(),
        }

    # -- what the Trainer calls

    def on_train_begin(
        self, args: Any, state: TrainerState, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        """Take up the state, before the monitor's callback looks for its own in the Trainer's."""
        kept, self._state = self._state, None
        if kept is None:
            return
        self.num_alerts, self._alarmed = kept["alerts"]
        self.seconds = dict(kept["seconds"])
        for name, weights in self._trained.items():
            weights.detach().copy_(kept["weights"][name])
        optimizer.state.clear()  # or the device would hold it twice for a moment
        optimizer.load_state_dict(kept["optimizer"])
        if kept["scaler"]:
            self.trainer.accelerator.scaler.load_state_dict(kept["scaler"])
        state.global_step = self.step
        of_callbacks: Any = state.stateful_callbacks
        of_callbacks[RMetricState.__name__] = {"attributes": kept["monitor"]}

    def on_step_begin(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """The chance, the learning rate, and what the fault does to the state before a step."""
        self._before_step(self.step)
        step, self._worker = self.step + 1, 0
        torch.manual_seed(int(generator_of(self.settings, step).integers(2**62)))
        rate = self.settings.scheduled_rate(step, self._highest_rate)
        if self.fault is not None and self.fault.acts(step):
            rate = self.fault.learning_rate(step, rate)
            if step == self.fault.onset:
                with torch.no_grad():
                    self.fault.state(self.model, optimizer, generator_of(self.settings, step, 0))
        for group in optimizer.param_groups:
            group["lr"] = rate

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self._worker += 1

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.step = state.global_step
        if self.step % self.settings.eval_every:
            control.should_evaluate = False  # the Trainer adds an evaluation after the last step
        last, metric = self.monitor.last, self.monitor.metric
        self.num_alerts += metric.alarm and not self._alarmed
        self._alarmed = metric.alarm
        loss = {} if last is None else {"loss": last.training_loss}
        loss["validation"] = self._validation_loss
        shown = {name: f"{value:.3f}" for name, value in loss.items() if value is not None}
        self._after_step(shown | {"R": f"{metric.score:.2f}", "alerts": str(self.num_alerts)})

    def on_evaluate(
        self, args: Any, state: Any, control: TrainerControl, metrics: Any = None, **_: Any
    ) -> None:
        """A model whose loss is no number is not trained on."""
        self.readings = readings_of(self._hardware)  # it is closed when the training ends
        self._validation_loss = metrics["eval_loss"]
        self.seconds["evaluations"] += metrics["eval_seconds"]
        control.should_training_stop |= not isfinite(metrics["eval_loss"])

    def _seconds_so_far(self) -> dict[str, float]:
        return self.seconds | {
            "steps": self.seconds["steps"] + self.clock.total,
            "monitor": self.seconds["monitor"] + self.monitor.seconds,
        }

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
        if self.fault is None or not self.fault.acts(step):
            return None
        chance = generator_of(self.settings, step, 2, self._worker, number)
        return self.fault.gradient(gradient, self._worker, chance)


def arguments_of(
    recipe: Recipe, settings: Settings, learning_rate: float, folder: Path
) -> TrainingArguments:
    """AdamW without weight decay, gradients clipped at norm 1; nothing is logged or saved."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.max_steps,
        eval_strategy="steps",
        eval_steps=settings.eval_every,
        per_device_train_batch_size=1,  # an item of the dataset is a whole micro-batch
        gradient_accumulation_steps=settings.micro_batches,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        dataloader_pin_memory=recipe.device == "cuda",
        learning_rate=learning_rate,
        lr_scheduler_type="constant",  # `Training` sets it before each step
        optim="adamw_torch_fused" if recipe.device == "cuda" else "adamw_torch",
        max_grad_norm=1.0,
        gradient_checkpointing=recipe.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=recipe.dtype == torch.bfloat16,
        fp16=recipe.dtype == torch.float16,
        use_cpu=recipe.device == "cpu",
        seed=settings.seed,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # the first GPU alone, not DataParallel over all
    return arguments
