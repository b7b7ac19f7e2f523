"""Tables of the real and the injected jobs, a column for each data set; all tables are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from rmetric.evaluation import intervals
from rmetric.evaluation.intervals import NUM_RESAMPLES, Estimate, wilson
from rmetric.logs import write_atomically
from studies.common.csv_rows import read_rows
from studies.common.markers import fill
from studies.common.provenance import commit, uncommitted_changes, versions
from studies.common.renderers import to_markdown
from studies.common.table import Cell, Table, show
from studies.diagnosis_benchmark import gpualert
from studies.diagnosis_benchmark.answers import OF_EVENTS, OF_RANKS, Answer
from studies.diagnosis_benchmark.reliability import calibration_tables
from studies.diagnosis_benchmark.results import TITLES, VARIANTS, JobScores, Results, read_results
from studies.diagnosis_benchmark.scoring import TOPS, macro_f1, mean, micro_f1
from studies.diagnosis_benchmark.written_jobs import WrittenScores, written_tables

COMMAND = "python -m studies.diagnosis_benchmark"
PACKAGES = ("numpy", "scikit-learn", "drain3", "dtaidistance", "regex")
WRITTEN, FIRST_LOOKS, GPUALERT = "written.csv", "first_looks.csv", "gpualert.csv"
#: Tables that are stored as they are shown.
STORED = {
    "held_out": "First looks at held-out real and injected jobs",
    "injected": "Injected jobs: the code before the rebuilding → today",
    "cut": "Written jobs of which a part was cut away",
}
#: Words -> their place in `TOPS`.
TOP = {"first": TOPS.index(1), "among five": TOPS.index(5)}
BETTER_THAN = ("Always rank 0", "Error_time")


def measures(found: Sequence[Results]) -> Table:
    """Measurements beside the goals, which were set before any measurement."""
    columns = pd.DataFrame({results.title: _measured(results) for results in found})
    return Table.of(
        "measures",
        "Real and injected jobs: measured, with the goals",
        columns.rename_axis("What").reset_index(),
        notes=[
            "A goal is met where the number itself reaches it; that of a difference, which is "
            "paired by job, where its whole interval lies above 0. Brackets: 95 % intervals; of "
            "class, outcome and stage by Wilson, of the others by bootstrap over jobs, real ones "
            "of one case together.",
        ],
    )


def _measured(of: Results) -> dict[str, str]:
    goals: list[tuple[str, float | None, Estimate | None]] = [
        ("F1 of events, mean of jobs", 0.90, _f1(of, macro_f1)),
        ("F1 of events, all events", 0.90, _f1(of, micro_f1)),
        ("Faulty rank first", 0.85, _rank(of, TOP["first"])),
        ("Faulty rank among five", 0.97, _rank(of, TOP["among five"])),
        *(
            (f"Faulty rank {words}, more often than {other}", 0.0, _rank(of, place, than=other))
            for words, place in TOP.items()
            for other in BETTER_THAN
        ),
        (
            "Cause class of classified crash logs", 0.90,
            _share(of, lambda job, answer: answer.class_right),
        ),
        ("Outcome", None, _share(of, lambda job, answer: answer.outcome == job.outcome)),
        ("Stage", None, _share(of, lambda job, answer: answer.stage_right)),
    ]  # fmt: skip
    well = sum(job.is_healthy for job in of.jobs)
    return {
        "Jobs: failed or slowed, healthy": f"{len(of.jobs) - well}, {well}",
        **{
            f"{words}, goal {goal:.2f}" if goal else words: _judged(measured, goal)
            for words, goal, measured in goals
        },
        "Healthy jobs accused surely, goal none": _accused(of),
    }


def _judged(measured: Estimate | None, goal: float | None) -> str:
    if measured is None:
        return ""
    missed = goal is not None and not (measured.point >= goal if goal else measured.low > 0)
    return show(measured) + (", not met" if missed else "")


def _accused(of: Results) -> str:
    answers = [job.answers[of.headline] for job in of.jobs if job.is_healthy]
    sure = sum(bool(answer.sure) for answer in answers)
    return f"{sure} of {len(answers)}" + (", not met" if sure else "")


def _f1(of: Results, over: Callable[..., Estimate], title: str | None = None) -> Estimate | None:
    """Over the jobs that did not end well and whose events the method was judged on."""
    answers = [(job, job.answers.get(title or of.headline, Answer())) for job in of.jobs]
    found = [(seen.events, of.drawn_with(job)) for job, seen in answers if seen.events is not None]
    return over(*zip(*found, strict=True)) if found else None


def _share(of: Results, right: Callable[[JobScores, Answer], bool | None]) -> Estimate | None:
    """Share of true values among those that are known."""
    values = [right(job, job.answers[of.headline]) for job in of.jobs]
    known = [value for value in values if value is not None]
    return wilson(sum(known), len(known)) if known else None


def _hits(of: Results, title: str, place: int) -> dict[str, float]:
    """Job -> hit at `TOPS[place]`, of the jobs of which a method was judged on its ranking."""
    found = {job.name: job.answers.get(title, Answer()).ranks for job in of.jobs}
    return {name: hits[place] for name, hits in found.items() if hits is not None}


def _rank(
    of: Results, place: int, title: str | None = None, than: str | None = None
) -> Estimate | None:
    """Share of hits of injected jobs; minus those of the method `than` on the same jobs."""
    found = _hits(of, title or of.headline, place)
    if than is not None:
        theirs = _hits(of, than, place)
        found = {name: hit - theirs[name] for name, hit in found.items() if name in theirs}
    if of.source != "injected" or not found:
        return None
    return mean([*found.values()], [*found])


def methods(found: Sequence[Results]) -> Table:
    """The diagnosis, its ablations and the baselines: events shown, and the faulty rank."""
    titles = (*VARIANTS, *OF_EVENTS, *OF_RANKS)
    columns: dict[str, Sequence[Cell]] = {"Method": titles}
    for of in found:
        columns[f"F1 of events, {of.title}"] = [_f1(of, macro_f1, title) for title in titles]
    for (words, place), of in product(TOP.items(), found):
        if of.source == "injected":
            columns[f"Rank {words}, {of.title}"] = [_rank(of, place, title) for title in titles]
    return Table.of(
        "methods",
        "The diagnosis, parts of it, and baselines",
        pd.DataFrame(columns, dtype=object),
        notes=[
            "F1: mean of jobs; true is an event with a line labelled cause or symptom; one with "
            "echoes or context alone is neither right nor wrong. Rank: a diagnosis without a named "
            "rank is a miss; the baselines rank all, and a tie counts with its expected value.",
            f"Brackets: 95 % intervals by {NUM_RESAMPLES} bootstrap resamples of whole groups (a "
            "real log's case; an injected job by itself). Where all jobs are alike an interval has "
            "no width, which is no certainty.",
        ],
    )


def note(folder: Path, name: str, inputs: dict[str, Any]) -> None:
    """Add to provenance.json: code and inputs; no times, so that a rerun writes the same bytes."""
    path = folder / "provenance.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known[name] = {
        "command": COMMAND,
        "inputs": inputs,
        "commit": commit(),
        "uncommitted_changes": uncommitted_changes(),
        "versions": versions(PACKAGES),
        "bootstrap": {"seed": intervals.SEED, "resamples": intervals.NUM_RESAMPLES},
    }
    text = json.dumps(dict(sorted(known.items())), indent=1, allow_nan=False)
    write_atomically(path, [text.encode(), b"\n"])


def report(folder: Path, page: Path | None) -> list[Table]:
    """All tables of the results in `folder`, put into `page`.

    Those of written jobs are also in written.md, that of the methods in methods.md.

    Raises ValueError: a file of results cannot be used, or the page asks for a table not made.
    """
    found = [
        read_results(path)
        for name in TITLES
        if (path := folder / f"{'_'.join(name)}.json").exists()
    ]
    first, today = (read_rows(folder / name, WrittenScores) for name in (FIRST_LOOKS, WRITTEN))
    written = written_tables(first, today)
    compared = [measures(found), methods(found)] if found else []
    for name, some in (("written", written), ("methods", compared[1:])):
        if some:
            text = "\n".join(to_markdown(table) for table in some)
            write_atomically(folder / f"{name}.md", [text.encode()])
    made = [*written, *calibration_tables(found, first, today), *compared]
    if logs := read_rows(folder / GPUALERT, gpualert.Classified):
        made.append(gpualert.table(logs))
    made += [stored(path) for name in STORED if (path := folder / f"{name}.csv").exists()]
    if page is not None:
        # The page has headings of its own.
        by_name = {table.name: to_markdown(table).partition("\n\n")[2] for table in made}
        fill(page, by_name.get, by_name)
    return made


def stored(path: Path) -> Table:
    return Table.of(path.stem, STORED[path.stem], pd.read_csv(path, keep_default_na=False))
