"""A run beside its training: its description, its log and hardware, and what came out of it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rmetric import logs
from rmetric.detectors import DETECTORS, IN_PAPER
from rmetric.evaluation import trace
from rmetric.monitor.step_recorder import Hardware
from rmetric.records import HardwareEvent, Record, Truth
from rmetric.replay.scored_run import ScoredRun, score_run
from rmetric.reporting.page import trace_of_r_metric
from rmetric.reporting.replay_report import replay_logs, safe_name, verdicts
from rmetric.reporting.style import save, style
from rmetric.simulation.outcome import soft_failure
from studies.case_study.data import Data
from studies.case_study.models import Device, Plan
from studies.case_study.plot import plot_twins
from studies.case_study.settings import Fault, Settings
from studies.common.provenance import commit, versions
from studies.common.real_runs import real_runs_table
from studies.common.renderers import to_markdown


def run_id(settings: Settings, fault: Fault | None) -> str:
    model = settings.model.rstrip("/\\").replace("\\", "/").rpartition("/")[2]
    return f"{safe_name(model)}_{fault.label if fault else 'NONE'}_s{settings.seed}"


def about_run(
    settings: Settings, plan: Plan, device: Device, fault: Fault | None
) -> dict[str, Any]:
    """A run's description of itself, by the keys of docs/log_format.md."""
    injected: dict[str, Any] = {"type": "NONE", "trigger_step": None, "params": {}}
    if fault is not None:
        params = dict(
            severity=fault.severity, severity_unit=fault.unit, duration_steps=fault.duration
        )
        injected = {"type": fault.name, "trigger_step": fault.onset, "params": params}
    return {
        "model_type": settings.model,
        "num_workers": settings.micro_batches,
        "total_training_steps": settings.max_steps,
        "seed": settings.seed,
        "eval_every_n_steps": settings.eval_every,
        "recipe": "case_study",
        "device": device.name,
        "training": str(plan.recipe),
        "fault_injection": injected,
    }


def about_study(
    settings: Settings, plan: Plan, device: Device, faults: Sequence[Fault], data: Data
) -> dict[str, Any]:
    """The summary without its runs: model, data, machine, packages and settings."""
    recipe, memory = plan.recipe, plan.memory
    packages = ["torch", "transformers", "peft", "datasets", "numpy"]
    used = asdict(settings) | {
        "fault": ",".join(f"{fault.name}:{fault.severity:g}" for fault in faults),
        "fault_step": settings.onset,
        "fault_steps": [fault.duration for fault in faults],
        "learning_rate": settings.learning_rate or recipe.learning_rate,
    }
    sequences = {f"{name}_sequences": len(getattr(data, name)) for name in ("training", "held_out")}
    processor = {"architecture": platform.machine(), "cores": os.cpu_count()}
    method = {"chosen": str(recipe), "reason": plan.reason}
    return {
        "runs": {},
        "settings": used,
        "recipe": asdict(recipe) | {"dtype": str(recipe.dtype).removeprefix("torch.")},
        "data": sequences | {"sha256": data.training.digest},
        "device": device._asdict(),
        "processor": processor | {"threads_used": torch.get_num_threads()},
        "method": method | {"trained_weights": memory["gradients"] // 4},
        "memory_needed_bytes": memory | {"total": sum(memory.values())},
        "versions": versions(packages + ["bitsandbytes"] * recipe.four_bit),
        "commit": commit(),
    }


class NoHardware:
    """A machine whose hardware reports nothing; λ is 0 on it, and known to be."""

    def poll(self) -> tuple[HardwareEvent, ...]:
        return ()

    def close(self) -> None:
        """Nothing to end."""


def hardware_of(device: str) -> tuple[Hardware | None, str]:
    """The source of hardware events, and what it is in words.

    None where there is a GPU that cannot be read: then nothing is logged of it.
    """
    if device == "cpu":
        return NoHardware(), "no GPU: no hardware events, λ is 0"
    from rmetric.telemetry.nvml import NvmlEvents

    events = NvmlEvents(devices=[f"GPU-{torch.cuda.get_device_properties(0).uuid}"])
    if events.ready():
        return events, "NVML: Xids, ECC errors, row remaps, throttling, temperature"
    problem = events.problem
    events.close()
    return None, f"λ is not logged: {problem}"


def finish_log(
    path: Path, injected: Truth, seconds_per_step: float, twin: Path | None, first_step: int
) -> None:
    """Complete the monitor's log of a run: the steps before its own, the fault, how it went.

    The steps before `first_step` are taken from `twin`, the control's log.
    """
    head, *own = path.read_bytes().splitlines(keepends=True)
    if twin:
        before = twin.read_bytes().splitlines(keepends=True)[1:]
        own = [x for x in before if logs.parse_line(x).get("step", first_step) < first_step] + own
    records = logs.read_lines(path, [head, *own]).records
    truth = truth_of(injected, records, logs.read_log(twin).records if twin else None)
    start = logs.parse_line(head)
    start["config"]["seconds_per_step"] = seconds_per_step
    lines, pending = [logs.encode_line(start)], [*logs.fault_lines(truth)]
    for line in own:
        if pending and logs.parse_line(line).get("step", 0) >= injected.onset_step:
            lines.append(pending.pop())
        lines.append(line)
    logs.write_atomically(path, [*lines, *pending, logs.final_line(truth, records)])


def truth_of(injected: Truth, records: Sequence[Record], twin: Sequence[Record] | None) -> Truth:
    """`injected` with what became of the run: absorbed, non-finite, diverged or degraded.

    Non-finite: the loss, to the end; a gradient that overflows is not a failure, as a loss scale
    is found by it. The others are of `soft_failure`, against the records of the control, `twin`.
    """
    kind, step = None, None
    for record in records:
        losses = [x for x in (record.training_loss, record.validation_loss) if x is not None]
        if losses and all(map(isfinite, losses)):
            kind, step = None, None
        elif losses and kind is None:
            kind, step = "non_finite", record.step
    if kind is None:
        loss = {r.step: r.validation_loss for r in records if r.validation_loss is not None}
        beside = {r.step: r.validation_loss for r in twin or ()}
        twin_T = None if twin is None else np.array([beside[step] for step in loss])
        # A loss that still falls fast has not diverged: one that also ends above its best has.
        soft = soft_failure(np.array(list(loss.values()), dtype=float), twin_T, ends_there=True)
        kind, step = (soft[0], list(loss)[soft[1]]) if soft else (None, None)
    outcome = "failed" if kind else "healthy" if injected.fault == "NONE" else "absorbed"
    return replace(injected, outcome=outcome, failure_kind=kind, failure_step=step)


# -- what came out of all runs, computed from their logs

CALIBRATED = "calibrated"


def write_report(summary: dict[str, Any], folder: Path) -> None:
    """The plot, claims.md, the replayed pages, and the summary with the judgements."""
    done = summary["runs"]
    paths = {name: logs.log_path(folder, run["id"]) for name, run in done.items()}
    scored = {name: score_run(logs.read_log(path)) for name, path in paths.items()}
    for name, run in scored.items():
        truth = asdict(run.run.truth or Truth())
        done[name] |= {part: truth[part] for part in truth if part not in ("benign", "applicable")}
        done[name]["max_r"] = max(score.score for score in run.scores)
        done[name]["r_metric"] = judgement(run, trace_of_r_metric(run))
    others = {
        name: {of: trace(name, run.run) for of, run in scored.items()}
        for name, entry in (IN_PAPER | {CALIBRATED: DETECTORS[CALIBRATED]}).items()
        if entry.kind in ("baseline", "ours") and not entry.sees_future
    }
    summary["other_detectors"] = {
        name: {of: judgement(scored[of], found) for of, found in traces.items()}
        for name, traces in others.items()
    }
    with style():
        save(plot_twins(scored, others[CALIBRATED]), folder / "case_study")
    logs.write_atomically(folder / "claims.md", [to_markdown(real_runs_table([summary])).encode()])
    replay_logs([*paths.values()], folder / "replayed", most_plots=0)
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False)
    logs.write_atomically(folder / "summary.json", [text.encode(), b"\n"])


def judgement(scored: ScoredRun, found: Any) -> dict[str, Any]:
    """A detector's alarms by phase, the first ones, and the verdict under each protocol."""
    began = found.steps[found.begins]
    counted = {"alerts": began, "steps_in_alert": found.alert_steps}
    truth, seconds = scored.run.truth or Truth(), scored.run.config["seconds_per_step"]
    onset, failure = truth.onset_step, truth.failure_step
    phases: dict[str, tuple[float, float]] = {"whole_run": (-inf, inf)}
    if onset is not None:
        after = "after_onset" if failure is None else "onset_to_failure"
        phases = {"before_onset": (-inf, onset), after: (onset, failure or inf)}
    if onset is not None and failure is not None:
        phases["after_failure"] = (failure, inf)
    since = (step for step in began.tolist() if onset is not None and step >= onset)
    judged: dict[str, Any] = {
        "first_alert_step": found.first_alert,
        "first_alert_since_onset": next(since, None),
        "alerts": {
            phase: {name: int(((low <= at) & (at < high)).sum()) for name, at in counted.items()}
            for phase, (low, high) in phases.items()
        },
    }
    for protocol, entry in (verdicts(scored, found) or {}).items():
        lead = entry["lead_steps"]
        judged[protocol] = entry | {"lead_minutes": lead if lead is None else lead * seconds / 60}
    return judged


def verdict(run: Mapping[str, Any], first: int | None) -> str:
    """The judgement on a detector's first alarm by the causal rule, with its step."""
    onset, failure = run["onset_step"], run["failure_step"]
    if first is None:
        return "no alarm" if failure is None else "missed"
    if onset is None or first < onset:
        return f"{first}: false alarm"
    if failure is None:
        return f"{first}: on a fault that was absorbed"
    ahead = failure - first
    return f"{first}: {ahead} step{'s' * (ahead > 1)} ahead" if ahead > 0 else f"{first}: too late"


def table_of(summary: Mapping[str, Any]) -> str:
    rows = [("run", "fault at", "outcome", "R-Metric (published)", "calibrated detector")]
    for name, run in summary["runs"].items():
        judged = run["r_metric"], summary["other_detectors"][CALIBRATED][name]
        published, calibrated = (verdict(run, of["first_alert_step"]) for of in judged)
        outcome = run["outcome"]
        if outcome == "failed":
            outcome = f"{run['failure_kind']} at {run['failure_step']}".replace("_", "-")
        rows.append((name, str(run["onset_step"] or "-"), outcome, published, calibrated))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)
