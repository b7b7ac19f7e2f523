"""Batches since the oldest snapshot, kept so that a training can use them again."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rmetric.monitor.actions.checkpoint_file import random_state, set_random_state

#: Result of `host_random_state`, and one before and one after something.
HostState = Mapping[str, Any]
States = tuple[HostState, HostState]
#: Batches beyond this are not kept: token ids of 100 steps take some ten million bytes.
KEPT_BYTES = 1 << 30


@dataclass
class KeptBatch:
    """A copy of one batch, its place in the loader's own terms, and whether its pass ended.

    `states` has the random states of the host before and after, where drawing it moved a generator.
    """

    value: Any
    where: Mapping[str, int]
    ended: bool = False
    bytes: int = 0
    states: States | None = None


@dataclass
class RecentBatches:
    """Source of batches that can be set back: the last ones are kept, at most `limit` bytes.

    `problem`: why older batches are not kept; `position` counts the batches before the next
    one, in the order of the data, of which the intervals in `skipped` are not used again.
    """

    limit: int = KEPT_BYTES
    position: int = 0
    skipped: list[tuple[int, int]] = field(default_factory=list)
    problem: str = ""
    _kept: deque[KeptBatch] = field(default_factory=deque)
    _drawn: int = 0  # from the loader, by now
    _bytes: int = 0

    @property
    def first(self) -> int:
        return self._drawn - len(self._kept)

    @property
    def waiting(self) -> bool:
        """True if the next batch is one that was drawn before."""
        while self.position < self._drawn and self._is_skipped(self.position):
            self.position += 1
        return self.position < self._drawn

    def next(self, draw: Callable[[], KeptBatch]) -> KeptBatch:
        """The batch at the position: the kept one, else what `draw` returns or raises."""
        while not self.waiting:
            before = host_random_state()
            new = draw()
            self._keep(new, before)
            if not self._is_skipped(self.position - 1):
                return new
        kept = self._kept[self.position - self.first]
        self.position += 1
        if kept.states is not None and same_state(kept.states[0], host_random_state()):
            set_random_state(kept.states[1])
        return replace(kept, value=_copy(kept.value))  # the training may change a batch in place

    def _keep(self, new: KeptBatch, before: HostState) -> None:
        self._drawn += 1
        self.position += 1
        after = host_random_state()
        new.states = None if same_state(before, after) else (before, after)
        try:
            kept = replace(new, value=_copy(new.value), bytes=bytes_of(new.value))
        except Exception as error:  # of the user's own class
            self.problem = f"a {type(new.value).__name__} cannot be copied: {error}"
            kept = replace(new, value=None, bytes=self.limit + 1)
        self._kept.append(kept)
        self._bytes += kept.bytes
        if self._bytes > self.limit:
            self.problem = self.problem or f"they take more than {self.limit} bytes"
            self._drop(lambda: self._bytes > self.limit)

    def place(self) -> Mapping[str, int] | None:
        """`KeptBatch.where` of the next batch, if it is a kept one."""
        return self._kept[self.position - self.first].where if self.waiting else None

    def set_back(self, position: int) -> bool:
        """Use the batches from `position` on again; False if they are no longer kept."""
        if not self.first <= position <= self._drawn:
            return False
        self.position = position
        return True

    def go_to(self, position: int) -> Any:
        """The loader itself was set to a position; the batch that was kept of it, if any."""
        there = self.first <= position < self._drawn
        before = self._kept[position - self.first].value if there else None
        self._kept.clear()
        self._bytes, self.position, self._drawn = 0, position, position
        return before

    def skip(self, start: int, end: int) -> list[KeptBatch]:
        """Never use the batches from `start` to before `end` again.

        Returns those that are still kept and were not skipped before.
        """
        inside = range(max(start, self.first), min(end, self._drawn))
        found = [self._kept[i - self.first] for i in inside if not self._is_skipped(i)]
        if start < end:
            self.skipped.append((start, end))
        return found

    def forget(self, position: int) -> None:
        self._drop(lambda: self.first < min(position, self.position))
        oldest = min(position, self.first)  # after `go_to` earlier ones are gone
        self.skipped = [interval for interval in self.skipped if interval[1] > oldest]

    def used(self, start: int, end: int) -> int:
        """Batches from `start` to before `end` that were not skipped."""
        return sum(not self._is_skipped(position) for position in range(start, end))

    def _is_skipped(self, position: int) -> bool:
        return any(start <= position < end for start, end in self.skipped)

    def _drop(self, excess: Callable[[], bool]) -> None:
        while self._kept and excess():
            self._bytes -= self._kept.popleft().bytes


def position_after(position: int, batches: int, left_out: Iterable[tuple[int, int]]) -> int:
    """Position after `batches` more, without the intervals of `left_out` (the end excluded)."""
    left = batches
    for start, end in sorted(left_out):
        if end <= position:
            continue
        if left <= start - position:
            break
        left -= max(0, start - position)
        position = end
    return position + left


def _copy(value: Any) -> Any:
    """Shares no memory with the batch; of a slice of the whole data set it is the slice alone."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        made: Any = copy.copy(value)
        for key, inner in value.items():
            made[key] = _copy(inner)
        return made
    if isinstance(value, (list, tuple)):
        items = [_copy(inner) for inner in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return copy.deepcopy(value)


def bytes_of(value: Any, seen: set[int] | None = None) -> int:
    """Bytes of the tensors, arrays and texts in a batch of any class, each object once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()  # a sparse one has no `nbytes`
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    inside = value if isinstance(value, (list, tuple)) else getattr(value, "__dict__", {}).values()
    return sum(bytes_of(inner, seen) for inner in inside)


def host_random_state() -> HostState:
    return random_state(set())


def same_state(state: HostState, other: HostState) -> bool:
    first, second = state["numpy"], other["numpy"]
    return (
        torch.equal(state["torch"], other["torch"])
        and state["python"] == other["python"]
        and first[2:] == second[2:]
        and bool(np.array_equal(first[1], second[1]))
    )
