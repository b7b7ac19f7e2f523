"""Norm of the update of a step, estimated from a sample of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from rmetric.monitor.gradients import local, plain

RUN = 16  # weights that lie together: one line of a processor's cache


class WeightSample:
    """Update norm and parameter norm over evenly spaced weights of every tensor.

        |Δθ|² ≈ Σ over tensors (n / m) Σ over its m sampled weights of Δθ²

    with n the weights of a tensor. Exact where at most `size` weights train. The sampled places
    stay the same, so the growth of the parameter norm is resolved far below the sampling error.
    Only the sample is copied; nothing is read from the device.

    Its weakness: an update of a few weights (one flipped bit) is missed unless they are in the
    sample.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], size: int = 16384) -> None:
        self._parameters, self._size = list(parameters), size
        self._choose()

    def _choose(self) -> None:
        size = self._size
        moving = [p for p in self._parameters if p.requires_grad and p.numel()]
        self._place_of = [_place_of(p) for p in moving]
        self._places = [place() for place in self._place_of]
        whole = sum(p.numel() for p in moving)
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
    """Gives the address of this rank's part of the weights; fast, as every step asks for it."""
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
    if local(parameter.detach()).is_sparse:
        return None
    try:
        return plain(parameter.detach()).view(-1)
    except RuntimeError:
        return None
