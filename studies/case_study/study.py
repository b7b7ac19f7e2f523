"""From what was asked for to the report: find the device, load, train the twins, write.

The twins are the same run up to the onset. The control keeps its state there, and the
others begin from it: they are equal to the last bit before the fault, on a GPU too,
whose sums are not the same twice.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import PreTrainedConfig

import rmetric
from rmetric.logs import read_log, start_line
from rmetric.records import Record, Truth
from rmetric.reporting.replay_report import safe_name
from studies.case_study.bundled import Sources, qwen_3b, sources_of
from studies.case_study.data import Data, make_blocks, read_rows
from studies.case_study.estimates import Download, device_named, plan_lines
from studies.case_study.faults import Fault, faults_of
from studies.case_study.folder import Checkpoints, Folder, copy_log, finish_log
from studies.case_study.models import (
    check_packages,
    check_weights,
    find_missing,
    load_model,
    load_tokenizer,
    read_config,
)
from studies.case_study.plan import Device, Plan, find_device, plan_training
from studies.case_study.report import truth_of, write_report
from studies.case_study.settings import FAULT, MODEL, TINY, CaseStudyError, Settings
from studies.case_study.training import (
    MONITOR,
    Training,
    hardware_of,
    own_randomness,
)  # fmt: skip
from studies.common.provenance import commit

CONTROL = "control"
BRANCH = "branch"
PACKAGES = ("torch", "transformers", "peft", "datasets", "numpy")


def run_case_study(
    settings: Settings,
    *,
    control: bool = True,
    faulty: bool = True,
    device_kind: str = "auto",
    method: str = "auto",
    out: Path | None = None,
    resume: bool = False,
    checkpoint_every: int = 100,
    began: float | None = None,
    float16: bool = False,
) -> Folder:
    """Train the control, the runs with a fault, or both, and write the report.

    Args:
        settings: as asked for.
        control, faulty: which of the runs are trained.
        device_kind: ``auto``, ``cuda`` or ``cpu``.
        method: ``auto``, ``full``, ``lora`` or ``qlora``.
        out: folder of the results; None for one named after the device.
        resume: go on with the case study in that folder.
        checkpoint_every: steps between two states; 0 for none.
        float16: compute in it where the GPU has bfloat16, as a T4 does.
        began: `time.perf_counter` at the start of the program, from which the set-up counts.

    Returns:
        The folder with the results.

    Raises CaseStudyError; before any weight is loaded, where it can be known then.
    """
    began = time.perf_counter() if began is None else began
    if checkpoint_every < 0:
        raise CaseStudyError(f"--checkpoint-every is {checkpoint_every}: at least 0 is needed")
    faults = faults_of(settings)
    device = chosen_device(device_kind, float16=float16)
    folder = Folder(out or default_folder(device, settings))
    folder.check_free(resume=resume)
    if resume and not folder.summary:
        print(f"--resume: {folder.path} holds no case study; a new one begins", file=sys.stderr)
    if settings.model == TINY:
        torch.set_num_threads(1)  # more gain nothing here, and sum in another order
    with quiet(), sources_of(settings) as sources:
        trained = [fault for fault in faults if faulty]
        config, plan = print_plan(
            settings, sources, device, method, trained, control=control,
            checkpoint_every=checkpoint_every,
        )  # fmt: skip
        check_packages(plan.recipe)
        if not settings.random_weights:
            check_weights(sources.model)
        checkpoints = Checkpoints(folder.path / "checkpoints" if checkpoint_every else None)
        checkpoints.check_room(3 * plan.memory.gradients, number=2)
        data = load_data(settings, config, sources)
        folder.claim(identity(settings, plan, faults, data))
        folder.summary |= provenance(device, plan)

        def load() -> Any:
            random, seed = settings.random_weights, settings.seed
            return load_model(sources.model, config, plan.recipe, random_weights=random, seed=seed)

        study = CaseStudy(
            settings=settings, plan=plan, device=device, data=data, load=load, folder=folder,
            checkpoints=checkpoints, checkpoint_every=checkpoint_every,
        )  # fmt: skip
        starts = time.perf_counter()
        twins = [Twin(settings, None)] if control else []
        study.run(twins + [Twin(settings, fault) for fault in faults if faulty])
    ends = time.perf_counter()
    write_report(folder)
    folder.summary["seconds"] = {
        "of_processor": time.process_time(),
        "set_up": starts - began,
        "training": ends - starts,
        "report": time.perf_counter() - ends,
    }
    folder.write()
    return folder


def chosen_device(kind: str, *, float16: bool) -> Device:
    """The device to train on, without its bfloat16 if `float16` is asked for."""
    device = find_device(kind)
    if not float16:
        return device
    if device.kind == "cpu":
        raise CaseStudyError("--float16: a processor computes in float32; it needs a GPU")
    return replace(device, has_bfloat16=False)


def show_plan(
    settings: Settings, gpu: str, *, device_kind: str, method: str, control: bool, faulty: bool,
    checkpoint_every: int, float16: bool = False,
) -> None:  # fmt: skip
    """Print the plan for this machine (`gpu` is empty), or for a GPU by its name."""
    device = device_named(gpu) if gpu else chosen_device(device_kind, float16=float16)
    faults = [fault for fault in faults_of(settings) if faulty]
    with quiet(), sources_of(settings) as sources:
        print_plan(
            settings, sources, device, method, faults, control=control,
            checkpoint_every=checkpoint_every, search=not gpu,
        )  # fmt: skip


def print_plan(
    settings: Settings, sources: Sources, device: Device, method: str, faults: Sequence[Fault], *,
    control: bool, checkpoint_every: int, search: bool = True,
) -> tuple[PreTrainedConfig, Plan]:  # fmt: skip
    """Print how and at what cost it would be trained; no weight is loaded and no data read.

    The default model's configuration is part of the program, so its plan needs no network.

    Args:
        settings, sources: as asked for, and where model and dataset are.
        device, method: as for `run_case_study`.
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


@dataclass(frozen=True)
class Twin:
    """One of the runs; `fault` is None for the control."""

    settings: Settings
    fault: Fault | None

    @property
    def name(self) -> str:
        """In the summary."""
        return self.fault.label if self.fault else CONTROL

    @property
    def id(self) -> str:
        fault = self.fault.label if self.fault else "NONE"
        model = self.settings.model.rstrip("/\\").replace("\\", "/").rpartition("/")[2]
        return f"{safe_name(model)}_{fault}_s{self.settings.seed}"

    @property
    def injected(self) -> Truth:
        fault = self.fault
        if fault is None:
            return Truth()
        return Truth(
            fault=fault.name,
            severity=fault.severity,
            onset_step=fault.onset,
            duration_steps=fault.duration,
        )


@dataclass(kw_only=True)
class CaseStudy:
    """What the twins share.

    Attributes:
        load: gives the model as it is before any step.
        checkpoint_every: steps between two states that can be gone on from; 0 for none.
    """

    settings: Settings
    plan: Plan
    device: Device
    data: Data
    load: Callable[[], Any]
    folder: Folder
    checkpoints: Checkpoints
    checkpoint_every: int
    model: Any = None

    def run(self, twins: Sequence[Twin]) -> None:
        """Train what is not finished; a kill loses the steps since the last checkpoint."""
        for twin in twins:
            if twin.name not in self.folder.summary["runs"]:
                branches = twin.fault is None and len(twins) > 1
                with own_randomness():
                    self._run(twin, branch_at=self.settings.onset - 1 if branches else None)
        if any(twin.fault for twin in twins):
            self.checkpoints.forget(BRANCH)

    def _run(self, twin: Twin, branch_at: int | None) -> None:
        if self.device.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
        gc.collect()  # the Trainer of the last twin refers to itself, and holds its optimiser
        state = self._state(twin)
        if self.model is None or state is None:
            self.model = None  # before the next one is loaded: two may not fit
            self.model = self.load()
        hardware, source = hardware_of(self.device.kind)
        first = state["step"] if state else 0

        def keep(step: int) -> None:
            every = self.checkpoint_every
            if step == branch_at:
                self.checkpoints.save(BRANCH, training.state_dict())
            if step > first and every and step % every == 0:
                self.checkpoints.save(twin.name, training.state_dict())

        def show(shown: dict[str, str]) -> None:
            bar.set_postfix(shown, refresh=False)
            bar.update()

        log = self.folder.log(twin.id)
        training = Training(
            self.model, self.plan.recipe, self.settings, self.data, twin.fault, hardware=hardware,
            log=log, run_id=twin.id, about=self._about(twin), before_step=keep, after_step=show,
        )  # fmt: skip
        total = self.settings.max_steps
        with tqdm(total=total, initial=first, desc=twin.name, unit="step") as bar:
            training.train(state)
        on_gpu = self.device.kind == "cuda"
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
        cost = training.cost()
        records = read_log(log).records
        finish_log(
            log, truth_of(twin.injected, records, self._control(twin)), records,
            cost["seconds_per_step"],
        )  # fmt: skip
        self.folder.summary["runs"][twin.name] = {
            "id": twin.id,
            "steps": training.step,
            "cost": cost | {"peak_memory_bytes": peak},
            "hardware": {"source": source, "readings_at_the_end": training.readings},
        }
        self.folder.write()
        self.checkpoints.forget(twin.name)

    def _state(self, twin: Twin) -> dict[str, Any] | None:
        """Where the run goes on: at its own last state, or at the control's before the onset."""
        log = self.folder.log(twin.id)
        state, source = self.checkpoints.load(twin.name), log
        if state is None and twin.fault is not None:
            state = self.checkpoints.load(BRANCH)
            source = self.folder.log(Twin(self.settings, None).id)
        if state is None:
            log.unlink(missing_ok=True)
        else:
            start = start_line(self._about(twin), twin.id, MONITOR.metric, "FULL_METRIC")
            # The last of the steps is in the monitor's state, and not yet in the log.
            copy_log(source, log, start, state["step"] - 1)
        return state

    def _control(self, twin: Twin) -> list[Record] | None:
        """Records of the finished control, for the run that is compared with it."""
        control = self.folder.summary["runs"].get(CONTROL)
        if twin.fault is None or control is None:
            return None
        return read_log(self.folder.log(control["id"])).records

    def _about(self, twin: Twin) -> dict[str, Any]:
        """The run's description of itself, by the keys of docs/log_format.md."""
        return {
            "model_type": self.settings.model,
            "num_workers": self.settings.micro_batches,
            "total_training_steps": self.settings.max_steps,
            "seed": self.settings.seed,
            "eval_every_n_steps": self.settings.eval_every,
            "recipe": "case_study",
            "device": self.device.name,
            "training": str(self.plan.recipe),
            "fault_injection": {
                "type": twin.injected.fault,
                "trigger_step": twin.injected.onset_step,
                "params": twin.fault.params if twin.fault else {},
            },
        }


def default_folder(device: Device, settings: Settings) -> Path:
    """Here, not in results/, which keeps what was published. The default faults need no name."""
    labels = [fault.label.lower() for fault in faults_of(settings)]
    named = "" if settings.fault == FAULT else f"_{'_'.join(labels)}"
    return Path(f"case_study_{device.slug}{named}")


def load_data(settings: Settings, config: PreTrainedConfig, sources: Sources) -> Data:
    tokenizer = load_tokenizer(sources.model)
    training, held_out = make_blocks(
        read_rows(sources.dataset), sources.dataset, tokenizer, settings
    )
    known = config.get_text_config().vocab_size
    highest = max(int(part.tokens_NL.max()) for part in (training, held_out))
    if highest >= known:
        raise CaseStudyError(
            f"--model {settings.model}: its tokenizer gives token {highest} and the model knows "
            f"{known}: they do not belong together"
        )
    return Data(training=training, held_out=held_out, vocabulary=min(len(tokenizer), known))


def _check_length(config: PreTrainedConfig, settings: Settings) -> None:
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and settings.sequence_length > longest:
        raise CaseStudyError(
            f"--sequence-length is {settings.sequence_length}: the model takes up to {longest}"
        )


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
            "trained_weights": plan.memory.gradients // 4,
        },
        "memory_needed_bytes": asdict(plan.memory) | {"total": plan.memory.total},
        "versions": {
            "rmetric": rmetric.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
            **({"bitsandbytes": version("bitsandbytes")} if plan.recipe.four_bit else {}),
        },
        "commit": commit(),
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Only what the user can do something about is said, and not across the progress bar."""
    loud: Any = transformers.utils.logging
    loud.set_verbosity_error()
    loud.disable_progress_bar()
    datasets.disable_progress_bars()
    with warnings.catch_warnings(), logging_redirect_tqdm([logging.getLogger("rmetric")]):
        warnings.simplefilter("ignore", FutureWarning)
        yield
