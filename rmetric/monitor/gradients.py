"""Norms of gradients in one fused pass, and of updates from a sample; left on the device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from rmetric.audits.fingerprint import local as local
from rmetric.audits.fingerprint import plain as plain

LAYER = re.compile(r"^(.*?\.\d+)(?:\.|$)")
RUN = 16  # weights that lie together: one line of a processor's cache


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients that there are: dense, real and local, of a sharded one the shard."""
    return [plain(p.grad.detach()) for p in parameters if p.grad is not None]


def is_sharded(parameters: Iterable[nn.Parameter]) -> bool:
    """True if a rank holds only a part of some parameter (FSDP2, DTensor)."""
    return any(hasattr(p, "device_mesh") for p in parameters)


@torch.no_grad()
def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norm of each tensor, shape (tensors,), float32 or wider; reads nothing from the device.

    One fused kernel a device and type; the squares of half-precision numbers would overflow.
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
    wide = torch.float32 if tensor.dtype.itemsize < 4 else None
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=wide)
    return norm


def layer_names(names: Iterable[str]) -> list[str]:
    """The layer of each parameter, by its name: up to the first number, which counts the blocks.

    What stands outside of them (embeddings, the head) goes by its first two words.

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


class WeightSample:
    """Update norm and parameter norm over evenly spaced weights of every tensor.

        |Δθ|² ≈ Σ over tensors (n / m) Σ over its m sampled weights of Δθ²

    with n the weights of a tensor. Exact where at most `size` weights train. The sampled places
    stay the same, so the growth of the parameter norm is resolved far below the sampling error.
    Only the sample is copied; nothing is read from the device.

    Its weakness: an update of a few weights (one flipped bit) is missed outside of the sample.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], size: int = 16384) -> None:
        self._parameters, self._size = list(parameters), size
        self._choose()

    def _choose(self) -> None:
        moving = [p for p in self._parameters if p.requires_grad and p.numel()]
        self._place_of = [_place_of(p) for p in moving]
        self._places = [place() for place in self._place_of]
        whole, size = sum(p.numel() for p in moving), self._size
        self.exact = whole <= size
        by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, float]]] = {}
        for parameter in moving:
            flat = _flat(parameter)
            if flat is None:
                self.exact = False
                continue
            if not flat.numel():  # of a small tensor, not every rank holds a part
                continue
            view = flat if self.exact else _runs(flat, whole / size)
            factor = (flat.numel() / view.numel()) ** 0.5
            by_kind.setdefault((flat.device, flat.dtype), []).append((view, factor))
        self._parts = [_Part(views) for views in by_kind.values()]

    @torch.no_grad()
    def remember(self) -> None:
        if [place() for place in self._place_of] != self._places:
            self._choose()  # their memory is another now
        for part in self._parts:
            part.past = part.now()

    @torch.no_grad()
    def moved(self) -> tuple[Tensor, Tensor] | None:
        """(update norm, parameter norm) since `remember`, on the device; None without weights."""
        norms = [part.norms() for part in self._parts]
        if not norms:
            return None
        where = norms[0].device
        whole = torch.linalg.vector_norm(torch.stack([n.to(where) for n in norms]), dim=0)
        return whole[0], whole[1]


def _place_of(parameter: nn.Parameter) -> Callable[[], int]:
    """Gives the address of this rank's part of the weights; fast, as every step needs it."""
    if not hasattr(parameter, "to_local"):
        return parameter.data_ptr
    return lambda: int(local(parameter.detach()).data_ptr())


class _Part:
    """The sampled weights of one device and type."""

    def __init__(self, views: list[tuple[Tensor, float]]) -> None:
        # Rows of runs and plain rows apart: one call gathers all of a kind, without copies between.
        views = sorted(views, key=lambda pair: pair[0].ndim)
        self._plain = [view for view, _ in views if view.ndim == 1]
        self._runs = [view for view, _ in views if view.ndim == 2]
        where = views[0][0].device
        self._factors = torch.cat(
            [torch.full((view.numel(),), factor, device=where) for view, factor in views]
        )
        self.past = self.now()

    def now(self) -> Tensor:
        kinds = [torch.cat(kind).view(-1) for kind in (self._plain, self._runs) if kind]
        return (kinds[0] if len(kinds) == 1 else torch.cat(kinds)).float()

    def norms(self) -> Tensor:
        now = self.now()
        both = torch.stack((now - self.past, now)) * self._factors
        norms: Tensor = torch.linalg.vector_norm(both, dim=1)
        return norms


def _runs(flat: Tensor, period: float) -> Tensor:
    """Runs of neighbouring weights, one in every `period` on the whole; shares their memory."""
    spacing = max(RUN, int(RUN * period))
    rows = flat.numel() // spacing
    if rows == 0:
        return flat[: max(1, int(flat.numel() / period))]
    return flat[: rows * spacing].view(rows, spacing)[:, :RUN]


def _flat(parameter: nn.Parameter) -> Tensor | None:
    """The weights as one row that shares their memory; None where they do not lie in one."""
    dense = not local(parameter.detach()).is_sparse
    with suppress(RuntimeError):
        return plain(parameter.detach()).view(-1) if dense else None
    return None
