"""Non-blocking exchange of one small message a step between the monitors of all ranks."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from math import sqrt
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Store

OPERATION_SECONDS = 24 * 3600.0  # rank 0 may evaluate for hours; nobody waits in here
LATE_SECONDS = 60.0  # without an answer, before that is reported
POLL_SECONDS = 0.0002

_exchanges: Counter[str] = Counter()  # made in this process, by name


class Exchange:
    """Gathers a fixed number of floats from every rank, once a step at most.

    `post` sends this rank's numbers and returns at once; `take`, a step later, returns those of all
    ranks, or None until they have arrived. The training keeps the ranks in step: a rank at the next
    step has passed a collective of the training, so every other rank has posted.

    Its gloo group is its own, found through the training's store in the background: a rank that
    never makes an Exchange leaves the others without one and disturbs no group of the training. A
    failure ends the exchange, not the training; `problem` holds the reason.

    Its weakness: a rank that stays away ends it for all, and a late message does not name the ranks
    that it waits for.

    Args:
        width: numbers in a message, the same on all ranks.
        name: the same on all ranks.
        group: of the training, whose `ranks` take part; None for all.
        join_seconds: how long to wait for the others at the beginning.
        patience: seconds that `take` may wait for a message that is late; less for the next ones.
    """

    def __init__(
        self,
        width: int,
        name: str = "run",
        *,
        group: dist.ProcessGroup | None = None,
        join_seconds: float = 30.0,
        patience: float = 0.5,
    ) -> None:
        self.width, self.patience, self.join_seconds = width, patience, join_seconds
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank = dist.get_rank()
        self.problem = ""
        self._group: Any = None
        self._work: dist.Work | None = None
        self._taken: dist.Work | None = None  # kept, as in `rmetric.guard.ranks`
        self._sent = torch.zeros(width, dtype=torch.float64)
        self._gathered = torch.zeros(len(self.ranks), width, dtype=torch.float64)
        self._rows = list(self._gathered)
        self._options = AllgatherOptions()
        self._options.timeout = timedelta(seconds=OPERATION_SECONDS)
        self._posted, self._waited_for, self._patience_left = 0.0, False, patience
        self._ended = threading.Event()
        _exchanges[name] += 1
        store: Any = dist.distributed_c10d._get_default_store()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        which = (name, attempt, _exchanges[name], self.ranks[0], len(self.ranks))
        prefix = "/".join(map(str, ("rmetric", *which)))
        # A store's client serves one caller at a time: ours must not hold up the training's.
        own = PrefixStore(prefix, store.clone())
        self._joining = threading.Thread(
            target=self._join, args=(own,), name="rmetric-join", daemon=True
        )
        self._joining.start()

    @property
    def active(self) -> bool:
        """All ranks are in touch, as far as is known."""
        return self._group is not None and not self.ended

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def under_way(self) -> bool:
        return self._work is not None

    @property
    def late(self) -> bool:
        """A message has been under way for a minute and more."""
        return self._work is not None and time.monotonic() - self._posted > LATE_SECONDS

    def wait_joined(self, seconds: float) -> bool:
        """Wait for the other ranks; True if they came. The call is optional."""
        self._joining.join(seconds)
        return self.active

    def post(self, values: Sequence[float]) -> bool:
        """Send this rank's numbers; False where a message is under way, or nobody is there."""
        if not self.active or self._work is not None:
            return False
        self._sent.numpy()[:] = values
        try:
            self._work = self._group.allgather([self._rows], [self._sent], self._options)
        except RuntimeError as error:
            self.end(str(error))
            return False
        self._posted, self._waited_for = time.monotonic(), False
        return True

    def take(self) -> np.ndarray | None:
        """The numbers of all ranks, shape (ranks, width); None until they have arrived."""
        work = self._work
        if work is None or not self._arrived(work):
            return None
        self._work, self._taken = None, work
        try:
            work.wait()
        except RuntimeError as error:
            self.end(str(error))
            return None
        gathered: np.ndarray = self._gathered.numpy().copy()
        return gathered

    def end(self, problem: str) -> None:
        self.problem = self.problem or problem.partition("\n")[0]
        self._ended.set()

    def close(self) -> None:
        """Take part no more. A message that is under way still goes out."""
        self._ended.set()
        if self._group is not None and self._work is None:
            self._free()

    def _arrived(self, work: dist.Work) -> bool:
        """True if the message has arrived; each message is waited for once."""
        until = time.monotonic() + (0.0 if self._waited_for else self._patience_left)
        pause = POLL_SECONDS
        while not (there := work.is_completed()) and (left := until - time.monotonic()) > 0.0:
            time.sleep(min(pause, left))
            pause = min(2.0 * pause, 0.01)
        if not self._waited_for:
            change = 2.0 if there else 0.25
            self._patience_left = min(self.patience, max(0.001, change * self._patience_left))
        self._waited_for = True
        return there

    def _join(self, store: Store) -> None:
        until = time.monotonic() + self.join_seconds
        pause = 0.01
        try:
            store.set(f"rank {self.rank}", "here")
            store.add("here", 1)
            while store.add("here", 0) < len(self.ranks):
                if time.monotonic() > until:
                    absent = [str(r) for r in self.ranks if not store.check([f"rank {r}"])]
                    after = f"after {self.join_seconds:g} s"
                    self.end(f"no monitor on rank {', '.join(absent)} {after}")
                if self._ended.wait(pause):
                    return
                pause = min(1.0, pause * 1.5)
            left = timedelta(seconds=max(1.0, until - time.monotonic()))
            place = self.ranks.index(self.rank)
            group = dist.ProcessGroupGloo(store, place, len(self.ranks), left)
        except RuntimeError as error:
            self.end(str(error))
            return
        # A group with an operation under way waits for it when it is destroyed; not once aborted.
        self._free = weakref.finalize(self, group.abort)
        self._group = group


#: A rank is waited for that long at a check; its training waits for it too, in the next forward.
NORM_SECONDS = 60.0


class WholeNorm:
    """Gradient norm of a sharded model before the optimiser's step: sums the ranks' squares.

    All ranks get the same sum by messages of this object's own, so they judge the step alike. A
    rank that leaves sends a last message, so that no other waits for it. Its weakness: a rank that
    is late by more than `NORM_SECONDS` takes a step that the others may leave out; that is
    reported.
    """

    def __init__(self, name: str, join_seconds: float) -> None:
        self._exchange = Exchange(
            3, f"{name}/norm", join_seconds=join_seconds, patience=NORM_SECONDS
        )
        self._join_seconds = join_seconds
        self._problem, self._reported = "", False

    def of_step(self, step: int, norm: float | None) -> float | None:
        """The norm over all ranks from this rank's share of it; None where it cannot be known."""
        exchange = self._exchange
        if not exchange.active and not exchange.wait_joined(self._join_seconds):
            self._problem = exchange.problem or "not all ranks are in touch"
            return None
        exchange.take()  # of a rank that was late at the step before
        norm = norm or 0.0
        rows = exchange.take() if exchange.post([step, 0.0, norm * norm]) else None
        if rows is None:
            late = f"a rank was not at its check of step {step} within {NORM_SECONDS:g} s"
            self._problem = exchange.problem or late
            return None
        left = [rank for rank, row in zip(exchange.ranks, rows, strict=True) if row[1]]
        if left:
            exchange.end(f"the monitor of rank {left[0]} takes part no more")
            self._problem = exchange.problem
            return None
        if (rows[:, 0] != step).any():
            return None
        return sqrt(square) if (square := float(rows[:, 2].sum())) >= 0.0 else square

    def new_problem(self) -> str:
        """Why a norm is not known, reported once; empty if there is nothing new."""
        if not self._problem or self._reported:
            return ""
        self._reported = True
        return f"{self._problem}; no step is skipped without the gradient norm of all ranks"

    def leave(self) -> None:
        self._exchange.post([0.0, 1.0, 0.0])
        self._exchange.close()
