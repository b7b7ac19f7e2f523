"""A language model and its tokenizer, from a folder, the hub or an architecture of this file.

Nothing that comes with a model is ever run: its own code is not asked for, and
pickled weights, which can hold code, are not loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import datasets
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.utils.import_utils import is_bitsandbytes_available

from studies.case_study import CaseStudyError
from studies.case_study.recipe import LORA_RANK, Recipe
from studies.case_study.settings import QWEN_3B, TINY, Settings

#: One of them is in a folder that has a tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
SAFE: dict[str, Any] = dict(trust_remote_code=False)
Loaded = TypeVar("Loaded")


def quiet() -> None:
    """Of what the libraries say, leave out all that no user of the case study can change."""
    loud: Any = transformers.utils.logging
    loud.set_verbosity_error()
    loud.disable_progress_bar()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    warnings.filterwarnings("ignore", category=FutureWarning)
    # float16 leaves steps out while it looks for its scale.
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")


def tiny_qwen() -> Qwen2Config:
    """A hundred thousand weights, which any processor trains in a minute."""
    return Qwen2Config(
        vocab_size=257, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=True,
    )  # fmt: skip


def qwen_3b() -> Qwen2Config:
    """The architecture of Qwen2.5-3B, for random weights where nothing can be downloaded."""
    rope: Any = {"rope_type": "default", "rope_theta": 1_000_000.0}
    return Qwen2Config(
        vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
        num_attention_heads=16, num_key_value_heads=2, max_position_embeddings=32768,
        tie_word_embeddings=True, rope_parameters=rope,
    )  # fmt: skip


#: Models that need no file: their weights are drawn, their tokens are bytes.
ARCHITECTURES: dict[str, Callable[[], Qwen2Config]] = {TINY: tiny_qwen, QWEN_3B: qwen_3b}
END = "<|endoftext|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte of UTF-8, 256 of them, and one that ends a text.

    >>> tokenizer = byte_tokenizer()
    >>> tokenizer.decode(tokenizer("1 → 2").input_ids), len(tokenizer)
    ('1 → 2', 257)
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
    tokenizer = Tokenizer(bytes_alone)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    build: Any = PreTrainedTokenizerFast
    made: PreTrainedTokenizerFast = build(tokenizer_object=tokenizer, eos_token=END)
    return made


def place_of(source: str, option: str) -> str:
    """The path that `source` is, or a name on the hub; CaseStudyError if it can be neither."""
    path = Path(source).expanduser()
    if path.exists():
        return str(path)
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise CaseStudyError(f"{option} {source}: there is no such file or folder")
    return source


def loaded(load: Callable[[], Loaded], source: str, option: str) -> Loaded:
    """What `load` returns; whatever a library says against `source` becomes one line."""
    try:
        return load()
    except Exception as error:  # there are as many kinds as there are formats
        vague = "while generating the dataset" in str(error)
        lines = str(error.__cause__ if vague else error).splitlines()
        reason = lines[0][:300] if lines else "it is empty or cannot be read"
    hint = ""
    if not Path(source).expanduser().exists():
        kind = " --repo-type dataset" if option == "--dataset" else ""
        hint = (
            f" (where there is a network: hf download {source}{kind} --local-dir FOLDER; here: "
            f"{option} FOLDER; --tiny needs none)"
        )
    raise CaseStudyError(f"{option} {source}: {reason}{hint}")


def read_config(source: str) -> PreTrainedConfig:
    """The configuration of a model, without its weights."""
    if source in ARCHITECTURES:
        return ARCHITECTURES[source]()
    place = place_of(source, "--model")
    return loaded(lambda: AutoConfig.from_pretrained(place, **SAFE), source, "--model")


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    if source in ARCHITECTURES:
        return byte_tokenizer()
    place = place_of(source, "--model")
    folder = Path(place)
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CaseStudyError(  # transformers would make one without a vocabulary
            f"--model {source}: it has no tokenizer (one of {', '.join(TOKENIZER_FILES)}); "
            "tokenizer.save_pretrained(folder) writes one"
        )
    return loaded(lambda: AutoTokenizer.from_pretrained(place, **SAFE), source, "--model")


def load_model(settings: Settings, config: PreTrainedConfig, recipe: Recipe) -> Any:
    """The model on its device; weights that are drawn (all, or those of LoRA) are of the seed."""
    if recipe.four_bit and not is_bitsandbytes_available():
        raise CaseStudyError(
            f"{recipe} needs the package bitsandbytes, 0.46.1 or later: "
            "pip install -e '.[study,live,qlora]'"
        )
    torch.manual_seed(settings.seed)
    drawn = settings.random_weights or settings.model in ARCHITECTURES
    model = _random(config, recipe) if drawn else _pretrained(settings.model, recipe)
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
    place = place_of(source, "--model")
    return loaded(lambda: AutoModelForCausalLM.from_pretrained(place, **options), source, "--model")


def with_lora(model: Any) -> Any:
    """`model` frozen, with adapters on all linear layers but the output's.

    No dropout, so that a run and its twin differ by the fault alone.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=LORA_RANK, lora_alpha=2 * LORA_RANK, lora_dropout=0.0, target_modules="all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return get_peft_model(model, config)
