"""A language model and its tokenizer, from a folder, the hub or a configuration.

Nothing that comes with a model is ever run: its own code is not asked for, and
pickled weights, which can hold code, are not loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import HfApi, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound, GatedRepoError, RepositoryNotFoundError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils.import_utils import is_bitsandbytes_available

from studies.case_study.plan import Recipe, in_units, with_lora
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


@dataclass(frozen=True, kw_only=True)
class Download:
    """A model or a dataset that is not on this machine.

    Attributes:
        kind: ``model`` or ``dataset``.
        name: on the hub.
        size: bytes; None if the hub was not asked or did not tell.
    """

    kind: str
    name: str
    size: int | None

    def __str__(self) -> str:
        size = "size unknown" if self.size is None else in_units(self.size)
        return f"{self.kind} {self.name} ({size})"


def is_local(source: str) -> bool:
    """True for a file or folder: one that exists, or is written like a path."""
    return Path(source).exists() or source.startswith((".", "/", "~")) or source.count("/") != 1


def find_missing(model: str, dataset: str, *, random_weights: bool) -> list[Download]:
    """The model and the dataset that are neither local nor cached, with their size on the hub.

    The loaders themselves would try again and again for minutes where there is no network.

    Raises:
        CaseStudyError: one of them cannot be had; two lines tell what to fetch and where to
            put it.
    """
    missing, problems = [], []
    for kind, name in (("model", model), ("dataset", dataset)):
        if is_local(name) or name in _cached(kind):
            continue
        size, problem = _on_hub(kind, name, random_weights=random_weights)
        missing.append(Download(kind=kind, name=name, size=size))
        problems += [problem] if problem else []
    if problems:
        raise CaseStudyError(_how_to_fetch(missing, problems[0]))
    return missing


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
    wanted = [file for file in info.siblings or () if _is_fetched(kind, name, file.rfilename)]
    if kind == "model" and random_weights:
        wanted = [file for file in wanted if not file.rfilename.endswith(".safetensors")]
    sizes = [file.size for file in wanted if file.size is not None]
    return sum(sizes) if sizes else known, ""


def _is_fetched(kind: str, name: str, file: str) -> bool:
    if kind == "model":
        return file.endswith((".safetensors", ".json", ".txt", ".model"))
    of_config = name != DATASET or file.startswith(f"{DATASET_CONFIG}/")
    return of_config and file.endswith((".parquet", ".jsonl", ".json", ".csv"))


def _how_to_fetch(missing: Sequence[Download], problem: str) -> str:
    commands, options = [], []
    for one in missing:
        folder = f"./{one.name.rpartition('/')[2]}"
        of_kind = " --repo-type dataset" if one.kind == "dataset" else ""
        commands.append(f"hf download {one.name}{of_kind} --local-dir {folder}")
        options.append(f"--{one.kind} {folder}")
    return (
        f"not on this machine: {', '.join(map(str, missing))}; {problem}\n"
        f"fetch where there is a network: {'; '.join(commands)}; put the "
        f"folder{'s' * (len(missing) > 1)} here and add {' '.join(options)} (--tiny needs none)"
    )


def _cached(kind: str) -> set[str]:
    """Names in the cache of the hub; a model counts with its weights only."""
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return set()
    return {repo.repo_id for repo in repositories if repo.repo_type == kind and _whole(repo)}


def _whole(repository: Any) -> bool:
    if repository.repo_type != "model":
        return bool(repository.nb_files > 1)
    names = [file.file_name for revision in repository.revisions for file in revision.files]
    return any(name.endswith(".safetensors") for name in names)


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
SAFE: dict[str, Any] = dict(trust_remote_code=False)


def read_config(source: str) -> PreTrainedConfig:
    """The configuration of a model, without its weights."""
    if is_local(source):
        _check_folder(Path(source).expanduser())
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(_where(source), **SAFE)
        return config
    except (OSError, ValueError, KeyError) as error:
        raise CaseStudyError(f"--model {source}: {first_line(error)}") from None


def _check_folder(folder: Path) -> None:
    """Name what is missing in a model's folder, in the words of who must add it."""
    if not folder.is_dir():
        raise CaseStudyError(f"--model {folder}: there is no such folder")
    if not (folder / "config.json").is_file():
        raise CaseStudyError(f"--model {folder}: it has no config.json, so it is no model's folder")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CaseStudyError(
            f"--model {folder}: it has no tokenizer (one of {', '.join(TOKENIZER_FILES)}); "
            "tokenizer.save_pretrained(folder) writes one"
        )


def check_weights(source: str) -> None:
    """Fail where a model's folder has no weights that are safe to load."""
    folder = Path(source).expanduser()
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        pickled = [path.name for path in sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt"))]
        found = f"; {pickled[0]} is pickled and could run code" if pickled else ""
        raise CaseStudyError(
            f"--model {folder}: it has no *.safetensors weights{found}; "
            "model.save_pretrained(folder) writes them, --random-weights does without"
        )


def check_packages(recipe: Recipe) -> None:
    """Fail where 4-bit weights are planned and the package that packs them is missing."""
    if recipe.four_bit and not is_bitsandbytes_available():
        raise CaseStudyError(
            f"{recipe} needs the package bitsandbytes, 0.46.1 or later: "
            "pip install -e '.[live,qlora]'"
        )


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(_where(source), **SAFE)
    except Exception as error:  # a damaged tokenizer.json raises a bare Exception
        raise CaseStudyError(
            f"--model {source}: its tokenizer cannot be read ({first_line(error)})"
        ) from None


def load_model(source: str, config: PreTrainedConfig, recipe: Recipe, settings: Settings) -> Any:
    """The model on its device; weights that are drawn (all, or those of LoRA) are of the seed."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(settings.seed)
        drawn = settings.random_weights
        model = _random(config, recipe) if drawn else _pretrained(source, recipe)
        if recipe.lora:
            model = with_lora(model)
    # 4-bit weights are packed on their device while they are loaded.
    prepared: Any = model if recipe.four_bit else model.to(recipe.device)
    prepared.config.use_cache = False
    if recipe.gradient_checkpointing:
        prepared.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    return prepared.train()


def _random(config: PreTrainedConfig, recipe: Recipe) -> Any:
    build: Any = AutoModelForCausalLM.from_config
    if recipe.four_bit:  # only weights from files are packed while they are loaded
        with TemporaryDirectory(prefix="rmetric-") as folder:
            build(config, dtype=recipe.weights_dtype, **SAFE).save_pretrained(folder)
            return _pretrained(folder, recipe)
    # On the device at once: the processor's memory may not hold the whole model.
    with torch.device(recipe.device):
        return build(config, dtype=recipe.weights_dtype, **SAFE)


def _pretrained(source: str, recipe: Recipe) -> Any:
    check_weights(source)
    packed = packing(recipe) if recipe.four_bit else {}
    try:
        return AutoModelForCausalLM.from_pretrained(
            _where(source), dtype=recipe.weights_dtype, use_safetensors=True, **packed, **SAFE
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CaseStudyError(f"--model {source}: {first_line(error)}") from None


def packing(recipe: Recipe) -> dict[str, Any]:
    """Options of loading that pack the linear layers into 4 bits, as QLoRA has it."""
    build: Any = BitsAndBytesConfig
    return {
        "device_map": {"": recipe.device},
        "quantization_config": build(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=recipe.dtype,
        ),
    }


def _where(source: str) -> str:
    return str(Path(source).expanduser()) if is_local(source) else source


def first_line(error: Exception) -> str:
    """The first line of an error, without the advice that follows."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
