"""Each job of the corpus has its expected diagnosis, which only a change of the job alters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from rmetric.cli.main import main
from rmetric.diagnosis import Diagnosis, diagnose
from rmetric.diagnosis.ingest import ingest
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.report.result import SURE
from studies.diagnosis_benchmark.corpus import CorpusJob, corpus, expanded, write

ALL = list(corpus())
assert len({job.name for job in ALL}) == len(ALL), "two jobs have one name"
#: Those that test only which rank logged what.
LAYOUTS = {job.name: job for job in ALL if job.expected.keys() <= {"ranks", "streams"}}
JOBS = {job.name: job for job in ALL if job.name not in LAYOUTS}

#: Field of `expected` -> the same of a diagnosis. Where these are lists, any of them is right.
ANSWERS: dict[str, Callable[[Diagnosis], Any]] = {
    **{
        name: attrgetter(name)
        for name in ("outcome", "cause", "family", "stage", "iteration", "since", "time", "basis")
    },
    "attempt": attrgetter("attempt"),
    "first": lambda found: found.nodes[0].name if found.nodes else None,
    "node": lambda found: found.nodes[0].node if found.nodes else None,
    "sure": lambda found: found.confidence >= SURE,
}
#: Field of `says` and `says_not` -> the words in which these stand, or do not.
WORDS: dict[str, Callable[[Diagnosis], str]] = {
    "title": lambda found: found.title,
    "why": lambda found: found.why,
    "summary": lambda found: found.summary,
    "notes": lambda found: "\n".join(found.notes),
    "who": lambda found: "\n".join(suspect.why for suspect in found.nodes),
    "candidates": lambda found: "\n".join(candidate.why for candidate in found.candidates),
    "events": lambda found: "\n".join(event.text for event in found.events),
}


def wrong(found: Diagnosis, expected: Mapping[str, Any]) -> list[str]:
    """What is not as expected, in words."""
    errors = []
    for field, right in expected.items():
        answer, is_right = _judged(found, field, right)
        if not is_right:
            errors.append(f"{field} is {answer!r}, expected {right!r}")
    return errors


def _judged(found: Diagnosis, field: str, right: Any) -> tuple[Any, bool]:
    if field in ANSWERS:
        answer = ANSWERS[field](found)
        return answer, answer in right if isinstance(right, list) else answer == right
    if field.removeprefix("not_") in ANSWERS:
        answer = ANSWERS[field.removeprefix("not_")](found)
        return answer, answer not in right
    names = [suspect.name for suspect in found.nodes]
    causes = [candidate.cause for candidate in found.candidates]
    match field:
        case "who":
            return names, names == right
        case "not_who":
            return names, not {*names} & {*right}
        case "candidates":
            return causes, causes[: len(right)] == right
        case "not_candidates":
            return causes, not {*causes} & {*right}
        case "at_least":
            return found.confidence, found.confidence >= right
        case "at_most":
            return found.confidence, found.confidence < right
        case "attempts" if isinstance(right, int):
            return len(found.attempts), len(found.attempts or [None]) == right
        case "attempts":
            return found.attempts, _have(found.attempts, right, exactly=True)
        case "events":
            return found.events, _have(found.events, right, exactly=False)
        case "job":
            seconds = (found.job["last_time"] or 0.0) - (found.job["first_time"] or 0.0)
            return found.job, right.items() <= {**found.job, "seconds": seconds}.items()
        case "says" | "says_not":
            missing = [
                (where, text)
                for where, texts in right.items()
                for text in texts
                if (text in WORDS[where](found)) is (field == "says_not")
            ]
            return {where: WORDS[where](found) for where, _ in missing}, not missing
    raise ValueError(f"expected has a field {field!r}, which nothing checks")


def _have(entries: Any, right: list[dict[str, Any]], *, exactly: bool) -> bool:
    """Whether entries have these fields in order; a text or a file may be a part of it."""
    if len(entries) < len(right) or (exactly and len(entries) != len(right)):
        return False
    return all(
        value in getattr(entry, name) if name in ("text", "file") else value == getattr(entry, name)
        for entry, fields in zip(entries, right, strict=False)
        for name, value in fields.items()
    )


def layout(job: CorpusJob, folder: Path) -> dict[str, Any]:
    """Files of each rank, and nodes of all that log, as they are read."""
    streams = ingest([write(job.files, folder)], SignatureLibrary.shipped()).streams
    return {
        "ranks": {log.rank: sorted(log.files) for log in streams.values() if log.rank is not None},
        "streams": {name: log.node for name, log in streams.items()},
    }


def diagnosed(job: CorpusJob, folder: Path) -> Diagnosis:
    healthy = [write(job.healthy, folder / "healthy")] if job.healthy else []
    return diagnose([write(job.files, folder / "job")], healthy=healthy, attempt=job.attempt)


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_and_nodes_are_those_that_the_lines_state(name: str, tmp_path: Path) -> None:
    expected, found = LAYOUTS[name].expected, layout(LAYOUTS[name], tmp_path)
    assert expected
    assert {field: found[field] for field in expected} == expected


def cases(jobs: Mapping[str, CorpusJob]) -> list[Any]:
    """Names of jobs; one that is known to be missed must be missed."""
    missed = pytest.mark.xfail(strict=True, reason="a known miss")
    return [pytest.param(name, marks=[missed] if job.miss else []) for name, job in jobs.items()]


@pytest.mark.parametrize("name", cases(JOBS))
def test_a_job_has_the_diagnosis_that_is_right(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    found = diagnosed(job, tmp_path)
    assert job.expected
    assert not wrong(found, job.expected)
    assert all(suspect.why for suspect in found.nodes)
    assert found.cause is None or all(
        candidate.confidence <= found.confidence for candidate in found.candidates
    )


#: Unrelated lines, such as a shell prints before a training begins.
SHELL = """\
total 12
-rw-r--r-- 1 ada users  412 train.sbatch
drwxr-xr-x 2 ada users 4096 configs
Activating the environment of the project
"""
RANKED = re.compile(r"^\[rank(\d+)\]: ", re.MULTILINE)


def begin_with_shell(files: dict[str, str]) -> dict[str, str]:
    return {name: SHELL + text for name, text in files.items()}


def end_lines_as_windows(files: dict[str, str]) -> dict[str, str]:
    return {name: text.replace("\r", "").replace("\n", "\r\n") for name, text in files.items()}


def in_another_order(files: dict[str, str]) -> dict[str, str]:
    return dict(reversed(files.items()))


def of_mpirun(files: dict[str, str]) -> dict[str, str]:
    """The label before the lines of ranks as another launcher writes it."""
    return {
        name: RANKED.sub(lambda found: f"[1,{found[1]}]<stdout>:", text)
        for name, text in files.items()
    }


#: Each so manieth job that a change changes is tried.
SAMPLE = 4


def same(before: Diagnosis, after: Diagnosis) -> bool:
    first, second = ([found.rank for found in each.nodes[:1]] for each in (before, after))
    return (before.outcome, before.cause, first) == (after.outcome, after.cause, second)


@pytest.mark.parametrize(
    "change", [begin_with_shell, end_lines_as_windows, in_another_order, of_mpirun]
)
def test_what_is_no_news_changes_no_sure_answer(
    change: Callable[[dict[str, str]], dict[str, str]], tmp_path: Path
) -> None:
    # By which lines a log begins is the point of some.
    jobs = [job for job in JOBS.values() if not job.healthy and "a head of" not in job.name]
    plain = [(job, expanded(job.files)) for job in jobs]
    changed = [(job, files) for job, files in plain if [*change(files).items()] != [*files.items()]]
    num_sure, others = 0, []
    for number, (job, files) in enumerate(changed[::SAMPLE]):
        folder = write(files, tmp_path / f"{number}")
        before = diagnose([folder], attempt=job.attempt)
        if before.confidence < SURE:
            continue
        num_sure += 1
        write(change(files), folder)
        paths = [folder / name for name in change(files)]
        others += [job.name] if not same(before, diagnose(paths, attempt=job.attempt)) else []
    assert num_sure >= 5
    assert others == []


def test_an_attempt_is_counted_from_either_end(tmp_path: Path, capsys) -> None:
    folder = write(
        JOBS["the last attempt is diagnosed and the others are listed: 1"].files, tmp_path
    )
    assert diagnose(folder, attempt=-2) == diagnose(folder, attempt=2)
    assert main(["diagnose", str(folder), "--attempt", "4"]) == 2
    message = "attempt is 4: these logs have 3; 1 to 3 or -3 to -1 is accepted"
    assert message in capsys.readouterr().err


def test_loops_are_written_out() -> None:
    text = "%% 2 n 2 r\n<5+r>: <10:59:58+3n> <08+n%9> <3.00-.5n> <x>\n%%\nend <1+n>"
    assert expanded({"rank_<7+f> %% 2 f": text, "b": "%% 1 n\n<2024-02-28 23:59:59+2n>\n%%"}) == {
        f"rank_{rank}": "5: 10:59:58 08 3.00 <x>\n6: 10:59:58 08 3.00 <x>\n"
        "5: 11:00:01 00 2.50 <x>\n6: 11:00:01 00 2.50 <x>\nend <1+n>"
        for rank in (7, 8)
    } | {"b": "2024-02-28 23:59:59"}
