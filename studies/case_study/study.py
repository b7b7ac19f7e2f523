"""The case study: the control and the run with the fault, one after the other.

Both are the same run up to the onset. The control keeps its state there, and the
other begins from it: the twins are equal to the last bit before the fault, on a
GPU too, whose sums are not the same twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

from tqdm import tqdm

from rmetric.logs import read_log, start_line
from rmetric.records import Truth
from rmetric.reporting.replay_report import safe_name
from studies.case_study.checkpoints import Checkpoints
from studies.case_study.device import Device
from studies.case_study.faults import Fault
from studies.case_study.folder import Folder, copy_log, finish_log
from studies.case_study.hardware import Hardware, hardware_of, readings_of
from studies.case_study.outcome import judge
from studies.case_study.recipe import Recipe
from studies.case_study.settings import CaseStudyError, Settings
from studies.case_study.training import MONITOR, Data, Training, own_randomness

CONTROL, FAULT = "control", "fault"
RUNS = CONTROL, FAULT
BRANCH = "branch"


@dataclass(kw_only=True)
class CaseStudy:
    """Everything that both runs share.

    Attributes:
        fault: what goes wrong in the second.
        load: gives the model as it is before any step.
        checkpoint_every: steps between two states that can be gone on from; 0 for none.
    """

    settings: Settings
    fault: Fault
    device: Device
    recipe: Recipe
    data: Data
    load: Callable[[], Any]
    folder: Folder
    checkpoints: Checkpoints
    checkpoint_every: int

    def __post_init__(self) -> None:
        self._model: Any = None

    def run(self, names: Sequence[str]) -> None:
        """Train what is not finished; a kill loses the steps since the last checkpoint."""
        for name in names:
            if name not in self.folder.summary["runs"]:
                branches = name == CONTROL and FAULT in names
                with own_randomness():
                    self._run(name, branch_at=self.settings.onset - 1 if branches else None)

    def _run(self, name: str, branch_at: int | None) -> None:
        state = self._state(name)
        if self._model is None or state is None:
            self._model = None  # before the next one is loaded: two may not fit
            self._model = self.load()
        hardware, source = hardware_of(self.device.kind)
        training = self._training(name, hardware)
        try:
            if state is not None:
                training.load_state_dict(state)
                del state
            with tqdm(
                total=self.settings.max_steps, initial=training.step, desc=name, unit="step"
            ) as bar:
                self._train(name, training, bar, branch_at)
            readings = readings_of(hardware)
        finally:
            training.close()
        if not training.monitor.usable:
            raise CaseStudyError(f"the monitor was disabled: {training.monitor.problem}")
        about = {
            "steps": training.step,
            "cost": cost_of(training),
            "hardware": {"source": source, "readings_at_the_end": readings},
        }
        self._finish(name, about)

    def _state(self, name: str) -> dict[str, Any] | None:
        """Where the run goes on: at its own last state, or at the control's before the onset."""
        state, of = self.checkpoints.load(name), name
        if state is None and name == FAULT:
            state, of = self.checkpoints.load(BRANCH), CONTROL
        log = self.folder.log(self.run_id(name))
        if state is None:
            log.unlink(missing_ok=True)
        else:
            # The last of the steps is in the monitor's state, and not yet in the log.
            copy_log(self.folder.log(self.run_id(of)), log, self._start(name), state["step"] - 1)
        return state

    def _training(self, name: str, hardware: Hardware | None) -> Training:
        return Training(
            self._model,
            self.recipe,
            self.settings,
            self.data,
            self.fault if name == FAULT else None,
            hardware=hardware,
            log=self.folder.log(self.run_id(name)),
            run_id=self.run_id(name),
            about=self._about(name),
        )

    def _train(self, name: str, training: Training, bar: tqdm, branch_at: int | None) -> None:
        every = self.checkpoint_every
        validation_loss = None
        while training.step < self.settings.max_steps:
            if training.step == branch_at:
                self.checkpoints.save(BRANCH, training.state_dict())
            training.make_step()
            if training.step % self.settings.eval_every == 0:
                validation_loss = training.evaluate()
            self._show(bar, training, validation_loss)
            if validation_loss is not None and not isfinite(validation_loss):
                return
            due = every and training.step % every == 0 and training.step < self.settings.max_steps
            if due and self.checkpoints.on_disk:
                self.checkpoints.save(name, training.state_dict())

    def _show(self, bar: tqdm, training: Training, validation_loss: float | None) -> None:
        last, metric = training.monitor.last, training.monitor.metric
        shown = {"R": f"{metric.score:.2f}", "alerts": training.num_alerts}
        if last is not None and last.training_loss is not None:
            shown = {"loss": f"{last.training_loss:.3f}"} | shown
        if validation_loss is not None:
            shown["validation"] = f"{validation_loss:.3f}"
        bar.set_postfix(shown, refresh=False)
        bar.update()

    def _finish(self, name: str, about: dict[str, Any]) -> None:
        log = self.folder.log(self.run_id(name))
        records = read_log(log).records
        truth = judge(self._injected(name), records, self._twin() if name == FAULT else None)
        finish_log(log, truth, records, about["cost"]["seconds_per_step"])
        self.folder.summary["runs"][name] = {"id": self.run_id(name)} | about
        self.folder.write()
        self.checkpoints.forget(name)
        if name == FAULT:
            self.checkpoints.forget(BRANCH)

    def _twin(self) -> list | None:
        finished = CONTROL in self.folder.summary["runs"]
        return read_log(self.folder.log(self.run_id(CONTROL))).records if finished else None

    def run_id(self, name: str) -> str:
        fault = self.fault.name if name == FAULT else "NONE"
        model = self.settings.model.rstrip("/\\").replace("\\", "/").rpartition("/")[2]
        return f"{safe_name(model)}_{fault}_s{self.settings.seed}"

    def _injected(self, name: str) -> Truth:
        if name == CONTROL:
            return Truth()
        fault = self.fault
        return Truth(
            fault=fault.name,
            severity=fault.severity,
            onset_step=fault.onset,
            duration_steps=fault.duration,
        )

    def _start(self, name: str) -> bytes:
        return start_line(self._about(name), self.run_id(name), MONITOR.metric, "FULL_METRIC")

    def _about(self, name: str) -> dict[str, Any]:
        """The run's description of itself, by the keys of docs/log_format.md."""
        injected = self._injected(name)
        return {
            "model_type": self.settings.model,
            "num_workers": self.settings.micro_batches,
            "total_training_steps": self.settings.max_steps,
            "eval_every_n_steps": self.settings.eval_every,
            "seed": self.settings.seed,
            "recipe": "case_study",
            "device": self.device.name,
            "training": str(self.recipe),
            "fault_injection": {
                "type": injected.fault,
                "trigger_step": injected.onset_step,
                "params": self.fault.params if name == FAULT else {},
            },
        }


def cost_of(training: Training) -> dict[str, float]:
    """What a step costs with the monitor and without, as medians; the training must be over.

    The steps without it are made for this, after the last: whatever the monitor
    does to a step, the hooks in the backward pass included, is the difference.
    """
    seconds = training.seconds
    last = list(training.last_seconds)
    watched, unwatched = median(last), median(training.seconds_unwatched(len(last)))
    return {
        "seconds_per_step": watched,
        "seconds_per_step_without_monitor": unwatched,
        "monitoring_percent": 100 * (watched / unwatched - 1),
        "timed_steps": len(last),
        "percent_of_time_inside_monitor_calls": 100 * seconds["monitor"] / seconds["steps"],
        "minutes_training": seconds["steps"] / 60,
        "minutes_evaluating": seconds["evaluations"] / 60,
    }
