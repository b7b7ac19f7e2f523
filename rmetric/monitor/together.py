"""What the monitors of all ranks tell one another, and what follows from it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from math import inf, isfinite

import numpy as np

from rmetric.monitor.alerts import Alert
from rmetric.monitor.config import MonitorConfig
from rmetric.monitor.exchange import Exchange
from rmetric.monitor.pending import nine_digits
from rmetric.records import Record

#: What a rank may say of a step; squares are of the shards that it holds.
FIELDS = (
    "loss",
    "own_norm",
    "own_cosine",
    "own_non_finite",
    "gradient_square",
    "update_square",
    "parameter_square",
)
WIDTH = 5 + len(FIELDS)
STAYS, CLOSED, STEPPED_ASIDE = range(3)
#: Told at the second check after a step, acted upon at the third: by then every rank has heard.
ACTED_UPON = 3


def message(
    step: int, values: Mapping[str, float | None], *, leaves: int, settings: int, alarms: int
) -> list[float]:
    """What one rank says of one step; see `Messages`."""
    said = [values.get(name) for name in FIELDS]
    measured = sum(1 << i for i, value in enumerate(said) if value is not None)
    numbers = (0.0 if value is None else value for value in said)
    return [step, leaves, settings, alarms, measured, *numbers]


class Messages:
    """What all ranks said, one row each; rows are looked at singly only where something is wrong.

    Attributes:
        steps: that they are about, shape (ranks,); so are all of these.
        leaves: whether it is the rank's last message, and why.
        settings: the same number on ranks that are set alike.
        alarms: one bit for each source of `alert_on` that was alarmed there.
        troubled: rows that have an alarm, or what no other rank can see: a loss
            or entries of the own gradient that are no numbers.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self._values = rows[:, 5:]
        columns = rows[:, :5].astype(np.int64).T
        self.steps, self.leaves, self.settings, self.alarms, self._measured = columns
        fine = np.isfinite(self.of_each("loss")) & (self.of_each("own_non_finite") == 0)
        self.troubled = np.flatnonzero((self.alarms != 0) | ~fine).tolist()

    def about(self, step: int) -> bool:
        """Whether every rank has spoken of this step."""
        return bool((self.steps == step).all())

    def of_each(self, name: str) -> np.ndarray:
        """A value of each rank, 0 where it was not measured."""
        return self._values[:, FIELDS.index(name)]

    def of_all(self, name: str) -> np.ndarray | None:
        """The same; None where a rank has not measured it."""
        bit = 1 << FIELDS.index(name)
        return self.of_each(name) if (self._measured & bit).all() else None


class Together:
    """Keeps the ranks' monitors in step, and says what all of them have to do.

    A message about step t goes out when step t+1 is checked, and is there when
    step t+2 is. All ranks then hold the same messages, so they raise the same
    alerts and complete the same record. What they must do alike is done at the
    check of step t+3: a rank whose messages are late by one step still does it
    with the others.

    Ranks that have got out of step (one message came late) wait until all of
    them are at the same step again; messages go out there.

    Its weakness: two steps pass before a rank hears of another's alarm. And
    messages that are late by two steps part the ranks: then one acts late.

    Args:
        config: of the monitor.
        exchange: of messages that are `WIDTH` numbers wide.
        scaled: a gradient scaler overflows on purpose now and then.
    """

    def __init__(self, config: MonitorConfig, exchange: Exchange, *, scaled: bool = False) -> None:
        self._sources, self._scaled = config.alert_on, scaled
        self._settings = zlib.crc32(repr((config.alert_on, config.workers_every)).encode())
        self.exchange = exchange
        self._place = self.exchange.ranks.index(self.exchange.rank)
        self._next_step: float = 0  # no message before the one about this step
        self._agreed: tuple[float, float] = inf, inf  # from one check on, and until another
        self._raised: dict[str, Alert] = {}  # here, since the last message
        self._posted: dict[str, Alert] = {}  # here, told with it
        self._own_step = 0  # of the last alert that was about this rank alone
        self._agenda: list[tuple[int, Alert]] = []
        self._sounding: set[tuple[str, int]] = set()
        self._left, self._told, self._told_late = False, False, False

    @property
    def alive(self) -> bool:
        """The ranks are in touch, or about to be."""
        return not self.exchange.ended

    def agreed(self, check: int) -> bool:
        """Whether all ranks decide alike at this check."""
        begin, end = self._agreed
        return self.exchange.active and begin <= check < end

    def raised(self, alert: Alert, *, own: bool = False) -> None:
        """An alert was raised here; `own` where the other ranks cannot see it themselves."""
        self._raised[alert.source] = alert
        if own:
            self._own_step = alert.step

    def post(self, step: int, values: Mapping[str, float | None], leaves: int = STAYS) -> bool:
        """Tell the others of a step; whether they will hear of it."""
        if step < self._next_step and not leaves:
            return False
        alarms = sum(1 << i for i, source in enumerate(self._sources) if source in self._raised)
        row = message(step, values, leaves=leaves, settings=self._settings, alarms=alarms)
        if not self.exchange.post(row):
            return False
        self._left = leaves != STAYS
        self._posted, self._raised = self._raised, {}
        return True

    def take(self) -> Messages | None:
        """What the ranks said; None where it is not there yet."""
        rows = self.exchange.take()
        if rows is None:
            return None
        messages = Messages(rows)
        first, last = int(messages.steps.min()), int(messages.steps.max())
        begin, end = self._agreed
        if first < last:
            self._next_step = last + ACTED_UPON
            self._agreed = begin, min(end, last + ACTED_UPON)
        else:
            self._next_step = last + 1
            self._agreed = min(begin, last + ACTED_UPON) if end == inf else last + ACTED_UPON, inf
        self._part_with(messages)
        return messages

    def heard(self, messages: Messages) -> list[tuple[Alert, bool]]:
        """The alerts in it that this rank has not raised, and whether each one goes on."""
        alerts = []
        for place in messages.troubled:
            rank, step = self.exchange.ranks[place], int(messages.steps[place])
            evidence = self._own_evidence(messages, place)
            if evidence and not (place == self._place and step == self._own_step):
                alerts.append(Alert(step=step, source="non_finite", reason=evidence, rank=rank))
            for source in self._named(messages.alarms[place] & ~messages.alarms[self._place]):
                if not (evidence and source == "non_finite"):
                    reason = "alarmed on that rank"
                    alerts.append(Alert(step=step, source=source, reason=reason, rank=rank))
        self._put_on_agenda(messages, alerts)
        sounding = {(alert.source, alert.rank) for alert in alerts}
        found = [(alert, (alert.source, alert.rank) in self._sounding) for alert in alerts]
        self._sounding = sounding
        return found

    def rewind(self) -> None:
        """The steps begin anew: a checkpoint was loaded."""
        self._next_step, self._agreed, self._own_step = 0, (inf, inf), 0
        self._agenda = []

    def due(self, check: int) -> list[Alert]:
        """Alerts that all ranks act upon at this check."""
        due = [alert for step, alert in self._agenda if step <= check]
        self._agenda = [(step, alert) for step, alert in self._agenda if step > check]
        return due

    def news(self) -> str:
        """What has happened to the exchange, once; empty where nothing has."""
        if self.exchange.problem and not self._told:
            self._told = True
            return (
                f"{self.exchange.problem}; each rank goes on by itself, "
                "and what all must do alike is not done"
            )
        if self.exchange.late and not self._told_late:
            self._told_late = True
            return "a rank has not answered for a minute"
        return ""

    def leave(self, why: int) -> None:
        """The last word, unless it was said; waits for nobody longer than a late message may."""
        if not self._left:
            self.exchange.take()
            self.post(0, {}, why)
        self.exchange.close()

    def _part_with(self, messages: Messages) -> None:
        """One rank less is no agreement."""
        pairs = zip(messages.leaves.tolist(), self.exchange.ranks, strict=True)
        left = {why: rank for why, rank in pairs if why != STAYS}
        if (messages.settings != messages.settings[0]).any():
            self.exchange.end("the ranks' monitors are set differently")
        elif STEPPED_ASIDE in left:
            self.exchange.end(f"the monitor of rank {left[STEPPED_ASIDE]} has stepped aside")
        elif CLOSED in left and not self._left:
            self.exchange.end(f"the monitor of rank {left[CLOSED]} was closed")
        if self.exchange.ended:
            self._agenda = []

    def _own_evidence(self, messages: Messages, place: int) -> str:
        """What is wrong on that rank, as nobody else can see after the reduction."""
        if "non_finite" not in self._sources:
            return ""
        said = []
        loss, count = (messages.of_each(name)[place] for name in ("loss", "own_non_finite"))
        if not isfinite(loss):
            said.append(f"its loss is {loss:g}")
        if count and not (self._scaled and "non_finite" not in self._named(messages.alarms[place])):
            said.append(f"{count:g} entries of its own gradient are not finite")
        return "; ".join(said)

    def _put_on_agenda(self, messages: Messages, alerts: Sequence[Alert]) -> None:
        if self.exchange.ended:
            return
        check = int(messages.steps.max()) + ACTED_UPON
        known = {alert.source: alert for alert in reversed(alerts)}
        for source in self._named(np.bitwise_or.reduce(messages.alarms)):
            if source not in known:  # then it was raised here as well
                known[source] = self._posted[source]
        self._agenda += [(check, known[source]) for source in self._sources if source in known]

    def _named(self, alarms: int) -> list[str]:
        return [source for i, source in enumerate(self._sources) if alarms >> i & 1]


def complete(record: Record, messages: Messages) -> None:
    """What all ranks together know of the step: the workers' gradients, the whole of the shards.

    The training loss becomes the mean over the ranks. What one of them did not
    measure stays as it was.
    """
    losses, norms = messages.of_all("loss"), messages.of_all("own_norm")
    if losses is not None:
        record.training_loss = nine_digits(float(losses.mean()))
    if norms is not None:
        record.worker_gradient_norms = tuple(norms.tolist())
        record.worker_gradient_cosines = tuple(messages.of_each("own_cosine").tolist())
        record.non_finite_gradients = round(float(messages.of_each("own_non_finite").sum()))
    for name in ("gradient", "update", "parameter"):
        squares = messages.of_all(f"{name}_square")
        if squares is not None:
            setattr(record, f"{name}_norm", nine_digits(float(squares.sum()) ** 0.5))
