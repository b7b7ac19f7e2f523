"""Takes and restores the snapshots of a training, at the distance that their cost allows."""

from __future__ import annotations

import copy
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import ExitStack
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rmetric._util.host_memory import check_fits
from rmetric.monitor.actions.checkpoint_file import set_random_state
from rmetric.monitor.gradients import local
from rmetric.rescue.data_position import NoData
from rmetric.rescue.disk import SnapshotFolder
from rmetric.rescue.judgement import LossLevel
from rmetric.rescue.policy import Decision, RescueConfig, RescuePolicy
from rmetric.rescue.snapshot import (
    Buffer,
    Parts,
    Snapshot,
    aligned,
    assign_in_place,
    restorers,
    settings_of,
    small_state,
    tensors_of,
)

logger = logging.getLogger("rmetric")

#: Share of the time of the training that snapshots may take.
BUDGET = 0.01
#: Snapshots that are timed: the first one has no state of the optimiser.
_TIMED = 3
#: Bounds of the distance, in steps; it is a multiple of the first.
LEAST, MOST = 10, 1000


class SnapshotPace:
    """Finds the distance k of two snapshots from the times of the first ones.

        k = cost / (0.01 step),  from 10 to 1000, rounded up to a multiple of 10

    The cost of a snapshot is the time until the training goes on, and on an accelerator, where the
    copy runs `beside` the next step, what that step takes longer than the median one.

    >>> pace = SnapshotPace(beside=True)
    >>> for step in range(31):
    ...     if step % 10 == 0:
    ...         pace.snapshot_taken(0.01)
    ...     pace.step_made(0.55 if step % 10 == 0 else 0.2)
    >>> pace.distance, pace.words
    (180, 'a snapshot takes 0.36 s, a step 0.2 s')
    """

    def __init__(self, *, beside: bool) -> None:
        self._beside = beside
        self._snapshots: list[float] = []
        self._after: list[float] = []  # steps after a snapshot, and all others
        self._others: list[float] = []
        self._is_after = False

    def snapshot_taken(self, seconds: float) -> None:
        self._snapshots.append(seconds)
        self._is_after = True

    def step_made(self, seconds: float) -> None:
        (self._after if self._is_after else self._others).append(seconds)
        self._is_after = False

    @property
    def is_known(self) -> bool:
        return len(self._after) > _TIMED and bool(self._others)

    @property
    def distance(self) -> int:
        """Steps from one snapshot to the next; only where `is_known`."""
        steps = self._cost / (BUDGET * max(self._step, 1e-9))
        return min(max(LEAST, LEAST * ceil(round(steps / LEAST, 6))), MOST)

    @property
    def words(self) -> str:
        return f"a snapshot takes {self._cost:.2g} s, a step {self._step:.2g} s"

    @property
    def _step(self) -> float:
        return median(self._others)

    @property
    def _cost(self) -> float:
        longer = max(median(self._after[1:]) - self._step, 0.0) if self._beside else 0.0
        return median(self._snapshots[1:]) + longer


class SnapshotKeeper:
    """The snapshots of one training; memory of those that are dropped is used again.

    In a folder the newest one has a buffer in host memory while it is written. `pace` finds their
    distance, None where `config` has it. `most_of_ranks` gives the largest of all ranks' values,
    from 0; all ask at the same place.
    """

    parts: Parts  # as they are now

    def __init__(
        self,
        config: RescueConfig,
        where: str | Path,
        pace: SnapshotPace | None,
        most_of_ranks: Callable[[int], int],
    ) -> None:
        self.where, self._pace = where, pace
        self._most_of_ranks, self._most = most_of_ranks, snapshots_kept(config)
        self._disk: SnapshotFolder | None = None
        self.kept: dict[int, Snapshot] = {}
        self._spare: list[Buffer] = []
        self._streams: dict[torch.device, Any] = {}
        self._ended = 0.0  # time of the end of the last boundary
        self._refused, self._announced = False, 0

    def boundary_begins(self) -> None:
        if self._pace is not None and self._ended:
            self._pace.step_made(time.perf_counter() - self._ended)

    def boundary_ends(self) -> None:
        self._ended = time.perf_counter()

    # -- take

    def take(self, step: int, parts: Parts, policy: RescuePolicy, level: LossLevel) -> None:
        """Take the snapshot that is due after a step, unless a longer distance was just found.

        The copy of weights from a GPU is under way on return; `wait` before they change.
        """
        if self._pace is not None and self._pace.is_known:
            self._settle_distance(self._pace, policy)
            if not policy.snapshot_due(step):
                return
        if self._most_of_ranks(int(parts.not_finite())):
            if not self._refused:
                logger.warning("rmetric: no snapshot of step %d: weights are not finite", step)
            self._refused = True
            return
        self._refused = False
        policy.snapshot_taken(step)
        self.keep_only(policy.state.snapshots)
        began = time.perf_counter()
        self.parts = parts
        snapshot = self.kept[step] = self._taken(step)
        snapshot.small["losses"] = level.state()  # the snapshot may have completed a record
        seconds = time.perf_counter() - began
        if self._pace is not None:
            self._pace.snapshot_taken(seconds)
        self._announce(snapshot, seconds, policy.every)

    @torch.no_grad()
    def _taken(self, step: int) -> Snapshot:
        parts = self.parts
        if self.where not in ("host", "device"):
            # Made here: a folder that cannot be written is a failure of the first snapshot.
            self._disk = self._disk or SnapshotFolder(self.where)
            self._disk.wait()
        snapshot = Snapshot(step, {}, small=small_state(parts))
        snapshot.small["monitor"] = parts.monitor.state_dict(audited=False)
        model, states = parts.model_tensors(), parts.optimizer_states()
        tensors = [*model, *tensors_of(states)]
        views = self._reserve(snapshot, tensors)
        snapshot.model, rest = views[: len(model)], iter(views[len(model) :])
        snapshot.states = [
            {k: next(rest) if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in state.items()}
            for state in states
        ]
        if parts.optimizer is not None:
            snapshot.groups = settings_of(parts.optimizer)
            snapshot.parameters = [len(group) for group in parts.groups()]
        self._copy(snapshot, list(zip(views, tensors, strict=True)))
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

    def restore(self, decision: Decision, parts: Parts) -> Snapshot:
        """Restore a snapshot on all ranks, or raise on all and leave the training as it was."""
        assert decision.to is not None
        self.parts, snapshot = parts, self.kept[decision.to]
        problem: Exception | None = None
        with ExitStack() as undo:  # also after an interrupt, or when another rank has left
            try:
                self._check_fits(snapshot)
                if self._disk is not None:
                    self._disk.wait()
                    self._disk.read(snapshot.step, snapshot.memory)
                undo.callback(self._undo, small_state(parts), list(parts.data.left_out))
                for _, restore in restorers(parts, snapshot.small, decision.skip):
                    restore()
            except Exception as error:
                problem = error
            if self._most_of_ranks(int(problem is not None)):
                raise problem or RuntimeError("another rank could not go back")
            undo.pop_all()
        self._restore_rest(snapshot)
        return snapshot

    def _undo(self, before: dict[str, Any], left_out: list[tuple[int, int]]) -> None:
        self.parts.data.left_out = left_out
        for part, restore in restorers(self.parts, before):
            try:
                restore()
            except Exception as error:  # the other parts are restored all the same
                logger.error("rmetric: rescue: %s is not as it was: %s", part, error)
        set_random_state(before["random"])

    @torch.no_grad()
    def _restore_rest(self, snapshot: Snapshot) -> None:
        parts = self.parts
        self.wait()
        for saved, tensor in zip(snapshot.model, parts.model_tensors(), strict=True):
            tensor.copy_(saved)
        self._restore_optimizer(snapshot)
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
        parts = self.parts
        fits = [len(group) for group in parts.groups()] == snapshot.parameters
        fits = fits and _shapes(parts.model_tensors()) == _shapes(snapshot.model)
        if fits:
            pairs = zip(parts.optimizer_states(), snapshot.states, strict=True)
            held = [{k: now[k] for k in then if k in now} for now, then in pairs]
            fits = _shapes(tensors_of(held)) == _shapes(tensors_of(snapshot.states))
        if not fits:
            raise ValueError(
                f"the snapshot of step {snapshot.step} does not fit the training any more: "
                "parameters, groups or the optimizer's state were replaced"
            )

    def _restore_optimizer(self, snapshot: Snapshot) -> None:
        optimizer = self.parts.optimizer
        if optimizer is None:
            return
        optimized = [parameter for group in self.parts.groups() for parameter in group]
        for parameter, state in zip(optimized, snapshot.states, strict=True):
            if not state:
                optimizer.state.pop(parameter, None)
                continue
            now = optimizer.state[parameter]
            for key in [key for key in now if key not in state]:
                del now[key]
            assign_in_place(now, state)
        for group, settings in zip(optimizer.param_groups, snapshot.groups, strict=True):
            for key in [key for key in group if key not in settings and key != "params"]:
                del group[key]
            assign_in_place(group, settings)

    # -- memory

    def _reserve(self, snapshot: Snapshot, tensors: list[Tensor]) -> list[Tensor]:
        """Give the snapshot a buffer on each device; returns a view in them for each tensor."""
        places = defaultdict[torch.device, list[int]](list)
        for place, tensor in enumerate(tensors):
            device = tensor.device if self.where == "device" else torch.device("cpu")
            places[device].append(place)
        pinned = any(tensor.device.type == "cuda" for tensor in tensors)
        found = list(tensors)
        for device, of_device in places.items():
            those = [tensors[place] for place in of_device]
            size = sum(aligned(t.numel() * t.element_size()) for t in those)
            buffer = self._buffer(size, device, pinned=pinned)
            snapshot.buffers[device] = buffer
            for place, view in zip(of_device, buffer.views(those), strict=True):
                found[place] = view
        return found

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
        most = self._most if self._disk is None else 1
        kept = [s.buffers[d] for s in self.kept.values() for d in s.buffers if d.type == "cpu"]
        there = sum(block.size == size for block in kept)
        check_fits(
            max(1, most - there) * size,
            f"{most} snapshots of {size / 1e9:.3g} GB",
            freed=sum(block.size for block in kept if block.size != size),  # they go in time
            advice=": RescueConfig(every=..., far=...) keeps fewer, where=FOLDER keeps them on a "
            "disk",
        )

    def _copy(self, snapshot: Snapshot, whole: list[tuple[Tensor, Tensor]]) -> None:
        buffers = {local(b.detach()).data_ptr() for b in self.parts.model.buffers()}
        for device in {tensor.device for _, tensor in whole}:
            pairs = [(view, tensor) for view, tensor in whole if tensor.device == device]
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

    # -- reports

    def _settle_distance(self, pace: SnapshotPace, policy: RescuePolicy) -> None:
        """Go on with the distance that the first snapshots allow, on all ranks with the largest."""
        self._pace, every = None, self._most_of_ranks(pace.distance)
        policy.state.every = every
        logger.info(
            "rmetric: rescue takes a snapshot every %d steps: %s, and %g %% of the time is allowed",
            every, pace.words, 100 * BUDGET,
        )  # fmt: skip

    def _announce(self, snapshot: Snapshot, seconds: float, every: int) -> None:
        if snapshot.size <= self._announced:
            return
        first, self._announced, number = not self._announced, snapshot.size, self._most
        logger.info(
            "rmetric: rescue takes a snapshot of %s every %d steps (%s), at most %d at a time, "
            "%s; this one took %.3g s",
            gigabytes(snapshot.size), every, self.where, number, gigabytes(number * snapshot.size),
            seconds,
        )  # fmt: skip
        if first and isinstance(self.parts.data, NoData):
            logger.warning(
                "rmetric: rescue cannot rewind these data: after a return the training goes on "
                "with the data that come next"
            )


def _shapes(tensors: list[Tensor]) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors]


def snapshots_kept(config: RescueConfig) -> int:
    policy, most = RescuePolicy(config), 0
    for step in range(0, 4 * config.far + 4 * policy.every, policy.every):
        policy.snapshot_taken(step)
        most = max(most, len(policy.state.snapshots))
    return most


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
