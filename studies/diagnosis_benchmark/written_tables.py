"""Tables of the written jobs: the first look at each set beside the code of today."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rmetric.diagnosis.result import SURE
from rmetric.evaluation.intervals import Estimate
from studies.common.table import Cell, Table
from studies.diagnosis_benchmark.aggregation import mean
from studies.diagnosis_benchmark.written_jobs import TOP_CAUSES, WrittenScores
from studies.diagnosis_benchmark.written_sets import written_sets

Rows = Sequence[WrittenScores]
#: The value of a job that has what is counted; None of another.
Value = Callable[[WrittenScores], float | None]


def _failed(value: Value) -> Value:
    return lambda job: value(job) if job.causes else None


def _when(holds: Callable[[WrittenScores], bool], value: Value) -> Value:
    return lambda job: value(job) if holds(job) else None


#: Parts of an answer, with a column in the table of sets.
COUNTED: dict[str, Value] = {
    "Outcome": lambda job: job.outcome_right,
    "Cause first": _failed(lambda job: job.cause_at == 1),
    f"Cause among {TOP_CAUSES}": _failed(lambda job: job.cause_at > 0),
    "Rank or node first": _failed(lambda job: job.first),
    "Stage": _failed(lambda job: job.stage_right),
    "Number of attempts": lambda job: job.attempts_found == job.attempts,
    "Sure and right": _when(lambda job: job.states and job.confidence >= SURE,
                            lambda job: job.right),
}  # fmt: skip
#: Further parts.
PARTS: dict[str, Value] = {
    **COUNTED,
    "Cause partly right": _failed(lambda job: job.cause == "partly"),
    "No cause named": _failed(lambda job: job.cause == "unknown"),
    "Cause wrong": _failed(lambda job: job.cause == "wrong"),
    "Rank or node among five": _failed(lambda job: job.among_five),
    "Several attempts: found": _when(lambda job: job.attempts > 1,
                                     lambda job: job.attempts_found > 1),
    "Several attempts: ends right": _when(lambda job: job.attempts > 1,
                                          lambda job: job.ends_right / job.attempts),
    "Healthy: no cause named": _when(lambda job: job.is_healthy, lambda job: not job.said),
    "Healthy: accused surely": _when(lambda job: job.is_healthy,
                                     lambda job: job.confidence >= SURE and not job.outcome_right),
}  # fmt: skip


def written_tables(first: Rows, today: Rows) -> list[Table]:
    """The sets, the parts of the answers, and the misses by group of causes."""
    if not today:
        return []
    return [of_sets(first, today), of_parts(first, today), of_groups(first, today)]


def values(rows: Rows, value: Value) -> list[float]:
    return [float(one) for job in rows if (one := value(job)) is not None]


def _count(looks: Sequence[Rows], value: Value) -> str:
    """Right at each look, of how many; said once where they are as many at both."""
    found = [values(rows, value) for rows in looks if rows]
    if len({len(one) for one in found}) == 1:
        return f"{' → '.join(f'{sum(one):.4g}' for one in found)} of {len(found[0])}"
    return " → ".join(f"{sum(one):.4g} of {len(one)}" for one in found)


def of_sets(first: Rows, today: Rows) -> Table:
    """A row for each set, and one for all that had a first look."""

    def row(known: tuple[Cell, ...], names: Sequence[str]) -> tuple[Cell, ...]:
        looks = [[job for job in rows if job.set in names] for rows in (first, today)]
        return *known, *(_count(looks, value) for value in COUNTED.values())

    judged = {job.set for job in today}
    sets = [one for one in written_sets().values() if one.name in judged]
    rows = [
        row((one.name, one.authors, one.jobs, one.first_look, one.commit), [one.name])
        for one in sets
    ]
    looked = [one for one in sets if one.name in {job.set for job in first}]
    whole = sum(one.jobs for one in looked)
    rows.append(row(("all numbered", "", whole, "", ""), [one.name for one in looked]))
    return Table(
        "sets",
        "Whole answers to written jobs: first look → today",
        ("Set", "Authors", "Jobs", "First look", "Code", *COUNTED),
        rows,
    )


def of_parts(first: Rows, today: Rows) -> Table:
    """Shares of all sets that had a first look."""
    sets = {job.set for job in first}
    looks = (first, [job for job in today if job.set in sets])
    return Table(
        "parts",
        "All numbered sets together",
        ("Part of the answer", "Jobs", "First look", "Today"),
        [
            (words, _jobs(looks, value), *(_share(values(rows, value)) for rows in looks))
            for words, value in PARTS.items()
        ],
        notes=["Brackets: 95 % intervals by bootstrap over jobs."],
    )


def _jobs(looks: Sequence[Rows], value: Value) -> str:
    counts = dict.fromkeys(str(len(values(rows, value))) for rows in looks)
    return " → ".join(counts)


def _share(known: Sequence[float]) -> Estimate:
    return mean(known, [str(number) for number in range(len(known))])


def of_groups(first: Rows, today: Rows) -> Table:
    """Misses by group of the labelled cause."""
    sets = {job.set for job in first}
    looks = (first, [job for job in today if job.set in sets])
    rows: list[tuple[Cell, ...]] = []
    for group in sorted({job.group for job in looks[1]}):
        own = [[job for job in rows if job.group == group] for rows in looks]
        missed = [
            " → ".join(f"{sum(1 - one for one in values(some, value)):.4g}" for some in own)
            for value in list(COUNTED.values())[:-1]
        ]
        rows.append((group, len(own[1]), *missed))
    return Table(
        "misses",
        "Misses in the numbered sets, by group of the cause: first look → today",
        ("Group", "Jobs", *list(COUNTED)[:-1]),
        rows,
    )
