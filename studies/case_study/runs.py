"""One run beside its training: its name, its hardware, its log, and what became of it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rmetric.logs import (
    encode_line,
    fault_lines,
    final_line,
    parse_line,
    read_lines,
    read_log,
    write_atomically,
)
from rmetric.monitor.step_recorder import Hardware
from rmetric.records import HardwareEvent, Record, Truth
from rmetric.reporting.replay_report import safe_name
from rmetric.simulation.outcome import soft_failure
from studies.case_study.data import Data
from studies.case_study.faults import Fault
from studies.case_study.recipe import Device, Plan
from studies.case_study.settings import Settings
from studies.common.provenance import commit, versions

PACKAGES = ("torch", "transformers", "peft", "datasets", "numpy")


def run_id(settings: Settings, fault: Fault | None) -> str:
    """Name of a run's files: model, fault and seed."""
    model = settings.model.rstrip("/\\").replace("\\", "/").rpartition("/")[2]
    return f"{safe_name(model)}_{fault.label if fault else 'NONE'}_s{settings.seed}"


def about_run(
    settings: Settings, plan: Plan, device: Device, fault: Fault | None
) -> dict[str, Any]:
    """A run's description of itself, by the keys of docs/log_format.md."""
    params = {} if fault is None else {
        "severity": fault.severity, "severity_unit": fault.unit, "duration_steps": fault.duration
    }  # fmt: skip
    return {
        "model_type": settings.model,
        "num_workers": settings.micro_batches,
        "total_training_steps": settings.max_steps,
        "seed": settings.seed,
        "eval_every_n_steps": settings.eval_every,
        "recipe": "case_study",
        "device": device.name,
        "training": str(plan.recipe),
        "fault_injection": {
            "type": fault.name if fault else "NONE",
            "trigger_step": fault.onset if fault else None,
            "params": params,
        },
    }


def about_study(
    settings: Settings, plan: Plan, device: Device, faults: Sequence[Fault], data: Data
) -> dict[str, Any]:
    """What was trained, where and with what: the summary before its runs."""
    recipe = plan.recipe
    return {
        "runs": {},
        "settings": asdict(settings)
        | {
            "fault": ",".join(f"{fault.name}:{fault.severity:g}" for fault in faults),
            "fault_step": settings.onset,
            "fault_steps": [fault.duration for fault in faults],
            "learning_rate": settings.learning_rate or recipe.learning_rate,
        },
        "recipe": asdict(recipe) | {"dtype": str(recipe.dtype).removeprefix("torch.")},
        "data": {
            "training_sequences": len(data.training),
            "held_out_sequences": len(data.held_out),
            "sha256": data.training.digest,
        },
        "device": asdict(device),
        "processor": {
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
            "threads_used": torch.get_num_threads(),
        },
        "method": {
            "chosen": str(recipe),
            "reason": plan.reason,
            "trained_weights": plan.memory["gradients"] // 4,
        },
        "memory_needed_bytes": plan.memory | {"total": sum(plan.memory.values())},
        "versions": versions([*PACKAGES, *["bitsandbytes"] * recipe.four_bit]),
        "commit": commit(),
    }


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


# -- the log, and what became of a run: absorbed, non-finite, diverged or degraded


def finish_log(
    path: Path, injected: Truth, seconds_per_step: float, twin: Path | None, first_step: int
) -> None:
    """Complete the monitor's log of a run: the steps before its own, the fault, how it went.

    Args:
        path: of the log.
        injected: the fault, without its outcome.
        seconds_per_step: for the first line.
        twin: the log of the control; None for the control itself.
        first_step: of the monitor's own lines; those before it are the twin's.
    """
    head, *own = path.read_bytes().splitlines(keepends=True)
    of_twin = twin.read_bytes().splitlines(keepends=True)[1:] if twin else []
    own = [line for line in of_twin if parse_line(line).get("step", first_step) < first_step] + own
    records = read_lines(path, [head, *own]).records
    truth = truth_of(injected, records, read_log(twin).records if twin else None)
    start = parse_line(head)
    start["config"]["seconds_per_step"] = seconds_per_step
    lines, pending = [encode_line(start)], [*fault_lines(truth)]
    for line in own:
        if pending and parse_line(line).get("step", 0) >= injected.onset_step:
            lines.append(pending.pop())
        lines.append(line)
    write_atomically(path, [*lines, *pending, final_line(truth, records)])


def truth_of(injected: Truth, records: Sequence[Record], twin: Sequence[Record] | None) -> Truth:
    """The truth of a whole run: `injected` with what became of it.

    - non_finite: the loss is nan or infinite, and stays so to the end. A gradient that overflows
      is no failure: under loss scaling it is how the scale is found.
    - diverged: the validation loss stays 20 % above its best so far, and ends there;
    - degraded: it stays 0.10 nat above the twin's.

    The last two hold for the median of three evaluations, and count from the
    evaluation since which they do. A loss that falls fast leaves that median
    above its best as well: only one that also ends above it has diverged.
    `twin` are the records of the same run without the fault; None for that run itself.
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
