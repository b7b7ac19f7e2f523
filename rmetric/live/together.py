"""What the monitors of all ranks tell one another, and what follows from it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from math import inf, isfinite
from typing import NamedTuple

from rmetric.live.alerts import Alert
from rmetric.live.config import MonitorConfig
from rmetric.live.exchange import Exchange
from rmetric.live.pending import nine_digits
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


class Message(NamedTuple):
    """What one rank says of one step.

    Attributes:
        step: that it is about.
        leaves: whether it is the rank's last, and why.
        settings: the same number on ranks that are set alike.
        alarms: one bit for each source of `alert_on` that was alarmed here.
        values: of `FIELDS`, those that were measured.
    """

    step: int
    leaves: int
    settings: int
    alarms: int
    values: dict[str, float]

    def encode(self) -> list[float]:
        measured = sum(1 << i for i, name in enumerate(FIELDS) if name in self.values)
        numbers = (self.values.get(name, 0.0) for name in FIELDS)
        return [self.step, self.leaves, self.settings, self.alarms, measured, *numbers]

    @classmethod
    def decode(cls, row: Sequence[float]) -> Message:
        step, leaves, settings, alarms, measured = map(int, row[:5])
        numbers = zip(FIELDS, row[5:], strict=True)
        values = {name: v for i, (name, v) in enumerate(numbers) if measured >> i & 1}
        return cls(step, leaves, settings, alarms, values)


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
        measured = {name: value for name, value in values.items() if value is not None}
        alarms = sum(1 << i for i, source in enumerate(self._sources) if source in self._raised)
        message = Message(step, leaves, self._settings, alarms, measured)
        if not self.exchange.post(message.encode()):
            return False
        self._left = leaves != STAYS
        self._posted, self._raised = self._raised, {}
        return True

    def take(self) -> list[Message]:
        """What the ranks said, in their order; empty where it is not there yet."""
        rows = self.exchange.take()
        if rows is None:
            return []
        messages = [Message.decode(row) for row in rows]
        steps = [m.step for m in messages]
        begin, end = self._agreed
        all_have_heard = max(steps) + ACTED_UPON
        if min(steps) < max(steps):
            self._next_step = all_have_heard
            self._agreed = begin, min(end, all_have_heard)
        else:
            self._next_step = steps[0] + 1
            self._agreed = (min(begin, all_have_heard) if end == inf else all_have_heard), inf
        self._part_with(messages)
        return messages

    def heard(self, messages: Sequence[Message]) -> list[tuple[Alert, bool]]:
        """The alerts in it that this rank has not raised, and whether each one goes on."""
        alerts = []
        mine = messages[self._place]
        for place, message in enumerate(messages):
            rank, told = self.exchange.ranks[place], message.alarms & ~mine.alarms
            evidence = self._own_evidence(message)
            if evidence and not (place == self._place and message.step == self._own_step):
                alerts.append(_alert(message, "non_finite", evidence, rank))
            for source in self._named(told):
                if not (evidence and source == "non_finite"):
                    alerts.append(_alert(message, source, "alarmed on that rank", rank))
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

    def _part_with(self, messages: Sequence[Message]) -> None:
        """One rank less is no agreement."""
        left = {m.leaves: rank for m, rank in zip(messages, self.exchange.ranks, strict=True)}
        if len({m.settings for m in messages}) > 1:
            self.exchange.end("the ranks' monitors are set differently")
        elif STEPPED_ASIDE in left:
            self.exchange.end(f"the monitor of rank {left[STEPPED_ASIDE]} has stepped aside")
        elif CLOSED in left and STAYS in left and not self._left:
            self.exchange.end(f"the monitor of rank {left[CLOSED]} was closed")
        if self.exchange.ended:
            self._agenda = []

    def _own_evidence(self, message: Message) -> str:
        """What is wrong on that rank, as nobody else can see after the reduction."""
        if "non_finite" not in self._sources:
            return ""
        said = []
        loss, count = message.values.get("loss", 0.0), message.values.get("own_non_finite", 0.0)
        if not isfinite(loss):
            said.append(f"its loss is {loss:g}")
        alarmed = "non_finite" in self._named(message.alarms)
        if count and (alarmed or not self._scaled):
            said.append(f"{count:g} entries of its own gradient are not finite")
        return "; ".join(said)

    def _put_on_agenda(self, messages: Sequence[Message], alerts: Sequence[Alert]) -> None:
        if self.exchange.ended:
            return
        check = max(m.step for m in messages) + ACTED_UPON
        known = {alert.source: alert for alert in reversed(alerts)}
        for place, message in enumerate(messages):
            for source in self._named(message.alarms):
                rank = self.exchange.ranks[place]
                here = self._posted.get(source)
                known.setdefault(source, here or _alert(message, source, "alarmed", rank))
        self._agenda += [(check, known[source]) for source in self._sources if source in known]

    def _named(self, alarms: int) -> list[str]:
        return [source for i, source in enumerate(self._sources) if alarms >> i & 1]


def _alert(message: Message, source: str, reason: str, rank: int) -> Alert:
    return Alert(step=message.step, source=source, reason=reason, rank=rank)


def about(step: int, messages: Sequence[Message]) -> bool:
    """Whether every rank has said something, and of this step."""
    return bool(messages) and all(m.step == step for m in messages)


def complete(record: Record, messages: Sequence[Message]) -> None:
    """What all ranks together know of the step: the workers' gradients, the whole of the shards.

    The training loss becomes the mean over the ranks. What one of them did not
    measure stays as it was.
    """

    def all_of(name: str) -> list[float] | None:
        values = [m.values[name] for m in messages if name in m.values]
        return values if len(values) == len(messages) else None

    if losses := all_of("loss"):
        record.training_loss = nine_digits(sum(losses) / len(losses))
    if norms := all_of("own_norm"):
        record.worker_gradient_norms = tuple(norms)
        record.worker_gradient_cosines = tuple(all_of("own_cosine") or ())
        record.non_finite_gradients = round(sum(all_of("own_non_finite") or ()))
    for name in ("gradient", "update", "parameter"):
        if squares := all_of(f"{name}_square"):
            setattr(record, f"{name}_norm", nine_digits(sum(squares) ** 0.5))
