"""From what was asked for to the report: find the device, load, train, write."""

from __future__ import annotations

import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import PreTrainedConfig

import rmetric
from rmetric.reporting.provenance import commit
from studies.case_study.blocks import make_blocks
from studies.case_study.bundled import Sources, sources_of
from studies.case_study.checkpoints import Checkpoints
from studies.case_study.device import Device, find_device
from studies.case_study.faults import Fault, LearningRateSpike, fault_of
from studies.case_study.folder import Folder
from studies.case_study.models import check_weights, load_model, load_tokenizer, read_config
from studies.case_study.plan import Plan, plan_training
from studies.case_study.report import write_report
from studies.case_study.rows import read_rows
from studies.case_study.settings import TINY, CaseStudyError, Settings
from studies.case_study.study import CaseStudy
from studies.case_study.training import Data

PACKAGES = ("torch", "transformers", "peft", "datasets", "numpy")


def run_case_study(
    settings: Settings,
    names: Sequence[str],
    *,
    device_kind: str = "auto",
    method: str = "auto",
    out: Path | None = None,
    resume: bool = False,
    checkpoint_every: int = 100,
) -> Folder:
    """Train `names` of control and fault, and write the report; returns where it is.

    Raises CaseStudyError; before any weight is loaded, where it can be known then.
    """
    if checkpoint_every < 0:
        raise CaseStudyError(f"--checkpoint-every is {checkpoint_every}: at least 0 is needed")
    fault = fault_of(settings)
    device = find_device(device_kind)
    folder = Folder(out or default_folder(device, fault))
    folder.check_free(resume=resume)
    if resume and not folder.summary:
        print(f"--resume: {folder.path} holds no case study; a new one begins", file=sys.stderr)
    if settings.model == TINY:
        # More threads gain nothing here, and with one its sums are the same on every machine.
        torch.set_num_threads(1)
    with quiet(), sources_of(settings) as sources:
        config = read_config(sources.model)
        _check_length(config, settings)
        plan = plan_training(config, settings, device, method)
        print(f"device  {device}\nmethod  {plan.recipe}: {plan.reason}\nmemory  {plan.memory}")
        if not settings.random_weights:
            check_weights(sources.model)
        checkpoints = Checkpoints(folder.path / "checkpoints" if checkpoint_every else None)
        checkpoints.check_room(3 * plan.memory.gradients, number=2)
        data = load_data(settings, config, sources)
        folder.claim(identity(settings, plan, fault, data))
        folder.summary |= provenance(device, plan)
        CaseStudy(
            settings=settings,
            fault=fault,
            device=device,
            recipe=plan.recipe,
            data=data,
            load=partial(
                load_model,
                sources.model,
                config,
                plan.recipe,
                random_weights=settings.random_weights,
                seed=settings.seed,
            ),
            folder=folder,
            checkpoints=checkpoints,
            checkpoint_every=checkpoint_every,
        ).run(names)
    write_report(folder)
    return folder


def default_folder(device: Device, fault: Fault) -> Path:
    """Here, not in results/, which keeps what was published. The paper's fault needs no name."""
    named = "" if isinstance(fault, LearningRateSpike) else f"_{fault.name.lower()}"
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


def identity(settings: Settings, plan: Plan, fault: Fault, data: Data) -> dict[str, Any]:
    """What makes it the same case study when it is resumed."""
    recipe = plan.recipe
    return {
        "settings": asdict(settings)
        | {
            "severity": fault.severity,
            "fault_step": fault.onset,
            "fault_steps": fault.duration,
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
        },
        "commit": commit(),
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Only what the user can do something about is said, and not across the progress bar."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    with warnings.catch_warnings(), logging_redirect_tqdm([logging.getLogger("rmetric")]):
        warnings.simplefilter("ignore", FutureWarning)
        yield
