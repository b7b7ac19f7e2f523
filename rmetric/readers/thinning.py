"""Records of a log that holds more than memory may: every second is kept, every fourth, and so on.

Records that carry more than the usual numbers (`Kind`) are kept beside these, and are thinned
only where they are the most numerous themselves.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from itertools import compress
from math import isfinite
from operator import attrgetter
from sys import maxsize

from rmetric.metric import RMetricConfig
from rmetric.metric_settings import stated_threshold
from rmetric.records import Record, Run


class Kind(Enum):
    """Kind of a record, by the rarest that it holds; the value describes it in a note."""

    ORDINARY = ""
    STATED = "with R as the log states it"
    EVALUATION = "with an evaluation"
    EVENT = "with an event (hardware, planned change, action, skipped step, alarm by logged R)"
    NOT_FINITE = "with a value that is not finite"


class _Pool:
    """The records of one kind of one run that are kept.

    Attributes:
        every: one of so many records is kept.
        seen: number of records so far, those that were dropped included.
        places, records: of those that are kept, the places in the run.
    """

    def __init__(self) -> None:
        self.every, self.seen = 1, 0
        self.places: array[int] = array("q")
        self.records: list[Record] = []


class _KeptRun:
    def __init__(self, run: Run | None) -> None:
        self.pools = {kind: _Pool() for kind in Kind}
        self.waiting: list[Record] = []  # up to the limit no kind is asked for
        self.seen = 0
        self.last: Record | None = None
        own = None if run is None else stated_threshold(run.config)
        self._threshold = RMetricConfig().threshold if own is None else own
        self._alarm = False

    def kind_of(self, record: Record) -> Kind:
        began = False
        if record.stated_score is not None:
            alarm = record.stated_score > self._threshold
            began, self._alarm = alarm and not self._alarm, alarm
        if not _is_finite(record):
            return Kind.NOT_FINITE
        if began or record.skipped or record.events or record.planned_events or record.actions:
            return Kind.EVENT
        if record.validation_loss is not None:
            return Kind.EVALUATION
        return Kind.ORDINARY if record.stated_score is None else Kind.STATED

    def halve(self, kind: Kind) -> int:
        """Keep half as many records of a kind; returns the number of those dropped."""
        pool = self.pools[kind]
        before = len(pool.records)
        pool.every *= 2
        if kind is Kind.ORDINARY:
            wanted = [place % pool.every == 0 for place in pool.places]
            pool.places = array("q", compress(pool.places, wanted))
            pool.records = list(compress(pool.records, wanted))
        else:
            pool.places, pool.records = pool.places[::2], pool.records[::2]
        return before - len(pool.records)

    def in_order(self) -> list[Record]:
        by_place = {
            place: record
            for pool in self.pools.values()
            for place, record in zip(pool.places, pool.records, strict=True)
        }
        if self.last is not None:
            by_place.setdefault(self.seen - 1, self.last)
        return [by_place[place] for place in sorted(by_place)]


class Thinning:
    """Holds at most about `most` records of a log, spread evenly over each of its runs.

    Every k-th record of a run is kept; k doubles each time that the limit is reached. Records of
    another kind than `Kind.ORDINARY` are kept besides, or every j-th of them: the kind that
    holds the most records is thinned. The first record of each kind in a run is kept in any
    case, and so is the run's last record.

    Args:
        most: number of records.
        runs: id -> what is known of the run, for the threshold of an R that the log states.
    """

    def __init__(self, most: int, runs: Mapping[str, Run]) -> None:
        self.most = self._limit = most
        self._known, self._runs = runs, dict[str, _KeptRun]()
        self._held, self._waits = 0, True

    def take(self, id: str, records: Sequence[Record]) -> None:
        """Take the next records of a run."""
        run = self._run(id)
        if not self._waits:
            return self._sort(run, records)
        run.waiting += records
        self._held += len(records)
        if self._held > self._limit:
            self._held, self._waits = 0, False
            for each in self._runs.values():
                self._sort(each, each.waiting)
                each.waiting = []

    def _sort(self, run: _KeptRun, records: Sequence[Record]) -> None:
        for place, record in enumerate(records, start=run.seen):
            kind = run.kind_of(record)
            pool = run.pools[kind]
            count = place if kind is Kind.ORDINARY else pool.seen
            pool.seen += 1
            if count % pool.every == 0:
                pool.places.append(place)
                pool.records.append(record)
                self._held += 1
                if self._held > self._limit:
                    self._thin()
        if records:
            run.seen += len(records)
            run.last = records[-1]

    def records(self, id: str) -> list[Record]:
        """The records of a run that are kept, in the order of the log."""
        run = self._run(id)
        return run.waiting or run.in_order()

    def note(self, id: str) -> str:
        """What was done to a run, as a sentence; empty if all of its records are kept."""
        run = self._run(id)
        pools = {kind: pool for kind, pool in run.pools.items() if pool.seen}
        if all(pool.every == 1 for pool in pools.values()):
            return ""
        base = max(pools, key=lambda kind: pools[kind].seen)
        main = pools.pop(base)
        total = run.seen if base is Kind.ORDINARY else main.seen
        words = f" {base.value}" if base.value else ""
        parts = [f"{_every(main.every, total)}{words} was judged"]
        parts += [
            f"{_every(pool.every, pool.seen)} {kind.value or 'other records'}"
            for kind, pool in pools.items()
        ]
        return (
            f"{', and also '.join([parts[0], ', '.join(parts[1:])] if parts[1:] else parts)}; the "
            f"log holds more than --most-records {self.most:,}; steps between them were not seen; "
            f"windows count records and span {main.every} times as many steps"
        )

    def _run(self, id: str) -> _KeptRun:
        run = self._runs.get(id)
        if run is None:
            run = self._runs[id] = _KeptRun(self._known.get(id))
        return run

    def _thin(self) -> None:
        """Drop records until the limit is kept, first of the kind and the runs with the most."""
        while self._held > self._limit:
            sizes = {
                kind: [len(run.pools[kind].records) for run in self._runs.values()] for kind in Kind
            }
            kind = max(Kind, key=lambda kind: sum(sizes[kind]))
            largest = max(sizes[kind])
            if largest <= 1:
                # More runs than records are allowed: each keeps its first.
                self._limit = 2 * self._held
                return
            for run, size in zip(self._runs.values(), sizes[kind], strict=True):
                if 2 * size > largest and size > 1:
                    self._held -= run.halve(kind)


def _every(every: int, number: int) -> str:
    """One of so many of a number of records.

    >>> _every(32, 45_000_000), _every(1, 12), _every(1, 1)
    ('every 32nd of 45,000,000 records', 'all 12 records', 'the one record')
    """
    if every > 1:
        ending = {2: "nd", 4: "th", 6: "th", 8: "th"}[every % 10]
        return f"every {every:,}{'th' if every % 100 == 12 else ending} of {number:,} records"
    return "the one record" if number == 1 else f"all {number:,} records"


#: All of a record that is one number and was measured, or computed by somebody else.
_NUMBERS = attrgetter(
    "training_loss", "validation_loss", "gradient_norm", "learning_rate", "update_norm",
    "parameter_norm", "loss_scale", "activation_headroom", "attention_logit_max", "router_load",
    "probe_loss", "failure_rate", "gradient_variance", "loss_drift", "stated_score",
)  # fmt: skip


def _is_finite(record: Record) -> bool:
    several = (
        *(record.worker_gradient_norms or ()),
        *(record.worker_gradient_cosines or ()),
        *(record.layer_gradient_norms or {}).values(),
        *(record.loss_parts or {}).values(),
    )
    total = sum(filter(None, _NUMBERS(record))) + sum(several)
    return isfinite(total) and not record.non_finite_gradients


def collect(
    batches: Iterable[tuple[str, list[Record]]], runs: Mapping[str, Run], most: int | None = None
) -> Thinning:
    """The records in all `batches` (run id, records); of more than `most` as `Thinning` says."""
    thinning = Thinning(maxsize if most is None else most, runs)
    for id, batch in batches:
        thinning.take(id, batch)
    return thinning
