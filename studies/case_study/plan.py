"""How a model is trained on a device, and at what cost: known before any weight is loaded.

Weights, gradients and the optimiser's state are counted on the meta device, which
holds shapes and no numbers. Activations are measured there too: a forward pass of
the architecture with one and with two layers keeps what it keeps, and the
difference is what a layer adds.
"""

from __future__ import annotations

import copy
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from studies.case_study.faults import Fault
from studies.case_study.settings import TINY, CaseStudyError, Settings

GIB = 2**30
#: Of a container whose memory is limited, which the system's own count does not know.
CONTAINER = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


# -- the device


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
        plain = re.sub(r"(?i)nvidia|tesla|geforce", "", self.name)
        return re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-") or "gpu"

    def __str__(self) -> str:
        capability = f", compute capability {self.capability}" if self.capability else ""
        return f"{self.name}, {self.free / GIB:.1f} of {self.total / GIB:.1f} GiB free{capability}"


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


def find_device(kind: str = "auto", *, float16: bool = False) -> Device:
    """The device to train on: a GPU where there is one, unless `kind` says which.

    `float16` leaves its bfloat16 unused. Raises CaseStudyError where CUDA is asked for and
    torch cannot use it, and for float16 on a processor.
    """
    if torch.cuda.is_available() and kind != "cpu":
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info(0)
        # is_bf16_supported() is also True where bfloat16 is only emulated, as on a T4.
        has_bfloat16 = properties.major >= 8 and not float16
        return Device(
            kind="cuda", name=properties.name, free=free, total=total, has_bfloat16=has_bfloat16,
            capability=f"{properties.major}.{properties.minor}",
        )  # fmt: skip
    if kind == "cuda":
        built = torch.version.cuda or "no CUDA"
        raise CaseStudyError(
            f"--device cuda: torch {torch.__version__} (built for {built}) finds no usable GPU; "
            "--device cpu trains on the processor, --tiny a small model there"
        )
    if float16:
        raise CaseStudyError("--float16: a processor computes in float32; it needs a GPU")
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    try:
        most, used = (int(path.read_text()) for path in CONTAINER)
    except (OSError, ValueError):
        pass  # no container, or one without a limit
    else:
        free, total = min(free, max(0, most - used)), min(total, most)
    return Device(kind="cpu", name="CPU", free=free, total=total, has_bfloat16=False)


# -- the recipe

#: Highest learning rates that are usual for fine-tuning a language model.
LEARNING_RATE = {"full": 1e-5, "lora": 1e-4}


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


def with_lora(model: nn.Module) -> Any:
    """`model` frozen, with adapters of rank 16 on all linear layers but the output's.

    No dropout, so that a run and its twin differ by the fault alone.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise CaseStudyError("LoRA needs the package peft: pip install peft") from None
    config = LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


# -- its memory

#: Share of the free memory that may be planned for; allocators waste the rest.
USABLE = 0.9
#: What a GPU's libraries hold for themselves.
RESERVED = {"cuda": GIB, "cpu": 0}
#: Of double quantisation: weights that share a constant, and constants that share another.
BLOCK, BLOCK_OF_BLOCKS = 64, 256
#: Bytes of the tables that a 4-bit tensor has for itself: 16 values of NF4, 256 of its
#: constants, and their mean, in float32.
TABLES = 4 * (16 + 256 + 1)


def in_units(size: int) -> str:
    """A number of bytes as people read it.

    >>> in_units(3 * 2**30), in_units(5_000_000)
    ('3.0 GiB', '5 MiB')
    """
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"


def memory_needed(
    config: PreTrainedConfig, recipe: Recipe, *, sequence_length: int, micro_batch_size: int
) -> dict[str, int]:
    """Bytes that training the architecture `config` by `recipe` takes at its highest, by purpose.

    Scratch is the largest 4-bit weight unpacked, and the logits are counted with their gradients.
    """
    model = on_meta(config, recipe.weights_dtype)
    output = model.get_output_embeddings()
    packed = [  # as transformers packs: linear layers, the output's left out
        module.weight.numel()
        for module in model.modules()
        if recipe.four_bit and type(module) is nn.Linear and module is not output
    ]
    if recipe.lora:
        model = with_lora(model)
    sizes = Counter[bool]()
    for weights in model.parameters():
        sizes[weights.requires_grad] += weights.numel()
    trained, frozen = sizes[True], sizes[False] - sum(packed)
    # Weights that are trained are held in float32 by every recipe, with a copy to compute with.
    of_trained = trained * (4 + (recipe.dtype.itemsize if recipe.mixed else 0))
    blocks = [ceil(number / BLOCK) for number in packed]
    logits = micro_batch_size * sequence_length * config.get_text_config().vocab_size
    activations, kept_logits = _activations(config, recipe, (micro_batch_size, sequence_length))
    return {
        "weights": frozen * recipe.weights_dtype.itemsize + (0 if recipe.lora else of_trained),
        "weights_4bit": sum(ceil(number / 2) for number in packed),
        "quantisation_constants": sum(n + 4 * ceil(n / BLOCK_OF_BLOCKS) + TABLES for n in blocks),
        "adapters": of_trained if recipe.lora else 0,
        "gradients": 4 * trained,
        "optimiser": 8 * trained,
        "activations": activations,
        "logits": kept_logits + 2 * 4 * logits,
        "scratch": recipe.dtype.itemsize * max(packed, default=0),
        "cuda_context": RESERVED[recipe.device],
    }


def on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """The model as shapes alone."""
    with torch.device("meta"):
        build: Any = AutoModelForCausalLM.from_config
        return build(config, dtype=dtype, trust_remote_code=False)


def _activations(
    config: PreTrainedConfig, recipe: Recipe, shape: tuple[int, int]
) -> tuple[int, int]:
    """Bytes that are kept for the backward pass: of the layers, and of the logits."""
    (one, logits), (two, _) = (_kept(config, layers, recipe.dtype, shape) for layers in (1, 2))
    layer = two - one
    text = config.get_text_config()
    if not recipe.gradient_checkpointing:
        return one + (text.num_hidden_layers - 1) * layer, logits
    # A layer's input is kept, and one layer at a time is computed again.
    inputs: int = shape[0] * shape[1] * text.hidden_size * recipe.dtype.itemsize
    return one + text.num_hidden_layers * inputs, logits


def _kept(
    config: PreTrainedConfig, layers: int, dtype: torch.dtype, shape: tuple[int, int]
) -> tuple[int, int]:
    """Bytes that a forward pass through so many layers saves, weights left out.

    Of those with an entry for each token of the vocabulary, the logits, apart.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
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
    sizes = Counter[bool]()
    for tensor in kept.values():
        sizes[tensor.shape[-1:] == (text.vocab_size,)] += tensor.untyped_storage().nbytes()
    return sizes[False], sizes[True]


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata


# -- the plan

#: Shorter sequences than this hold no question with its answer.
SHORTEST = 64
WHY = {
    torch.float32: "a processor computes in float32",
    torch.bfloat16: "this GPU has bfloat16",
    torch.float16: "this GPU has no bfloat16 of its own",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A recipe with its memory, and why none that asks for more was taken.

    Attributes:
        memory: bytes by purpose, see `memory_needed`.
        weights: their number, adapters left out.
    """

    recipe: Recipe
    memory: dict[str, int]
    reason: str
    weights: int

    @property
    def bytes_needed(self) -> int:
        return sum(self.memory.values())

    @property
    def state_bytes(self) -> int:
        """Of a checkpoint: the trained weights and both of the optimiser's moments."""
        return 3 * self.memory["gradients"]


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
    def needed(recipe: Recipe, length: int) -> dict[str, int]:
        return memory_needed(
            config, recipe, sequence_length=length, micro_batch_size=settings.micro_batch_size
        )

    def fits(recipe: Recipe, length: int) -> bool:
        return sum(needed(recipe, length).values()) <= USABLE * device.free

    too_much: list[str] = []
    length = settings.sequence_length
    kinds = _recipes(device)
    for recipe in [r for k, recipes in kinds.items() if method in ("auto", k) for r in recipes]:
        memory = needed(recipe, length)
        if fits(recipe, length):
            weights = sum(p.numel() for p in on_meta(config, torch.float32).parameters())
            reason = "; ".join([WHY[recipe.dtype], *too_much[-1:]])
            return Plan(recipe=recipe, memory=memory, reason=reason, weights=weights)
        too_much.append(f"{recipe} needs {in_units(sum(memory.values()))}")
    helps = list(_ways_out(kinds, method, length, fits))
    if settings.micro_batch_size > 1:
        helps.append("--micro-batch-size 1 needs less")
    raise CaseStudyError(
        f"too little memory on {device.name}: {too_much[-1]}, and of the "
        f"{in_units(device.free)} free {USABLE:.0%} can be planned for. "
        f"What helps: {'; '.join([*helps, '--tiny trains a small model on any machine'])}"
    )


def _recipes(device: Device) -> dict[str, list[Recipe]]:
    """By method, each needs less memory than the one before.

    Checkpointing costs a third more time, LoRA changes the training, 4-bit weights the model.
    """
    of_gpu = torch.bfloat16 if device.has_bfloat16 else torch.float16
    full = Recipe(
        device=device.kind, dtype=of_gpu if device.kind == "cuda" else torch.float32,
        lora=False, gradient_checkpointing=False,
    )  # fmt: skip
    lora = replace(full, lora=True, gradient_checkpointing=True)
    found = {"full": [full, replace(full, gradient_checkpointing=True)], "lora": [lora]}
    return found | ({"qlora": [replace(lora, four_bit=True)]} if device.kind == "cuda" else {})


def _ways_out(
    kinds: dict[str, list[Recipe]], method: str, length: int, fits: Callable[[Recipe, int], bool]
) -> Iterator[str]:
    """The methods and sequence lengths with which it would fit."""
    names = list(kinds)
    for kind in names[names.index(method) :] if method in names else names[-1:]:
        halved = [length >> n for n in range(length.bit_length()) if length >> n >= SHORTEST]
        shorter = next((n for n in halved if fits(kinds[kind][-1], n)), None)
        if shorter is not None:
            options = [f"--{kind}"] * (method not in (kind, "auto"))
            options += [f"--sequence-length {shorter}"] * (shorter < length)
            yield f"{' '.join(options)} fits"
        if shorter == length:
            return


# -- its time

#: Dense matrix products in 16 bits, FLOP/s, from NVIDIA's data sheets, by a part of the name.
PEAKS = {
    "T4": 65e12, "L4": 121e12, "V100": 125e12, "A10": 125e12, "L40S": 362e12, "A100": 312e12,
    "H100": 989e12, "H200": 989e12,
}  # fmt: skip
#: Share of the peak that such a training reaches, and that of a measured product: from, to. An
#: H100 reached 0.06: its kernels on 512 tokens end before the host has launched the next ones.
REACHED, REACHED_OF_MEASURED = (0.05, 0.45), (0.25, 0.9)
#: Seconds of a step of the tiny model on one free core, and on a busy one.
TINY_STEP = (0.05, 0.1)


def steps_by_run(settings: Settings, faults: Sequence[Fault], *, control: bool) -> dict[str, int]:
    """Optimiser steps of each run; those with a fault start from the control, if it runs."""
    shared = settings.onset - 1 if control else 0
    runs = {"control": settings.max_steps} if control else {}
    return runs | {fault.label: settings.max_steps - shared for fault in faults}


def step_flops(plan: Plan, settings: Settings) -> float:
    """Floating-point operations of an optimiser step.

    A weight costs two a token forwards, two for the gradient of its input, and two for its own
    if it is trained; gradient checkpointing repeats the forward pass.
    """
    tokens = settings.micro_batches * settings.micro_batch_size * settings.sequence_length
    a_weight = (4 if plan.recipe.lora else 6) + 2 * plan.recipe.gradient_checkpointing
    return float(a_weight * plan.weights * tokens)


def time_needed(plan: Plan, settings: Settings, device: Device, steps: int) -> str:
    """From and to how long so many steps with their evaluations take, and what that rests on."""
    peak = next((p for n, p in PEAKS.items() if n in re.split("[- ]", device.name)), None)
    held_out = settings.eval_sequences * settings.sequence_length
    flops = steps * step_flops(plan, settings)
    flops += steps / settings.eval_every * 2.0 * plan.weights * held_out
    if settings.model == TINY:
        (low, high), basis = (steps * a_step for a_step in TINY_STEP), "0.05 to 0.1 s a step"
    elif peak is not None and device.kind == "cuda":
        low, high = (flops / (share * peak) for share in reversed(REACHED))
        basis = "{:.0%} to {:.0%} of the peak of {:g} TFLOP/s".format(*REACHED, peak / 1e12)
    elif device.kind == "cpu" or torch.cuda.is_available():
        peak = _measured_peak(device, plan.recipe.dtype)
        low, high = (flops / (share * peak) for share in reversed(REACHED_OF_MEASURED))
        basis = "{:.0%} to {:.0%} of {:.2g} TFLOP/s of a matrix product here".format(
            *REACHED_OF_MEASURED, peak / 1e12
        )
    else:
        return "unknown: no peak is known for this GPU"
    return f"{duration(low)} to {duration(high)}, set-up left out ({basis})"


def _measured_peak(device: Device, dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product on this machine; takes a fraction of a second."""
    width = 8192 if device.kind == "cuda" else 1024
    left = torch.ones(width, width, device=device.kind, dtype=dtype)
    best = 0.0
    for _ in range(4):  # the first one warms up
        began = time.perf_counter()
        left @ left
        if device.kind == "cuda":
            torch.cuda.synchronize()
        best = max(best, 2.0 * width**3 / (time.perf_counter() - began))
    return best


def duration(seconds: float) -> str:
    """Seconds in the unit that reads best.

    >>> duration(50), duration(1500), duration(9000), duration(400_000)
    ('50 s', '25 min', '2.5 h', '4.6 days')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def plan_lines(
    plan: Plan, settings: Settings, device: Device, steps: dict[str, int], *, checkpoints: bool
) -> list[str]:
    """The plan, a line for each part; `steps` by run."""
    precision = "bfloat16" if device.has_bfloat16 else "no bfloat16 of its own: float16"
    on_host = plan.memory["weights"] + plan.memory["weights_4bit"]
    state = in_units(plan.state_bytes)
    in_memory = f"in host memory, 1 of {state}"
    return [
        f"device     {device}, {precision if device.kind == 'cuda' else 'float32'}",
        f"method     {plan.recipe}: {plan.reason}",
        f"memory     {in_units(plan.bytes_needed)} on the device:",
        *(
            f"           {part.replace('_', ' '):<24}{in_units(size):>9}"
            for part, size in plan.memory.items()
            if size
        ),
        f"host       {in_units(on_host)} while the weights are loaded",
        f"snapshots  {f'up to 3 of {state} on disk' if checkpoints else in_memory}",
        f"runs       {', '.join(f'{name} {number} steps' for name, number in steps.items())}",
        f"time       {time_needed(plan, settings, device, sum(steps.values()))}",
    ]
