"""A small study whose runs are drawn, not simulated: for what reads logs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rmetric.logs import run_lines, write_atomically
from rmetric.metric import MODES, RMetricConfig
from rmetric.records import HardwareEvent, Record, Run, Truth

ARCHITECTURES = ("Llama-3-8B", "Mistral-7B", "GPT-4-MoE")
FAULTS = ("EXPERT_FAILURE", "ROUTER_IMBALANCE", "GRADIENT_EXPLOSION", "LR_SPIKE", "NONE")
ONSET, STEPS, EVERY = 500, 1000, 50
FAILING = ("GRADIENT_EXPLOSION", "LR_SPIKE")


def make_run(architecture: str, fault: str, repetition: int) -> Run:
    """A falling loss that, under a failing fault, rises from the onset until the run ends."""
    run_id = f"{architecture}_{fault}_r{repetition:02d}"
    rng = np.random.default_rng(list(run_id.encode()))
    fails = fault in FAILING and repetition % 3 != 2
    truth = _truth(architecture, fault, fails)
    last = truth.failure_step if fault == "GRADIENT_EXPLOSION" and fails else STEPS
    records = [_record(rng, step, fails) for step in range(EVERY, last + 1, EVERY)]
    return Run(id=run_id, records=records, config=_config(architecture, fault, repetition),
               truth=truth)  # fmt: skip


def write_study(
    folder: Path, runs: list[Run] | None = None, modes: tuple[str, ...] = tuple(MODES)
) -> None:
    """The logs of `runs`, by default one of each scenario."""
    for mode in modes:
        (folder / f"logs_{mode}").mkdir(parents=True)
        for run in runs or make_runs():
            lines = run_lines(run, RMetricConfig.simulation(), mode)
            write_atomically(folder / f"logs_{mode}" / f"{run.id}.jsonl", lines)


def make_runs(num_repetitions: int = 1) -> list[Run]:
    return [
        make_run(architecture, fault, repetition)
        for architecture in ARCHITECTURES
        for fault in FAULTS
        for repetition in range(num_repetitions)
    ]


def _record(rng: np.random.Generator, step: int, fails: bool) -> Record:
    under_fault = fails and step >= ONSET
    loss = 2 + 8 / step**0.5 + 0.01 * rng.normal() + (0.02 * (step - ONSET) if under_fault else 0)
    norms = (9.0 if under_fault else 1.0) + 0.05 * rng.normal(size=4)
    events = (HardwareEvent(5.0 * step - 1, "link_retry", 0),) if rng.random() < 0.2 else ()
    return Record(step=step, time=5.0 * step, validation_loss=float(loss), events=events,
                  gradient_norm=float(norms.mean()),
                  worker_gradient_norms=tuple(norms.tolist()))  # fmt: skip


def _truth(architecture: str, fault: str, fails: bool) -> Truth:
    if fault == "NONE":
        return Truth()
    moe_only = fault in ("EXPERT_FAILURE", "ROUTER_IMBALANCE")
    applicable = architecture == "GPT-4-MoE" or not moe_only
    truth = Truth(fault=fault, severity=2.0, applicable=applicable, onset_step=ONSET)
    truth.outcome = "failed" if fails else "absorbed" if applicable else "not_applicable"
    if fails:
        non_finite = fault == "GRADIENT_EXPLOSION"
        truth.failure_kind = "non_finite" if non_finite else "diverged"
        truth.failure_step = ONSET + (170 if non_finite else 90)
    return truth


def _config(architecture: str, fault: str, repetition: int) -> dict:
    return {
        "model_type": architecture,
        "seconds_per_step": 5.0,
        "seed": 0,
        "repetition": repetition,
        "fault_injection": {"type": fault, "trigger_step": ONSET, "params": {"severity": 2.0}},
    }
