"""Snapshots of everything that a training is, in buffers that are used again."""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rmetric._util.host_memory import check_fits
from rmetric.monitor.actions.checkpoint_file import random_state, set_random_state
from rmetric.monitor.gradients import local
from rmetric.rescue.data_position import DataPosition, NoData
from rmetric.rescue.disk import SnapshotFolder

logger = logging.getLogger("rmetric")

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

    def optimizer_tensors(self) -> Iterator[tuple[int, Any, Tensor]]:
        """(index of the parameter, key, tensor) of the optimiser's state."""
        for place, parameter in enumerate(self.optimized()):
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield place, key, local(value.detach())

    def groups(self) -> list[list[Any]]:
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        return [list(group["params"]) for group in groups]

    def optimized(self) -> list[Any]:
        return [parameter for group in self.groups() for parameter in group]

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
        tensors += [tensor for _, _, tensor in self.optimizer_tensors()]
        by_device = defaultdict[torch.device, list[Tensor]](list)
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.numel():
                by_device[tensor.device].append(tensor)
        norms = (torch._foreach_norm(those, torch.inf) for those in by_device.values())
        largest = (torch.stack([norm.float() for norm in of_device]) for of_device in norms)
        return not all(bool(of_device.isfinite().all()) for of_device in largest)


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
    bulk: list[Tensor] = field(default_factory=list)  # in the buffers: model, then optimiser
    #: (index of the parameter, key) of the optimiser's tensors.
    optimizer_keys: list[tuple[int, Any]] = field(default_factory=list)
    #: The optimiser's state that is no tensor, by index of the parameter.
    optimizer_values: list[dict[Any, Any]] = field(default_factory=list)
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
        "others": {name: copy.deepcopy(one.state_dict()) for name, one in parts.others.items()},
        "modules": {name: copy.deepcopy(one.get_extra_state()) for name, one in modules.items()},
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
        for name, one in parts_of_kind.items():
            if name in state[kind]:
                yield name, partial(_load, one, method, state[kind][name])


def _load(one: Any, method: str, state: Any) -> None:
    getattr(one, method)(copy.deepcopy(state))


class Snapshots:
    """The snapshots of one training; memory of those that are dropped is used again.

    In a folder the newest one has a buffer in host memory while it is written. There must be memory
    for `most` at a time. `parts` are those of the training as they are now.
    """

    parts: Parts

    def __init__(self, where: str | Path = "host", most: int = 1) -> None:
        self.where = where
        self._disk: SnapshotFolder | None = None
        self._most = most if where in ("host", "device") else 1
        self.kept: dict[int, Snapshot] = {}
        self._spare: list[Buffer] = []
        self._streams: dict[torch.device, Any] = {}

    # -- take

    @torch.no_grad()
    def take(self, step: int) -> Snapshot:
        """Take a snapshot of the state after `step`.

        The copy of weights from a GPU is under way on return; `wait` before they change.
        """
        parts = self.parts
        if self.where not in ("host", "device"):
            # Made here: a folder that cannot be written is a failure of the first snapshot.
            self._disk = self._disk or SnapshotFolder(self.where)
            self._disk.wait()
        small = small_state(parts)
        snapshot = Snapshot(step, {}, small=small)
        small["monitor"] = parts.monitor.state_dict(audited=False)
        tensors = self._describe(snapshot)
        self._reserve(snapshot, tensors)
        self._copy(snapshot, tensors)
        self.kept[step] = snapshot
        if self._disk is not None:
            self._disk.write(step, snapshot.memory, snapshot.copied)
            # The next snapshot takes this memory, when the write is complete.
            self._spare += snapshot.buffers.values()
        return snapshot

    def wait(self) -> None:
        """Let the present CUDA stream wait for the copies that are under way."""
        for snapshot in self.kept.values():
            for event in snapshot.copied:
                torch.cuda.current_stream().wait_event(event)
            snapshot.copied = []

    def keep_only(self, steps: Collection[int]) -> None:
        for step in [step for step in self.kept if step not in steps]:
            dropped = self.kept.pop(step)
            if self._disk is None:
                self._spare += dropped.buffers.values()
            else:
                self._disk.wait()
                self._disk.remove(step)

    def clear(self) -> None:
        """Drop all, with their memory and their files, whatever became of the last write."""
        self.wait()
        for snapshot in self.kept.values():
            self._spare += snapshot.buffers.values()
        self.kept = {}
        if self._disk is not None:
            self._disk.close()
        for buffer in self._spare:
            buffer.free()
        self._spare = []

    # -- restore

    def restore_small(self, snapshot: Snapshot, skip: tuple[int, int] | None) -> Callable[[], None]:
        """Restore everything but weights, optimiser, monitor and random state; all or nothing.

        The data from the first to the last step of `skip` are not used again. Returns what undoes
        it.
        """
        parts = self.parts
        self._check_fits(snapshot)
        if self._disk is not None:
            self._disk.wait()
            self._disk.read(snapshot.step, snapshot.memory)
        before, left_out = small_state(parts), list(parts.data.left_out)

        def undo() -> None:
            parts.data.left_out = left_out
            for part, restore in restorers(parts, before):
                try:
                    restore()
                except Exception as error:  # the other parts are restored all the same
                    logger.error("rmetric: rescue: %s is not as it was: %s", part, error)
            set_random_state(before["random"])

        try:
            for _, restore in restorers(parts, snapshot.small, skip):
                restore()
        except BaseException:
            undo()
            raise
        return undo

    @torch.no_grad()
    def restore_rest(self, snapshot: Snapshot) -> None:
        parts = self.parts
        self.wait()
        weights = parts.model_tensors()
        for saved, tensor in zip(snapshot.bulk, weights, strict=False):
            tensor.copy_(saved)
        self._restore_optimizer(snapshot, snapshot.bulk[len(weights) :])
        for module in parts.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation may have left whole weights behind
        parts.model.zero_grad(set_to_none=True)
        if parts.optimizer is not None:
            parts.optimizer.zero_grad(set_to_none=True)
        parts.monitor.go_back(snapshot.small["monitor"])
        set_random_state(snapshot.small["random"])

    def _check_fits(self, snapshot: Snapshot) -> None:
        """Raise ValueError if a tensor of the snapshot has no place in the training any more."""
        now = self.parts.model_tensors()
        groups = [len(of_one) for of_one in self.parts.groups()]
        held = {(place, key): t for place, key, t in self.parts.optimizer_tensors()}
        now += [held[key] for key in snapshot.optimizer_keys if key in held]
        shapes = [t.shape for t in now]
        if groups != snapshot.parameters or shapes != [t.shape for t in snapshot.bulk]:
            raise ValueError(
                f"the snapshot of step {snapshot.step} does not fit the training any more: "
                "parameters, groups or the optimizer's state were replaced"
            )

    def _restore_optimizer(self, snapshot: Snapshot, bulk: list[Tensor]) -> None:
        optimizer, optimized = self.parts.optimizer, self.parts.optimized()
        if optimizer is None:
            return
        saved = [dict(values) for values in snapshot.optimizer_values]
        for (place, key), tensor in zip(snapshot.optimizer_keys, bulk, strict=True):
            saved[place][key] = tensor
        for parameter, state in zip(optimized, saved, strict=True):
            now = optimizer.state.get(parameter, {})
            for key in [key for key in now if key not in state]:
                del now[key]
            if not state:
                optimizer.state.pop(parameter, None)
                continue
            for key, value in state.items():
                put(now, key, value)
        for group, settings in zip(optimizer.param_groups, snapshot.groups, strict=True):
            for key in [key for key in group if key not in settings and key != "params"]:
                del group[key]
            for key, value in settings.items():
                put(group, key, value)

    # -- parts of a copy

    def _describe(self, snapshot: Snapshot) -> list[Tensor]:
        """All tensors in order; fills in what is no tensor."""
        parts = self.parts
        tensors = parts.model_tensors()
        if parts.optimizer is None:
            return tensors
        for place, key, tensor in parts.optimizer_tensors():
            snapshot.optimizer_keys.append((place, key))
            tensors.append(tensor)
        for parameter in parts.optimized():
            state = parts.optimizer.state.get(parameter, {})
            plain = {k: copy.deepcopy(v) for k, v in state.items() if not isinstance(v, Tensor)}
            snapshot.optimizer_values.append(plain)
        snapshot.groups = settings_of(parts.optimizer)
        snapshot.parameters = [len(of_one) for of_one in parts.groups()]
        return tensors

    def _reserve(self, snapshot: Snapshot, tensors: list[Tensor]) -> None:
        """Give the snapshot a buffer on each device, and in it a view for each tensor."""
        places = defaultdict[torch.device, list[int]](list)
        for place, tensor in enumerate(tensors):
            device = tensor.device if self.where == "device" else torch.device("cpu")
            places[device].append(place)
        pinned = any(tensor.device.type == "cuda" for tensor in tensors)
        snapshot.bulk = list(tensors)
        for device, of_device in places.items():
            those = [tensors[place] for place in of_device]
            size = sum(aligned(t.numel() * t.element_size()) for t in those)
            buffer = self._buffer(size, device, pinned=pinned)
            snapshot.buffers[device] = buffer
            for place, view in zip(of_device, buffer.views(those), strict=True):
                snapshot.bulk[place] = view

    def _buffer(self, size: int, device: torch.device, *, pinned: bool) -> Buffer:
        """A spare buffer, or a new one in place of those of another size."""
        wanted = size, device
        fitting = next((b for b in self._spare if (b.size, b.memory.device) == wanted), None)
        if fitting is not None:
            self._spare = [b for b in self._spare if b is not fitting]
            return fitting
        self._drop_spare(device)
        on_host = device.type == "cpu"
        if on_host:
            self._check_room(size)
        return Buffer(size, device, pinned=pinned and on_host)

    def _drop_spare(self, device: torch.device) -> None:
        """Free those of a device: the optimiser's state came or went, which changes the size."""
        for buffer in self._spare:
            if buffer.memory.device == device:
                buffer.free()
        self._spare = [b for b in self._spare if b.memory.device != device]

    def _check_room(self, size: int) -> None:
        """Raise MemoryError if the snapshots of `size` bytes to come do not fit."""
        kept = [s.buffers[d] for s in self.kept.values() for d in s.buffers if d.type == "cpu"]
        there = sum(block.size == size for block in kept)
        check_fits(
            max(1, self._most - there) * size,
            f"{self._most} snapshots of {size / 1e9:.3g} GB",
            freed=sum(block.size for block in kept if block.size != size),  # they go in time
            advice=": RescueConfig(every=..., far=...) keeps fewer, where=FOLDER keeps them on a "
            "disk",
        )

    def _copy(self, snapshot: Snapshot, tensors: list[Tensor]) -> None:
        buffers = {local(b.detach()).data_ptr() for b in self.parts.model.buffers()}
        for device in {tensor.device for tensor in tensors}:
            pairs = [
                (view, tensor)
                for view, tensor in zip(snapshot.bulk, tensors, strict=True)
                if tensor.device == device
            ]
            if device.type != "cuda":
                for view, tensor in pairs:
                    view.copy_(tensor)
                continue
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream = self._streams[device]
            # The forward pass changes buffers (running means), before anything waits.
            for view, tensor in pairs:
                if tensor.data_ptr() in buffers:
                    view.copy_(tensor, non_blocking=True)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for view, tensor in pairs:
                    if tensor.data_ptr() not in buffers:
                        view.copy_(tensor, non_blocking=True)
            snapshot.copied.append(stream.record_event())


def put(values: dict[Any, Any], key: Any, value: Any) -> None:
    """Set a value; one that is a tensor, which a compiled optimiser holds on to, in its place."""
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
