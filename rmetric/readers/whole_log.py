"""Work on a whole log instead of its stream: a bound of its records, steps of evaluations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import isfinite
from operator import attrgetter

from rmetric.metric import RMetricConfig
from rmetric.metric_settings import stated_threshold
from rmetric.records import Record, Run

ORDINARY = "beside these"
#: Fields of a record that are one number and were measured, or computed by another program.
_ADDED_VALUES = attrgetter(
    "training_loss", "validation_loss", "gradient_norm", "learning_rate", "update_norm",
    "parameter_norm", "loss_scale", "activation_headroom", "attention_logit_max", "router_load",
    "probe_loss", "failure_rate", "gradient_variance", "loss_drift", "stated_score",
)  # fmt: skip


def kind_of(record: Record, *, alarm_begins: bool = False) -> str:
    """Kind of a record, by the rarest value that it holds, in words for a note."""
    several = (
        *(record.worker_gradient_norms or ()),
        *(record.worker_gradient_cosines or ()),
        *(record.layer_gradient_norms or {}).values(),
        *(record.loss_parts or {}).values(),
    )
    total = sum(filter(None, _ADDED_VALUES(record))) + sum(several)
    if not isfinite(total) or record.non_finite_gradients:
        return "with a value that is not finite"
    if record.skipped or record.events or record.planned_events or record.actions:
        return "with an event (hardware, planned change, action, skipped step)"
    if alarm_begins:
        return "with the beginning of an alarm by the logged R"
    return ORDINARY if record.validation_loss is None else "with an evaluation"


class _KeptRun:
    """The kept records of one run; its settings may state the threshold of a logged R."""

    def __init__(self, run: Run | None) -> None:
        #: Kind -> count, place in the run and record of those that are kept.
        self.kept: dict[str, list[tuple[int, int, Record]]] = defaultdict(list)
        self.every: dict[str, int] = defaultdict(lambda: 1)
        self.seen: Counter[str] = Counter()
        self.length = 0
        own = stated_threshold(run.config) if run is not None else None
        self._threshold = RMetricConfig().threshold if own is None else own
        self._alarm = False

    def take(self, record: Record) -> bool:
        """Take the next record; True if it is kept for now."""
        was, score = self._alarm, record.stated_score
        self._alarm = was if score is None else score > self._threshold
        kind = kind_of(record, alarm_begins=self._alarm and not was)
        # Ordinary ones are counted with all others between them.
        count = self.length if kind == ORDINARY else self.seen[kind]
        self.seen[kind] += 1
        self.last, place, self.length = record, self.length, self.length + 1
        kept, every = self.kept[kind], self.every[kind]
        is_kept = not kept or kept[-1][0] // every < count // every
        if is_kept:
            kept.append((count, place, record))
        return is_kept

    def halve(self, kind: str) -> int:
        """Keep half as many records of a kind; returns the number of those dropped."""
        before, self.every[kind] = self.kept[kind], self.every[kind] * 2
        first = {entry[0] // self.every[kind]: entry for entry in reversed(before)}
        self.kept[kind] = list(first.values())[::-1]
        return len(before) - len(first)


class Thinning:
    """Holds at most about `most` records of a log, spread evenly over each of its runs.

    At the limit every second record of the most numerous kind (`kind_of`) is dropped, in the runs
    that have the most of it, so every 2nd, 4th, 8th ... is kept. The first of each kind in a run is
    kept in any case, and so is the run's last record.
    """

    def __init__(self, most: int, runs: Mapping[str, Run]) -> None:
        self.most = self._limit = most
        self._known, self.runs = runs, dict[str, _KeptRun]()
        self._held = 0

    def take(self, id: str, records: Sequence[Record]) -> None:
        """Take the next records of a run."""
        if id not in self.runs:
            self.runs[id] = _KeptRun(self._known.get(id))
        run = self.runs[id]
        for record in records:
            self._held += run.take(record)
            while self._held > self._limit:
                self._thin()

    def _thin(self) -> None:
        """Drop records of the kind that has the most, from the runs with the most of these."""
        sizes: Counter[str] = Counter()
        for run in self.runs.values():
            sizes.update({kind: len(kept) for kind, kept in run.kept.items()})
        [(kind, _)] = sizes.most_common(1)
        runs = [run for run in self.runs.values() if kind in run.kept]
        largest = max(len(run.kept[kind]) for run in runs)
        if largest == 1:
            self._limit = 2 * self._held  # more runs than records are allowed: each keeps its first
            return
        for run in runs:
            if 2 * (size := len(run.kept[kind])) > largest and size > 1:
                self._held -= run.halve(kind)

    def records(self, id: str) -> list[Record]:
        """The records of a run that are kept, in the order of the log."""
        run = self.runs[id]
        kept = {place: record for some in run.kept.values() for _, place, record in some}
        kept[run.length - 1] = run.last
        return [kept[place] for place in sorted(kept)]

    def note(self, id: str) -> str:
        """A note on the records that were left out; empty if all are kept."""
        run = self.runs[id]
        if all(every == 1 for every in run.every.values()):
            return ""
        words = {
            kind: _every(run.every[kind], run.length)
            if kind == ORDINARY and run.every[kind] > 1
            else f"{_every(run.every[kind], number)} {kind}"
            for kind, number in run.seen.most_common()
        }
        main, *others = words
        also = f", and also {', '.join(words[kind] for kind in others)}" if others else ""
        return (
            f"{words[main]} was judged{also}; the log holds more than --most-records "
            f"{self.most:,}; steps between them were not seen; windows count records and span "
            f"{run.every[main]} times as many steps"
        )


def _every(every: int, number: int) -> str:
    """One of so many of a number of records.

    >>> _every(32, 45_000_000), _every(1, 12), _every(1, 1)
    ('every 32nd of 45,000,000 records', 'all 12 records', 'the one record')
    """
    if every > 1:
        ending = {2: "nd", 4: "th", 6: "th", 8: "th"}[every % 10]
        return f"every {every:,}{'th' if every % 100 == 12 else ending} of {number:,} records"
    return "the one record" if number == 1 else f"all {number:,} records"


def collect(
    batches: Iterable[tuple[str, list[Record]]], runs: Mapping[str, Run], most: int | None = None
) -> tuple[dict[str, list[Record]], dict[str, str]]:
    """The records of each run, of more than `most` as `Thinning` says, and its notes."""
    held: dict[str, list[Record]] = defaultdict(list)
    number, thinning = 0, None
    for id, batch in batches:
        held[id] += batch
        number += len(batch)
        if most is not None and number > most:
            thinning = thinning or Thinning(most, runs)
            for name, records in held.items():
                thinning.take(name, records)
            held.clear()
    if thinning is None:
        return held, {}
    notes = {id: note for id in thinning.runs if (note := thinning.note(id))}
    return {id: thinning.records(id) for id in thinning.runs}, notes


_JOINED = "{} evaluations stand after the training records in the file: each was put at its step"


def with_evaluations_in_place(runs: list[Run]) -> list[Run]:
    """`runs` of one log, with evaluations that follow all other records at their steps.

    A table in long form, sorted by kind, has two counters of steps, one under the other. A stream
    takes the second for a new part, or for a run that was resumed. Both become one run where the
    first part has no validation loss, the second nothing else, and its steps begin within the
    first's.
    """
    base = runs[0].id.removesuffix("__part1") if runs else ""
    if [run.id for run in runs] == [f"{base}__part1", f"{base}__part2"]:
        first, second = runs
        if _join(first, first.records, second.records, "the steps start again"):
            first.id = base
            return [first]
        return runs
    for run in runs:
        steps = [record.step for record in run.records]
        falls = [place for place in range(1, len(steps)) if steps[place] < steps[place - 1]]
        if len(falls) == 1:
            border = falls[0]
            _join(run, run.records[:border], run.records[border:], "the step falls back 1")
    return runs


def _join(run: Run, training: list[Record], evaluations: list[Record], obsolete: str) -> bool:
    """Put evaluations at their steps in `run`; False where the two are nothing of that kind."""
    if any(record.validation_loss is not None for record in training) or not all(
        map(_is_evaluation, evaluations)
    ):
        return False
    steps, later = ([record.step for record in some] for some in (training, evaluations))
    if not steps or any(b < a for a, b in [*pairwise(steps), *pairwise(later)]):
        return False
    usual = max(1, (steps[-1] - steps[0]) // max(1, len(steps) - 1))
    gap = max((b - a for a, b in pairwise(later)), default=usual)
    if later[0] < steps[0] - gap:  # the end is free: some log the beginning of the training only
        return False
    last_of = {record.step: record for record in training}
    alone = []
    for record in evaluations:
        if (beside := last_of.get(record.step)) is None or beside.validation_loss is not None:
            alone.append(record)
        else:
            beside.validation_loss = record.validation_loss
    run.records = sorted([*training, *alone], key=lambda record: record.step)
    run.notes = [note for note in run.notes if not note.startswith(obsolete)]
    run.notes.append(_JOINED.format(len(evaluations)))
    return True


def _is_evaluation(record: Record) -> bool:
    return record.validation_loss is not None and all(
        getattr(record, name) is None
        for name in ("training_loss", "gradient_norm", "update_norm", "probe_loss")
    )
