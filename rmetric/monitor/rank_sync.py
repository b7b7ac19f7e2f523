"""Synchronise the monitors of all ranks: exchange of messages, shared alerts and joint actions."""

from __future__ import annotations

import os
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import inf, isfinite
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Store

from rmetric._util import background
from rmetric.monitor.alerts import Alert
from rmetric.monitor.config import MonitorConfig
from rmetric.monitor.gradients import nine_digits
from rmetric.monitor.stalls import SECONDS, TIMES, StepTimes
from rmetric.records import Record

OPERATION_SECONDS = 24 * 3600.0  # rank 0 may evaluate for hours; no training waits for it
LATE_SECONDS = 60.0  # without an answer, before that is reported
POLL_SECONDS = 0.0002
_exchanges: Counter[str] = Counter()  # made in this process, by name


class Exchange:
    """Gathers `width` floats from every rank, once a step at most.

    `post` sends this rank's numbers and returns at once; `take`, a step later, returns those of all
    ranks, or None until they have arrived. The training keeps the ranks in step: a rank at the next
    step has passed a collective of the training, so every other rank has posted.

    Its gloo group is its own, found through the training's store in the background: a rank that
    never makes an Exchange leaves the others without one and disturbs no group of the training. A
    failure ends the exchange, not the training; `problem` holds the reason.

    Its weakness: a rank that stays away ends it for all, and a late message does not name the ranks
    that it waits for.

    Args:
        width, name: the same on all ranks.
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
        which = ("rmetric", name, attempt, _exchanges[name], self.ranks[0], len(self.ranks))
        # A store's client serves one caller at a time: ours must not hold up the training's.
        own = PrefixStore("/".join(map(str, which)), store.clone())
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
        return self.under_way and time.monotonic() - self._posted > LATE_SECONDS

    def wait_joined(self, seconds: float) -> bool:
        """Wait for the other ranks; True if they came. The call is optional."""
        self._joining.join(seconds)
        return self.active

    def post(self, values: Sequence[float]) -> bool:
        """Send this rank's numbers; False while a message is under way, or without other ranks."""
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
        return np.array(self._gathered.numpy())

    def end(self, problem: str) -> None:
        self.problem = self.problem or problem.partition("\n")[0]
        self._ended.set()

    def close(self) -> None:
        """Stop taking part. A message under way is still sent."""
        self._ended.set()
        # A thread that is inside torch when the interpreter ends would abort the process.
        self._joining.join(background.CLOSE_SECONDS)
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
            while (here := store.add("here", 0)) < len(self.ranks) and not self._ended.wait(pause):
                if time.monotonic() > until:
                    absent = [str(r) for r in self.ranks if not store.check([f"rank {r}"])]
                    after = f"after {self.join_seconds:g} s"
                    self.end(f"no monitor on rank {', '.join(absent)} {after}")
                pause = min(1.0, pause * 1.5)
            # The first rank decides for all, so that none waits in the group for one that has left.
            decision = store.compare_set("begins", "", str(here == len(self.ranks)))
            if decision != b"True":
                if not self.ended:
                    self.end("the monitor of another rank was closed before all were in touch")
                return
            left = timedelta(seconds=max(1.0, until - time.monotonic()))
            place = self.ranks.index(self.rank)
            group = dist.ProcessGroupGloo(store, place, len(self.ranks), left)
        except RuntimeError as error:
            self.end(str(error))
            return
        # A group with an operation under way waits for it when it is destroyed; not once aborted.
        self._free = weakref.finalize(self, group.abort)
        self._group = group


#: Measurements of a step in a message; squares are of the shards that a rank holds.
FIELDS = (
    "loss",
    "own_norms",
    "own_cosines",
    "own_non_finite",
    "gradient_square",
    "update_square",
    "parameter_square",
    *TIMES,
)
WIDTH = 5 + len(FIELDS)
RUNNING, CLOSED, DISABLED = range(3)
#: Checks between a step and the actions on it: all ranks have its messages by then.
ACTION_DELAY = 3


def encode_message(
    step: int, values: Mapping[str, float | None], *, leaving: int, settings: int, alarms: int
) -> list[float]:
    """One rank's message on one step as `WIDTH` numbers; `RankMessages` decodes them.

    `values` are of `FIELDS`, absent or None where not measured; `leaving` is RUNNING or why this is
    the last message; `settings` a checksum; `alarms` one bit for each source of `alert_on`.
    """
    measurements = [values.get(name) for name in FIELDS]
    measured = sum(1 << i for i, value in enumerate(measurements) if value is not None)
    numbers = (0.0 if value is None else value for value in measurements)
    return [step, leaving, settings, alarms, measured, *numbers]


class RankMessages:
    """The messages of all ranks on one step, one row a rank.

    `suspect_rows` are those with an alarm, or with what no other rank can see: a non-finite loss or
    non-finite parts of the rank's own gradient.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self._values = rows[:, 5:]
        columns = rows[:, :5].astype(np.int64).T
        self.steps, self.leaving, self.settings, self.alarms, self._measured = columns
        fine = np.isfinite(self.of_each("loss")) & (self.of_each("own_non_finite") == 0)
        self.suspect_rows = np.flatnonzero((self.alarms != 0) | ~fine).tolist()

    def is_complete_for(self, step: int) -> bool:
        return bool((self.steps == step).all())

    def of_each(self, name: str) -> np.ndarray:
        """A value of each rank, 0 where it was not measured."""
        return self._values[:, FIELDS.index(name)]

    def of_all(self, name: str) -> np.ndarray | None:
        """The same; None where a rank has not measured it."""
        bit = 1 << FIELDS.index(name)
        return self.of_each(name) if (self._measured & bit).all() else None

    def step_times(self) -> list[StepTimes]:
        """The times of each rank; a part that one did not measure is None."""
        columns = {part: self.of_all(name) for name, part in SECONDS.items()}
        columns["size"] = self.of_all("step_size")
        rows = []
        for place, total in enumerate(self.of_each("step_seconds").tolist()):
            measured = {p: float(c[place]) for p, c in columns.items() if c is not None}
            row = StepTimes(**measured)  # type: ignore[arg-type]
            row.check = max(0.0, total - row.total)
            rows.append(row)
        return rows


class RankSync:
    """Synchronises the monitors of all ranks and schedules their joint actions.

    A message about step t is sent when step t+1 is checked, and has arrived when step t+2 is. All
    ranks then hold the same messages, raise the same alerts and complete the same record. Joint
    actions run at the check of step t+3: a rank whose messages are late by one step still runs them
    with the others, one late by two acts late. Ranks at different steps send no message until all
    are at the same step again.
    """

    def __init__(
        self, config: MonitorConfig, exchange: Exchange, *, waits_for_norm: bool = False
    ) -> None:
        self._sources = config.alert_on
        self.scaled = False  # a gradient scaler overflows on purpose now and then
        settings = (config.alert_on, config.workers_every, waits_for_norm)
        self._settings = zlib.crc32(repr(settings).encode())
        self.exchange = exchange
        self._place = self.exchange.ranks.index(self.exchange.rank)
        self._next_step: float = 0  # no message before the one about this step
        self._agreed: tuple[float, float] = inf, inf  # from one check on, and until another
        self._raised: dict[str, Alert] = {}  # here, since the last message
        self._posted: dict[str, Alert] = {}  # here, sent with the last message
        self._own_step = 0  # of the last alert that was about this rank alone
        self._agenda: list[tuple[int, Alert]] = []
        self._has_left = self._stale = False
        self.left_out: frozenset[int] = frozenset()  # ranks that do not count in the records

    @property
    def places(self) -> list[int]:
        """Rows of the ranks that count in the records."""
        return [i for i, rank in enumerate(self.exchange.ranks) if rank not in self.left_out]

    @property
    def alive(self) -> bool:  # the ranks are in touch, or about to be
        return not self.exchange.ended

    def agreed(self, check: int) -> bool:
        """True if all ranks make the same decision at this check."""
        begin, end = self._agreed
        return self.exchange.active and begin <= check < end

    def note_alert(self, alert: Alert, *, own: bool = False) -> None:
        """An alert was raised here; `own` where the other ranks cannot see it themselves."""
        self._raised[alert.source] = alert
        if own:
            self._own_step = alert.step

    def post(self, step: int, values: Mapping[str, float | None], leaving: int = RUNNING) -> bool:
        """Send the message on a step to the other ranks; False if none was sent."""
        if step < self._next_step and not leaving:
            return False
        alarms = sum(1 << i for i, source in enumerate(self._sources) if source in self._raised)
        row = encode_message(step, values, leaving=leaving, settings=self._settings, alarms=alarms)
        if not self.exchange.post(row):
            return False
        self._has_left = leaving != RUNNING
        self._posted, self._raised = self._raised, {}
        return True

    def take(self) -> RankMessages | None:
        """The messages of all ranks; None until they have arrived."""
        rows = self.exchange.take()
        if rows is None:
            return None
        if self._stale:
            self._stale = False
            return None
        messages = RankMessages(rows)
        last, (begin, end) = int(messages.steps.max()), self._agreed
        check = last + ACTION_DELAY
        if not messages.is_complete_for(last):
            self._next_step, self._agreed = check, (begin, min(end, check))
        else:
            self._next_step = last + 1
            self._agreed = min(begin, check) if end == inf else check, inf
        self._end_if_ranks_differ(messages)
        return messages

    def new_alerts(self, messages: RankMessages) -> list[Alert]:
        alerts = []
        for place in messages.suspect_rows:
            rank, step = self.exchange.ranks[place], int(messages.steps[place])
            evidence = self._non_finite_evidence(messages, place)
            if evidence and not (place == self._place and step == self._own_step):
                reason = f"{evidence}: check the data and the GPU of rank {rank}"
                alerts.append(Alert(step=step, source="non_finite", reason=reason, rank=rank))
            for source in self._named(messages.alarms[place] & ~messages.alarms[self._place]):
                if not (evidence and source == "non_finite"):
                    reason = f"alarmed on that rank: read the log of rank {rank}"
                    alerts.append(Alert(step=step, source=source, reason=reason, rank=rank))
        if not self.exchange.ended:
            check = int(messages.steps.max()) + ACTION_DELAY
            known = {alert.source: alert for alert in reversed(alerts)}
            for source in self._named(np.bitwise_or.reduce(messages.alarms)):
                if source not in known:  # then it was raised here as well
                    known[source] = self._posted[source]
            self._agenda += [(check, known[source]) for source in self._sources if source in known]
        return alerts

    def reset(self) -> None:
        self._next_step, self._agreed, self._own_step = 0, (inf, inf), 0
        self._agenda = []
        self._raised, self._posted = {}, {}
        # A message of a later step that is under way is dropped when it arrives.
        self._stale = self.exchange.take() is None and self.exchange.under_way

    def due_alerts(self, check: int) -> list[Alert]:
        due = [alert for step, alert in self._agenda if step <= check]
        self._agenda = [(step, alert) for step, alert in self._agenda if step > check]
        return due

    @property
    def problem(self) -> str:
        """Why the ranks are not in touch; empty where they are."""
        if self.exchange.problem:
            rest = "each rank goes on by itself, and what all must do alike is not done"
            return f"{self.exchange.problem}; {rest}"
        return "a rank has not answered for a minute" if self.exchange.late else ""

    def leave(self, why: int) -> None:
        """Send the last message, unless it was sent; waits no longer than for a late message."""
        if not self._has_left:
            self.exchange.take()
            self.post(0, {}, why)
        self.exchange.close()

    def _end_if_ranks_differ(self, messages: RankMessages) -> None:
        pairs = zip(messages.leaving.tolist(), self.exchange.ranks, strict=True)
        left = {why: rank for why, rank in pairs if why != RUNNING}
        if (messages.settings != messages.settings[0]).any():
            self.exchange.end("the ranks' monitors are set differently")
        elif DISABLED in left:
            why = "was disabled after an internal error, or an action failed there"
            self.exchange.end(f"the monitor of rank {left[DISABLED]} {why}")
        elif CLOSED in left and not self._has_left:
            self.exchange.end(f"the monitor of rank {left[CLOSED]} was closed")
        if self.exchange.ended:
            self._agenda = []

    def _non_finite_evidence(self, messages: RankMessages, place: int) -> str:
        """Non-finite values of that rank which the reduction hides from the others."""
        if "non_finite" not in self._sources:
            return ""
        evidence = []
        loss, count = (messages.of_each(name)[place] for name in ("loss", "own_non_finite"))
        if not isfinite(loss):
            evidence.append(f"its loss is {loss:g}")
        if count and not (self.scaled and "non_finite" not in self._named(messages.alarms[place])):
            evidence.append(f"at least {count:g} entries of its own gradient are not finite")
        return "; ".join(evidence)

    def _named(self, alarms: int) -> list[str]:
        return [source for i, source in enumerate(self._sources) if alarms >> i & 1]


def complete_from_ranks(record: Record, messages: RankMessages, places: Sequence[int]) -> None:
    """Complete a record from the messages of all ranks: workers' gradients, whole norms of shards.

    The training loss becomes the mean over the ranks; of losses and own gradients the rows of
    `places` count. What a rank did not measure stays as it was.
    """
    losses, norms = messages.of_all("loss"), messages.of_all("own_norms")
    if losses is not None:
        record.training_loss = nine_digits(float(losses[places].mean()))
    if norms is not None:
        record.worker_gradient_norms = tuple(norms[places].tolist())
        record.worker_gradient_cosines = tuple(messages.of_each("own_cosines")[places].tolist())
        record.non_finite_gradients = round(float(messages.of_each("own_non_finite")[places].sum()))
    for name in ("gradient", "update", "parameter"):
        squares = messages.of_all(f"{name}_square")
        if squares is not None:
            setattr(record, f"{name}_norm", nine_digits(float(squares.sum()) ** 0.5))
