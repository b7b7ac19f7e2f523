"""A language model: the recipe by which a device can train it, and how it is loaded.

Nothing that comes with a model is ever run: its own code is not requested, and
pickled weights, which can hold code, are not loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import datasets
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.import_utils import is_bitsandbytes_available

from rmetric._util.host_memory import available_memory, check_fits
from rmetric.guard.planner.cluster import GIB, in_words
from studies.case_study.settings import QWEN_3B, TINY, CaseStudyError, Settings

#: Share of the free memory that may be planned for; allocators waste the rest.
USABLE = 0.9
LORA_RANK = 16
MODEL_CLASS: Any = transformers.AutoModelForCausalLM


class Device(NamedTuple):
    """One GPU, ``cuda``, or the processor, ``cpu``, with its free memory in bytes."""

    kind: str
    name: str
    free: int
    has_bfloat16: bool


def find_device(kind: str = "auto", *, float16: bool = False) -> Device:
    """A GPU where there is one, unless `kind` says which; `float16` leaves its bfloat16 unused."""
    if torch.cuda.is_available() and kind != "cpu":
        properties = torch.cuda.get_device_properties(0)
        # is_bf16_supported() is also True where bfloat16 is only emulated, as on a T4.
        has_bfloat16 = properties.major >= 8 and not float16
        return Device("cuda", properties.name, torch.cuda.mem_get_info(0)[0], has_bfloat16)
    if kind == "cuda":
        raise CaseStudyError(
            f"--device cuda: torch {torch.__version__} (built for "
            f"{torch.version.cuda or 'no CUDA'}) finds no usable GPU; --device cpu trains on the "
            "processor, --tiny a small model there"
        )
    if float16:
        raise CaseStudyError("--float16: a processor computes in float32; it needs a GPU")
    return Device("cpu", "CPU", available_memory() or 0, has_bfloat16=False)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A way to train.

    Attributes:
        dtype: of the arithmetic.
        four_bit: hold the weights under the adapters in 4 bits (QLoRA).
    """

    device: str
    dtype: torch.dtype
    lora: bool
    gradient_checkpointing: bool
    four_bit: bool = False

    @property
    def weights_dtype(self) -> torch.dtype:
        """Type of the model's own weights. In bfloat16 small updates would be rounded away."""
        return self.dtype if self.lora else torch.float32

    @property
    def scales_loss(self) -> bool:
        """float16 gradients underflow without it."""
        return self.dtype == torch.float16

    @property
    def learning_rate(self) -> float:
        """The highest that is usual for fine-tuning a language model."""
        return 1e-4 if self.lora else 1e-5

    def __str__(self) -> str:
        trained = "LoRA" if self.lora else "full fine-tuning"
        packed = " on 4-bit weights (NF4)" * self.four_bit
        scaling = " with loss scaling" * self.scales_loss
        kept = ", gradient checkpointing" * self.gradient_checkpointing
        return f"{trained}{packed} in {str(self.dtype).removeprefix('torch.')}{scaling}{kept}"


class Plan(NamedTuple):
    """A recipe, why none that needs more was taken, and bytes of memory by purpose."""

    recipe: Recipe
    reason: str
    memory: dict[str, int]

    def __str__(self) -> str:
        parts = [f"{part.replace('_', ' ')} {in_words(n)}" for part, n in self.memory.items() if n]
        whole = in_words(sum(self.memory.values()))
        return f"method  {self.recipe}: {self.reason}\nmemory  about {whole}: {', '.join(parts)}"


def plan_training(
    config: PreTrainedConfig, settings: Settings, device: Device, method: str = "auto"
) -> Plan:
    """The first way to train `config` that fits: all weights, LoRA, or LoRA on 4-bit weights.

    `method` is ``auto``, ``full``, ``lora`` or ``qlora``. Raises CaseStudyError where none fits.
    """
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and settings.sequence_length > longest:
        raise CaseStudyError(
            f"--sequence-length is {settings.sequence_length}: the model takes up to {longest}"
        )
    of_gpu = torch.bfloat16 if device.has_bfloat16 else torch.float16
    dtype = of_gpu if device.kind == "cuda" else torch.float32
    full = Recipe(device=device.kind, dtype=dtype, lora=False, gradient_checkpointing=False)
    lora = replace(full, lora=True, gradient_checkpointing=True)
    # Each needs less memory than the one before. Checkpointing costs a third more time, LoRA
    # changes the training, 4-bit weights the model.
    ways = {"full": [full, replace(full, gradient_checkpointing=True)], "lora": [lora]}
    if device.kind == "cuda":
        ways["qlora"] = [replace(lora, four_bit=True)]
    elif method == "qlora":
        raise CaseStudyError(
            "--qlora needs an NVIDIA GPU that torch can use (CUDA), and the package bitsandbytes; "
            "on a processor --lora or --full trains, --tiny a small model"
        )
    reason = "it fits"
    for recipe in chain(*ways.values()) if method == "auto" else ways[method]:
        memory = memory_needed(config, recipe, settings)
        if sum(memory.values()) <= USABLE * device.free:
            try:  # kept in host memory: weights and both moments
                check_fits(3 * memory["gradients"], "the states from before the onset")
            except MemoryError as error:
                raise CaseStudyError(f"{error}; --lora keeps little") from None
            return Plan(recipe, reason, memory)
        reason = f"{recipe} needs {in_words(sum(memory.values()))}"
    raise CaseStudyError(
        f"too little memory on {device.name}: {reason}, and of the {in_words(device.free)} free "
        f"{USABLE:.0%} can be planned for. What helps: --lora, on a GPU --qlora, a lower "
        "--sequence-length; --tiny trains a small model on any machine"
    )


def memory_needed(config: PreTrainedConfig, recipe: Recipe, settings: Settings) -> dict[str, int]:
    """About the bytes that training `config` takes at its highest, by purpose.

    For each layer and token the backward pass needs some 56 bytes a hidden unit, as norms are in
    float32, and four vectors of the feed-forward layer; with checkpointing the layer's input, and
    one layer at a time. 4-bit weights take 4.127 bits with their constants (Dettmers et al. 2023).
    """
    text = config.get_text_config()
    with torch.device("meta"):
        model = MODEL_CLASS.from_config(config, trust_remote_code=False)
    output = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not output]
    adapters = LORA_RANK * sum(layer.in_features + layer.out_features for layer in linear)
    packed = sum(layer.weight.numel() for layer in linear) if recipe.four_bit else 0
    weights = sum(parameter.numel() for parameter in model.parameters())
    trained, frozen = (adapters, weights - packed) if recipe.lora else (weights, 0)
    size, tokens = recipe.dtype.itemsize, settings.micro_batch_size * settings.sequence_length
    wide = getattr(text, "intermediate_size", 4 * text.hidden_size)
    of_layer = 56 * text.hidden_size + 4 * size * wide
    kept = text.num_hidden_layers * of_layer
    if recipe.gradient_checkpointing:
        kept = text.num_hidden_layers * size * text.hidden_size + of_layer
    return {
        "frozen_weights": round(frozen * size + packed * 4.127 / 8),
        # In float32, with a copy to compute with.
        "trained_weights": trained * (4 + (size if recipe.dtype != torch.float32 else 0)),
        "gradients": 4 * trained,
        "optimiser": 8 * trained,
        "activations": tokens * kept,
        "logits": 12 * tokens * text.vocab_size,  # in float32, with two gradients of their size
        "cuda_context": GIB if recipe.device == "cuda" else 0,
    }


# -- loading

#: Models that need no file: their weights are drawn, their tokens are bytes.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    TINY: dict(
        vocab_size=257, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    ),
    QWEN_3B: dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
        num_attention_heads=16, num_key_value_heads=2, max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    ),
}  # fmt: skip
#: One of them is in a folder that has a tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
SAFE: dict[str, Any] = dict(trust_remote_code=False)


def quiet() -> None:
    """Silence messages of the libraries that no user of the case study can act on."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    warnings.filterwarnings("ignore", category=FutureWarning)
    # float16 leaves steps out while it looks for its scale.
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte of UTF-8, 256 of them, and one that ends a text."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def loaded(source: str, option: str, load: Callable[[str], Any]) -> Any:
    """Result of `load` for a path or a name on the hub; any failure is an error of one line."""
    path = Path(source).expanduser()
    local = path.exists()
    if not local and (source.startswith((".", "/", "~")) or source.count("/") != 1):
        raise CaseStudyError(f"{option} {source}: there is no such file or folder")
    try:
        return load(str(path) if local else source)
    except Exception as error:  # there are as many kinds as there are formats
        vague = "while generating the dataset" in str(error)
        lines = str(error.__cause__ if vague else error).splitlines()
        reason = lines[0][:300] if lines else "it is empty or cannot be read"
    if not local:
        kind = " --repo-type dataset" if option == "--dataset" else ""
        reason += (
            f" (where there is a network: hf download {source}{kind} --local-dir FOLDER; here: "
            f"{option} FOLDER; --tiny needs none)"
        )
    raise CaseStudyError(f"{option} {source}: {reason}")


def read_config(source: str) -> PreTrainedConfig:
    if source in ARCHITECTURES:
        return transformers.Qwen2Config(tie_word_embeddings=True, **ARCHITECTURES[source])
    return loaded(source, "--model", partial(transformers.AutoConfig.from_pretrained, **SAFE))


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    if source in ARCHITECTURES:
        return byte_tokenizer()
    folder = Path(source).expanduser()
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CaseStudyError(  # transformers would make one without a vocabulary
            f"--model {source}: it has no tokenizer (one of {', '.join(TOKENIZER_FILES)}); "
            "tokenizer.save_pretrained(folder) writes one"
        )
    return loaded(source, "--model", partial(transformers.AutoTokenizer.from_pretrained, **SAFE))


def load_model(settings: Settings, config: PreTrainedConfig, recipe: Recipe) -> Any:
    """The model on its device; weights that are drawn (all, or those of LoRA) are of the seed."""
    if recipe.four_bit and not is_bitsandbytes_available():
        raise CaseStudyError(
            f"{recipe} needs the package bitsandbytes, 0.46.1 or later: "
            "pip install -e '.[study,live,qlora]'"
        )
    torch.manual_seed(settings.seed)
    draw = partial(MODEL_CLASS.from_config, config, dtype=recipe.weights_dtype, **SAFE)
    if not settings.random_weights and settings.model not in ARCHITECTURES:
        model = _pretrained(settings.model, recipe)
    elif recipe.four_bit:  # only weights from files are packed while they are loaded
        with TemporaryDirectory(prefix="rmetric-") as folder:
            draw().save_pretrained(folder)
            model = _pretrained(folder, recipe)
    else:  # on the device at once: the processor's memory may not hold the whole model
        with torch.device(recipe.device):
            model = draw()
    if recipe.lora:
        from peft import LoraConfig, get_peft_model

        # On all linear layers but the output's. Without dropout, a run and its twin differ by
        # the fault alone.
        adapters = LoraConfig(
            r=LORA_RANK, lora_alpha=2 * LORA_RANK, lora_dropout=0.0, target_modules="all-linear",
            task_type="CAUSAL_LM",
        )  # fmt: skip
        model = get_peft_model(model, adapters)
    if not recipe.four_bit:  # those are packed on their device while they are loaded
        model = model.to(recipe.device)
    model.config.use_cache = False
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    return model.train()


def _pretrained(source: str, recipe: Recipe) -> Any:
    options: dict[str, Any] = dict(dtype=recipe.weights_dtype, use_safetensors=True, **SAFE)
    if recipe.four_bit:  # the linear layers, as QLoRA has it
        options["device_map"] = {"": recipe.device}
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=recipe.dtype,
        )  # fmt: skip
    return loaded(source, "--model", partial(MODEL_CLASS.from_pretrained, **options))
