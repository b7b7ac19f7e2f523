"""Gradient norms in one fused pass, left on the device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from rmetric.audits.fingerprint import local as local
from rmetric.audits.fingerprint import plain as plain

LAYER = re.compile(r"^(.*?\.\d+)(?:\.|$)")


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients that there are: dense, real and local.

    The norm of what comes back is that of the gradient, for a sharded one that of the shard.
    """
    return [plain(p.grad.detach()) for p in parameters if p.grad is not None]


def is_sharded(parameters: Iterable[nn.Parameter]) -> bool:
    """True if a rank holds only a part of some parameter (FSDP2, DTensor)."""
    return any(hasattr(p, "device_mesh") for p in parameters)


@torch.no_grad()
def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norm of each tensor, shape (tensors,), float32 or wider; reads nothing from the device.

    One fused kernel a device and type, accumulated in float32 at least: the
    squares of half-precision numbers overflow long before the numbers do.
    """
    if not tensors:
        return torch.zeros(0)
    where = tensors[0].device
    norms: list[Tensor] = list(tensors)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    for (_, dtype), indices in groups.items():
        wide = torch.float32 if dtype.itemsize < 4 else None
        measured = torch._foreach_norm([tensors[i] for i in indices], 2, dtype=wide)
        for index, norm in zip(indices, measured, strict=True):
            norms[index] = norm.to(where)
    return torch.stack(norms)


@torch.no_grad()
def tensor_norm(tensor: Tensor) -> Tensor:
    """L2 norm of one tensor, a scalar: as `tensor_norms`, with fewer kernels for one alone."""
    norm: Tensor = torch.linalg.vector_norm(
        tensor, dtype=torch.float32 if tensor.dtype.itemsize < 4 else None
    )
    return norm


def layer_names(names: Iterable[str]) -> list[str]:
    """The layer that each parameter is part of, by its name.

    Up to the first number, which is where repeated blocks are counted; what
    stands outside of them (embeddings, the head) goes by its first two words.

    >>> layer_names(["model.layers.3.mlp.up_proj.weight", "model.embed_tokens.weight"])
    ['model.layers.3', 'model.embed_tokens']
    """
    layers = []
    for name in names:
        block, path = LAYER.match(name), name.split(".")
        outside = ".".join(path[: min(2, max(1, len(path) - 1))])
        layers.append(block.group(1) if block else outside)
    return layers


def norms_by_layer(names: Sequence[str], norms: Sequence[float]) -> dict[str, float]:
    squares: dict[str, float] = {}
    for name, norm in zip(names, norms, strict=True):
        squares[name] = squares.get(name, 0.0) + norm * norm
    return {name: nine_digits(square**0.5) for name, square in squares.items()}


def nine_digits(value: float) -> float:
    """All that a float32 holds, and the precision of the log."""
    return float(f"{value:.9g}")
