"""Evaluations that a table lists after all training records, put at their steps.

A table in long form, sorted by kind, has two counters of steps, one under the other. A stream
takes the second for a new part, or for a run that was resumed; a whole log is put right here.
"""

from __future__ import annotations

from itertools import pairwise

from rmetric.records import Record, Run

_JOINED = "{} evaluations stand after the training records in the file: each was put at its step"


def with_evaluations_in_place(runs: list[Run]) -> list[Run]:
    """`runs` of one log, with evaluations that follow all other records at their steps.

    Two parts become one run where the first has no validation loss, the second nothing else, and
    its steps begin within the first's; a run whose steps fall back once at such a border likewise.
    """
    base = runs[0].id.removesuffix("__part1") if runs else ""
    if [run.id for run in runs] == [f"{base}__part1", f"{base}__part2"]:
        first, second = runs
        joined = _joined([*first.records, *second.records], len(first.records))
        if joined is None:
            return runs
        first.id, runs = base, [first]
        _take(first, joined, len(second.records), "the steps start again")
        return runs
    for run in runs:
        border = _border(run.records)
        joined = None if border is None else _joined(run.records, border)
        if joined is not None and border is not None:
            _take(run, joined, len(run.records) - border, "the step falls back 1")
    return runs


def _take(run: Run, records: list[Record], number: int, obsolete: str) -> None:
    run.notes = [note for note in run.notes if not note.startswith(obsolete)]
    run.notes.append(_JOINED.format(number))
    run.records = records


def _border(records: list[Record]) -> int | None:
    """The only record whose step is below that of the record before it; None if not one."""
    falls = [i for i in range(1, len(records)) if records[i].step < records[i - 1].step]
    return falls[0] if len(falls) == 1 else None


def _joined(records: list[Record], border: int) -> list[Record] | None:
    """The records in the order of their steps; None where the border is none of that kind."""
    training, evaluations = records[:border], records[border:]
    if any(record.validation_loss is not None for record in training) or not all(
        _is_evaluation(record) for record in evaluations
    ):
        return None
    steps = [record.step for record in training]
    if not steps or any(b < a for a, b in pairwise(steps)):
        return None
    later = [record.step for record in evaluations]
    if any(b < a for a, b in pairwise(later)):
        return None
    usual = max(1, (steps[-1] - steps[0]) // max(1, len(steps) - 1))
    gap = max((b - a for a, b in pairwise(later)), default=usual)
    if later[0] < steps[0] - gap:  # the end is free: some log the beginning of the training only
        return None
    last_of = {record.step: record for record in training}
    alone = []
    for record in evaluations:
        beside = last_of.get(record.step)
        if beside is None or beside.validation_loss is not None:
            alone.append(record)
        else:
            beside.validation_loss = record.validation_loss
    return sorted([*training, *alone], key=lambda record: record.step)


def _is_evaluation(record: Record) -> bool:
    return record.validation_loss is not None and all(
        getattr(record, name) is None
        for name in ("training_loss", "gradient_norm", "update_norm", "probe_loss")
    )
