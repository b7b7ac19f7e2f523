"""The paper's case study, live: a fine-tuning, undisturbed and under faults.

    python run_case_study.py              Qwen2.5-3B on code questions, 800 steps (needs a GPU)
    python run_case_study.py --tiny       a tiny model, 400 steps, on two cores in two minutes

One control and two faulty runs: one fault that the model recovers from and one that it does not.
R-Metric as published and the calibrated detector judge the three runs side by side.
The results are in case_study_<device>/; see docs/case_study.md.

Read from top to bottom: the study (model, data, its runs, the outcome), one run (optimiser,
fault, monitor), one step, what a step costs. Packages that only a training needs are imported
where they are used, so that --help does not wait for them.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from argparse import Namespace
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from studies.common.command import ends_at_once

with ends_at_once():
    from studies.case_study.settings import (
        CONTROL,
        IGNORED,
        TINY,
        CaseStudyError,
        Fault,
        Settings,
        faults_of,
        parse_arguments,
        settings_of,
    )

if TYPE_CHECKING:
    from torch import Tensor

    from rmetric import Monitor
    from studies.case_study.data import Batch, Data
    from studies.case_study.models import Recipe

State = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv, __doc__)
    try:
        case_study(settings_of(arguments), arguments)
        return 0
    except ModuleNotFoundError as error:
        if str(error.name).startswith(("rmetric", "studies")):
            raise  # not a package that the user could install
        problem, code = f"{error.name} is not installed: pip install -e '.[study,live]'", 2
    except CaseStudyError as error:
        problem, code = str(error), 2
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        problem, code = "the GPU's memory is full: --lora or --qlora needs less", 2
    except OSError as error:
        problem, code = f"the results cannot be written: {error}", 1
    except KeyboardInterrupt:
        print("\nstopped; the logs of runs that ended are whole", file=sys.stderr)
        return 130
    print(f"error: {problem}", file=sys.stderr)
    return code


# -- the study: model, data, a run without a fault and one with each, the outcome


def case_study(settings: Settings, arguments: Namespace) -> None:
    """Train the control and the runs with a fault, and write the report.

    Raises CaseStudyError, if possible before it loads the model; OSError if it cannot write.
    """
    import torch

    from rmetric.guard.planner.cluster import in_words
    from rmetric.logs import log_path
    from rmetric.records import Truth
    from studies.case_study import models, report
    from studies.case_study.data import load_data

    began = time.perf_counter()
    models.quiet()
    faults = faults_of(settings.fault, settings.onset, settings.fault_steps)
    device = models.find_device(arguments.device, float16=arguments.float16)
    # Here, not in results/, which keeps what was published.
    out = arguments.out or Path(f"case_study_{device.kind}")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise CaseStudyError(f"--out {out}: it is not an empty folder; choose another --out")
    if settings.model == TINY:
        torch.set_num_threads(1)  # more gain nothing here, and sum in another order

    config = models.read_config(settings.model)
    plan = models.plan_training(config, settings, device, arguments.method)
    print(f"device  {device.name}, {in_words(device.free)} free\n{plan}", flush=True)
    data = load_data(settings, config, models.load_tokenizer(settings.model))
    model = models.load_model(settings, config, plan.recipe)

    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    summary = report.about_study(settings, plan, device, faults, data)
    control, state_before_fault = log_path(out, report.run_id(settings, None)), None
    for fault in (None, *faults):
        log = log_path(out, report.run_id(settings, fault))
        about = report.about_run(settings, plan, device, fault)
        run = train(model, plan.recipe, settings, data, fault, log, about, state_before_fault)
        cost = run.cost()
        state_before_fault = state_before_fault or run.state_before_fault
        if state_before_fault is None:
            raise CaseStudyError(
                f"the undisturbed run broke down at step {run.step}, before the onset of a fault; "
                "a lower --learning-rate may help"
            )
        truth = fault.truth if fault else Truth()
        twin, first_step = control if fault else None, state_before_fault["step"]
        report.finish_log(log, truth, cost["seconds_per_step"], twin, first_step)
        summary["runs"][fault.label if fault else CONTROL] = {
            "id": log.stem, "steps": run.step, "cost": cost, "hardware": {"source": run.hardware}
        }  # fmt: skip
        del run  # and its optimiser, before the next one is made: two may not fit

    summary["seconds"] = {
        "of_processor": time.process_time(),
        "set_up": started - began,
        "training": time.perf_counter() - started,
    }
    report.write_report(summary, out)
    print(f"\n{report.table_of(summary)}\n")
    print(f"{out}: case_study.png and .pdf, claims.md, summary.json, for")
    print("each run its log (.jsonl), and in replayed/index.html the interactive pages")


# -- one run: optimiser, fault, monitor


def train(
    model: Any, recipe: Recipe, settings: Settings, data: Data, fault: Fault | None,
    log: Path | None, about: State, state: State | None = None,
) -> Training:  # fmt: skip
    """Train `model` in place to the last step, with the monitor and maybe a fault.

    The state after a step depends on the settings and the step alone, whatever was trained
    before: batches, dropout and a fault's chance are drawn from the seed and the step.

    Without a `fault` it keeps `Training.state_before_fault`; with that as `state` another run
    continues from there. The monitor writes `about` into `log`; without a `log` there is none.
    """
    import torch
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    gc.collect()  # the optimiser of the last run
    on_gpu = recipe.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    run = Training(model, recipe, settings, data, fault)
    prepare(run, state)
    # The fault's hooks come before the monitor's, which must see what it has done.
    corrupted = run.weights.values() if fault is not None and fault.gradient else ()
    hooks = [parameter.register_hook(run.corrupt_gradient) for parameter in corrupted]
    if log is not None:
        attach_monitor(run, log, about, state)
    bar = tqdm(total=settings.max_steps, initial=run.step, desc=str(log and log.stem), unit="step")
    with run.monitor or nullcontext(), logging_redirect_tqdm([logging.getLogger("rmetric")]), bar:
        while run.step < settings.max_steps:
            if fault is None and run.step == settings.onset - 1:
                run.state_before_fault = run.state_dict()
            run.make_step()
            run.schedule.step()
            if run.step % settings.eval_every == 0:
                run.evaluate()
            run.show(bar)
            if not isfinite(run.validation_loss or 0.0):
                break  # no step repairs a model whose loss is not a number
    for hook in hooks:
        hook.remove()
    if run.monitor is not None and not run.monitor.usable:
        raise CaseStudyError(f"the monitor was disabled: {run.monitor.problem}")
    run.peak_memory = torch.cuda.max_memory_allocated() if on_gpu else None
    return run


def prepare(run: Training, state: State | None) -> None:
    """Give the run its optimiser and schedule, for step 1 or the step after `state`."""
    import torch

    run.weights = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
    rate = run.settings.learning_rate or run.recipe.learning_rate
    on_gpu = run.recipe.device == "cuda"
    run.optimizer = torch.optim.AdamW(run.weights.values(), lr=rate, weight_decay=0.0, fused=on_gpu)
    run.scaler = torch.amp.GradScaler(run.recipe.device, enabled=run.recipe.scales_loss)
    if state is not None:
        run.load_state_dict(state)
    share_of_rate = partial(run.settings.share_of_rate, first=run.step + 1)
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, share_of_rate)


def attach_monitor(run: Training, log: Path, about: State, state: State | None) -> None:
    """Monitor the run with the settings of the paper's case study."""
    from rmetric import Monitor, MonitorConfig, RMetricConfig
    from studies.case_study.report import hardware_of

    hardware, run.hardware = hardware_of(run.recipe.device)
    run.monitor = Monitor(
        run.model, run.optimizer, log=log, run_id=log.stem, about=about, hardware=hardware,
        config=MonitorConfig(metric=RMetricConfig.case_study(), workers_every=1),
        scaler=run.scaler if run.scaler.is_enabled() else None,
    )  # fmt: skip
    run.monitor.schedulers = [run.schedule]
    if state is not None:
        run.monitor.load_state_dict(tree_to_device(state["monitor"], "cpu"))


# -- one step

#: At most so many last steps are timed, and at most this share of all steps.
TIMED_STEPS, TIMED_SHARE = 20, 0.125


@dataclass
class Training:
    """One run and its steps.

    Attributes:
        weights: those that are trained, by name.
        hardware: where hardware events come from, in words.
        step: steps made so far.
        worker: number of the current micro-batch; each stands for a data-parallel worker.
        seconds: of all steps, and of the evaluations.
        recent: seconds of each of the last steps.
        state_before_fault: of the control, just before the onset; the faulty runs start from it.
        peak_memory: bytes on a GPU.
    """

    model: Any
    recipe: Recipe
    settings: Settings
    data: Data
    fault: Fault | None
    weights: dict[str, Any] = field(default_factory=dict)
    optimizer: Any = None
    scaler: Any = None
    schedule: Any = None
    monitor: Monitor | None = None
    hardware: str = ""
    step: int = 0
    worker: int = 0
    validation_loss: float | None = None
    seconds: dict[str, float] = field(default_factory=lambda: {"steps": 0.0, "evaluations": 0.0})
    recent: deque[float] = field(default_factory=partial(deque, maxlen=TIMED_STEPS))
    state_before_fault: State | None = None
    peak_memory: int | None = None

    def make_step(self) -> None:
        """The mean of the workers' gradients, clipped, checked by the monitor, and applied."""
        import torch

        began = time.perf_counter()
        self.step += 1
        torch.manual_seed(int(self.settings.generator(self.step).integers(2**62)))
        fault = self.fault if self.fault is not None and self.fault.acts(self.step) else None
        if fault is not None and fault.rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] *= fault.rate(fault.severity, self.step - fault.onset + 1)
        loss: Any = 0.0
        workers = self.settings.micro_batches
        for self.worker in range(workers):
            number = (self.step - 1) * workers + self.worker
            batch = self.data.training.batch(number, self.settings.micro_batch_size)
            if fault is not None and fault.batch is not None:
                chance = self.settings.generator(self.step, 1, self.worker)
                batch = fault.batch(batch, fault.severity, self.data.vocabulary, chance)
            part = self.loss_of(batch) / workers
            self.scaler.scale(part).backward()
            loss = loss + part.detach()
            if self.monitor is not None:
                self.monitor.micro_batch()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        if self.monitor is not None:
            self.monitor.check_before_step(loss, gradient_norm=norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.recipe.device == "cuda":
            torch.cuda.synchronize()
        self.recent.append(time.perf_counter() - began)
        self.seconds["steps"] += self.recent[-1]

    def loss_of(self, batch: Batch) -> Tensor:
        """Mean loss of a micro-batch, nats per learnt token."""
        import torch

        device, dtype = self.recipe.device, self.recipe.dtype
        tokens_BL, labels_BL = (torch.from_numpy(part).to(device) for part in batch)
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss: Tensor = self.model(input_ids=tokens_BL, labels=labels_BL).loss
        return loss

    def corrupt_gradient(self, gradient: Tensor) -> Tensor | None:
        """A worker's gradient of one weight tensor under the fault; None leaves it as it is."""
        fault = self.fault
        if fault is None or fault.gradient is None or not fault.acts(self.step):
            return None
        corrupted = fault.all_workers or self.worker == 0
        return fault.gradient(gradient, fault.severity) if corrupted else None

    def evaluate(self) -> None:
        """Loss on the held-out sequences, nats per learnt token."""
        import torch

        began, losses, learnt = time.perf_counter(), [], []
        self.model.eval()
        with torch.no_grad():
            for batch in self.data.held_out.in_order(self.settings.micro_batch_size):
                losses.append(self.loss_of(batch).double())
                learnt.append(int((batch.labels_BL[:, 1:] != IGNORED).sum()))
        self.model.train()
        loss_N, learnt_N = torch.stack(losses).cpu(), torch.tensor(learnt)
        self.validation_loss = float((loss_N * learnt_N).sum() / learnt_N.sum())
        self.seconds["evaluations"] += time.perf_counter() - began
        if self.monitor is not None:
            self.monitor.evaluated(self.validation_loss)

    def show(self, bar: Any) -> None:
        """The losses and R in the progress bar."""
        last = self.monitor.last if self.monitor is not None else None
        shown = {"loss": last and last.training_loss, "validation": self.validation_loss}
        shown["R"] = self.monitor.metric.score if self.monitor is not None else None
        known = {name: f"{value:.3f}" for name, value in shown.items() if value is not None}
        bar.set_postfix(known, refresh=False)
        bar.update()

    def state_dict(self) -> State:
        """All that later steps depend on, in host memory; call it between two steps."""
        state = {
            "step": self.step,
            "weights": self.weights,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "monitor": self.monitor.state_dict() if self.monitor is not None else {},
        }
        return tree_to_device(state, "cpu")

    def load_state_dict(self, state: State) -> None:
        self.step = state["step"]
        for name, weights in self.weights.items():
            weights.detach().copy_(state["weights"][name])
        # A copy: on a processor the optimiser would change the tensors of `state`.
        self.optimizer.load_state_dict(tree_to_device(state["optimizer"], self.recipe.device))
        self.scaler.load_state_dict(state["scaler"])

    def cost(self) -> dict[str, Any]:
        """What a step costs with the monitor and without, as medians; the run must be over.

        The steps without it are made for this, after the last: whatever the monitor does to a
        step, the hooks in the backward pass included, is the difference.
        """
        last = list(self.recent)[-max(1, int(TIMED_SHARE * self.settings.max_steps)) :]
        alone = replace(self, monitor=None, fault=None, recent=deque(), seconds=dict(self.seconds))
        for _ in last:
            alone.make_step()
        with_monitor, without = median(last), median(alone.recent)
        inside = self.monitor.seconds if self.monitor is not None else 0.0
        return {
            "seconds_per_step": with_monitor,
            "seconds_per_step_without_monitor": without,
            "monitoring_percent": 100 * (with_monitor / without - 1),
            "timed_steps": len(last),
            "percent_of_time_inside_monitor_calls": 100 * inside / self.seconds["steps"],
            "minutes_training": self.seconds["steps"] / 60,
            "minutes_evaluating": self.seconds["evaluations"] / 60,
            "peak_memory_bytes": self.peak_memory,
        }


def tree_to_device(state: State, device: str) -> Any:
    """The same state with copies of its tensors on `device`."""
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, lambda tensor: tensor.detach().to(device, copy=True), state)


if __name__ == "__main__":
    sys.exit(main())
