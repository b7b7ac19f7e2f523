"""How much memory a training needs, known before any weight is loaded.

Weights, gradients and the optimiser's state are counted on the meta device, which
holds shapes and no numbers. Activations are measured there too: a forward pass of
the architecture with one and with two layers keeps what it keeps, and the
difference is what a layer adds.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from studies.case_study.device import GIB, Device
from studies.case_study.lora import with_lora
from studies.case_study.recipe import Recipe

#: Share of the free memory that may be planned for; allocators waste the rest.
USABLE = 0.9
#: What a GPU's libraries hold for themselves.
RESERVED = {"cuda": GIB, "cpu": 0}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that a training needs at its highest, by purpose.

    Attributes:
        weights: of the model, and their copies in the arithmetic's type.
        gradients: one for each weight that is trained.
        optimiser: two numbers for each weight that is trained.
        activations: what the forward pass keeps for the backward pass.
        scratch: gradients of the logits, and what the libraries hold.
    """

    weights: int
    gradients: int
    optimiser: int
    activations: int
    scratch: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimiser + self.activations + self.scratch

    def fits(self, device: Device) -> bool:
        return self.total <= USABLE * device.free

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {in_units(size)}" for name, size in vars(self).items())
        return f"{in_units(self.total)} ({parts})"


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
    if recipe.lora:
        model = with_lora(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    casts = recipe.dtype.itemsize if recipe.mixed else 0
    shape = (micro_batch_size, sequence_length)
    logits = micro_batch_size * sequence_length * config.get_text_config().vocab_size
    # Weights that are trained are held in float32 by every recipe.
    return Memory(
        weights=trained * (4 + casts) + frozen * recipe.weights_dtype.itemsize,
        gradients=4 * trained,
        optimiser=8 * trained,
        activations=_activations(config, recipe, shape),
        scratch=2 * 4 * logits + RESERVED[recipe.device],
    )


def on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
    """The model as shapes alone."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def _activations(config: PreTrainedConfig, recipe: Recipe, shape: tuple[int, int]) -> int:
    one, two = (_kept(_with_layers(config, n), recipe.dtype, shape) for n in (1, 2))
    layer = two - one
    outside = one - layer
    num_layers = config.get_text_config().num_hidden_layers
    if not recipe.gradient_checkpointing:
        return outside + num_layers * layer
    # A layer's input is kept, and one layer at a time is computed again.
    inputs = shape[0] * shape[1] * config.get_text_config().hidden_size * recipe.dtype.itemsize
    return outside + num_layers * inputs + layer


def _with_layers(config: PreTrainedConfig, number: int) -> PreTrainedConfig:
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    text.num_hidden_layers = number
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:number]
    return changed


def _kept(config: PreTrainedConfig, dtype: torch.dtype, shape: tuple[int, int]) -> int:
    """Bytes that a forward pass saves for the backward pass, weights left out."""
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
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata
