"""The logs among the files of a folder: one log a run, without its weights, pictures and settings.

Trainers leave many files beside their log, and some write one log several times. The rules are
by name, since that is how the trainers themselves know these files; a file that the user names
is always read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from fnmatch import translate
from pathlib import Path
from typing import NamedTuple

from rmetric.readers import wandb_file

#: Weights and other tensors, pictures, programs: never a log.
_NO_LOGS = (
    ".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".onnx", ".gguf", ".npz", ".npy", ".h5",
    ".msgpack", ".pkl", ".pickle", ".model", ".distcp", ".tar", ".zip", ".png", ".jpg", ".jpeg",
    ".gif", ".webp", ".svg", ".pdf", ".html", ".py", ".ipynb", ".so", ".parquet", ".arrow",
    ".wandb", ".lock", ".db-wal", ".db-shm",
)  # fmt: skip
#: Settings, vocabularies and closing results that trainers write as text.
_SETTINGS = (
    "config.json", "*_config.json", "tokenizer.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.*",
    "*.index.json", "all_results.json", "train_results.json", "eval_results.json",
    "scheduler.json", "zero_to_fp32.py", "latest", "hparams.yaml", "config.yaml", "meta.yaml",
    "wandb-metadata.json", "wandb-summary.json", "requirements.txt", "conda-environment.yaml",
)  # fmt: skip
_IS_SETTINGS = re.compile("|".join(map(translate, _SETTINGS)))
_STATE = "trainer_state.json"
#: What LLaMA-Factory and ms-swift write beside the Trainer's state.
_TRAINER_LOGS = ("trainer_log.jsonl", "logging.jsonl")
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_WANDB_RUN = re.compile(r"(offline-)?run-\d{8}_\d{6}-\w+|latest-run")
_GLOBAL_STEP = re.compile(rb'"global_step"\s*:\s*(\d+)')
_STEP_OF_LINE = re.compile(rb'"(?:current_steps"\s*:\s*|global_step/max_steps"\s*:\s*")(\d+)')
_SCORES = frozenset({"scores.csv", "summary.json", "report.html"})
_INDEX = frozenset({"index.csv", "index.html"})


class FolderFiles(NamedTuple):
    """The files below a folder: those to read, in the order given, and those passed over."""

    logs: list[Path]
    rest: list[Path]


def logs_among(files: Sequence[Path], root: Path) -> FolderFiles:
    """Split the files below `root` into logs and the rest.

    Recognised are runs of Hugging Face's Trainer (of the states of its checkpoints the latest
    is the log), of Lightning (``metrics.csv`` before its event files), of W&B (its history, or
    what the program printed), a case study (its JSONL logs) and results of an earlier replay.
    """
    by_folder: dict[Path, set[str]] = defaultdict(set)
    states: dict[Path, list[Path]] = defaultdict(list)  # of a Trainer's run, by its folder
    for file in files:
        by_folder[file.parent].add(file.name)
        if file.name == _STATE:
            of_checkpoint = _CHECKPOINT.fullmatch(file.parent.name) is not None
            states[file.parent.parent if of_checkpoint else file.parent].append(file)
    latest = {max(found, key=_global_step) for found in states.values()}
    longer = _longer_logs(files, states, latest)
    latest -= {state for run in longer for state in states[run]}
    kept, rest = list[Path](), list[Path]()
    for file in files:
        above = (folder for folder in file.parents if folder == root or root in folder.parents)
        run = next((folder for folder in above if folder in states), None)
        passed_over = (
            _is_no_log(file)
            or (file.name == _STATE and file not in latest)
            or (run is not None and _repeats_trainer(file, run, longer))
            or _repeats_neighbour(file, by_folder[file.parent])
            or _is_of_wandb(file, by_folder)
        )
        (rest if passed_over else kept).append(file)
    return FolderFiles(kept, rest)


def _is_no_log(file: Path) -> bool:
    name = file.name.lower()
    if file.suffix == ".wandb" and _WANDB_RUN.fullmatch(file.parent.name):
        return False
    return file.suffix.lower() in _NO_LOGS or _IS_SETTINGS.match(name) is not None


def _highest(file: Path, stated: re.Pattern[bytes]) -> int:
    try:
        return max(map(int, stated.findall(file.read_bytes())), default=-1)
    except OSError:
        return -1


def _global_step(state: Path) -> tuple[int, str]:
    # If steps are equal, the state of the run itself, which has the shorter path.
    return _highest(state, _GLOBAL_STEP), "" if "checkpoint" in state.parent.name else "~"


def _longer_logs(
    files: Sequence[Path], states: dict[Path, list[Path]], latest: set[Path]
) -> set[Path]:
    """Folders of runs whose log of lines goes beyond the last state that was saved."""
    longer = set()
    for log in files:
        run = log.parent
        if log.name in _TRAINER_LOGS and run in states:
            state = next(state for state in states[run] if state in latest)
            if _highest(log, _STEP_OF_LINE) > _global_step(state)[0]:
                longer.add(run)
    return longer


def _repeats_trainer(file: Path, run: Path, longer: set[Path]) -> bool:
    """True for what logs the same run again: its event files, its W&B folder, its model card."""
    first = file.relative_to(run).parts[0]
    if first in _TRAINER_LOGS:
        return run not in longer
    return first in ("runs", "wandb", "logs") or (
        "tfevents" in file.name or file.name.lower() == "readme.md"
    )


def _repeats_neighbour(file: Path, beside: set[str]) -> bool:
    if "tfevents" in file.name:
        return "metrics.csv" in beside  # of Lightning
    if {"results.csv", "summary.json"} <= beside and any(n.endswith(".jsonl") for n in beside):
        return file.name in ("results.csv", "summary.json", "claims.md")
    if beside >= _SCORES:
        return file.name in _SCORES
    return beside >= _INDEX and file.name in (*_INDEX, "index.md")


def _is_of_wandb(file: Path, by_folder: dict[Path, set[str]]) -> bool:
    """True for what is below a run's folder of W&B and not its one log."""
    for folder in file.parents:
        if _WANDB_RUN.fullmatch(folder.name):
            parts = file.relative_to(folder).parts
            if parts == ("files", "wandb-history.jsonl"):
                return False
            has_history = "wandb-history.jsonl" in by_folder.get(folder / "files", ())
            if len(parts) == 1 and file.suffix == ".wandb":
                return has_history or not wandb_file.has_history(file)
            printed = parts == ("files", "output.log")
            own = (folder / name for name in by_folder.get(folder, ()) if name.endswith(".wandb"))
            return not printed or has_history or any(map(wandb_file.has_history, own))
    return file.name.startswith("debug") and "wandb" in file.parent.name
