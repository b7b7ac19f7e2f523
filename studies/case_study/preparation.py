"""What is looked at before a weight is loaded: downloads, and the plan as it is printed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import transformers
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import PreTrainedConfig

from studies.case_study.bundled import Sources, qwen_3b
from studies.case_study.faults import Fault
from studies.case_study.models import is_local, read_config
from studies.case_study.plan import (
    Device,
    Plan,
    in_units,
    plan_lines,
    plan_training,
    steps_by_run,
)
from studies.case_study.settings import (
    DATASET,
    DATASET_CONFIG,
    MODEL,
    CaseStudyError,
    Settings,
)

PATIENCE = 5.0  # seconds that the hub has to answer
#: Of the default model's weights: two bytes each of 3,085,938,688.
QWEN_3B_BYTES = 6_171_877_376
#: What is fetched of a model and of a dataset.
WANTED = {
    "model": (".safetensors", ".json", ".txt", ".model"),
    "dataset": (".parquet", ".jsonl", ".json", ".csv"),
}


class Download(NamedTuple):
    """A model or a dataset of the hub; `size` in bytes, None if the hub did not tell."""

    kind: str
    name: str
    size: int | None

    def __str__(self) -> str:
        size = "size unknown" if self.size is None else in_units(self.size)
        return f"{self.kind} {self.name} ({size})"


def find_missing(model: str, dataset: str, *, random_weights: bool) -> list[Download]:
    """The model and the dataset that are neither local nor cached, with their size on the hub.

    The loaders themselves would try again and again for minutes where there is no network.

    Raises:
        CaseStudyError: one of them cannot be had; two lines tell what to fetch and where to
            put it.
    """
    missing, problems = [], []
    for kind, name in (("model", model), ("dataset", dataset)):
        if not is_local(name) and not _is_cached(kind, name):
            size, problem = _on_hub(kind, name, random_weights=random_weights)
            missing.append(Download(kind, name, size))
            problems += [problem] * bool(problem)
    if problems:
        raise CaseStudyError(_how_to_fetch(missing, problems[0]))
    return missing


def _is_cached(kind: str, name: str) -> bool:
    """Whether it lies in the cache of the hub; a model counts with its weights only."""
    try:
        folder = Path(snapshot_download(name, repo_type=kind, local_files_only=True))
    except (OSError, ValueError):  # not there, or no name that the hub could have
        return False
    return any(folder.rglob("*.safetensors")) if kind == "model" else True


def _on_hub(kind: str, name: str, *, random_weights: bool) -> tuple[int | None, str]:
    """Bytes that would be fetched, and why they cannot be."""
    known = QWEN_3B_BYTES if name == MODEL and not random_weights else None
    if constants.HF_HUB_OFFLINE:
        return known, "HF_HUB_OFFLINE forbids to fetch"
    try:
        info: Any = HfApi().repo_info(name, repo_type=kind, timeout=PATIENCE, files_metadata=True)
    except GatedRepoError:
        raise CaseStudyError(
            f"{kind} {name} asks for its terms to be accepted on its page, and for a login"
        ) from None
    except RepositoryNotFoundError:
        raise CaseStudyError(
            f"the hub has no {kind} {name}, or it is private; --{kind} also takes a local path"
        ) from None
    except Exception as error:
        # Every way in which a network can be missing has its own exception.
        return known, f"the hub does not answer ({type(error).__name__})"
    below = f"{DATASET_CONFIG}/" if name == DATASET else ""
    sizes = [
        file.size
        for file in info.siblings or ()
        if file.rfilename.startswith(below)
        and file.rfilename.endswith(WANTED[kind])
        and not (random_weights and file.rfilename.endswith(".safetensors"))
        and file.size is not None
    ]
    return sum(sizes) if sizes else known, ""


def _how_to_fetch(missing: Sequence[Download], problem: str) -> str:
    commands, options = [], []
    for kind, name, _ in missing:
        folder = f"./{name.rpartition('/')[2]}"
        of_kind = " --repo-type dataset" if kind == "dataset" else ""
        commands.append(f"hf download {name}{of_kind} --local-dir {folder}")
        options.append(f"--{kind} {folder}")
    return (
        f"not on this machine: {', '.join(map(str, missing))}; {problem}\n"
        f"fetch where there is a network: {'; '.join(commands)}; put the "
        f"folder{'s' * (len(missing) > 1)} here and add {' '.join(options)} (--tiny needs none)"
    )


def print_plan(
    settings: Settings, sources: Sources, device: Device, method: str, faults: Sequence[Fault], *,
    control: bool, checkpoints: bool, search: bool,
) -> tuple[PreTrainedConfig, Plan]:  # fmt: skip
    """Print how and at what cost it would be trained; no weight is loaded and no data read.

    The default model's configuration is part of the program, so its plan needs no network.

    Args:
        settings, sources: as asked for, and where model and dataset are.
        device: to train on.
        method: full, lora, qlora or auto.
        faults, control: the runs.
        checkpoints: states go to disk.
        search: find out what is not on this machine.

    Returns:
        The model's own configuration and the plan.

    Raises:
        CaseStudyError: nothing fits, or something is missing and cannot be fetched.
    """
    known = settings.model == MODEL
    problem, downloads = None, []
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
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and settings.sequence_length > longest:
        raise CaseStudyError(
            f"--sequence-length is {settings.sequence_length}: the model takes up to {longest}"
        )
    plan = plan_training(config, settings, device, method)
    steps = steps_by_run(settings, faults, control=control)
    lines = plan_lines(plan, settings, device, steps, checkpoints=checkpoints)
    if search and problem is None:
        lines.append(f"download   {', '.join(map(str, downloads)) or 'nothing'}")
    print("\n".join(lines), flush=True)
    if problem is not None:
        raise problem
    return read_config(sources.model) if known and search else config, plan


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
