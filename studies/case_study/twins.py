"""The twins of a case study: one run after the other, each from the state that it begins with.

The twins are the same run up to the onset. The control keeps its state there, and the others
begin from it: they are equal to the last bit before the fault, on a GPU too, whose sums are
not the same twice.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from rmetric.logs import read_log
from rmetric.monitor.step_recorder import Hardware
from rmetric.records import HardwareEvent, Record, Truth
from rmetric.simulation.outcome import soft_failure
from studies.case_study.data import Data
from studies.case_study.faults import Fault
from studies.case_study.folder import Checkpoints, Folder, copy_log, finish_log, run_id
from studies.case_study.plan import Recipe
from studies.case_study.settings import CONTROL, Settings

BRANCH = "branch"  # the control's state before the onset


@dataclass
class Twins:
    """What the runs share.

    Attributes:
        load: returns the model as it is before any step.
        train: `run_case_study.train`.
        checkpoint_every: steps between two states that can be gone on from; 0 for none.
    """

    settings: Settings
    recipe: Recipe
    data: Data
    load: Callable[[], Any]
    train: Callable[..., Any]
    folder: Folder
    checkpoints: Checkpoints
    checkpoint_every: int
    model: Any = None

    def run(self, faults: Sequence[Fault | None]) -> None:
        """Train the runs that are not finished; a kill loses the steps since the last state."""
        for fault in faults:
            if _name(fault) not in self.folder.summary["runs"]:
                with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
                    self._run(fault, branches=fault is None and len(faults) > 1)
        if any(faults):
            self.checkpoints.forget(BRANCH)

    def _run(self, fault: Fault | None, *, branches: bool) -> None:
        on_gpu = self.recipe.device == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        gc.collect()  # the optimiser of the last twin
        name, log = _name(fault), self.folder.log(run_id(self.settings, fault))
        about = self.folder.about(self.settings, fault)
        state = self._state(fault, log, about)
        if self.model is None or state is None:
            self.model = None  # before the next one is loaded: two may not fit
            self.model = self.load()
        hardware, source = hardware_of(self.recipe.device)
        first, every = state["step"] if state else 0, self.checkpoint_every

        def keep(run: Any) -> None:
            if branches and run.step == self.settings.onset - 1:
                self.checkpoints.save(BRANCH, run.state_dict())
            if run.step > first and every and run.step % every == 0:
                self.checkpoints.save(name, run.state_dict())

        with tqdm(total=self.settings.max_steps, initial=first, desc=name, unit="step") as bar:
            run = self.train(
                self.model, self.recipe, self.settings, self.data, fault, log=log, state=state,
                hardware=hardware, about=about, before_step=keep, bar=bar,
            )  # fmt: skip
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
        cost = run.cost()
        records = read_log(log).records
        control = self.folder.summary["runs"].get(CONTROL) if fault else None
        twin = read_log(self.folder.log(control["id"])).records if control else None
        truth = truth_of(fault.truth if fault else Truth(), records, twin)
        finish_log(log, truth, records, cost["seconds_per_step"])
        self.folder.summary["runs"][name] = {
            "id": log.stem,
            "steps": run.step,
            "cost": cost | {"peak_memory_bytes": peak},
            "hardware": {"source": source, "readings_at_the_end": run.readings},
        }
        self.folder.write()
        self.checkpoints.forget(name)

    def _state(
        self, fault: Fault | None, log: Path, about: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Where the run goes on: at its own last state, or at the control's before the onset."""
        state, source = self.checkpoints.load(_name(fault)), log
        if state is None and fault is not None:
            state = self.checkpoints.load(BRANCH)
            source = self.folder.log(run_id(self.settings, None))
        if state is None:
            log.unlink(missing_ok=True)
        else:
            # The last of the steps is in the monitor's state, and not yet in the log.
            copy_log(source, log, about, state["step"] - 1)
        return state


def _name(fault: Fault | None) -> str:
    """Of the run in the summary."""
    return fault.label if fault else CONTROL


# -- where hardware events come from: NVML on a GPU, nowhere on a processor


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


# -- what became of a run: absorbed, non-finite, diverged or degraded


def truth_of(injected: Truth, records: Sequence[Record], twin: Sequence[Record] | None) -> Truth:
    """The truth of a whole run: `injected` with what became of it.

    - non_finite: the loss is nan or infinite, and stays so to the end. A gradient that overflows
      is no failure: under loss scaling it is how the scale is found.
    - diverged: the validation loss stays 20 % above its best so far, and ends there;
    - degraded: it stays 0.10 nat above the twin's.

    The last two hold for the median of three evaluations, and count from the
    evaluation since which they do. A loss that falls fast leaves that median
    above its best as well: only one that also ends above it has diverged.
    `twin` are the records of the same run without the fault; None where it was not run.
    """
    failure = None
    for record in records:
        losses = [x for x in (record.training_loss, record.validation_loss) if x is not None]
        if losses and all(map(isfinite, losses)):
            failure = None
        elif losses and failure is None:
            failure = "non_finite", record.step
    if failure is None:
        loss = {r.step: r.validation_loss for r in records if r.validation_loss is not None}
        beside = {r.step: r.validation_loss for r in twin or ()}
        twin_T = None if twin is None else np.array([beside[step] for step in loss])
        soft = soft_failure(np.array(list(loss.values()), dtype=float), twin_T, ends_there=True)
        failure = (soft[0], list(loss)[soft[1]]) if soft else None
    if failure is not None:
        kind, step = failure
        return replace(injected, outcome="failed", failure_kind=kind, failure_step=step)
    return replace(injected, outcome="healthy" if injected.fault == "NONE" else "absorbed")
