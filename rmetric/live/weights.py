"""How far a step moved the weights, from a sample of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class WeightSample:
    """Update norm and parameter norm over evenly spaced weights of every tensor.

        |Δθ|² ≈ Σ over tensors (n / m) Σ over its m sampled weights of Δθ²

    with n the weights of a tensor. Exact where the model has at most `size`
    weights. The sampled places stay the same, so the rate at which the
    parameter norm grows is seen far below the sampling error. Nothing is
    copied but the sample, and nothing is read from the device.

    Its weakness: an update that strikes a few weights only (one flipped bit) is
    missed unless the sample holds them.

    Args:
        parameters: those that the optimiser moves; frozen ones are left out.
        size: weights looked at, at least 1.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], size: int = 65536) -> None:
        moving = [p for p in parameters if p.requires_grad and p.numel()]
        whole = sum(p.numel() for p in moving)
        self.exact = whole <= size
        self._views: list[Tensor] = []
        self._factors: list[float] = []
        for parameter in moving:
            flat = _flat(parameter)
            if flat is None:
                self.exact = False
                continue
            share = 1 if self.exact else flat.numel() / max(1, round(size * flat.numel() / whole))
            view = flat[:: max(1, int(share))]
            self._views.append(view)
            self._factors.append((flat.numel() / view.numel()) ** 0.5)
        self._past = [torch.empty_like(view) for view in self._views]

    @torch.no_grad()
    def remember(self) -> None:
        """Keep the weights as they are before a step."""
        if self._views:
            torch._foreach_copy_(self._past, self._views)

    @torch.no_grad()
    def moved(self) -> tuple[Tensor, Tensor] | None:
        """(update norm, parameter norm) since `remember`, on the device; None without weights."""
        if not self._views:
            return None
        changes = torch._foreach_sub(self._views, self._past)
        return self._norm(list(changes)), self._norm(self._views)

    def _norm(self, tensors: list[Tensor]) -> Tensor:
        norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)
        where = norms[0].device
        scaled = [norm * factor for norm, factor in zip(norms, self._factors, strict=True)]
        return torch.linalg.vector_norm(torch.stack([norm.to(where) for norm in scaled]))


def _flat(parameter: nn.Parameter) -> Tensor | None:
    """The weights as one row that shares their memory; None where they do not lie in one."""
    tensor = parameter.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_sparse:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    try:
        return tensor.view(-1)
    except RuntimeError:
        return None
