"""Written jobs: scores, meanings of classes, calibration; their archives, and the commands."""

import csv
import gzip
import hashlib
import io
import json
import os
import tarfile
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from msgspec import structs

from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.model import Model
from rmetric.diagnosis.report.result import Attempt, Candidate, Diagnosis, Suspect
from rmetric.diagnosis.signature import inferred_causes
from studies.common.csv_rows import read_rows, write_rows
from studies.diagnosis_benchmark import cause_meanings as meanings
from studies.diagnosis_benchmark import cut, gpualert, transformed, written_sets
from studies.diagnosis_benchmark.__main__ import main
from studies.diagnosis_benchmark.answers import Answer
from studies.diagnosis_benchmark.cases import JOBS, Case, InjectedJob
from studies.diagnosis_benchmark.fit import Choices, left_out, right_first, shares
from studies.diagnosis_benchmark.reliability import (
    FIRST,
    TODAY,
    Stated,
    calibration_error,
    calibration_tables,
    is_right,
    reliability,
    stated,
)
from studies.diagnosis_benchmark.results import WHOLE, JobScores, Results
from studies.diagnosis_benchmark.written_jobs import REFUSED, WrittenScores, scored, written_tables
from studies.diagnosis_benchmark.written_sets import WrittenCase, WrittenSet, packed, unpacked

KNOWN = [(sig.family, sig.id) for sig in (*SignatureLibrary.shipped(), *inferred_causes().values())]


def known(entry: str) -> bool:
    family, _, pattern = entry.partition("@")[0].partition("/")
    return any(family == group and fnmatchcase(id, pattern or "*") for group, id in KNOWN)


def test_each_class_and_each_injected_kind_has_a_meaning_in_the_library() -> None:
    assert set(meanings.CLASSES) == set(meanings.CAUSES)
    assert set(meanings.GROUPS) == {group for group, _ in meanings.CAUSES.values()}
    injected = read_rows(JOBS / "jobs.csv", InjectedJob)
    assert set(meanings.KINDS) == {row.kind for row in injected} - {""}
    families = {family for family, _ in KNOWN}
    without = {"no cause": meanings.NO_CAUSE}
    for table in (meanings.CLASSES, meanings.GROUPS, meanings.KINDS, without):
        for entries in table.values():
            assert {entry.partition("@")[0].partition("/")[0] for entry in entries} <= families
    for name, entries in meanings.CLASSES.items():
        assert name == "none" or any(map(known, entries)), name


@pytest.mark.parametrize(
    ("answer", "classes", "expected"),
    [
        (meanings.Named("disk_full", "disk full"), ["disk_full"], "right"),
        (meanings.Named("quota_exceeded", "quota"), ["disk_full"], "partly"),
        (meanings.Named("cuda_out_of_memory", "out of GPU memory"), ["disk_full"], "wrong"),
        (meanings.Named(None, ""), ["disk_full"], "unknown"),
        (meanings.Named("torchrun_child_failed", "launcher"), ["disk_full"], "unknown"),
        (meanings.Named("torchrun_child_failed", "launcher"), ["rendezvous"], "unknown"),
        (meanings.Named("training_hung", "hang", "load data"), ["hang_data"], "right"),
        (meanings.Named("training_hung", "hang", "train"), ["hang_data"], "partly"),
        (meanings.Named("training_hung", "hang", "train"), ["hang_data", "hang_stopped"], "right"),
        (meanings.Named("slurm_time_limit", "time limit"), ["hang_data"], "wrong"),
        (meanings.Named("slurm_time_limit", "time limit"), ["cancelled"], "partly"),
        (meanings.Named("name_not_resolved", "network"), ["network_link"], "partly"),
    ],
)
def test_how_right_a_cause_is(answer: meanings.Named, classes: list[str], expected: str) -> None:
    assert meanings.verdict(answer, classes) == expected


def job(**fields: object) -> WrittenCase:
    base = {
        "made_as": "storage", "variant": "full", "outcomes": ["failed"], "causes": ["disk_full"],
        "cause_group": "storage", "stages": ["checkpoint", "train"], "lines": 9,
        "attempts": [{"outcome": "healthy"}, {"outcome": "failed"}],
    }  # fmt: skip
    case = Case(
        name="job-1", group="job-1", folder=Path(), outcome="failed", kind="storage", rank=2,
        node="n1", node_of_rank={0: "n0", 2: "n1"}, cause_class="disk_full",
    )  # fmt: skip
    return WrittenCase(case=case, set="05", manifest={**base, **fields})


#: Neither a rank nor a node is labelled.
NOWHERE = replace(job(), case=replace(job().case, rank=None, node=None))


def attempt(number: int, outcome: str) -> Attempt:
    return Attempt(
        number=number, file="a", line=1, first_time=None, last_time=None, last_step=None,
        outcome=outcome, cause=None, title="", confidence=0.5,
    )  # fmt: skip


def a_diagnosis(**fields: object) -> Diagnosis:
    base = {
        "outcome": "failed", "cause": "cuda_out_of_memory", "family": "out of GPU memory",
        "stage": "train", "confidence": 0.9,
        "nodes": (Suspect(name="node n1", rank=None, node="n1", score=0.9, why=""),),
        "candidates": (Candidate("disk_full", "", 0.5, ""),),
        "attempts": (attempt(1, "failed"), attempt(2, "failed")),
    }  # fmt: skip
    return Diagnosis(**{**base, **fields})  # type: ignore[arg-type]


def test_an_answer_is_scored_on_all_its_parts() -> None:
    found = scored(job(), a_diagnosis())
    assert (found.outcome_right, found.cause, found.cause_at) == (True, "wrong", 2)
    assert (found.first, found.among_five, found.stage_right) == (1.0, 1.0, True)
    assert (found.attempts, found.attempts_found, found.ends_right) == (2, 2, 1)
    whole = scored(job(), a_diagnosis(attempts=(), stage="launch", outcome="healthy", cause=None))
    assert (whole.outcome_right, whole.cause, whole.cause_at) == (False, "unknown", 2)
    assert (whole.stage_right, whole.attempts_found, whole.ends_right) == (False, 1, 0)
    refused = scored(job(), REFUSED)  # logs that are refused are wrong in everything
    assert (refused.outcome_right, refused.cause, refused.cause_at) == (False, "unknown", 0)
    assert (refused.first, refused.attempts_found, refused.states) == (0.0, 0, False)


def test_a_node_counts_where_no_rank_is_labelled() -> None:
    on_node = replace(job(), case=replace(job().case, rank=None))
    assert scored(on_node, a_diagnosis()).first == 1.0
    assert scored(NOWHERE, a_diagnosis()).first is None


def test_the_calibration_error_by_hand() -> None:
    stated_ = ((0.95, True), (0.91, False), (0.55, True), (0.1, False))
    answers = [Stated(*pair, group) for pair, group in zip(stated_, "abcd", strict=True)]
    # The first two are of one bin: |1 - 1.86|; then 0.45 and 0.1.
    assert calibration_error(answers).point == pytest.approx((0.86 + 0.45 + 0.1) / 4)
    assert calibration_error([Stated(1.0, True, "a")]).point == 0.0
    rows = reliability({"x": answers}).rows
    assert [row[1:3] for row in rows] == [("0.0 to 0.2", 1), ("0.5 to 0.6", 1), ("0.9 to 1.0", 2)]


def test_a_fit_ranks_what_was_right_first_and_keeps_to_the_signs() -> None:
    """Two candidates a job: what is right has `sure`; both may have `survived`."""
    jobs = [
        [({"sure": 1.0}, True), ({"survived": 1.0, "nobody": 1.0}, False)],
        [({"sure": 1.0, "survived": 1.0}, True), ({"nobody": 1.0}, False)],
    ] * 20
    choices = Choices.of(jobs)
    weights = choices.fit(np.ones(len(jobs), dtype=bool))
    assert weights["sure"] > 0 > weights["nobody"]
    assert weights.get("survived", 0.0) >= 0  # of suspects no evidence has a weight below 0
    assert right_first(choices, weights).all()
    assert left_out(choices, [f"{at % 4}" for at in range(len(jobs))]).all()
    # Nothing is learnt of what is right in the group alone that is left out.
    only = Choices.of([[({"a": 1.0}, True), ({"b": 1.0}, False)]] * 3)
    assert only.fit(np.zeros(3, dtype=bool)) == {}


def test_shares_rise_with_the_confidence_and_tell_from_where_an_answer_is_sure() -> None:
    good = [scored(job(causes=["cuda_oom"]), a_diagnosis(basis="cause", score=0.9))] * 40
    bad = [scored(job(), a_diagnosis(basis="cause", score=0.6))] * 30
    knots, sure = shares([*good, *bad, scored(job(), REFUSED)])
    (low, few), (high, most) = knots["cause"]
    assert (low, high) == (0.6, 0.9)
    assert few < 0.1
    assert most > 0.95
    assert sure == {"cause": 0.9}


def test_stored_answers_are_limited_by_the_model_of_today() -> None:
    answer = Answer(outcome="failed", cause="slurm_task_failed", family="launcher", confidence=0.45)
    known = JobScores("a", "g", "network", "failed", 1, {WHOLE: answer})
    old = Results(source="injected", split="development", jobs=[known])
    [found] = stated(old)
    assert (found.confidence, found.right) == (0.45, False)
    scored = structs.replace(answer, confidence=0.4, score=0.85, basis="cause")
    [found] = stated(replace(old, jobs=[replace(known, answers={WHOLE: scored})]))
    assert found.confidence == min(0.85, Model.shipped().limit("cause", 0.85)) != 0.4


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
def test_an_answer_without_a_labelled_cause_is_right_by_outcome_and_line(answer, right):
    known = JobScores("a", "g", "", "failed", 1, {})
    given = Answer(**{"outcome": "failed", "family": "disk full", **answer})  # type: ignore[arg-type]
    assert is_right(known, given) is right
    healthy = replace(known, outcome="healthy")
    assert is_right(healthy, given) is (given.outcome == "healthy" and given.cause is None)


def test_scores_come_back_from_their_file_and_a_bad_row_is_named(tmp_path: Path) -> None:
    rows = [scored(job(), a_diagnosis()), scored(NOWHERE, REFUSED)]
    path = tmp_path / "scores.csv"
    write_rows(path, WrittenScores, rows)
    assert read_rows(path, WrittenScores) == rows
    assert read_rows(tmp_path / "none.csv", WrittenScores) == []
    path.write_text(path.read_text().replace("yes", "perhaps", 1))
    with pytest.raises(ValueError, match=r"scores\.csv, line 2: no row of Wri.*'perhaps'"):
        read_rows(path, WrittenScores)


def test_answers_of_first_looks_have_a_row_of_their_own() -> None:
    first = scored(job(), a_diagnosis(basis="cause", score=0.9))
    today = replace(first, cause="right")
    errors, bins = calibration_tables([], [first], [today])
    assert [row[:2] for row in errors.rows] == [(FIRST, 1), (TODAY, 1), ("all of today", 1)]
    assert {row[0] for row in bins.rows} == {FIRST}
    assert calibration_tables([], [first], []) == []


def test_macro_f1_is_the_mean_over_the_classes() -> None:
    def log(mode: str, family: str) -> gpualert.Classified:
        return gpualert.Classified("a", mode, "wild", "failed", "x", family, 0.9)

    right = [log(mode, family) for mode, family in meanings.FAMILIES.items()]
    assert gpualert.macro_f1(right) == 1.0
    other = [*right, log("nccl", "hang"), log("nccl", "out of GPU memory")]
    # Of nccl 1 of 3 is found and nothing else; of cuda_oom 1 of 2 that are named is.
    expected = (len(meanings.FAMILIES) - 2 + 1 / 2 + 2 / 3) / len(meanings.FAMILIES)
    assert gpualert.macro_f1(other) == pytest.approx(expected)
    assert "a (hang), a (out of GPU memory)" in gpualert.table(other).notes[0]


def test_the_gpualert_corpus_is_read_without_the_line_that_tells(tmp_path: Path) -> None:
    text = b"[inject] mode=nan_loss\nstep 1 loss 2.1\nFloatingPointError: loss is nan\n"
    with tarfile.open(tmp_path / "corpus.tar.xz", "w:xz") as tar:
        info = tarfile.TarInfo("corpus/a.log")
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text))
    label = {"id": "a", "mode": "nan_loss", "source": "injected", "log_path": "corpus/a.log"}
    (tmp_path / "labels.jsonl").write_text(json.dumps(label) + "\n")
    out = tmp_path / "out"
    arguments = ["real", "--split", "gpualert", "--logs", str(tmp_path), "--out", str(out)]
    assert main([*arguments, "--jobs", "1"]) == 0
    [found] = read_rows(out / "gpualert.csv", gpualert.Classified)
    assert (found.answer, found.source) == ("nan_loss", "injected")
    (tmp_path / "labels.jsonl").write_text(json.dumps(label | {"mode": "other"}))
    assert main([*arguments, "--jobs", "1"]) == 2
    assert main([*arguments[:4], str(tmp_path / "none"), "--jobs", "1"]) == 2


def test_shares_are_of_the_jobs_that_have_the_label() -> None:
    first = scored(job(), a_diagnosis())
    other = scored(job(stages=[""]), a_diagnosis(cause="disk_full", family="disk full"))
    well = replace(first, outcomes=("healthy",), causes=(), cause="", first=None, stage_right=None)
    sets, parts, misses = written_tables([first, other], [other, other, well])
    rows = {row[0]: dict(zip((column.label for column in sets.columns), row, strict=True))
            for row in sets.rows}  # fmt: skip
    assert list(rows) == ["05", "all numbered"]
    assert rows["05"]["Cause first"] == rows["all numbered"]["Cause first"] == "1 → 2 of 2"
    assert rows["05"]["Stage"] == "1 of 1 → 0 of 0"
    assert rows["05"]["Outcome"] == "2 of 2 → 3 of 3"
    known = {row[0]: row[1] for row in parts.rows}
    assert (known["Healthy: no cause named"], known["Rank or node first"]) == ("0 → 1", "2")
    assert [row[:4] for row in misses.rows] == [("healthy", 1, "0 → 0", "0 → 0"),
                                                ("storage", 2, "0 → 0", "1 → 0")]  # fmt: skip
    assert written_tables([first], []) == []


# -- the archives, the jobs of their first looks, and the commands that judge them

RESULTS = Path(__file__).parents[3] / "studies" / "diagnosis_benchmark" / "results"
SETS = written_sets.written_sets()


def length(path: Path) -> int:
    """Lines of a file, of a cut archive as far as it goes."""
    data = path.read_bytes()
    if data[:2] != b"\x1f\x8b":
        return data.count(b"\n") + 1
    count = 1
    try:
        with gzip.open(io.BytesIO(data)) as file:
            while piece := file.read1(1 << 16):
                count += piece.count(b"\n")
    except EOFError:
        pass
    return count


@pytest.mark.parametrize("name", SETS)
def test_a_set_holds_the_jobs_of_its_first_look_and_labels_of_lines_that_are_there(name, tmp_path):
    jobs = unpacked(SETS[name], tmp_path)
    assert len(jobs) == SETS[name].jobs
    assert written_sets.digest([SETS[name].archive]) == SETS[name].sha256
    for job in jobs:
        meta = job.manifest
        for label in job.case.labels:
            assert 1 <= label.line <= length(job.case.folder / label.file), (job.case.name, label)
        roles = {label.role for label in job.case.labels}
        assert job.case.is_healthy or roles & {"cause", "symptom"}, job.case.name
        assert set(meta["causes"]) <= set(meanings.CAUSES)
        assert (meta["outcomes"][0], meta["causes"][0]) == (meta["outcome"], meta["cause_class"])


def test_each_set_is_an_archive_and_numbered_ones_had_a_first_look() -> None:
    assert [*SETS] == [*(f"{number:02d}" for number in range(1, len(SETS) - 1)),
                       "development", "opened"]  # fmt: skip
    assert {entry.archive for entry in SETS.values()} == set(written_sets.SETS.glob("*.tar.xz"))
    looked = {name for name, entry in SETS.items() if entry.commit and entry.first_look}
    assert looked == {name for name in SETS if name.isdecimal()}
    # The first looks have each job once, and today's answers all sets.
    for file, numbered in (("first_looks.csv", True), ("written.csv", False)):
        rows = read_rows(RESULTS / file, WrittenScores)
        assert len({(row.set, row.job) for row in rows}) == len(rows)
        sets = [entry for entry in SETS.values() if entry.commit or not numbered]
        assert {entry.name: entry.jobs for entry in sets} == pd.Series(
            [row.set for row in rows]
        ).value_counts().to_dict()


def test_set_01_is_that_of_its_seal() -> None:
    sealed, seal = io.BytesIO(), json.loads((RESULTS / "blind_seal.json").read_text())
    with (
        tarfile.open(SETS["01"].archive) as archive,
        tarfile.open(fileobj=sealed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        files = [member for member in archive.getmembers() if member.isfile()]
        for member in sorted(files, key=lambda member: member.name.split("/", 1)):
            info = tarfile.TarInfo(f"sealed/{member.name}")
            info.size = member.size
            tar.addfile(info, archive.extractfile(member))
    assert hashlib.sha256(sealed.getvalue()).hexdigest() == seal["sha256_of_tar"]
    assert seal["set"] == "01"


def test_a_manifest_that_lacks_something_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no job"):
        written_sets.written_jobs(tmp_path)
    (tmp_path / "job-000").mkdir()
    (tmp_path / "job-000" / "manifest.json").write_text('{"outcome": "failed", "labels": []}')
    with pytest.raises(ValueError, match=r"manifest\.json: 'cause_class' is missing"):
        written_sets.written_jobs(tmp_path)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sets, 02 and development, of a job each; returns a folder for results."""
    jobs = unpacked(SETS["development"], tmp_path / "all")
    two = {written.manifest["variant"]: written for written in jobs}
    rows = []
    for name, variant, commit in (("02", "requeued, four", "abc"), ("development", "full", "")):
        folder = tmp_path / "parts" / name
        folder.mkdir(parents=True)
        job = two[variant].case.folder.parent
        job.rename(folder / job.name)
        sha = packed(folder, tmp_path / f"{name}.tar.xz")
        rows.append(WrittenSet(name, "somebody", 1, "2026-01-01" if commit else "", commit, sha))
    with open(tmp_path / "sets.csv", "w", newline="") as file:
        csv.writer(file).writerows([WrittenSet._fields, *rows])
    monkeypatch.setattr(written_sets, "SETS", tmp_path)
    return tmp_path / "out"


def test_packing_keeps_the_jobs_and_not_their_times(small: Path, tmp_path: Path) -> None:
    part = tmp_path / "parts" / "02"
    for path in part.rglob("*"):
        os.utime(path, (0, 7))
    assert packed(part, tmp_path / "again.tar.xz") == written_sets.written_sets()["02"].sha256


def test_the_first_run_of_a_numbered_set_is_kept_as_its_first_look(small, capsys):
    command = ["written", "--out", str(small), "--jobs", "1"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "Number of attempts" in printed
    assert "Expected calibration error" in printed
    today, first = small / "written.csv", small / "first_looks.csv"
    rows = read_rows(today, WrittenScores)
    assert [(row.set, row.cause, row.attempts_found) for row in rows] == [
        ("02", "right", 4), ("development", "right", 1),
    ]  # fmt: skip
    assert [row.set for row in read_rows(first, WrittenScores)] == ["02"]
    write_rows(first, WrittenScores, rows[:0])
    before = today.read_bytes()
    assert main([*command, "--set", "development"]) == 0
    assert today.read_bytes() == before
    assert read_rows(first, WrittenScores) == []
    assert main([*command, "--set", "2"]) == 0
    kept = first.read_bytes().replace(b",yes,right,1,", b",no,wrong,0,")
    assert kept != first.read_bytes()
    first.write_bytes(kept)
    assert main([*command, "--set", "all"]) == 0
    assert first.read_bytes() == kept
    assert today.read_bytes() == before


def test_an_unknown_set_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["written", "--set", "99"])
    assert ended.value.code == 2
    assert "'99'" in capsys.readouterr().err


def test_each_cut_is_a_row_and_the_same_at_each_run(small: Path, tmp_path: Path) -> None:
    for out in ("one.csv", "two.csv"):
        assert cut.main(["--out", str(tmp_path / out), "--jobs", "1"]) == 0
    assert (tmp_path / "one.csv").read_bytes() == (tmp_path / "two.csv").read_bytes()
    found = pd.read_csv(tmp_path / "one.csv", index_col="Logs")
    assert list(found.index) == [*cut.CUTS] == list(pd.read_csv(RESULTS / "cut.csv")["Logs"])
    assert (found["Sure and right"] <= found["Sure"]).all()
    assert found["Jobs"].max() == 2


def test_what_is_cut() -> None:
    lines = [b"line %d" % at for at in range(100)]
    files = {"a.log": b"\n".join([*lines, b""]), "b.json": b"{}\n"}
    for name, change in cut.CUTS.items():
        left = change(files, np.random.default_rng(1))
        if change in (cut.without_one, cut.one_alone):
            assert len(left) == 1
            continue
        kept = left["a.log"].splitlines()
        assert left["b.json"] == files["b.json"], name
        assert 0 < len(kept) < 100, name
        assert set(kept) < set(lines), name


def test_each_transformation_is_a_row_and_the_answers_to_kept_logs_agree(small, tmp_path):
    out = tmp_path / "found.csv"
    assert transformed.main(["--set", "development", "--out", str(out), "--jobs", "1"]) == 0
    found = pd.read_csv(out).set_index("Logs")
    assert list(found.index) == [*transformed.KEPT, *transformed.LOST]
    kept = found[found["Lost"] == "nothing"]
    assert set(kept["Another outcome or cause"]) == {0}


def test_every_transformation_changes_text_and_no_dump() -> None:
    lines = [f'10.0.0.1 "x" /a/b/{at} 12:00:01.5 ' + "y" * 200 for at in range(9)]
    text, dump = ("\n".join([*lines, "  z"]) + "\n").encode(), b"\x80\x04\x95\xff"
    for name, change in {**transformed.KEPT, **transformed.LOST}.items():
        assert transformed.changed("a.log", text, change) != text, name
        assert transformed.changed("trace_0", dump, change) == dump
    assert transformed.changed("a.log", text, None) == text
