"""Run every method on every job: logs are read once, each variant decides on them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from rmetric.diagnosis.decide import decide
from rmetric.diagnosis.evidence import Switches
from rmetric.diagnosis.facts.job import Job
from rmetric.diagnosis.ingest import ingest
from rmetric.diagnosis.library import SignatureLibrary
from studies.common.processes import mapped
from studies.diagnosis_benchmark.answers import of_baselines, of_diagnosis
from studies.diagnosis_benchmark.cases import Case
from studies.diagnosis_benchmark.reading import read
from studies.diagnosis_benchmark.results import VARIANTS, JobScores


def score_job(case: Case) -> JobScores:
    """All methods on one job."""
    library, seen = _library(), read(case.folder, _library())
    healthy = [_healthy(folder) for folder in case.healthy]
    answers = {}
    for title, off in VARIANTS.items():
        switches = Switches(**dict.fromkeys(off, False))
        said = decide(seen.job, library, healthy, switches=switches)
        answers[title] = of_diagnosis(case, seen, said)
    return JobScores(
        name=case.name,
        group=case.group,
        kind=case.kind,
        outcome=case.outcome,
        published_outcome=case.published_outcome,
        stage=case.stage,
        cause_class=case.cause_class,
        rank=case.rank,
        world_size=case.world_size,
        with_healthy=len(case.healthy),
        lines=seen.job.lines,
        answers=answers | of_baselines(case, seen),
    )


def score_all(cases: Sequence[Case], processes: int) -> list[JobScores]:
    """In the order of the cases. Those of a group come one after another: they share siblings."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    done = mapped(_score_group, groups.values(), processes=processes)
    by_name = {judged.name: judged for of_group in done for judged in of_group}
    return [by_name[case.name] for case in cases]


def _score_group(cases: Sequence[Case]) -> list[JobScores]:
    return [score_job(case) for case in cases]


@lru_cache(maxsize=1)
def _library() -> SignatureLibrary:
    return SignatureLibrary.shipped()


@lru_cache(maxsize=32)
def _healthy(folder: Path) -> Job:
    return ingest([folder], _library())
