"""Snapshots of everything that a training is, in buffers that are used again."""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rmetric._util.host_memory import check_fits
from rmetric.monitor.actions.checkpoint_file import random_state, set_random_state
from rmetric.rescue.data_position import DataPosition
from rmetric.rescue.disk import SnapshotFolder

logger = logging.getLogger("rmetric")

_ALIGNED = 64  # bytes


class Stateful(Protocol):
    """Anything with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, not a copy."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor.detach()


@dataclass
class Parts:
    """The parts of a training that a snapshot holds.

    Attributes:
        model: whose buffers are kept, and what its modules give as `get_extra_state`.
        parameters: of the model and of the optimiser, sharded or not.
        optimizer: the optimiser itself; None for none.
        others: by name: schedulers, the scaler, whatever else has a state.
        data: position of the data.
        monitor: the monitor.
    """

    model: nn.Module
    parameters: list[Any]
    optimizer: Any
    others: Mapping[str, Stateful]
    data: DataPosition
    monitor: Any

    def model_tensors(self) -> list[Tensor]:
        """Parameters and buffers, each memory once."""
        unique = {id(t): t for t in (*self.parameters, *self.model.buffers())}
        return [local(tensor) for tensor in unique.values()]

    def optimizer_tensors(self) -> Iterator[tuple[int, Any, Tensor]]:
        """(index of the parameter, key, tensor) of the optimiser's state."""
        for place, parameter in enumerate(self.optimized()):
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield place, key, local(value)

    def groups(self) -> list[list[Any]]:
        """Parameters of each of the optimiser's groups."""
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        return [list(group["params"]) for group in groups]

    def optimized(self) -> list[Any]:
        """Parameters in the order of the optimiser's groups."""
        return [parameter for group in self.groups() for parameter in group]

    def with_extra_state(self) -> dict[str, nn.Module]:
        """The modules with a state of their own beside parameters and buffers, by name."""
        return {
            name: module
            for name, module in self.model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def devices(self) -> set[torch.device]:
        """CUDA devices of the parameters."""
        return {p.device for p in self.parameters if p.device.type == "cuda"}

    @torch.no_grad()
    def not_finite(self) -> bool:
        """True if a weight or a number of the optimiser's state is nan or infinite."""
        tensors = [local(p) for p in self.parameters]
        if self.optimizer is not None:
            tensors += [tensor for _, _, tensor in self.optimizer_tensors()]
        by_device: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.numel():
                by_device.setdefault(tensor.device, []).append(tensor)
        for those in by_device.values():
            largest = torch.stack([n.float() for n in torch._foreach_norm(those, torch.inf)])
            if not bool(largest.isfinite().all()):
                return True
        return False


class Buffer:
    """One block of memory that holds the tensors of a snapshot one behind the other.

    Args:
        size: bytes.
        device: where it is.
        pinned: the copies from a GPU run beside its computations.
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
        """A place for each tensor, of its shape and type."""
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


def memory_of(snapshot: Snapshot) -> dict[str, Tensor]:
    """The blocks of memory of a snapshot by device."""
    return {str(device): buffer.memory for device, buffer in snapshot.buffers.items()}


def aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def size_of(tensors: Collection[Tensor]) -> int:
    """Bytes that they take in a buffer."""
    return sum(aligned(t.numel() * t.element_size()) for t in tensors)


@dataclass
class Snapshot:
    """State of a training after a step.

    Attributes:
        step: the last one that it contains.
        buffers: memory of the tensors, by the device of the originals.
        bulk: place of each tensor in the buffers: model, then optimiser.
        optimizer_keys: (index of the parameter, key) of the optimiser's tensors.
        optimizer_values: the optimiser's state that is no tensor, by index of the parameter.
        groups: settings of the optimiser's groups.
        parameters: number of parameters of each group.
        small: state of everything else, by name.
        copied: the event after which the copies are complete; None for now.
    """

    step: int
    buffers: dict[torch.device, Buffer]
    bulk: list[Tensor] = field(default_factory=list)
    optimizer_keys: list[tuple[int, Any]] = field(default_factory=list)
    optimizer_values: list[dict[Any, Any]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    small: dict[str, Any] = field(default_factory=dict)
    copied: Any = None

    @property
    def size(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.size for buffer in self.buffers.values())


@contextlib.contextmanager
def reported(part: str) -> Iterator[None]:
    """Log an exception: the other parts are restored all the same."""
    try:
        yield
    except Exception as error:
        logger.error("rmetric: rescue: %s is not as it was: %s", part, error)


def small_state(parts: Parts) -> dict[str, Any]:
    """State of everything but weights and optimiser."""
    return {
        # First: what follows may draw random numbers.
        "random": random_state(parts.devices()),
        "data": parts.data.state(),
        "others": {name: copy.deepcopy(one.state_dict()) for name, one in parts.others.items()},
        "modules": extra_states(parts),
        "monitor": parts.monitor.state_dict(audited=False),
    }


def extra_states(parts: Parts) -> dict[str, Any]:
    """What the modules give as `get_extra_state`, copied, by name."""
    return {n: copy.deepcopy(m.get_extra_state()) for n, m in parts.with_extra_state().items()}


def set_extra_states(parts: Parts, states: Mapping[str, Any]) -> None:
    """Restore `extra_states`."""
    for name, module in parts.with_extra_state().items():
        module.set_extra_state(copy.deepcopy(states[name]))


def load_small_state(parts: Parts, state: Mapping[str, Any], skip: tuple[int, int] | None) -> None:
    """Restore `small_state`, but for the monitor and the random state.

    Args:
        parts: to restore.
        state: of `small_state`.
        skip: first and last step whose data are not used again; None for none.
    """
    if parts.data.rewindable:
        parts.data.seek(state["data"], skip)
    for name, one in parts.others.items():
        if name in state["others"]:
            one.load_state_dict(copy.deepcopy(state["others"][name]))
    set_extra_states(parts, state["modules"])


class Snapshots:
    """The snapshots of one training; memory of those that are dropped is used again.

    Args:
        parts: of the training.
        where: ``host``, ``device``, or a folder. In a folder the newest snapshot has a buffer in
            host memory while it is written.
        most: snapshots at a time, for which there must be memory.
    """

    def __init__(self, parts: Parts, where: str | Path = "host", most: int = 1) -> None:
        self.parts, self.where = parts, where
        self._disk = None if where in ("host", "device") else SnapshotFolder(where)
        self._most = most if self._disk is None else 1
        self.kept: dict[int, Snapshot] = {}
        self._spare: list[Buffer] = []
        self._streams: dict[torch.device, Any] = {}
        self.allocated = 0

    # -- take

    @torch.no_grad()
    def take(self, step: int) -> Snapshot:
        """Take a snapshot of the state after `step`.

        The copy of weights from a GPU is under way on return; `wait` before they change.
        """
        parts = self.parts
        if self._disk is not None:
            self._disk.wait()
        snapshot = Snapshot(step, {}, small=small_state(parts))
        tensors = self._describe(snapshot)
        self._reserve(snapshot, tensors)
        snapshot.bulk = self._views(snapshot, tensors)
        self._copy(snapshot, tensors)
        self.kept[step] = snapshot
        if self._disk is not None:
            self._disk.write(step, memory_of(snapshot), snapshot.copied or [])
            # The next snapshot takes this memory, when the write is complete.
            self._spare += snapshot.buffers.values()
        return snapshot

    def wait(self) -> None:
        """Let the present CUDA stream wait for the copies that are under way."""
        for snapshot in self.kept.values():
            if snapshot.copied is not None:
                for event in snapshot.copied:
                    torch.cuda.current_stream().wait_event(event)
                snapshot.copied = None

    def keep_only(self, steps: Collection[int]) -> None:
        """Drop the snapshots of other steps."""
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

        Args:
            snapshot: to restore.
            skip: first and last step whose data are not used again; None for none.

        Returns:
            A function that undoes it.
        """
        parts = self.parts
        self._check_fits(snapshot)
        if self._disk is not None:
            self._disk.wait()
            self._disk.read(snapshot.step, memory_of(snapshot))
        before = {name: copy.deepcopy(one.state_dict()) for name, one in parts.others.items()}
        modules = extra_states(parts)
        data = parts.data.state() if parts.data.rewindable else None
        left_out = list(parts.data.left_out)
        randoms = random_state(parts.devices())

        def undo() -> None:
            if parts.data.rewindable:
                with reported("the position of the data"):
                    parts.data.left_out = left_out
                    parts.data.seek(data)
            for name, one in parts.others.items():
                with reported(name):
                    one.load_state_dict(before[name])
            with reported("the extra state of the modules"):
                set_extra_states(parts, modules)
            set_random_state(randoms)

        try:
            load_small_state(parts, snapshot.small, skip)
        except BaseException:
            undo()
            raise
        return undo

    @torch.no_grad()
    def restore_rest(self, snapshot: Snapshot) -> None:
        """Restore weights, optimiser, monitor and random state."""
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
        if self.parts.optimizer is not None:
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
        saved: list[dict[Any, Any]] = [copy.deepcopy(v) for v in snapshot.optimizer_values]
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
                if isinstance(value, Tensor) and isinstance(now.get(key), Tensor):
                    local(now[key]).copy_(value)
                else:
                    now[key] = value
        for group, settings in zip(optimizer.param_groups, snapshot.groups, strict=True):
            for key in [key for key in group if key not in settings and key != "params"]:
                del group[key]
            for key, value in settings.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = copy.deepcopy(value)

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
        by_device: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            by_device.setdefault(self._place(tensor), []).append(tensor)
        pinned = any(tensor.device.type == "cuda" for tensor in tensors)
        for device, those in by_device.items():
            size = size_of(those)
            fitting = [b for b in self._spare if b.memory.device == device and b.size == size]
            if fitting:
                buffer = fitting[0]
                self._spare = [b for b in self._spare if b is not buffer]
            else:
                for other in [b for b in self._spare if b.memory.device == device]:
                    other.free()  # of another size: the optimiser's state came or went
                self._spare = [b for b in self._spare if b.memory.device != device]
                on_host = device.type == "cpu"
                if on_host:
                    self._check_room(size)
                buffer = Buffer(size, device, pinned=pinned and on_host)
                self.allocated += 1
            snapshot.buffers[device] = buffer

    def _check_room(self, size: int) -> None:
        """Raise MemoryError if the snapshots of `size` bytes to come do not fit."""
        kept = [
            b
            for snapshot in self.kept.values()
            for d, b in snapshot.buffers.items()
            if d.type == "cpu"
        ]
        there = sum(block.size == size for block in kept)
        check_fits(
            max(1, self._most - there) * size,
            f"{self._most} snapshots of {size / 1e9:.3g} GB",
            freed=sum(block.size for block in kept if block.size != size),  # they go in time
            advice=": RescueConfig(every=..., far=...) keeps fewer, where=FOLDER keeps them on a "
            "disk",
        )

    def _views(self, snapshot: Snapshot, tensors: list[Tensor]) -> list[Tensor]:
        views: dict[int, Tensor] = {}
        for device, buffer in snapshot.buffers.items():
            those = [(i, t) for i, t in enumerate(tensors) if self._place(t) == device]
            found = buffer.views([t for _, t in those])
            views |= {i: view for (i, _), view in zip(those, found, strict=True)}
        return [views[i] for i in range(len(tensors))]

    def _place(self, tensor: Tensor) -> torch.device:
        return tensor.device if self.where == "device" else torch.device("cpu")

    def _copy(self, snapshot: Snapshot, tensors: list[Tensor]) -> None:
        buffers = {local(b).data_ptr() for b in self.parts.model.buffers()}
        events = []
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
            events.append(stream.record_event())
        snapshot.copied = events or None


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    """Settings of each group of the optimiser, copied."""
    return [
        {
            key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]
