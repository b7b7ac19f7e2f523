"""How a model is trained on a device: what there is room for, known before any weight is loaded.

Weights, gradients and the optimiser's state are counted on the meta device, which
holds shapes and no numbers. Activations are measured there too: a forward pass of
the architecture with one and with two layers keeps what it keeps, and the
difference is what a layer adds.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from studies.case_study.settings import CaseStudyError, Settings

GIB = 2**30
#: Of a container whose memory is limited, which the system's own count does not know.
CONTAINER = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU, or the processor.

    Attributes:
        kind: ``cuda`` or ``cpu``.
        name: as the driver states it.
        free, total: memory in bytes, at the time of asking.
        has_bfloat16: whether its arithmetic knows bfloat16.
        capability: of a GPU, as the vendor counts; empty for the processor.
    """

    kind: str
    name: str
    free: int
    total: int
    has_bfloat16: bool
    capability: str = ""

    @property
    def slug(self) -> str:
        """The name as part of a folder's: ``t4``, ``l4``, ``a100-sxm4-80gb``, ``cpu``."""
        if self.kind == "cpu":
            return "cpu"
        plain = re.sub(r"(?i)nvidia|tesla|geforce", "", self.name)
        return re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-") or "gpu"

    def __str__(self) -> str:
        capability = f", compute capability {self.capability}" if self.capability else ""
        return f"{self.name}, {self.free / GIB:.1f} of {self.total / GIB:.1f} GiB free{capability}"


def find_device(kind: str = "auto") -> Device:
    """The device to train on: a GPU where there is one, unless `kind` says which.

    Raises CaseStudyError where CUDA is asked for and torch cannot use it.
    """
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return _processor()
    if not torch.cuda.is_available():
        built = torch.version.cuda or "no CUDA"
        raise CaseStudyError(
            f"--device cuda: torch {torch.__version__} (built for {built}) finds no usable GPU; "
            "--device cpu trains on the processor, --tiny a small model there"
        )
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return Device(
        kind="cuda",
        name=properties.name,
        free=free,
        total=total,
        # is_bf16_supported() is also True where bfloat16 is only emulated, as on a T4.
        has_bfloat16=properties.major >= 8,
        capability=f"{properties.major}.{properties.minor}",
    )


def _processor() -> Device:
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    try:
        most, used = (int(path.read_text()) for path in CONTAINER)
    except (OSError, ValueError):
        pass  # no container, or one without a limit
    else:
        free, total = min(free, max(0, most - used)), min(total, most)
    return Device(kind="cpu", name="CPU", free=free, total=total, has_bfloat16=False)


#: GPUs that a plan can be made for elsewhere: memory that torch states (GiB), bfloat16 units,
#: compute capability.
GPUS = {
    "t4": ("Tesla T4", 14.7, False, "7.5"),
    "l4": ("NVIDIA L4", 22.0, True, "8.9"),
    "a100": ("NVIDIA A100-SXM4-80GB", 79.2, True, "8.0"),
    "h100": ("NVIDIA H100 80GB HBM3", 79.2, True, "9.0"),
    "h200": ("NVIDIA H200", 139.8, True, "9.0"),
}
FREE = 0.97  # of a GPU's memory that nobody else uses


def device_named(name: str) -> Device:
    """A GPU of `GPUS` as it is before anything runs on it."""
    if name not in GPUS:
        raise CaseStudyError(f"--plan {name}: known are {', '.join(GPUS)}")
    title, size, has_bfloat16, capability = GPUS[name]
    return Device(
        kind="cuda", name=title, free=int(FREE * size * GIB), total=int(size * GIB),
        has_bfloat16=has_bfloat16, capability=capability,
    )  # fmt: skip


def chosen_device(kind: str, *, float16: bool) -> Device:
    """The device to train on, without its bfloat16 if `float16` is asked for."""
    device = find_device(kind)
    if not float16:
        return device
    if device.kind == "cpu":
        raise CaseStudyError("--float16: a processor computes in float32; it needs a GPU")
    return replace(device, has_bfloat16=False)


#: Highest learning rates that are usual for fine-tuning a language model.
LEARNING_RATE = {"full": 1e-5, "lora": 1e-4}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A way to train; `plan.plan_training` chooses one.

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
    def mixed(self) -> bool:
        """True if the arithmetic is narrower than the weights that are trained."""
        return self.dtype != torch.float32

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
        return LEARNING_RATE["lora" if self.lora else "full"]

    def __str__(self) -> str:
        numbers = str(self.dtype).removeprefix("torch.")
        scaling = " with loss scaling" if self.scales_loss else ""
        trained = "LoRA" if self.lora else "full fine-tuning"
        trained += " on 4-bit weights (NF4)" if self.four_bit else ""
        kept = ", gradient checkpointing" if self.gradient_checkpointing else ""
        return f"{trained} in {numbers}{scaling}{kept}"

    @classmethod
    def on(
        cls, device: Device, *, lora: bool, gradient_checkpointing: bool, four_bit: bool = False
    ) -> Recipe:
        of_gpu = torch.bfloat16 if device.has_bfloat16 else torch.float16
        return cls(
            device=device.kind,
            dtype=of_gpu if device.kind == "cuda" else torch.float32,
            lora=lora,
            gradient_checkpointing=gradient_checkpointing,
            four_bit=four_bit,
        )


RANK = 16
ALPHA = 32


def with_lora(model: nn.Module) -> Any:
    """`model` frozen, with adapters on all linear layers but the output's.

    No dropout, so that a run and its twin differ by the fault alone.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise CaseStudyError("LoRA needs the package peft: pip install peft") from None
    config = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


#: Share of the free memory that may be planned for; allocators waste the rest.
USABLE = 0.9
#: What a GPU's libraries hold for themselves.
RESERVED = {"cuda": GIB, "cpu": 0}
#: Of double quantisation: weights that share a constant, and constants that share another.
BLOCK, BLOCK_OF_BLOCKS = 64, 256
#: Bytes of the tables that a 4-bit tensor has for itself: 16 values of NF4, 256 of its
#: constants, and their mean, in float32.
TABLES = 4 * (16 + 256 + 1)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that a training needs at its highest, by purpose.

    Attributes:
        weights: of the model, those in 4 bits left out, and copies in the arithmetic's type.
        weights_4bit: of the linear layers but the output's, where they are held so.
        quantisation_constants: of their blocks, themselves in 8 bits (double quantisation).
        adapters: LoRA's weights, and their copies in the arithmetic's type.
        gradients: one for each weight that is trained.
        optimiser: two numbers for each weight that is trained.
        activations: what the forward pass keeps for the backward pass, logits left out.
        logits: what it keeps of their size, and their gradients.
        scratch: the largest 4-bit weight unpacked.
        cuda_context: what the GPU's libraries hold.
    """

    weights: int
    weights_4bit: int
    quantisation_constants: int
    adapters: int
    gradients: int
    optimiser: int
    activations: int
    logits: int
    scratch: int
    cuda_context: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def fits(self, device: Device) -> bool:
        return self.total <= USABLE * device.free

    def __str__(self) -> str:
        parts = [f"{name} {in_units(size)}" for name, size in self.parts()]
        return f"{in_units(self.total)} ({', '.join(parts)})"

    def parts(self) -> list[tuple[str, int]]:
        """Name and bytes of each part that is not empty."""
        return [(name.replace("_", " "), size) for name, size in vars(self).items() if size]


def in_units(size: int) -> str:
    """A number of bytes as people read it.

    >>> in_units(3 * 2**30), in_units(5_000_000)
    ('3.0 GiB', '5 MiB')
    """
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"


def memory_needed(
    config: PreTrainedConfig, recipe: Recipe, *, sequence_length: int, micro_batch_size: int
) -> Memory:
    """What training the architecture `config` by `recipe` takes at its highest."""
    model = on_meta(config, recipe.weights_dtype)
    packed = _numbers_in_4_bits(model) if recipe.four_bit else []
    if recipe.lora:
        model = with_lora(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad) - sum(packed)
    casts = recipe.dtype.itemsize if recipe.mixed else 0
    shape = (micro_batch_size, sequence_length)
    logits = micro_batch_size * sequence_length * config.get_text_config().vocab_size
    # Weights that are trained are held in float32 by every recipe.
    of_trained = trained * (4 + casts)
    activations, kept_logits = _activations(config, recipe, shape)
    return Memory(
        weights=frozen * recipe.weights_dtype.itemsize + (0 if recipe.lora else of_trained),
        weights_4bit=sum(ceil(number / 2) for number in packed),
        quantisation_constants=sum(map(_bytes_of_constants, packed)),
        adapters=of_trained if recipe.lora else 0,
        gradients=4 * trained,
        optimiser=8 * trained,
        activations=activations,
        logits=kept_logits + 2 * 4 * logits,
        scratch=recipe.dtype.itemsize * max(packed, default=0),
        cuda_context=RESERVED[recipe.device],
    )


def _numbers_in_4_bits(model: Any) -> list[int]:
    """Weights of each tensor that transformers packs: linear layers, the output's left out."""
    output = model.get_output_embeddings()
    return [
        module.weight.numel()
        for module in model.modules()
        if type(module) is nn.Linear and module is not output
    ]


def _bytes_of_constants(number: int) -> int:
    """What unpacking a tensor of `number` 4-bit weights needs beside them."""
    blocks = ceil(number / BLOCK)
    return blocks + 4 * ceil(blocks / BLOCK_OF_BLOCKS) + TABLES


def on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """The model as shapes alone."""
    with torch.device("meta"):
        build: Any = AutoModelForCausalLM.from_config
        return build(config, dtype=dtype, trust_remote_code=False)


def _activations(
    config: PreTrainedConfig, recipe: Recipe, shape: tuple[int, int]
) -> tuple[int, int]:
    """Bytes that are kept for the backward pass: of the layers, and of the logits."""
    (one, logits), (two, _) = (_kept(_with_layers(config, n), recipe.dtype, shape) for n in (1, 2))
    layer = two - one
    outside = one - layer
    num_layers: int = config.get_text_config().num_hidden_layers
    if not recipe.gradient_checkpointing:
        return outside + num_layers * layer, logits
    # A layer's input is kept, and one layer at a time is computed again.
    inputs: int = shape[0] * shape[1] * config.get_text_config().hidden_size * recipe.dtype.itemsize
    return outside + num_layers * inputs + layer, logits


def _with_layers(config: PreTrainedConfig, number: int) -> PreTrainedConfig:
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    text.num_hidden_layers = number
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:number]
    return changed


def _kept(config: PreTrainedConfig, dtype: torch.dtype, shape: tuple[int, int]) -> tuple[int, int]:
    """Bytes that a forward pass saves for the backward pass, weights left out.

    Of those with an entry for each token of the vocabulary, the logits, apart.
    """
    model = on_meta(config, dtype)
    weights = {_storage(p) for p in model.parameters()}
    kept: dict[Any, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in weights:
            kept[_storage(tensor)] = tensor
        return tensor

    tokens = torch.zeros(shape, dtype=torch.long, device="meta")
    # Without a mask the model would look into the tokens for sequence borders.
    mask = torch.ones((1, 1, shape[1], shape[1]), dtype=torch.bool, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=tokens, labels=tokens, attention_mask=mask, use_cache=False)
    vocabulary = config.get_text_config().vocab_size
    sizes = {True: 0, False: 0}
    for tensor in kept.values():
        sizes[tensor.shape[-1:] == (vocabulary,)] += tensor.untyped_storage().nbytes()
    return sizes[False], sizes[True]


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata


#: Shorter sequences than this hold no question with its answer.
SHORTEST = 64
#: Each needs less memory than the one before.
METHODS = ("full", "lora", "qlora")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A recipe with its memory, and why none that asks for more was taken.

    Attributes:
        weights: their number, adapters left out.
    """

    recipe: Recipe
    memory: Memory
    reason: str
    weights: int


def plan_training(
    config: PreTrainedConfig, settings: Settings, device: Device, method: str = "auto"
) -> Plan:
    """The first way to train `config` that fits: all weights, LoRA, or LoRA on 4-bit weights.

    `method` is ``auto``, ``full``, ``lora`` or ``qlora``. Raises CaseStudyError where none
    fits; it names what would.
    """
    if method == "qlora" and device.kind != "cuda":
        raise CaseStudyError(
            "--qlora needs an NVIDIA GPU that torch can use (CUDA), and the package bitsandbytes; "
            "on a processor --lora or --full trains, --tiny a small model"
        )

    @cache
    def needed(recipe: Recipe, length: int) -> Memory:
        return memory_needed(
            config, recipe, sequence_length=length, micro_batch_size=settings.micro_batch_size
        )

    too_much: list[str] = []
    for recipe in _ways(device, method):
        memory = needed(recipe, settings.sequence_length)
        if memory.fits(device):
            weights = sum(p.numel() for p in on_meta(config, torch.float32).parameters())
            reason = _reason(recipe, too_much)
            return Plan(recipe=recipe, memory=memory, reason=reason, weights=weights)
        too_much.append(f"{recipe} needs {in_units(memory.total)}")
    raise CaseStudyError(
        f"too little memory on {device.name}: {too_much[-1]}, and of the "
        f"{in_units(device.free)} free {USABLE:.0%} can be planned for. "
        + _ways_out(device, method, settings, needed)
    )


def _ways(device: Device, method: str) -> Iterator[Recipe]:
    """The most thorough first; checkpointing costs a third more time, LoRA changes the training.

    4-bit weights change the model as well, so they come last.
    """
    if method in ("auto", "full"):
        yield Recipe.on(device, lora=False, gradient_checkpointing=False)
        yield Recipe.on(device, lora=False, gradient_checkpointing=True)
    if method in ("auto", "lora"):
        yield Recipe.on(device, lora=True, gradient_checkpointing=True)
    if method == "qlora" or (method == "auto" and device.kind == "cuda"):
        yield Recipe.on(device, lora=True, gradient_checkpointing=True, four_bit=True)


def _reason(recipe: Recipe, too_much: list[str]) -> str:
    numbers = {
        torch.float32: "a processor computes in float32",
        torch.bfloat16: "this GPU has bfloat16",
        torch.float16: "this GPU has no bfloat16 of its own",
    }
    return "; ".join([numbers[recipe.dtype], *too_much[-1:]])


def _ways_out(
    device: Device, method: str, settings: Settings, needed: Callable[[Recipe, int], Memory]
) -> str:
    """The options with which it would fit."""
    ways = []
    kinds = [kind for kind in METHODS if kind != "qlora" or device.kind == "cuda"]
    for kind in kinds[kinds.index(method) :] if method in kinds else kinds[-1:]:
        thriftiest = list(_ways(device, kind))[-1]
        length = settings.sequence_length
        while length >= SHORTEST and not needed(thriftiest, length).fits(device):
            length //= 2
        if length >= SHORTEST:
            options = [f"--{kind}"] if method not in (kind, "auto") else []
            if length < settings.sequence_length:
                options.append(f"--sequence-length {length}")
            ways.append(f"{' '.join(options)} fits")
        if length == settings.sequence_length:
            break
    if settings.micro_batch_size > 1:
        ways.append("--micro-batch-size 1 needs less")
    ways.append("--tiny trains a small model on any machine")
    return "What helps: " + "; ".join(ways)
