"""Scores of the written jobs, the meanings of their classes, and the calibration of answers."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from rmetric.diagnosis.confidence import Basis, calibrated
from rmetric.diagnosis.inferred_causes import INFERRED
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.result import Attempt, Candidate, Diagnosis, Suspect
from rmetric.diagnosis.usual_causes import USUAL
from studies.diagnosis_benchmark.__main__ import main
from studies.diagnosis_benchmark.answers import Answer
from studies.diagnosis_benchmark.blind.cases import WrittenCase
from studies.diagnosis_benchmark.blind.causes import CAUSES
from studies.diagnosis_benchmark.blind.job import dumped
from studies.diagnosis_benchmark.blind.make import TITLES
from studies.diagnosis_benchmark.blind.make import jobs as made_jobs
from studies.diagnosis_benchmark.cases import Case
from studies.diagnosis_benchmark.cause_meanings import (
    CLASSES,
    GROUPS,
    KINDS,
    NO_CAUSE,
    Named,
    verdict,
)
from studies.diagnosis_benchmark.first_answers import answers_of, read_first_answers
from studies.diagnosis_benchmark.first_answers import main as first_answers
from studies.diagnosis_benchmark.fit_confidence import Evidence, cross_validated, evidence_of, fit
from studies.diagnosis_benchmark.injected.plan import KINDS as INJECTED
from studies.diagnosis_benchmark.job_scores import WHOLE, JobScores
from studies.diagnosis_benchmark.reliability import (
    FIRST,
    Stated,
    calibration_error,
    calibration_tables,
    is_right,
    reliability,
    stated,
    stated_on_written,
)
from studies.diagnosis_benchmark.results import Results
from studies.diagnosis_benchmark.written_jobs import (
    WrittenResults,
    load,
    read_written,
    scored,
)
from studies.diagnosis_benchmark.written_tables import scores

RESULTS = Path(__file__).parents[1] / "studies" / "diagnosis_benchmark" / "results"
KNOWN = [(one.family, one.id) for one in (*SignatureLibrary.shipped(), *INFERRED, *USUAL)]


def known(entry: str) -> bool:
    family, _, pattern = entry.partition("@")[0].partition("/")
    return any(family == its and fnmatchcase(id, pattern or "*") for its, id in KNOWN)


def test_each_class_and_each_injected_kind_has_a_meaning_in_the_library() -> None:
    assert set(CLASSES) == set(CAUSES)
    assert set(GROUPS) == {group for group, _ in CAUSES.values()}
    assert set(KINDS) == set(INJECTED)
    families = {family for family, _ in KNOWN}
    for table in (CLASSES, GROUPS, KINDS, {"no cause": NO_CAUSE}):
        for entries in table.values():
            assert {one.partition("@")[0].partition("/")[0] for one in entries} <= families
    for name, entries in CLASSES.items():
        assert name == "none" or any(map(known, entries)), name


def test_each_cause_left_open_has_a_class_and_no_signature_has_its_name() -> None:
    signatures = {one.id for one in SignatureLibrary.shipped()}
    for one in USUAL:
        assert one.id not in signatures
        assert any(Named(one.id, one.family).means(entries) for entries in CLASSES.values()), one


@pytest.mark.parametrize(
    ("answer", "classes", "expected"),
    [
        (Named("disk_full", "disk full"), ["disk_full"], "right"),
        (Named("quota_exceeded", "quota"), ["disk_full"], "partly"),
        (Named("cuda_out_of_memory", "out of GPU memory"), ["disk_full"], "wrong"),
        (Named(None, ""), ["disk_full"], "unknown"),
        (Named("torchrun_child_failed", "launcher"), ["disk_full"], "unknown"),
        (Named("torchrun_child_failed", "launcher"), ["rendezvous"], "unknown"),
        (Named("training_hung", "hang", "load data"), ["hang_data"], "right"),
        (Named("training_hung", "hang", "train"), ["hang_data"], "partly"),
        (Named("training_hung", "hang", "train"), ["hang_data", "hang_stopped"], "right"),
        (Named("slurm_time_limit", "time limit"), ["hang_data"], "wrong"),
        (Named("slurm_time_limit", "time limit"), ["cancelled"], "partly"),
        (Named("name_not_resolved", "network"), ["network_link"], "partly"),
    ],
)
def test_how_right_a_cause_is(answer: Named, classes: list[str], expected: str) -> None:
    assert verdict(answer, classes) == expected


def job(**told: object) -> WrittenCase:
    base = {
        "made_as": "storage", "variant": "full", "outcomes": ["failed"], "causes": ["disk_full"],
        "cause_group": "storage", "stages": ["checkpoint", "train"], "lines": 9,
        "attempts": [{"outcome": "healthy"}, {"outcome": "failed"}],
    }  # fmt: skip
    case = Case(
        name="job-1", group="job-1", folder=Path(), outcome="failed", kind="storage", rank=2,
        node="n1", node_of_rank={0: "n0", 2: "n1"}, cause_class="disk_full",
    )  # fmt: skip
    return WrittenCase(case=case, told={**base, **told})


def attempt(number: int, outcome: str) -> Attempt:
    return Attempt(
        number=number, file="a", line=1, first_time=None, last_time=None, last_step=None,
        outcome=outcome, cause=None, title="", confidence=0.5,
    )  # fmt: skip


def said(**fields: object) -> Diagnosis:
    base = {
        "outcome": "failed", "cause": "cuda_out_of_memory", "family": "out of GPU memory",
        "stage": "train", "confidence": 0.9,
        "nodes": (Suspect(name="node n1", rank=None, node="n1", score=0.9, why=""),),
        "candidates": (Candidate("disk_full", "", 0.5, ""),),
        "attempts": (attempt(1, "failed"), attempt(2, "failed")),
    }  # fmt: skip
    return Diagnosis(**{**base, **fields})  # type: ignore[arg-type]


def test_an_answer_is_scored_on_all_its_parts() -> None:
    found = scored(job(), said())
    assert (found.outcome_right, found.cause, found.cause_at) == (True, "wrong", 2)
    assert (found.where, found.stage_right) == ([1.0] * 4, True)
    assert (found.attempts, found.attempts_found, found.ends_right) == (2, 2, 1)
    whole = scored(job(), said(attempts=(), stage="launch", outcome="healthy", cause=None))
    assert (whole.outcome_right, whole.cause, whole.cause_at) == (False, "unknown", 2)
    assert (whole.stage_right, whole.attempts_found, whole.ends_right) == (False, 1, 0)


def test_a_node_counts_where_no_rank_is_labelled() -> None:
    base = job()
    on_node = replace(base, case=replace(base.case, rank=None))
    assert scored(on_node, said()).where == [1.0] * 4
    nowhere = replace(base, case=replace(base.case, rank=None, node=None))
    assert scored(nowhere, said()).where is None


def test_shares_are_of_the_jobs_that_have_the_label() -> None:
    one = scored(job(), said())
    other = scored(job(stages=[""]), said(cause="disk_full", family="disk full"))
    healthy = replace(one, outcomes=("healthy",), causes=(), cause="", where=None, stage_right=None)
    table = scores(WrittenResults(split="development", jobs=[one, other, healthy], made={}))
    rows = {(what, word): (number, total) for what, word, number, total, _ in table.rows}
    assert rows["Cause", "right"] == (2, 1)
    assert rows["Cause", "right, among 5"] == (2, 2)
    assert rows["Stage", "right"] == (1, 1)
    assert rows["Rank or node", "among the first 1"] == (2, 2)
    assert rows["Healthy", "no cause named"] == (1, 0)


def test_the_calibration_error_by_hand() -> None:
    answers = [
        Stated(0.95, True, "a"),
        Stated(0.91, False, "b"),
        Stated(0.55, True, "c"),
        Stated(0.1, False, "d"),
    ]
    # The first two are of one bin: |1 - 1.86|; then 0.45 and 0.1.
    assert calibration_error(answers).point == pytest.approx((0.86 + 0.45 + 0.1) / 4)
    assert calibration_error([Stated(1.0, True, "a")]).point == 0.0
    rows = reliability({"x": answers}).rows
    assert [row[1:3] for row in rows if row[0] == "all"] == [
        ("0.0 to 0.2", 1),
        ("0.5 to 0.6", 1),
        ("0.9 to 1.0", 2),
    ]


def test_a_fit_is_monotone_and_its_validation_leaves_the_group_out() -> None:
    good = [Evidence("cause", 0.9, True, f"{n % 8}", "good") for n in range(40)]
    bad = [Evidence("cause", 0.6, n % 8 in (0, 1), f"{n % 8}", "bad") for n in range(40)]
    alone = [Evidence("hang", 0.7, False, "other", "hang")] * 20
    answers = [*good, *bad, *alone]
    table = fit(answers)
    (low, few), (high, most) = table["cause"]
    assert (low, high) == (0.6, 0.9)
    assert 0.25 < few < 0.35 < 0.95 < most <= 0.98
    assert "hang" not in table  # of one case, which decides nothing: it keeps its score
    validated = cross_validated(answers, lambda one: one.case)
    assert len(validated) == len(answers)
    assert {one.confidence for one in validated if one.group == "other"} == {0.7}
    # The right ones of `bad` are of two cases, which are judged by the others.
    least = min(one.confidence for one in validated if one.group == "0")
    assert least < min(one.confidence for one in validated if one.group == "2")


def test_the_command_scores_written_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, files, told in made_jobs("development", 1):
        if told["variant"] in ("full", "requeued, four"):
            folder = tmp_path / "jobs" / "development" / name
            for path, data in files.items():
                (folder / "logs" / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / "logs" / path).write_bytes(data)
            (folder / "manifest.json").write_bytes(dumped(told))
    monkeypatch.chdir(tmp_path)
    arguments = ["written", "--written", "jobs", "--out", "out", "--jobs", "1"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "Several attempts" in printed
    assert "Expected calibration error" in printed
    results = read_written(tmp_path / "out" / "written_development.json")
    assert [one.attempts_found for one in results.jobs if one.attempts > 1] == [4]
    assert all(one.cause == "right" for one in results.jobs)
    assert (tmp_path / "out" / "reliability.csv").exists()
    results.write(tmp_path / "again")
    again = (tmp_path / "again" / "written_development.json").read_bytes()
    assert again == (tmp_path / "out" / "written_development.json").read_bytes()


def test_a_folder_without_jobs_and_an_unknown_split_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no job"):
        load("development", tmp_path)
    with pytest.raises(
        ValueError,
        match="'other'; development, sealed, second, third, fourth, fifth, sixth, seventh, "
        "eighth, ninth, tenth, eleventh, twelfth, thirteenth, fourteenth, fifteenth, "
        "sixteenth, seventeenth, eighteenth, nineteenth, twentieth, twentyfirst, twentysecond, "
        "twentythird, twentyfourth, twentyfifth, twentysixth, opened",
    ):
        load("other", tmp_path)
    bad = tmp_path / "written_development.json"
    bad.write_text("{}")
    with pytest.raises(ValueError, match="not written by this command"):
        read_written(bad)


def test_stored_answers_are_calibrated_by_the_table_of_today() -> None:
    answer = Answer(outcome="failed", cause="slurm_task_failed", family="launcher", confidence=0.45)
    known = JobScores(
        name="a", group="g", kind="network", outcome="failed", published_outcome="", stage="",
        cause_class="", rank=None, world_size=None, with_healthy=0, lines=1,
        answers={WHOLE: answer},
    )  # fmt: skip
    old = Results(source="injected", split="development", jobs=[known], made={})
    [found] = stated(old)
    assert (found.confidence, found.right) == (calibrated(Basis("symptom"), 0.45), False)
    scored = replace(answer, confidence=0.4, score=0.85, basis="cause")
    [found] = stated(replace(old, jobs=[replace(known, answers={WHOLE: scored})]))
    assert found.confidence == calibrated(Basis("cause"), 0.85) != 0.4


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ({"cause": None, "outcome": "failed"}, True),
        ({"cause": None, "outcome": "healthy"}, False),
        ({"cause": "disk_full", "line_right": True}, True),
        ({"cause": "disk_full", "line_right": False}, False),
        ({"cause": "disk_full", "class_right": False, "line_right": True}, False),
    ],
)
def test_an_answer_without_a_labelled_cause_is_right_by_outcome_and_line(
    answer: dict[str, object], right: bool
) -> None:
    known = JobScores(
        name="a", group="g", kind="", outcome="failed", published_outcome="", stage="",
        cause_class="", rank=None, world_size=None, with_healthy=0, lines=1, answers={},
    )  # fmt: skip
    said = Answer(**{"outcome": "failed", "family": "disk full", **answer})  # type: ignore[arg-type]
    assert is_right(known, said) is right
    healthy = replace(known, outcome="healthy")
    assert is_right(healthy, said) is (said.outcome == "healthy" and said.cause is None)


def test_the_answers_of_a_first_look_are_kept_once(tmp_path: Path) -> None:
    scores = RESULTS / "written_tenth.json"
    kept = tmp_path / "first.csv"
    assert first_answers([str(scores), "--out", str(kept)]) == 0
    once = kept.read_bytes()
    assert first_answers([str(scores), "--out", str(kept)]) == 0
    assert kept.read_bytes() == once
    answers = read_first_answers(kept)
    assert answers == answers_of(scores)
    assert [(one.kind, one.score, one.right) for one in evidence_of(kept)] == [
        (one.basis, one.score, one.right) for one in answers
    ]


def test_a_bad_row_of_first_answers_is_named(tmp_path: Path) -> None:
    kept = tmp_path / "first.csv"
    kept.write_text("split,job,kind,basis,score,right\na,b,c,cause,0.9,perhaps\n")
    with pytest.raises(ValueError, match=r"first\.csv, line 2"):
        read_first_answers(kept)


def test_answers_of_first_looks_have_a_row_of_their_own() -> None:
    first = [Stated(0.7, False, "a"), Stated(0.9, True, "b")]
    results = read_written(RESULTS / "written_tenth.json")
    answers = len(stated_on_written(results))
    of_errors, of_bins = calibration_tables([], [results], first)
    assert [(row[0], row[1]) for row in of_errors.rows] == [
        (FIRST, 2), (results.title, answers), ("all", answers),
    ]  # fmt: skip
    assert {row[0] for row in of_bins.rows} == {FIRST, results.title, "all"}
    assert calibration_tables([], [], first) == []


def test_no_two_sets_have_one_title() -> None:
    """The table of the confidence has a row for each title."""
    assert len(set(TITLES.values())) == len(TITLES)
