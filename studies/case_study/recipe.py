"""How a model is trained on a device, and about how much memory that takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rmetric._util.host_memory import available_memory, check_fits
from rmetric.guard.planner.cluster import GIB, in_words
from studies.case_study import CaseStudyError
from studies.case_study.settings import Settings

#: Share of the free memory that may be planned for; allocators waste the rest.
USABLE = 0.9
LORA_RANK = 16


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU, ``cuda``, or the processor, ``cpu``, with its free memory in bytes."""

    kind: str
    name: str
    free: int
    has_bfloat16: bool


def find_device(kind: str = "auto", *, float16: bool = False) -> Device:
    """The device to train on: a GPU where there is one, unless `kind` says which.

    `float16` leaves its bfloat16 unused. Raises CaseStudyError where CUDA is asked for and
    torch cannot use it, and for float16 on a processor.
    """
    if torch.cuda.is_available() and kind != "cpu":
        properties = torch.cuda.get_device_properties(0)
        # is_bf16_supported() is also True where bfloat16 is only emulated, as on a T4.
        has_bfloat16 = properties.major >= 8 and not float16
        free, _ = torch.cuda.mem_get_info(0)
        return Device(kind="cuda", name=properties.name, free=free, has_bfloat16=has_bfloat16)
    if kind == "cuda":
        built = torch.version.cuda or "no CUDA"
        raise CaseStudyError(
            f"--device cuda: torch {torch.__version__} (built for {built}) finds no usable GPU; "
            "--device cpu trains on the processor, --tiny a small model there"
        )
    if float16:
        raise CaseStudyError("--float16: a processor computes in float32; it needs a GPU")
    return Device(kind="cpu", name="CPU", free=available_memory() or 0, has_bfloat16=False)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A way to train.

    Attributes:
        device: ``cuda`` or ``cpu``.
        dtype: of the arithmetic.
        lora: train low-rank adapters in place of all weights.
        gradient_checkpointing: compute activations again in the backward pass.
        four_bit: hold the weights under the adapters in 4 bits (QLoRA).
    """

    device: str
    dtype: torch.dtype
    lora: bool
    gradient_checkpointing: bool
    four_bit: bool = False

    @property
    def weights_dtype(self) -> torch.dtype:
        """Of the model's own weights: those that are trained need float32.

        In bfloat16 an update of a thousandth of a weight would be rounded away.
        """
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
        numbers = str(self.dtype).removeprefix("torch.")
        scaling = " with loss scaling" if self.scales_loss else ""
        trained = "LoRA" if self.lora else "full fine-tuning"
        trained += " on 4-bit weights (NF4)" if self.four_bit else ""
        kept = ", gradient checkpointing" if self.gradient_checkpointing else ""
        return f"{trained} in {numbers}{scaling}{kept}"


class Plan(NamedTuple):
    """A recipe, why none that asks for more was taken, and bytes of memory by purpose."""

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
    if method == "qlora" and device.kind != "cuda":
        raise CaseStudyError(
            "--qlora needs an NVIDIA GPU that torch can use (CUDA), and the package bitsandbytes; "
            "on a processor --lora or --full trains, --tiny a small model"
        )
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and settings.sequence_length > longest:
        raise CaseStudyError(
            f"--sequence-length is {settings.sequence_length}: the model takes up to {longest}"
        )
    reason = "it fits"
    for recipe in _recipes(device, method):
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


def _recipes(device: Device, method: str) -> Iterator[Recipe]:
    """Each needs less memory than the one before.

    Checkpointing costs a third more time, LoRA changes the training, 4-bit weights the model.
    """
    of_gpu = torch.bfloat16 if device.has_bfloat16 else torch.float16
    dtype = of_gpu if device.kind == "cuda" else torch.float32
    full = Recipe(device=device.kind, dtype=dtype, lora=False, gradient_checkpointing=False)
    lora = replace(full, lora=True, gradient_checkpointing=True)
    if method in ("auto", "full"):
        yield from (full, replace(full, gradient_checkpointing=True))
    if method in ("auto", "lora"):
        yield lora
    if method in ("auto", "qlora") and device.kind == "cuda":
        yield replace(lora, four_bit=True)


def memory_needed(config: PreTrainedConfig, recipe: Recipe, settings: Settings) -> dict[str, int]:
    """About the bytes that training `config` takes at its highest, by purpose.

    Weights are counted on the meta device, which holds shapes and no numbers. Of each layer and
    token the backward pass needs some 56 bytes a hidden unit, norms are in float32, and four
    vectors of the feed-forward layer; with checkpointing the layer's input, and one layer at a
    time. 4-bit weights take 4.127 bits with their constants (Dettmers et al. 2023, QLoRA).
    """
    text = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
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
