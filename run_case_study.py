"""The paper's case study, live: a fine-tuning, and its twins under faults.

    python run_case_study.py              Qwen2.5-3B on code questions, 800 steps (needs a GPU)
    python run_case_study.py --tiny       a tiny model, 400 steps, on two cores in two minutes
    python run_case_study.py --plan t4    print the plan for a GPU, and stop

Three twins: undisturbed, under a fault that the runs measured so far absorb, and under one
that breaks them. R-Metric as published and the calibrated detector judge them side by side.
The results are in case_study_<device>/; see docs/case_study.md.

Read from top to bottom: preparation, the twins, one run, one step, the outcome. Packages that
only a training needs are imported where they are used, so that --help does without.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rmetric._util.interrupt import ends_at_once

with ends_at_once():
    from studies.case_study.faults import Fault, faults_of
    from studies.case_study.options import parse_arguments, settings_of
    from studies.case_study.settings import (
        FAULT,
        IGNORED,
        TINY,
        CannotWrite,
        CaseStudyError,
        Settings,
    )

if TYPE_CHECKING:
    from torch import Tensor

    from rmetric.monitor.monitor import Monitor
    from rmetric.monitor.step_recorder import Hardware
    from studies.case_study.data import Batch, Data
    from studies.case_study.folder import Folder
    from studies.case_study.plan import Recipe


def main(argv: list[str] | None = None) -> int:
    began = time.perf_counter()
    arguments = parse_arguments(argv, __doc__)
    try:
        folder = case_study(settings_of(arguments), arguments, began)
    except ModuleNotFoundError as error:
        if str(error.name).startswith(("rmetric", "studies")):
            raise  # not a package that the user could install
        print(f"error: {error.name} is not installed: pip install -e '.[live]'", file=sys.stderr)
        return 2
    except CaseStudyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, CannotWrite) else 2
    except KeyboardInterrupt:
        print("\nstopped; the same command with --resume goes on", file=sys.stderr)
        return 130
    if folder is not None:
        from studies.case_study.report import print_report

        print_report(folder)
    return 0


# -- preparation: device, plan, data, folder


def case_study(settings: Settings, arguments: Namespace, began: float) -> Folder | None:
    """Plan, train the control, the runs with a fault, or both, and write the report.

    Returns None where only the plan was asked for. Raises CaseStudyError; before any weight is
    loaded, where it can be known then.
    """
    import torch

    from studies.case_study.bundled import sources_of
    from studies.case_study.data import load_data
    from studies.case_study.folder import Checkpoints, Folder, identity, provenance
    from studies.case_study.models import check_packages, check_weights, load_model
    from studies.case_study.plan import device_named, find_device
    from studies.case_study.preparation import print_plan, quiet
    from studies.case_study.report import write_report
    from studies.case_study.twins import Twins

    every = arguments.checkpoint_every
    if every < 0:
        raise CaseStudyError(f"--checkpoint-every is {every}: at least 0 is needed")
    faults = faults_of(settings)
    trained = [] if arguments.control else faults
    control = not arguments.no_control
    device = (
        device_named(arguments.plan) if arguments.plan
        else find_device(arguments.device, float16=arguments.float16)
    )  # fmt: skip
    if settings.model == TINY:
        torch.set_num_threads(1)  # more gain nothing here, and sum in another order
    with quiet(), sources_of(settings) as sources:
        if arguments.plan is None:
            # Here, not in results/, which keeps what was published.
            labels = "".join(f"_{one.label.lower()}" for one in faults)
            name = f"case_study_{device.slug}{'' if settings.fault == FAULT else labels}"
            folder = Folder(arguments.out or Path(name), resume=arguments.resume)
        config, plan = print_plan(
            settings, sources, device, arguments.method, trained, control=control,
            checkpoints=every > 0, search=not arguments.plan,
        )  # fmt: skip
        if arguments.plan is not None:
            return None
        check_packages(plan.recipe)
        if not settings.random_weights:
            check_weights(sources.model)
        checkpoints = Checkpoints(folder.path / "checkpoints" if every else None)
        checkpoints.check_room(plan.state_bytes, number=2)
        data = load_data(settings, config, sources)
        folder.claim(identity(settings, plan, faults, data))
        folder.summary |= provenance(device, plan)
        started = time.perf_counter()
        load = partial(load_model, sources.model, config, plan.recipe, settings)
        twins = Twins(settings, plan.recipe, data, load, train, folder, checkpoints, every)
        twins.run([*[None] * control, *trained])
    ended = time.perf_counter()
    write_report(folder)
    folder.summary["seconds"] = {
        "of_processor": time.process_time(),
        "set_up": started - began,
        "training": ended - started,
        "report": time.perf_counter() - ended,
    }
    folder.write()
    return folder


# -- one run


def train(
    model: Any, recipe: Recipe, settings: Settings, data: Data, fault: Fault | None, *,
    log: Path, state: dict[str, Any] | None = None, hardware: Hardware | None = None,
    about: dict[str, Any] | None = None, before_step: Callable[[Training], None] | None = None,
    bar: Any = None, monitored: bool = True,
) -> Training:  # fmt: skip
    """Train `model` in place to the last step, with the monitor and maybe a fault.

    The state after a step depends on the settings and the step alone, whatever was trained
    before and however often it was stopped: batches, dropout and a fault's chance are drawn
    from the seed and the step. `state` is what to go on from, None the beginning.
    """
    import torch

    from rmetric.metric import RMetricConfig
    from rmetric.monitor.config import MonitorConfig
    from rmetric.monitor.monitor import Monitor
    from studies.case_study.twins import readings_of

    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        weights.values(), lr=settings.learning_rate or recipe.learning_rate, weight_decay=0.0,
        fused=recipe.device == "cuda",
    )  # fmt: skip
    scaler = torch.amp.GradScaler(recipe.device, enabled=recipe.scales_loss)
    run = Training(model, recipe, settings, data, fault, weights, optimizer, scaler)
    if state is not None:
        run.load_state_dict(state)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, partial(settings.share_of_rate, first=run.step + 1)
    )
    # The fault's hooks come before the monitor's, which must see what it has done.
    struck = weights.values() if fault is not None and fault.kind.gradient else ()
    hooks = [p.register_hook(partial(run.strike, number)) for number, p in enumerate(struck)]
    if monitored:
        # The settings of the paper's case study: each worker is measured at each step.
        config = MonitorConfig(metric=RMetricConfig.case_study(), workers_every=1)
        run.monitor = Monitor(
            model, optimizer, log=log, run_id=log.stem, config=config, about=about,
            scaler=scaler if scaler.is_enabled() else None, hardware=hardware,
        )  # fmt: skip
        run.monitor.schedulers = [schedule]
        if state is not None:
            run.monitor.load_state_dict(state["monitor"])
    with run.monitor or nullcontext():
        while run.step < settings.max_steps:
            if before_step is not None:
                before_step(run)
            run.make_step()
            schedule.step()
            if run.step % settings.eval_every == 0:
                run.evaluate()
                run.readings = readings_of(hardware)
            if bar is not None:
                run.show(bar)
            if not isfinite(run.validation_loss or 0.0):
                break  # a model whose loss is not a number is not trained on
    for hook in hooks:
        hook.remove()
    if run.monitor is not None and not run.monitor.usable:
        raise CaseStudyError(f"the monitor was disabled: {run.monitor.problem}")
    return run


# -- one step

#: Last steps whose median is what a step costs; as many are made without the monitor.
TIMED_STEPS, TIMED_SHARE = 20, 0.125


@dataclass
class Training:
    """One run and its steps.

    Attributes:
        weights: those that are trained, by name.
        step: steps made so far.
        worker: the micro-batch at hand; each stands for a data-parallel worker.
        alarms: of the R-Metric, without a gap.
        seconds: of all steps, of the evaluations, and inside the monitor.
        recent: seconds of each of the last steps.
        readings: of the hardware, at the last evaluation.
    """

    model: Any
    recipe: Recipe
    settings: Settings
    data: Data
    fault: Fault | None
    weights: dict[str, Any]
    optimizer: Any
    scaler: Any
    monitor: Monitor | None = None
    step: int = 0
    worker: int = 0
    alarms: tuple[int, bool] = (0, False)
    validation_loss: float | None = None
    seconds: dict[str, float] = field(
        default_factory=lambda: {"steps": 0.0, "evaluations": 0.0, "monitor": 0.0}
    )
    recent: deque[float] = field(default_factory=deque)
    readings: list[dict[str, Any]] = field(default_factory=list)

    def make_step(self) -> None:
        """The mean of the workers' gradients, clipped, checked by the monitor, and applied."""
        import torch

        began = time.perf_counter()
        self.step += 1
        torch.manual_seed(int(self.settings.generator(self.step).integers(2**62)))
        fault = self.fault if self.fault is not None and self.fault.acts(self.step) else None
        if fault is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = fault.learning_rate(self.step, group["lr"])
            if self.step == fault.onset:
                chance = self.settings.generator(self.step, 0)
                with torch.no_grad():
                    fault.state(self.model, self.optimizer, chance)
        loss: Any = 0.0
        workers = self.settings.micro_batches
        for self.worker in range(workers):
            number = (self.step - 1) * workers + self.worker
            batch = self.data.training.batch(number, self.settings.micro_batch_size)
            if fault is not None:
                chance = self.settings.generator(self.step, 1, self.worker)
                batch = fault.batch(batch, self.data.vocabulary, chance)
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

        device, dtype, mixed = self.recipe.device, self.recipe.dtype, self.recipe.mixed
        tokens_BL, labels_BL = (torch.from_numpy(part).to(device) for part in batch)
        with torch.autocast(device, dtype, enabled=mixed):
            loss: Tensor = self.model(input_ids=tokens_BL, labels=labels_BL).loss
        return loss

    def strike(self, number: int, gradient: Tensor) -> Tensor | None:
        """What the fault makes of one worker's gradient of one weight tensor."""
        if self.fault is None or not self.fault.acts(self.step):
            return None
        chance = self.settings.generator(self.step, 2, self.worker, number)
        return self.fault.gradient(gradient, self.worker, chance)

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
        """The losses, R and its alarms so far, in the progress bar."""
        assert self.monitor is not None
        last, metric, (number, alarm) = self.monitor.last, self.monitor.metric, self.alarms
        self.alarms = (number + (metric.alarm and not alarm), metric.alarm)
        losses = {"loss": last and last.training_loss, "validation": self.validation_loss}
        shown = {name: f"{value:.3f}" for name, value in losses.items() if value is not None}
        shown |= {"R": f"{metric.score:.2f}", "alerts": str(self.alarms[0])}
        bar.set_postfix(shown, refresh=False)
        bar.update()

    # -- state and cost

    def state_dict(self) -> dict[str, Any]:
        """All that the steps to come depend on; between two steps."""
        assert self.monitor is not None
        return {
            "step": self.step,
            "alarms": self.alarms,
            "weights": {name: weights.detach() for name, weights in self.weights.items()},
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "monitor": self.monitor.state_dict(),
            "seconds": self.seconds | {"monitor": self.seconds_in_monitor()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.seconds = state["step"], dict(state["seconds"])
        self.alarms = (state["alarms"][0], state["alarms"][1])
        for name, weights in self.weights.items():
            weights.detach().copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def seconds_in_monitor(self) -> float:
        return self.seconds["monitor"] + (self.monitor.seconds if self.monitor else 0.0)

    def cost(self) -> dict[str, float]:
        """What a step costs with the monitor and without, as medians; the run must be over.

        The steps without it are made for this, after the last: whatever the monitor does to a
        step, the hooks in the backward pass included, is the difference.
        """
        timed = min(TIMED_STEPS, max(1, int(TIMED_SHARE * self.settings.max_steps)))
        last = list(self.recent)[-timed:]
        alone = replace(self, monitor=None, fault=None, recent=deque(), seconds=dict(self.seconds))
        for _ in last:
            alone.make_step()
        with_monitor, without = median(last), median(alone.recent)
        return {
            "seconds_per_step": with_monitor,
            "seconds_per_step_without_monitor": without,
            "monitoring_percent": 100 * (with_monitor / without - 1),
            "timed_steps": len(last),
            "percent_of_time_inside_monitor_calls": (
                100 * self.seconds_in_monitor() / self.seconds["steps"]
            ),
            "minutes_training": self.seconds["steps"] / 60,
            "minutes_evaluating": self.seconds["evaluations"] / 60,
        }


if __name__ == "__main__":
    sys.exit(main())
