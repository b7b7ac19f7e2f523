"""The output folder: whose it is, the logs of the runs in it, and the states they go on from."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rmetric.logs import (
    encode_line,
    fault_lines,
    final_line,
    log_path,
    parse_line,
    start_line,
    write_atomically,
)
from rmetric.metric import RMetricConfig
from rmetric.records import Record, Truth
from rmetric.reporting.replay_report import safe_name
from studies.case_study.data import Data
from studies.case_study.faults import Fault
from studies.case_study.plan import Device, Plan, in_units
from studies.case_study.settings import CannotWrite, CaseStudyError, Settings
from studies.common.provenance import commit, versions

SUMMARY = "summary.json"
PACKAGES = ("torch", "transformers", "peft", "datasets", "numpy")
#: Keys of the summary that make it the same case study; the rest may differ on resuming.
IDENTITY = ("settings", "recipe", "data")
#: Events that the end of a run adds to what the monitor wrote.
ADDED = ("FAULT_INJECTED", "EXPERIMENT_SUCCESS", "EXPERIMENT_FAILURE")


class Folder:
    """One case study on disk. `summary` says what it is and which runs are done."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        """Raises CaseStudyError for a folder with something else in it."""
        self.path = path
        self.summary: dict[str, Any] = {}
        if path.exists() and not path.is_dir():
            raise CaseStudyError(f"--out {path}: it is no folder")
        summary = path / SUMMARY
        if summary.is_file():
            try:
                self.summary = json.loads(summary.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise CaseStudyError(f"{summary}: cannot be read ({error})") from None
            if not isinstance(self.summary, dict) or not set(IDENTITY) <= self.summary.keys():
                raise CaseStudyError(f"{summary}: it is not the summary of a case study")
            if not resume:
                raise CaseStudyError(
                    f"--out {path}: it holds a case study already; --resume goes on with it, "
                    "another --out begins a new one"
                )
        elif path.exists() and any(path.iterdir()):
            raise CaseStudyError(
                f"--out {path}: it is not empty and holds no case study; "
                "another --out begins a new one"
            )
        elif resume:
            print(f"--resume: {path} holds no case study; a new one begins", file=sys.stderr)

    def log(self, run_id: str) -> Path:
        return log_path(self.path, run_id)

    def claim(self, identity: dict[str, Any]) -> None:
        """Make it the folder of this case study, or raise CaseStudyError if it is another's."""
        plain = json.loads(json.dumps(identity))
        differing = [
            f"{name} is {self.summary[part].get(name)} there and {plain[part].get(name)} here"
            for part in IDENTITY
            if self.summary
            for name in sorted(plain[part].keys() | self.summary[part].keys())
            if self.summary[part].get(name) != plain[part].get(name)
        ]
        if differing:
            raise CaseStudyError(
                f"--resume {self.path}: it holds another case study: {'; '.join(differing)}"
            )
        self.summary = {"runs": {}} | self.summary | plain
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.write()
        except OSError as error:
            raise CannotWrite(f"--out {self.path}: cannot be written ({error.strerror})") from None

    def about(self, settings: Settings, fault: Fault | None) -> dict[str, Any]:
        """A run's description of itself, by the keys of docs/log_format.md."""
        truth = fault.truth if fault else Truth()
        return {
            "model_type": settings.model,
            "num_workers": settings.micro_batches,
            "total_training_steps": settings.max_steps,
            "seed": settings.seed,
            "eval_every_n_steps": settings.eval_every,
            "recipe": "case_study",
            "device": self.summary["device"]["name"],
            "training": self.summary["method"]["chosen"],
            "fault_injection": {
                "type": truth.fault,
                "trigger_step": truth.onset_step,
                "params": fault.params if fault else {},
            },
        }

    def write(self) -> None:
        text = json.dumps(self.summary, indent=2, ensure_ascii=False, allow_nan=False)
        write_atomically(self.path / SUMMARY, [text.encode(), b"\n"])


def run_id(settings: Settings, fault: Fault | None) -> str:
    """Name of a run's files: model, fault and seed."""
    model = settings.model.rstrip("/\\").replace("\\", "/").rpartition("/")[2]
    return f"{safe_name(model)}_{fault.label if fault else 'NONE'}_s{settings.seed}"


def identity(settings: Settings, plan: Plan, faults: Sequence[Fault], data: Data) -> dict[str, Any]:
    """What makes it the same case study when it is resumed."""
    recipe = plan.recipe
    return {
        "settings": asdict(settings)
        | {
            "fault": ",".join(f"{fault.name}:{fault.severity:g}" for fault in faults),
            "severity": None,  # it stands with each fault
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
    }


def provenance(device: Device, plan: Plan) -> dict[str, Any]:
    """Where and with what it was measured."""
    return {
        "device": asdict(device),
        "processor": {
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
            "threads_used": torch.get_num_threads(),
        },
        "method": {
            "chosen": str(plan.recipe),
            "reason": plan.reason,
            "trained_weights": plan.memory["gradients"] // 4,
        },
        "memory_needed_bytes": plan.memory | {"total": plan.bytes_needed},
        "versions": versions([*PACKAGES, *["bitsandbytes"] * plan.recipe.four_bit]),
        "commit": commit(),
    }


# -- logs


def copy_log(source: Path, target: Path, about: dict[str, Any], last_step: int) -> None:
    """Begin `target` with what the monitor wrote in `source` up to `last_step`.

    A run that goes on, or branches off another, begins with this.
    """
    start = start_line(about, target.stem, RMetricConfig.case_study(), "FULL_METRIC")
    entries = _entries(source) if source.exists() else ()
    lines = [line for line, entry in entries if entry.get("step", 0) <= last_step]
    write_atomically(target, [start, *lines])


def finish_log(path: Path, truth: Truth, records: list[Record], seconds_per_step: float) -> None:
    """Add what is known only at the end: what a step cost, the fault, and how it went."""
    start = parse_line(path.read_bytes().partition(b"\n")[0])
    start["config"]["seconds_per_step"] = seconds_per_step
    lines, injected = [encode_line(start)], fault_lines(truth)
    for line, entry in _entries(path):
        if truth.onset_step is not None and entry.get("step", 0) >= truth.onset_step:
            lines += injected
        lines.append(line)
    write_atomically(path, [*lines, *injected, final_line(truth, records)])


def _entries(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The monitor's own lines, with what they hold; a line that was cut off ends them."""
    for line in path.read_bytes().splitlines(keepends=True)[1:]:
        if not line.endswith(b"\n"):
            return
        entry = parse_line(line)
        if entry["event"] not in ADDED:
            yield line, entry


# -- states


class Checkpoints:
    """Named states; a kill at any moment leaves each whole or as it was.

    Args:
        folder: where they are files; None keeps them in the processor's memory,
            for machines without the disk, and nothing survives a kill.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._kept: dict[str, Any] = {}

    def check_room(self, bytes_each: int, number: int) -> None:
        """Raise CaseStudyError where `number` states and one being written do not fit."""
        if self._folder is None:
            return
        there = next(path for path in self._folder.absolute().parents if path.exists())
        free, needed = shutil.disk_usage(there).free, bytes_each * (number + 1)
        if needed > free:
            raise CaseStudyError(
                f"{self._folder}: checkpoints need {in_units(needed)} and {in_units(free)} are "
                "free; --out takes another disk, --checkpoint-every 0 keeps what is needed in "
                "memory and cannot be resumed"
            )

    def save(self, name: str, state: dict[str, Any]) -> None:
        if self._folder is None:
            # A copy whose tensors are in the processor's memory and change no more.
            self._kept[name] = tree_map_only(
                Tensor, lambda kept: kept.detach().to("cpu", copy=True), state
            )
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        part = self._folder / f"{name}.part"
        torch.save(state, part)
        part.replace(part.with_suffix(".pt"))

    def load(self, name: str) -> dict[str, Any] | None:
        """The state of that name; None where there is none."""
        if self._folder is None:
            return self._kept.get(name)
        path = self._folder / f"{name}.pt"
        # weights_only: whoever wrote the file, nothing in it is run.
        return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None

    def forget(self, name: str) -> None:
        self._kept.pop(name, None)
        if self._folder is not None:
            for suffix in (".pt", ".part"):
                (self._folder / f"{name}{suffix}").unlink(missing_ok=True)
            if self._folder.is_dir() and not any(self._folder.iterdir()):
                self._folder.rmdir()
