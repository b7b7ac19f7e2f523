"""Hands out the batches of a loop of the user's own, which a rescue can set back."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rmetric.monitor.actions.action import is_distributed
from rmetric.rescue.data_position import DataPosition

if TYPE_CHECKING:
    from rmetric.monitor.monitor import Monitor
    from rmetric.rescue.action import Rescue

logger = logging.getLogger("rmetric")

_UNCHECKED = 100  # batches in a row that a loop may leave out, once it has checked a step


class OwnLoop(DataPosition):
    """The course of `Rescue.steps`: epoch after epoch of a loader.

    A loader with `state_dict` and `load_state_dict` is set back by them; of any other one the kept
    batches come again. Each epoch begins with `set_epoch` of the loader's sampler, or of the
    loader.
    """

    per_step: int

    def __init__(self, rescue: Rescue, loader: Any, per_step: int, total: int) -> None:
        super().__init__(rescue)
        self.loader, self.per_step, self._total = loader, per_step, total
        self.restores_itself = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._batches: Iterator[Any] | None = None
        self._at = 0  # step of the newest batches
        self._used = 0  # steps' batches, by now
        self._unchecked = 0  # of them in a row

    def steps(self) -> Iterator[tuple[int, Any]]:
        dry = False
        self.rescue.data = self
        while True:
            monitor = self.rescue.monitor
            is_open = monitor is not None and monitor.is_open
            here = monitor.weights_step if monitor is not None and is_open else self._at
            self.at_boundary(here, last=dry or self._at >= self._total)
            if self._is_over():
                return
            if self._used == 1 and not dry and self.rescue.monitor is None:
                logger.warning(
                    "rmetric: no monitor has this rescue, so it does nothing: pass it as "
                    "Monitor(..., actions=[rescue])"
                )
            try:
                batches = [self.next_batch().value for _ in range(self.per_step)]
            except StopIteration:
                # Of several ranks another one may have data left.
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

    def _require_check(self, monitor: Monitor | None, checked: int | None) -> None:
        """Raise RuntimeError where the monitor has checked none of the steps: they have no end."""
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
            self.batches.go_to(loop["batch"])

    def resume_state(self) -> Mapping[str, Any]:
        return {"epoch": self.next_place()["epoch"], **super().resume_state()}

    def resumed_place(self) -> int:
        # A loader that restores itself, and an iterator, go on where they are. Any other one is
        # iterated from the beginning of its epoch.
        goes_on = self.restores_itself or isinstance(self.loader, Iterator)
        return self.next_place()["batch"] if goes_on else 0

    def resume(self, state: Mapping[str, Any]) -> None:
        super().resume(state)
        self._epoch_drawn = state["epoch"]

    def _set_epoch(self) -> None:
        for owner in (getattr(self.loader, "sampler", None), self.loader):
            set_epoch = getattr(owner, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._epoch_drawn)
                return
