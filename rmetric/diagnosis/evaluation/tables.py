"""The tables of one data set, from what was judged; here those of events and of kinds."""

from __future__ import annotations

from collections.abc import Iterable

from rmetric.diagnosis.evaluation.baselines import OF_EVENTS
from rmetric.diagnosis.evaluation.judged import VARIANTS
from rmetric.diagnosis.evaluation.rank_tables import differences, nodes, ranks
from rmetric.diagnosis.evaluation.results import INTERVALS, Results
from rmetric.diagnosis.evaluation.scoring import TOPS
from rmetric.diagnosis.evaluation.summing import macro, mean, micro
from rmetric.diagnosis.evaluation.verdict_tables import causes, healthy, misses, outcomes
from rmetric.evaluation.intervals import Estimate, wilson
from rmetric.reporting.table import Cell, Column, Table


def tables(results: Results) -> list[Table]:
    """All that apply; one of which no job is judged is left out."""
    makers = (events, by_kind, outcomes, causes, ranks, nodes, differences, healthy, misses)
    return [table for make in makers if (table := make(results)).rows]


def events(results: Results) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for title in (*VARIANTS, *OF_EVENTS):
        found = [
            (job, job.answers[title]) for job in results.jobs
            if title in job.answers and job.answers[title].events is not None
        ]  # fmt: skip
        if not found:
            continue
        groups = [results.drawn_with(job) for job, _ in found]
        main = [one.events for _, one in found if one.events is not None]
        echoes = [one.events_with_echoes for _, one in found if one.events_with_echoes is not None]
        together, each = micro(main, groups), macro(main, groups)
        rows.append(
            (
                title,
                len(found),
                *each,
                *together,
                macro(echoes, groups).f1,
                micro(echoes, groups).f1,
            )
        )
    return Table(
        name=f"{results.name}_events",
        number=0,
        title=f"Failure-indicating events, {results.title}",
        columns=(
            Column("Method"), Column("Jobs"),
            Column("Precision, mean of jobs"), Column("Recall, mean of jobs"),
            Column("F1, mean of jobs"),
            Column("Precision, all events"), Column("Recall, all events"), Column("F1, all events"),
            Column("F1 with echoes, mean of jobs"), Column("F1 with echoes, all events"),
        ),
        rows=rows,
        notes=[
            "True: an event with a line labelled cause or symptom. Echoes and context are neutral; "
            "with echoes, an echo is true as well, and one that is not shown is missed.",
            INTERVALS,
        ],
    )  # fmt: skip


def by_kind(results: Results) -> Table:
    """The headline method by kind of injected fault."""
    rows: list[tuple[Cell, ...]] = []
    for kind in dict.fromkeys(job.kind for job in results.jobs if not job.outcome == "healthy"):
        jobs = [job for job in results.jobs if job.kind == kind and kind]
        said = [job.answers[results.headline] for job in jobs]
        if not jobs:
            continue
        groups = [results.drawn_with(job) for job in jobs]
        counts = [one.events for one in said if one.events is not None]
        tops = [one.ranks or [float("nan")] * len(TOPS) for one in said]
        rows.append(
            (
                kind,
                len(jobs),
                macro(counts, groups).f1 if len(counts) == len(jobs) else None,
                *(mean([one[place] for one in tops], groups) for place in range(len(TOPS))),
                share(one.outcome == job.outcome for job, one in zip(jobs, said, strict=True)),
                share(one.cause is not None for one in said),
            )
        )
    return Table(
        name=f"{results.name}_kinds",
        number=0,
        title=f"By kind of fault, {results.title}",
        columns=(
            Column("Kind"), Column("Jobs"), Column("F1 of events, mean of jobs"),
            *(Column(f"Top-{top}") for top in TOPS),
            Column("Outcome right"), Column("A cause is named"),
        ),
        rows=rows,
        notes=[f"Method: {results.headline}. Shares of the last two columns: Wilson."],
    )  # fmt: skip


def share(hits: Iterable[bool]) -> Estimate:
    """Of true and false values, with a Wilson interval."""
    values = list(hits)
    return wilson(sum(values), len(values))
