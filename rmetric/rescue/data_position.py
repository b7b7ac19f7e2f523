"""Position of a training's loop in its steps and data, with the newest batches kept."""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rmetric.monitor.actions.action import is_distributed
from rmetric.monitor.actions.checkpoint_file import plain, set_random_state, write_whole
from rmetric.rescue.recent_batches import (
    HostState,
    KeptBatch,
    RecentBatches,
    States,
    host_random_state,
    position_after,
    same_state,
)

if TYPE_CHECKING:
    from rmetric.monitor.monitor import Monitor
    from rmetric.rescue.action import Rescue

logger = logging.getLogger("rmetric")

_UNCHECKED = 100  # batches in a row that a loop may leave out, once it has checked a step


class NoData:
    """Position of data that no loop has described: they cannot be set back."""

    def __init__(self) -> None:
        self.left_out: list[tuple[int, int]] = []

    def state(self) -> Any:
        return None

    def describe(self) -> Mapping[str, Any]:
        return {}

    resume_state = describe


class DataPosition(ABC):
    """Position in steps and data of a loop that passes each batch through `next_batch`."""

    keeps_batches = True  # False for a loop that passes none of its batches through `next_batch`
    per_step: int | None = None  # batches; None where they are counted

    def __init__(self, rescue: Rescue) -> None:
        self.rescue, self.batches = rescue, RecentBatches()
        self.short = False  # the present pass has given batches to no step of the schedule
        self._step = 0
        self._ends: dict[int, int] = {}  # step: position after it
        self._reported = False
        self._epoch_drawn, self._in_epoch = 0, 0  # of the batch that is drawn next
        self._begun: dict[int, States] = {}  # epoch: before and after its pass began
        self._skipped: list[KeptBatch] = []  # by the last return
        self._file: Path | None = None  # of the skipped batches

    # -- of the loop

    @abstractmethod
    def loop_state(self) -> Mapping[str, Any]:
        """Counters of the loop, between two steps."""

    @abstractmethod
    def set_loop_state(self, loop: Mapping[str, Any]) -> None:
        """Set the counters of the loop back."""

    @abstractmethod
    def draw(self) -> Any:
        """The next batch of the loader."""

    def ended(self) -> bool:
        """True if the batch that was just drawn is the last one of its pass."""
        return False

    # -- the course of the training

    def at_boundary(self, step: int, *, last: bool = False) -> bool:
        """Let the rescue act after a step; true if it has set the training back."""
        self._step, self._skipped = step, []
        self._ends[step] = self.batches.position
        went_back = self.rescue.boundary(last=last)
        oldest = min(self.rescue.policy.state.snapshots, default=step)
        self._ends = {at: end for at, end in self._ends.items() if at >= oldest}
        kept_from = self._ends.get(oldest, 0) if self.rescue.is_on else self.batches.position
        self.batches.forget(kept_from)
        for epoch in [e for e in self._begun if e < self._epoch_drawn - 1]:
            del self._begun[epoch]
        return went_back

    def next_batch(self) -> KeptBatch:
        """The next batch of the training: one that is kept, or a new one."""

        def draw() -> KeptBatch:
            value = self.draw()
            new = KeptBatch(value, self._newest_place(), self.ended())
            self._in_epoch += 1
            return new

        return self.batches.next(draw)

    def next_place(self) -> Mapping[str, int]:
        """Epoch and place in it, from 0, of the next batch."""
        return self.batches.place() or self._newest_place()

    def _newest_place(self) -> dict[str, int]:
        return {"epoch": self._epoch_drawn, "batch": self._in_epoch}

    def pass_begun(self, epoch: int, before: HostState, place: int = 0) -> None:
        """A pass over the data has begun; `before` is the host's random state before it.

        `place` is that of its first batch, above 0 after a checkpoint in mid-epoch.
        """
        self._epoch_drawn, self._in_epoch = epoch, place
        self.short = any(end > self.batches.position for _, end in self.left_out)
        after = host_random_state()
        if not same_state(before, after):
            self._begun[epoch] = (before, after)

    def pass_repeated(self, epoch: int) -> None:
        """Move the random state as when the pass for this epoch began."""
        before, after = self._begun.get(epoch, (None, None))
        if before is not None and after is not None and same_state(before, host_random_state()):
            set_random_state(after)

    # -- what a rescue reads and sets

    @property
    def left_out(self) -> list[tuple[int, int]]:
        """Intervals of batches, the end excluded, that are not used; counted over all epochs."""
        return self.batches.skipped

    @left_out.setter
    def left_out(self, intervals: Iterable[Sequence[int]]) -> None:
        self.batches.skipped = [(start, end) for start, end in intervals]

    def state(self) -> dict[str, Any]:
        """The position after the batches of all steps so far."""
        return {"step": self._step, "batch": self.batches.position, "loop": self.loop_state()}

    def seek(self, state: Any, skip: tuple[int, int] | None = None) -> None:
        """Go to the position of a `state`.

        The batches from the first to the last step of `skip`, which may be to come, are never used
        again.
        """
        step = state["step"]
        out = None if skip is None else (self._end_of(skip[0] - 1), self._end_of(skip[1]))
        if out is not None:
            self._skipped = self.batches.skip(*out)
            self._save_skipped()
        self.set_loop_state(state["loop"])
        self._ends = {at: end for at, end in self._ends.items() if at <= step}
        self._step = step
        if not (self.keeps_batches and self.batches.set_back(state["batch"])):
            self.short = True
            self._report()
        self.short |= skip is not None

    def _end_of(self, step: int) -> int:
        """Batches that are drawn by the end of a step, which may be to come."""
        if step in self._ends:
            return self._ends[step]
        newest = max(self._ends)
        end = self._ends[newest]
        used = self.batches.used(self._ends.get(newest - 1, end - 1), end)
        batches = (step - newest) * (self.per_step or max(1, used))
        return position_after(end, batches, self.batches.skipped)

    def describe(self) -> Mapping[str, Any]:
        """Epoch and place of the next batch; of the batches that were just skipped as well."""
        place = dict(self.next_place())
        if not self._skipped:
            return place
        file = {} if self._file is None else {"file": str(self._file)}
        return place | {"skipped": intervals(self._skipped)} | file

    def resumed_place(self) -> int:
        """Place in the epoch of the first batch that a resumed training draws."""
        return 0

    def resume_state(self) -> Mapping[str, Any]:
        """Data position that a restarted process needs, as JSON values.

        The intervals are counted from the first batch that a resumed training draws.
        """
        first = self.batches.position - self.next_place()["batch"] + self.resumed_place()
        counted = [[start - first, end - first] for start, end in self.left_out if end > first]
        return {"left_out": counted}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take over what `resume_state` gave, before the first batch is drawn."""
        self.left_out = state["left_out"]

    def _save_skipped(self) -> None:
        """Save the batches themselves beside the log."""
        monitor, self._file = self.rescue.monitor, None
        log = None if monitor is None else monitor.log_path
        if monitor is None or log is None or not self._skipped:
            return
        ends = (self._skipped[0].where, self._skipped[-1].where)
        first, last = (f"epoch{end['epoch']}_batch{end['batch']}" for end in ends)
        path = self._file = log.with_name(f"{log.stem}.skipped_{first}_to_{last}.pt")
        batches = [{**kept.where, "value": plain_or_text(kept.value)} for kept in self._skipped]

        def save() -> None:
            try:
                write_whole(path, batches)
            except OSError as error:
                logger.error("rmetric: %s cannot be written: %s", path, error)

        monitor.background.submit(save)

    def _report(self) -> None:
        if not self._reported:
            self._reported = True
            logger.warning(
                "rmetric: the batches of the repeated steps are not kept (%s): the training goes "
                "on with the data that come next",
                self.batches.problem or "the module draws them itself",
            )


class OwnLoop(DataPosition):
    """The course of `Rescue.steps`: epoch after epoch of a loader.

    A loader with `state_dict` and `load_state_dict` is set back by them, and its next batch is
    compared with the kept one; of any other one the kept batches come again. Each epoch begins
    with `set_epoch` of the loader's sampler, or of the loader.
    """

    per_step: int

    def __init__(self, rescue: Rescue, loader: Any, per_step: int, total: int) -> None:
        super().__init__(rescue)
        self.loader, self.per_step, self._total = loader, per_step, total
        self.restores_itself = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._expected: Any = None  # the batch that a loader which was set back gave before
        self._differed = False
        self._batches: Iterator[Any] | None = None
        self._at = 0  # step of the newest batches
        self._used = 0  # steps' batches, by now
        self._unchecked = 0  # of them in a row

    def steps(self) -> Iterator[tuple[int, Any]]:
        dry = False
        self.rescue.data = self
        while True:
            monitor = self.rescue.monitor
            here = monitor.weights_step if monitor is not None and monitor.is_open else self._at
            self.at_boundary(here, last=dry or self._at >= self._total)
            if self._is_over():
                return
            if not dry:
                self._warn()
            try:
                batches = [self.next_batch().value for _ in range(self.per_step)]
            except StopIteration:
                # Another rank may have data left.
                if dry or self._at == 0 or is_distributed():
                    logger.warning(
                        "rmetric: rescue.steps ends at step %d of %d with the data: %d steps are "
                        "missing", self._at, self._total, self._total - self._at,
                    )  # fmt: skip
                    return
                dry = True
                continue
            dry = False
            self._at, self._used = self._at + 1, self._used + 1
            monitor = self.rescue.monitor
            checked = None if monitor is None else monitor.step
            if monitor is not None:
                for batch in batches:
                    monitor.audit_batch(batch)
            yield self._at, batches if self.per_step > 1 else batches[0]
            self._require_check(monitor, checked)

    def _is_over(self) -> bool:
        monitor = self.rescue.monitor
        if monitor is not None and monitor.is_open:
            if monitor.should_stop:
                return True
            self._at = monitor.weights_step
        return self._at >= self._total

    def _warn(self) -> None:
        """Warn of a first batch that is not that of its step, and of a rescue without monitor."""
        if self._used == 0 and self._at and not self.restores_itself:
            logger.warning(
                "rmetric: rescue.steps begins at step %d with the first batch of the loader; "
                "after a restart the loader must be set to its place before", self._at + 1,
            )  # fmt: skip
        if self._used == 1 and self.rescue.monitor is None:
            logger.warning(
                "rmetric: no monitor has this rescue, so it does nothing: pass it as "
                "Monitor(..., actions=[rescue])"
            )

    def _require_check(self, monitor: Monitor | None, checked: int | None) -> None:
        """Raise RuntimeError if the monitor has checked none of the steps: they would never end."""
        idle = monitor is not None and monitor.is_open and monitor.step == checked
        self._unchecked = self._unchecked + 1 if idle else 0
        if self._unchecked > (_UNCHECKED if self._used > 1 else 0):
            raise RuntimeError(
                f"rescue.steps handed out step {self._at} and the monitor did not check it: call "
                "monitor.check_before_step(loss) in each step, after backward and before the "
                "optimizer's step"
            )

    # -- the position

    def draw(self) -> Any:
        batch = self._drawn()
        expected, self._expected = self._expected, None
        if expected is not None and not self._differed and differ(expected, batch):
            self._differed = True
            logger.warning(
                "rmetric: rescue: the loader gives other data after load_state_dict, so the "
                "training does not go on as it would have"
            )
        return batch

    def _drawn(self) -> Any:
        for _ in range(2):
            if self._batches is None:
                self._set_epoch()
                self._batches = iter(self.loader)
            try:
                return next(self._batches)
            except StopIteration:
                if self._in_epoch == 0 or isinstance(self.loader, Iterator):
                    raise
                self._epoch_drawn, self._in_epoch = self._epoch_drawn + 1, 0
                self._batches = None
        raise StopIteration

    def loop_state(self) -> Mapping[str, Any]:
        if not self.restores_itself:
            return {}
        return {
            "loader": copy.deepcopy(self.loader.state_dict()),
            "begun": self._batches is not None,
            "place": (self._epoch_drawn, self._in_epoch),
            "batch": self.batches.position,
        }

    def set_loop_state(self, loop: Mapping[str, Any]) -> None:
        if self.restores_itself:
            self.loader.load_state_dict(copy.deepcopy(loop["loader"]))
            self._batches = iter(self.loader) if loop["begun"] else None
            self._epoch_drawn, self._in_epoch = loop["place"]
            self._expected = self.batches.go_to(loop["batch"])

    def resume_state(self) -> Mapping[str, Any]:
        epoch, batch = self.next_place()["epoch"], self.resumed_place()
        return {"epoch": epoch, "batch": batch, **super().resume_state()}

    def resumed_place(self) -> int:
        # A loader that restores itself, and an iterator, go on where they are. Any other one is
        # iterated from the beginning of its epoch.
        goes_on = self.restores_itself or isinstance(self.loader, Iterator)
        return self.next_place()["batch"] if goes_on else 0

    def resume(self, state: Mapping[str, Any]) -> None:
        super().resume(state)
        self._epoch_drawn, self._in_epoch = state["epoch"], state["batch"]

    def _set_epoch(self) -> None:
        for owner in (getattr(self.loader, "sampler", None), self.loader):
            set_epoch = getattr(owner, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._epoch_drawn)
                return


def intervals(batches: Sequence[KeptBatch]) -> list[dict[str, Any]]:
    """The places of batches as intervals, one for each epoch."""
    found: list[dict[str, Any]] = []
    for kept in batches:
        epoch, place = kept.where["epoch"], kept.where["batch"]
        if found and found[-1]["epoch"] == epoch and found[-1]["batches"][1] == place - 1:
            found[-1]["batches"][1] = place
        else:
            found.append({"epoch": epoch, "batches": [place, place]})
    return found


def plain_or_text(batch: Any) -> Any:
    """A batch for a file that a `weights_only` load accepts; a class of the user's as text."""
    try:
        return plain(batch, "batch")
    except TypeError:
        return repr(batch)


def differ(batch: Any, other: Any) -> bool:
    """True if two batches hold other numbers; False for what torch cannot compare."""
    try:
        torch.testing.assert_close(batch, other, rtol=0, atol=0, equal_nan=True)
    except Exception as error:  # else of texts, or of a class of the user's own
        return isinstance(error, AssertionError)
    return False
