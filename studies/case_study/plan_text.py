"""The plan in words: memory by part, time, download; everything before a weight is loaded."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import datasets
import torch
import transformers
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import PreTrainedConfig

from studies.case_study.bundled import Sources, qwen_3b
from studies.case_study.faults import Fault
from studies.case_study.models import Download, find_missing, read_config
from studies.case_study.plan import Device, Plan, in_units, plan_training
from studies.case_study.settings import MODEL, TINY, CaseStudyError, Settings

#: Dense matrix products in 16 bits, FLOP/s, from NVIDIA's data sheets, by a part of the name.
PEAKS = {
    "T4": 65e12, "L4": 121e12, "V100": 125e12, "A10": 125e12, "L40S": 362e12, "A100": 312e12,
    "H100": 989e12, "H200": 989e12,
}  # fmt: skip
#: Share of the peak that such a training reaches, and that of a measured product: from, to. An
#: H100 reached 0.06: its kernels on 512 tokens end before the host has launched the next ones.
REACHED, REACHED_OF_MEASURED = (0.05, 0.45), (0.25, 0.9)
#: Seconds of a step of the tiny model on one free core, and on a busy one.
TINY_STEP = (0.05, 0.1)


def step_flops(plan: Plan, settings: Settings) -> float:
    """Floating-point operations of an optimiser step.

    A weight costs two a token forwards, two for the gradient of its input, and two for its own
    if it is trained; gradient checkpointing repeats the forward pass.
    """
    tokens = settings.micro_batches * settings.micro_batch_size * settings.sequence_length
    a_weight = (4 if plan.recipe.lora else 6) + 2 * plan.recipe.gradient_checkpointing
    return float(a_weight * plan.weights * tokens)


def total_flops(plan: Plan, settings: Settings, faults: Sequence[Fault], *, control: bool) -> float:
    """Of all runs with their evaluations; those with a fault start from the control, if it runs."""
    steps = steps_of(settings, faults, control=control)
    held_out = settings.eval_sequences * settings.sequence_length
    evaluations = steps / settings.eval_every
    return steps * step_flops(plan, settings) + evaluations * 2.0 * plan.weights * held_out


def steps_of(settings: Settings, faults: Sequence[Fault], *, control: bool) -> int:
    """Optimiser steps of all runs."""
    shared = settings.onset - 1 if control else 0
    return control * settings.max_steps + len(faults) * (settings.max_steps - shared)


def seconds_needed(
    plan: Plan, settings: Settings, device: Device, faults: Sequence[Fault], *, control: bool
) -> tuple[float, float, str] | None:
    """From and to how many seconds all runs take, and what that rests on; None if unknown."""
    if settings.model == TINY:
        steps = steps_of(settings, faults, control=control)
        return steps * TINY_STEP[0], steps * TINY_STEP[1], "0.05 to 0.1 s a step"
    flops = total_flops(plan, settings, faults, control=control)
    peak = next((p for name, p in PEAKS.items() if name in _words(device.name)), None)
    if peak is not None and device.kind == "cuda":
        low, high = REACHED
        basis = f"{low:.0%} to {high:.0%} of the peak of {peak / 1e12:g} TFLOP/s"
    elif device.kind == "cpu" or torch.cuda.is_available():
        peak = measured_peak(device, plan.recipe.dtype)
        low, high = REACHED_OF_MEASURED
        basis = f"{low:.0%} to {high:.0%} of {peak / 1e12:.2g} TFLOP/s of a matrix product here"
    else:
        return None
    return flops / (high * peak), flops / (low * peak), basis


def _words(name: str) -> set[str]:
    return set(name.replace("-", " ").split())


def measured_peak(device: Device, dtype: torch.dtype, width: int = 1024) -> float:
    """FLOP/s of a matrix product on this machine; takes a fraction of a second."""
    width = 8 * width if device.kind == "cuda" else width
    left = torch.ones(width, width, device=device.kind, dtype=dtype)
    best = 0.0
    for _ in range(4):  # the first one warms up
        began = time.perf_counter()
        left @ left
        if device.kind == "cuda":
            torch.cuda.synchronize()
        best = max(best, 2.0 * width**3 / (time.perf_counter() - began))
    return best


def duration(seconds: float) -> str:
    """Seconds in the unit that reads best.

    >>> duration(50), duration(1500), duration(9000), duration(400_000)
    ('50 s', '25 min', '2.5 h', '4.6 days')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def plan_lines(
    plan: Plan, settings: Settings, device: Device, faults: Sequence[Fault], *,
    control: bool, checkpoint_every: int, downloads: Sequence[Download],
) -> list[str]:  # fmt: skip
    """The plan, a line for each part."""
    precision = "bfloat16" if device.has_bfloat16 else "no bfloat16 of its own: float16"
    on_gpu = f", {precision}" if device.kind == "cuda" else ", float32"
    state = 3 * plan.memory.gradients
    kept = f"up to 3 of {in_units(state)} on disk" if checkpoint_every else "in host memory, 1 of "
    kept += "" if checkpoint_every else in_units(state)
    runs = [("control", settings.max_steps)] * control
    shared = settings.onset - 1 if control else 0
    runs += [(fault.label, settings.max_steps - shared) for fault in faults]
    time_needed = seconds_needed(plan, settings, device, faults, control=control)
    took = "unknown: no peak is known for this GPU"
    if time_needed is not None:
        least, most, basis = time_needed
        took = f"{duration(least)} to {duration(most)}, set-up left out ({basis})"
    return [
        f"device     {device}{on_gpu}",
        f"method     {plan.recipe}: {plan.reason}",
        f"memory     {in_units(plan.memory.total)} on the device:",
        *(f"           {part:<24}{in_units(size):>9}" for part, size in plan.memory.parts()),
        f"host       {in_units(plan.memory.weights + plan.memory.weights_4bit)} "
        "while the weights are loaded",
        f"snapshots  {kept}",
        f"runs       {', '.join(f'{name} {steps} steps' for name, steps in runs)}",
        f"time       {took}",
        f"download   {', '.join(map(str, downloads)) or 'nothing'}",
    ]


def print_plan(
    settings: Settings, sources: Sources, device: Device, method: str, faults: Sequence[Fault], *,
    control: bool, checkpoint_every: int, search: bool = True,
) -> tuple[PreTrainedConfig, Plan]:  # fmt: skip
    """Print how and at what cost it would be trained; no weight is loaded and no data read.

    The default model's configuration is part of the program, so its plan needs no network.

    Args:
        settings, sources: as asked for, and where model and dataset are.
        device: to train on.
        method: full, lora, qlora or auto.
        faults, control: the runs.
        checkpoint_every: steps between two states; 0 for none.
        search: find out what is not on this machine.

    Returns:
        The model's own configuration and the plan.

    Raises:
        CaseStudyError: nothing fits, or something is missing and cannot be fetched.
    """
    known = settings.model == MODEL
    problem: CaseStudyError | None = None
    downloads: list[Download] = []
    if search:
        try:
            downloads = find_missing(
                sources.model, sources.dataset, random_weights=settings.random_weights
            )
        except CaseStudyError as error:
            if not known:
                raise
            problem = error
    config = qwen_3b() if known else read_config(sources.model)
    _check_length(config, settings)
    plan = plan_training(config, settings, device, method)
    lines = plan_lines(
        plan, settings, device, faults, control=control, checkpoint_every=checkpoint_every,
        downloads=downloads,
    )  # fmt: skip
    if problem is not None or not search:
        lines = lines[:-1]  # the download: the error tells, or nobody has looked
    print("\n".join(lines), flush=True)
    if problem is not None:
        raise problem
    return read_config(sources.model) if known and search else config, plan


def _check_length(config: PreTrainedConfig, settings: Settings) -> None:
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and settings.sequence_length > longest:
        raise CaseStudyError(
            f"--sequence-length is {settings.sequence_length}: the model takes up to {longest}"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Only what the user can do something about is said, and not across the progress bar."""
    loud: Any = transformers.utils.logging
    loud.set_verbosity_error()
    loud.disable_progress_bar()
    datasets.disable_progress_bars()
    with warnings.catch_warnings(), logging_redirect_tqdm([logging.getLogger("rmetric")]):
        warnings.simplefilter("ignore", FutureWarning)
        # float16 leaves steps out while it looks for its scale.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        yield
