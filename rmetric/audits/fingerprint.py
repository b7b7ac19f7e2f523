"""64-bit fingerprints of tensors, made on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: Odd, with bits everywhere: the golden ratio in 64 bits, as Knuth's multiplicative hash has it.
_FACTOR = -7046029254386353131
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def local(tensor: Any) -> Any:
    """This rank's part of a sharded tensor (DTensor); anything else as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def plain(tensor: Tensor) -> Tensor:
    """The same numbers as a dense, real, local tensor."""
    tensor = local(tensor)
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits, eight bytes as one integer, modulo 2^64; int64, shape ().

    Its weakness: changes that cancel are missed, with a probability of about
    1 / sqrt(number of changed elements) for random changes of the last bit.

    >>> tensor = torch.tensor([1.0, 2.0])
    >>> [bool(fingerprint(tensor) == fingerprint(other)) for other in (tensor.clone(), -tensor)]
    [True, False]
    """
    tensor = plain(tensor.detach())
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    flat = tensor.contiguous().view(-1)
    words, bits = 8 // flat.element_size(), _INTEGERS[flat.element_size()]
    if flat.storage_offset() % words:
        return flat.view(bits).sum(dtype=torch.int64)
    whole = len(flat) // words * words  # eight bytes at once: as fast as the memory
    rest = flat[whole:].view(bits).sum(dtype=torch.int64)
    return flat[:whole].view(torch.int64).sum() + rest


@torch.no_grad()
def ordered(row: Tensor) -> Tensor:
    """Order-sensitive checksum of a short row: one factor for each element; int64, shape ().

    >>> rows = torch.tensor([[1, 2], [2, 1]])
    >>> bool(ordered(rows[0]) == ordered(rows[1]))
    False
    """
    row = row.contiguous()
    bits = row.view(_INTEGERS[row.element_size()]).to(torch.int64)
    places = torch.arange(len(bits), dtype=torch.int64, device=bits.device)
    mixed = (places + 1) * _FACTOR
    return (bits * (mixed ^ (mixed >> 29) | 1)).sum()


def fingerprints(tensors: Sequence[Tensor | None]) -> Tensor:
    """Checksum of each tensor, shape (tensors,), int64, on the first one's device; 0 for None."""
    return _of_each(tensors, fingerprint, torch.tensor(0))


def halves(whole: Tensor) -> Tensor:
    """int64 as two rows that a float64 holds exactly, shape (2, n)."""
    return torch.stack((whole >> 32, whole & 0xFFFFFFFF))


def joined(rows: Any) -> np.ndarray:
    """Inverse of `halves`, from numbers on the host; int64, shape (n,).

    >>> joined(halves(torch.tensor([-5, 2**40])).double().tolist()).tolist()
    [-5, 1099511627776]
    """
    high, low = np.asarray(rows, dtype=np.float64).reshape(2, -1).astype(np.int64)
    whole: np.ndarray = (high << 32) | low
    return whole


def peaks(tensors: Sequence[Tensor | None]) -> Tensor:
    """Largest magnitude in each tensor, shape (tensors,), float64; -1 for None and empty ones."""
    return _of_each(tensors, _peak, torch.tensor(-1.0, dtype=torch.float64))


@torch.no_grad()
def _of_each(
    tensors: Sequence[Tensor | None], measure: Callable[[Tensor], Tensor | None], none: Tensor
) -> Tensor:
    found = [None if tensor is None else measure(tensor) for tensor in tensors]
    none = none.to(next((row.device for row in found if row is not None), none.device))
    rows = [none if row is None else row.to(none) for row in found]
    return torch.stack(rows) if rows else none.new_zeros(0)


def _peak(tensor: Tensor) -> Tensor | None:
    tensor = plain(tensor.detach())
    if not tensor.numel():
        return None
    low, high = tensor.aminmax()
    return torch.maximum(-low, high)
