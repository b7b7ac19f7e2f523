"""A language model and its tokenizer, from a folder, the hub or a configuration.

Nothing that comes with a model is ever run: its own code is not asked for, and
pickled weights, which can hold code, are not loaded.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
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

from studies.case_study.plan import Recipe, with_lora
from studies.case_study.settings import CaseStudyError, Settings


def is_local(source: str) -> bool:
    """True for a file or folder: one that exists, or is written like a path."""
    return Path(source).exists() or source.startswith((".", "/", "~")) or source.count("/") != 1


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
        raise CaseStudyError(f"--model {source}: {_first_line(error)}") from None


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
            f"--model {source}: its tokenizer cannot be read ({_first_line(error)})"
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
    options: dict[str, Any] = dict(dtype=recipe.weights_dtype, use_safetensors=True, **SAFE)
    if recipe.four_bit:  # the linear layers, as QLoRA has it
        build: Any = BitsAndBytesConfig
        options |= {
            "device_map": {"": recipe.device},
            "quantization_config": build(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=recipe.dtype,
            ),
        }  # fmt: skip
    try:
        return AutoModelForCausalLM.from_pretrained(_where(source), **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CaseStudyError(f"--model {source}: {_first_line(error)}") from None


def _where(source: str) -> str:
    return str(Path(source).expanduser()) if is_local(source) else source


def _first_line(error: Exception) -> str:
    """The first line of an error, without the advice that follows."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
