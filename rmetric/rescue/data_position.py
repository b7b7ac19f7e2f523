"""Positions in the data of a training, which a rescue restores."""

from __future__ import annotations

import copy
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from rmetric.rescue.recent_batches import (
    host_random_state,
    position_after,
    set_host_random_state,
)

logger = logging.getLogger("rmetric")

#: Steps before the present one whose place in the data is known.
_STEPS_KEPT = 100_000
#: Positions, of snapshots, whose next batch is known by its checksum.
_CHECKSUMS_KEPT = 16


class DataPosition(Protocol):
    """Adaptor of a source of data. `Rescue` calls it between two steps and at no other time.

    Attributes:
        rewindable: False if `seek` cannot go back; the training then goes on with the data that
            comes next.
        left_out: intervals of batches, the end excluded, that are not used; counted over all
            epochs from 0.
    """

    rewindable: bool
    left_out: list[tuple[int, int]]

    def state(self) -> Any:
        """The position after the batches of all steps so far."""

    def seek(self, state: Any, skip: tuple[int, int] | None = None) -> None:
        """Go to a position.

        Args:
            state: of `state`.
            skip: first and last step, as counted since the last position, whose batches are not
                used again; the last may be to come. They stay left out at later positions.

        It may change the random state of the process, which the rescue restores afterwards.
        It is not called if `rewindable` is False.
        """

    def describe(self) -> Mapping[str, Any]:
        """The position for the log, as JSON values."""

    def resume_state(self) -> Mapping[str, Any]:
        """What a restarted process must know of the data, as JSON values.

        ``left_out`` are the intervals of `left_out`, counted from the first batch that a resumed
        training draws.
        """

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take over what `resume_state` gave, before the first batch is drawn."""


class NoData:
    """Position of data that nobody has described."""

    rewindable = False

    def __init__(self) -> None:
        self.left_out: list[tuple[int, int]] = []

    def state(self) -> Any:
        return None

    def seek(self, state: Any, skip: tuple[int, int] | None = None) -> None:
        raise NotImplementedError("these data cannot be rewound")

    def describe(self) -> Mapping[str, Any]:
        return {}

    def resume_state(self) -> Mapping[str, Any]:
        return {}

    def resume(self, state: Mapping[str, Any]) -> None:
        pass


def counted_from(place: int, intervals: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Intervals of batches counted from another place, without those that lie before it."""
    return [[start - place, end - place] for start, end in intervals if end > place]


def generators_of(*owners: Any) -> list[torch.Generator]:
    """The generators of random numbers that loaders and samplers hold, each once."""
    found: list[torch.Generator] = []
    for owner in owners:
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and all(g is not generator for g in found):
            found.append(generator)
    return found


class LoaderPosition:
    """Batches of a loader, epoch after epoch, with a position that can be restored.

    - A loader with `state_dict` and `load_state_dict` restores itself.
    - A loader that can be iterated again is iterated under the random state of the beginning of
      the epoch, and the batches before the position are drawn and discarded. Without worker
      processes the samples of those batches are not loaded, unless they are a stream
      (`IterableDataset`).
    - An iterator cannot be rewound.

    `set_epoch` of the loader's sampler, or of the loader, is called at the beginning of each
    epoch.

    A batch that is not the same after a return is reported once: the loader has random numbers
    that nobody can set back.

    Its weakness: batches that are left out across the end of an epoch, which the process's own
    random state shuffles, are not exactly those that came before.

    Args:
        loader: the source; an iterable of batches.
        per_step: batches of one step.

    Attributes:
        restores_itself: by `state_dict` and `load_state_dict`.
    """

    def __init__(self, loader: Any, per_step: int = 1) -> None:
        self.loader, self.per_step = loader, per_step
        self.restores_itself = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self.rewindable = self.restores_itself or not isinstance(loader, Iterator)
        self._epoch, self._batch = 0, 0
        self._drawn = 0  # batches, over all epochs
        self._ends: dict[int, int] = {}  # step -> batches drawn by its end
        self.left_out: list[tuple[int, int]] = []
        self._batches: Iterator[Any] | None = None
        self._began: Any = None  # random state at the beginning of the epoch
        self._checksums: dict[int, int] = {}  # of the batch after a snapshot, by its position
        self._compare = self._differs = False
        self._newest_left_out: tuple[int, int] | None = None  # by the last return

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            batch = self._draw()
            if not any(start < self._drawn <= end for start, end in self.left_out):
                return batch

    def of_step(self, step: int) -> list[Any]:
        """The batches of a step. Raises StopIteration where there are no more."""
        if step in self._ends:  # again, after a return
            self._ends = {known: end for known, end in self._ends.items() if known < step}
        self._ends[step - 1] = self._drawn
        batches = [next(self) for _ in range(self.per_step)]
        self._ends[step] = self._drawn
        self._ends.pop(step - _STEPS_KEPT, None)
        return batches

    def _draw(self) -> Any:
        for _ in range(2):
            if self._batches is None:
                self._batches = self._begin()
            try:
                batch = next(self._batches)
            except StopIteration:
                if self._batch == 0 or isinstance(self.loader, Iterator):
                    raise
                self._epoch, self._batch, self._batches = self._epoch + 1, 0, None
                continue
            if self._compare:
                self._compare_with_before(batch)
            self._batch += 1
            self._drawn += 1
            return batch
        raise StopIteration

    def state(self) -> Any:
        inner = copy.deepcopy(self.loader.state_dict()) if self.restores_itself else None
        begun = self._batches is not None
        self._compare, self._newest_left_out = True, None
        return self._epoch, self._batch, begun, self._began, self._random(), inner, self._drawn

    def seek(self, state: Any, skip: tuple[int, int] | None = None) -> None:
        self._compare, self._newest_left_out = True, None
        if skip is not None:
            stretch = self._end_of(skip[0] - 1), self._end_of(skip[1])
            self.left_out = [*self.left_out, stretch]
            self._newest_left_out = stretch
        self._epoch, self._batch, begun, self._began, now, inner, self._drawn = state
        self._batches = None
        if self.restores_itself:
            self.loader.load_state_dict(copy.deepcopy(inner))
            if begun:
                self._batches = iter(self.loader)
        elif begun:
            self._set_random(self._began)
            self._set_epoch()
            self._batches = self._skipped(self._batch)
        self._set_random(now)

    def _end_of(self, step: int) -> int:
        """Batches that are drawn by the end of a step, which may be to come."""
        if step in self._ends:
            return self._ends[step]
        newest = max(self._ends, default=0)
        end = self._ends.get(newest, self._drawn)
        return position_after(end, (step - newest) * self.per_step, self.left_out)

    def describe(self) -> Mapping[str, Any]:
        """Epoch and place of the next batch; of the batches that were just left out as well."""
        place = {"epoch": self._epoch, "batch": self._batch}
        if self._newest_left_out is None:
            return place
        return place | {"skipped": self._places(*self._newest_left_out)}

    def _places(self, start: int, end: int) -> list[dict[str, Any]]:
        """Intervals of batches, one for each epoch; `end` is excluded."""
        try:
            length = len(self.loader)
        except TypeError:
            length = 0
        found: list[dict[str, Any]] = []
        epoch, begun = self._epoch, self._drawn - self._batch
        while start < end:
            last = min(end, begun + length) if length else end
            if start < last:
                found.append({"epoch": epoch, "batches": [start - begun, last - begun - 1]})
                start = last
            epoch, begun = epoch + 1, begun + length
        return found

    def _compare_with_before(self, batch: Any) -> None:
        """Compare the first batch after a snapshot with the one that came there before."""
        self._compare = False
        if self._differs or not self.rewindable:
            return
        found = checksum(batch)
        known = self._checksums.pop(self._drawn, found)
        self._checksums[self._drawn] = found
        while len(self._checksums) > _CHECKSUMS_KEPT:
            del self._checksums[next(iter(self._checksums))]
        if found != known:
            self._differs = True
            logger.warning(
                "rmetric: rescue: the loader gives other data when it is iterated again, so the "
                "training does not go on as it would have: its random numbers cannot be set back "
                "(a generator of its own, or persistent_workers)"
            )

    def resume_state(self) -> Mapping[str, Any]:
        # A loader that restores itself, and an iterator, go on where they are. Any other one is
        # iterated from the beginning of its epoch.
        goes_on = self.restores_itself or isinstance(self.loader, Iterator)
        first = self._drawn if goes_on else self._drawn - self._batch
        return {"epoch": self._epoch, "left_out": counted_from(first, self.left_out)}

    def resume(self, state: Mapping[str, Any]) -> None:
        self._epoch = state["epoch"]
        self.left_out = [(start, end) for start, end in state["left_out"]]

    def _begin(self) -> Iterator[Any]:
        self._began = self._random()
        self._set_epoch()
        batches: Iterator[Any] = iter(self.loader)
        return batches

    def _skipped(self, batches: int) -> Iterator[Any]:
        """An iterator of this epoch without its first batches."""
        loader = self.loader
        found: Iterator[Any]
        index_wise = (
            type(loader) is DataLoader
            and loader.num_workers == 0
            and loader.batch_sampler is not None
            and not isinstance(loader.dataset, IterableDataset)  # its sampler knows no samples
        )
        if index_wise:
            loader = copy.copy(loader)
            # DataLoader refuses to have its sampler set as an attribute.
            sampler = loader.__dict__["batch_sampler"] = _From(loader.batch_sampler)
            found = iter(loader)
            # A sampler draws its seed with its first batch, which must be now: afterwards the
            # random state of the snapshot is set.
            sampler.discard(batches)
            return found
        found = iter(loader)
        for _ in range(batches):
            next(found, None)  # a stream that ends before gives other data, and goes on
        return found

    def _random(self) -> Any:
        held = [generator.get_state() for generator in self._generators()]
        return host_random_state(), held

    def _set_random(self, state: Any) -> None:
        of_host, held = state
        set_host_random_state(of_host)
        for generator, one in zip(self._generators(), held, strict=True):
            generator.set_state(one)

    def _generators(self) -> list[torch.Generator]:
        batches = getattr(self.loader, "batch_sampler", None)
        samplers = (getattr(self.loader, "sampler", None), getattr(batches, "sampler", None))
        return generators_of(self.loader, batches, *samplers)

    def _set_epoch(self) -> None:
        for owner in (getattr(self.loader, "sampler", None), self.loader):
            set_epoch = getattr(owner, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._epoch)
                return


def checksum(batch: Any) -> int:
    """Checksum of the numbers and texts of a batch; 0 of what is not on the host."""
    if isinstance(batch, Tensor):
        if batch.device.type != "cpu" or batch.layout != torch.strided:
            return 0
        numbers = batch.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return zlib.crc32(numbers.data)
    if isinstance(batch, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(batch).tobytes()) if batch.dtype != object else 0
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return zlib.crc32(repr([checksum(part) for part in batch]).encode())
    return zlib.crc32(repr(batch).encode()) if isinstance(batch, (str, int, float)) else 0


class _From:
    """A sampler of batches whose first ones can be drawn before the loader asks for any."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._drawn: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        self._drawn = iter(self._sampler)
        return self

    def __next__(self) -> Any:
        return next(self._drawn)

    def discard(self, batches: int) -> None:
        for _ in range(batches):
            next(self._drawn)
