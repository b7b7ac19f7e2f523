"""A snapshot: the whole state of a training, its tensors in one block of memory."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rmetric.monitor.actions.checkpoint_file import random_state
from rmetric.monitor.gradients import local
from rmetric.rescue.data_position import DataPosition, NoData

_ALIGNED = 64  # bytes


class Stateful(Protocol):
    """Anything with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


@dataclass
class Parts:
    """The parts of a training that a snapshot holds."""

    model: nn.Module  # whose buffers are kept, and what its modules give as `get_extra_state`
    parameters: list[Any]  # of the model and of the optimiser, sharded or not
    optimizer: Any  # the optimiser itself; None for none
    others: Mapping[str, Stateful]  # schedulers, the scaler, whatever else has a state
    data: DataPosition | NoData
    monitor: Any

    def model_tensors(self) -> list[Tensor]:
        """Parameters and buffers, each memory once."""
        unique = {id(t): t for t in (*self.parameters, *self.model.buffers())}
        return [local(tensor.detach()) for tensor in unique.values()]

    def groups(self) -> list[list[Any]]:
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        return [list(group["params"]) for group in groups]

    def optimizer_states(self) -> list[dict[Any, Any]]:
        """The optimiser's state of each of its parameters, tensors as this rank holds them."""
        known = (self.optimizer.state.get(p, {}) for group in self.groups() for p in group)
        return [
            {k: local(v.detach()) if isinstance(v, Tensor) else v for k, v in state.items()}
            for state in known
        ]

    def with_extra_state(self) -> dict[str, nn.Module]:
        """The modules with a state of their own beside parameters and buffers, by name."""
        return {
            name: module
            for name, module in self.model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def devices(self) -> set[torch.device]:
        return {p.device for p in self.parameters if p.device.type == "cuda"}

    @torch.no_grad()
    def not_finite(self) -> bool:
        tensors = [local(p.detach()) for p in self.parameters]
        tensors += tensors_of(self.optimizer_states())
        by_device = defaultdict[torch.device, list[Tensor]](list)
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.numel():
                by_device[tensor.device].append(tensor)
        norms = (torch._foreach_norm(those, torch.inf) for those in by_device.values())
        largest = (torch.stack([norm.float() for norm in of_device]) for of_device in norms)
        return not all(bool(of_device.isfinite().all()) for of_device in largest)


def tensors_of(states: list[dict[Any, Any]]) -> list[Tensor]:
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


class Buffer:
    """One block of memory that holds the tensors of a snapshot one behind the other.

    To a pinned one the copies from a GPU run beside its computations.
    """

    def __init__(self, size: int, device: torch.device, *, pinned: bool = False) -> None:
        self.size = size
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._unpin: Callable[[], Any] | None = None
        if pinned and size:
            # pin_memory of torch rounds up to a power of two: up to twice the memory.
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(runtime.cudaHostRegister(self.memory.data_ptr(), size, 0))
            if error != 0:
                forget_cuda_error()
                raise MemoryError(f"{size / 1e9:.2f} GB of host memory cannot be pinned: {error}")
            # Before the memory goes: CUDA refuses to pin the same addresses a second time.
            finalizer = weakref.finalize(self, unpin, self.memory)
            finalizer.atexit = False
            self._unpin = finalizer

    def free(self) -> None:
        """Unpin it; the memory goes with the object."""
        if self._unpin is not None:
            self._unpin()

    def views(self, like: Collection[Tensor]) -> list[Tensor]:
        out, offset = [], 0
        for tensor in like:
            size = tensor.numel() * tensor.element_size()
            view = self.memory[offset : offset + size].view(tensor.dtype).view(tensor.shape)
            out.append(view)
            offset += aligned(size)
        return out


def unpin(memory: Tensor) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostUnregister(memory.data_ptr())) != 0:
        forget_cuda_error()


def forget_cuda_error() -> None:
    """CUDA keeps an error of its runtime's calls, and the training's next kernel would raise it."""
    with contextlib.suppress(RuntimeError, AssertionError):  # the latter without CUDA
        torch.ones(1, device="cuda")


def aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


@dataclass
class Snapshot:
    """State of a training after a step, the last one that it contains."""

    step: int
    buffers: dict[torch.device, Buffer]  # memory of the tensors, by the device of the originals
    model: list[Tensor] = field(default_factory=list)  # in the buffers
    #: The optimiser's state of each parameter; its tensors are in the buffers.
    states: list[dict[Any, Any]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)  # settings of the optimiser's groups
    parameters: list[int] = field(default_factory=list)  # number of parameters of each group
    small: dict[str, Any] = field(default_factory=dict)  # state of everything else, by name
    copied: list[Any] = field(default_factory=list)  # events after which the copies are complete

    @property
    def memory(self) -> dict[str, Tensor]:
        return {str(device): buffer.memory for device, buffer in self.buffers.items()}

    @property
    def size(self) -> int:
        return sum(buffer.size for buffer in self.buffers.values())


def small_state(parts: Parts) -> dict[str, Any]:
    """State of everything but weights, optimiser and monitor."""
    modules = parts.with_extra_state()
    return {
        # First: what follows may draw random numbers.
        "random": random_state(parts.devices()),
        "data": parts.data.state(),
        "others": {name: copy.deepcopy(part.state_dict()) for name, part in parts.others.items()},
        "modules": {name: copy.deepcopy(m.get_extra_state()) for name, m in modules.items()},
    }


def restorers(
    parts: Parts, state: Mapping[str, Any], skip: tuple[int, int] | None = None
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name of each part of `small_state`, and what restores it; but for the random state."""
    if isinstance(parts.data, DataPosition):
        yield "the position of the data", partial(parts.data.seek, state["data"], skip)
    owners = {"others": (parts.others, "load_state_dict"),
              "modules": (parts.with_extra_state(), "set_extra_state")}  # fmt: skip
    for kind, (parts_of_kind, method) in owners.items():
        for name, part in parts_of_kind.items():
            if name in state[kind]:
                yield name, partial(_load, part, method, state[kind][name])


def _load(part: Any, method: str, state: Any) -> None:
    getattr(part, method)(copy.deepcopy(state))


def assign_in_place(values: dict[Any, Any], new: Mapping[Any, Any]) -> None:
    """Set new values; a tensor, which a compiled optimiser holds on to, in its place."""
    for key, value in new.items():
        there = values.get(key)
        if isinstance(there, Tensor) and isinstance(value, (Tensor, int, float)):
            local(there.detach()).copy_(torch.as_tensor(value))
        else:
            values[key] = copy.deepcopy(value)


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {
            key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]
