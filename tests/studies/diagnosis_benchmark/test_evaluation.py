"""Benchmark of the diagnosis: scores, baselines, aggregates and tables, on made-up jobs."""

import gzip
import hashlib
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.facts.job import STAGES as OUR_STAGES
from rmetric.diagnosis.facts.job import Job
from rmetric.diagnosis.ingest import ingest
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.report.result import SURE, Diagnosis, Evidence, Suspect
from studies.common.csv_rows import read_rows, write_rows
from studies.diagnosis_benchmark import answers, cause_meanings, restart_advice, scoring
from studies.diagnosis_benchmark.__main__ import main
from studies.diagnosis_benchmark.answers import Answer, nodes_of, of_diagnosis, ranks_of
from studies.diagnosis_benchmark.cases import (
    INJECTED,
    Case,
    InjectedJob,
    Label,
    injected_jobs,
    real_jobs,
)
from studies.diagnosis_benchmark.cases import JOBS as ARCHIVES
from studies.diagnosis_benchmark.reading import LogLine, Read, read
from studies.diagnosis_benchmark.results import (
    ALONE,
    VARIANTS,
    WHOLE,
    JobScores,
    Results,
    read_results,
    score_job,
)
from studies.diagnosis_benchmark.scoring import TOPS, Counts, event_counts, hits
from studies.diagnosis_benchmark.tables import measures, report
from studies.diagnosis_benchmark.written_sets import packed, written_sets

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "studies" / "diagnosis_benchmark" / "results"
PAGE = ROOT / "docs" / "diagnosis_evaluation.md"

EVENTS = {("a", 1): 0, ("a", 2): 1, ("a", 3): 2, ("a", 4): 3, ("a", 5): 0}


def labelled(**roles: str) -> list[Label]:
    """`a3="cause"`: line 3 of file a."""
    return [Label(file=at[0], line=int(at[1:]), role=role) for at, role in roles.items()]


def test_an_event_is_true_by_any_of_its_lines_and_neutral_by_echo_or_context() -> None:
    labels = labelled(a5="cause", a2="echo", a3="context")
    shown = [("a", 1), ("a", 2), ("a", 3), ("a", 4)]
    assert event_counts(labels, shown, EVENTS) == Counts(found=1, wrong=1, missed=0)
    assert event_counts(labels, [], EVENTS) == Counts(0, 0, 1)
    assert event_counts(labelled(b7="symptom"), [], EVENTS) == Counts(0, 0, 1)
    assert event_counts([], [("b", 9)], EVENTS) == Counts(0, 1, 0)


def test_hits_among_ties_are_the_mean_over_all_orders() -> None:
    assert TOPS == (1, 3, 5, 8)
    assert hits([[3], [5]], 5) == [0.0, 1.0, 1.0, 1.0]
    assert hits([[1, 2], [5]], 2) == [0.5, 1.0, 1.0, 1.0]
    assert hits([[1], [2, 3, 4, 5]], 4) == [0.0, 0.5, 1.0, 1.0]
    assert hits([[3], [4]], 5) == [0.0] * 4


LINES = [
    LogLine(("a", number), who, time, text)
    for number, (who, text, time) in enumerate(
        [
            (0, "starting", None), (2, "ERROR: no route", 20.0), (1, "Traceback", 5.0),
            (1, "RuntimeError: lost", 10.0), (2, "failed again", 30.0),
            (None, "fatal: the launcher", 1.0), (0, "   ", None),
        ],
        start=1,
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("title", "clocks", "ranking"),
    [
        ("Error_time", True, [[1], [2], [0, 3]]),
        ("Error_time", False, [[2], [1], [0, 3]]),
        ("Error_count", True, [[2], [1], [0, 3]]),
        ("Random", True, [[0, 1, 2, 3]]),
        ("Always rank 0", True, [[0], [1], [2], [3]]),
    ],
)
def test_who_is_suspect_by_a_baseline(title: str, clocks: bool, ranking: list[list[int]]) -> None:
    lines = LINES if clocks else [line._replace(time=None) for line in LINES]
    assert answers.OF_RANKS[title](lines, [0, 1, 2, 3]) == ranking


def test_grep_and_last_lines() -> None:
    assert [place[1] for place in answers.grep(LINES)] == [2, 4, 5, 6]
    many = [LogLine(("a", n), 0, None, "x" if n < 16 else " ") for n in range(1, 17)]
    assert [place[1] for place in answers.last_lines(many)] == list(range(6, 16))


def test_each_class_is_right_by_one_family_only_and_stages_are_ours() -> None:
    assert len(set(cause_meanings.FAMILIES.values())) == len(cause_meanings.FAMILIES)
    known = {signature.family for signature in SignatureLibrary.shipped()}
    assert set(cause_meanings.FAMILIES.values()) <= known
    assert cause_meanings.class_is_right("cuda_oom", "out of GPU memory")
    assert not cause_meanings.class_is_right("cuda_oom", "host out of memory")
    assert not cause_meanings.class_is_right("a new class", "")
    assert set().union(*cause_meanings.STAGES.values()) <= set(OUR_STAGES)
    assert cause_meanings.stages_of("data loading (after run_start)") == ("load data",)
    assert cause_meanings.stages_of("") == ()
    assert cause_meanings.stages_of("somewhere") == ()
    assert cause_meanings.faulty_rank("rank 12") == 12
    nobody = "all ranks; torchrun names local_rank as first failure"
    assert cause_meanings.faulty_rank(nobody) is None


def case(**known: object) -> Case:
    base = {
        "name": "j", "group": "g", "folder": Path(), "outcome": "failed",
        "node_of_rank": {0: "n0", 1: "n0", 2: "n1", 3: "n1"}, "world_size": 4,
        "rank": 3, "node": "n1",
    }  # fmt: skip
    return Case(**{**base, **known})  # type: ignore[arg-type]


def suspect(rank: int | None, node: str | None = None) -> Suspect:
    return Suspect(name="x", rank=rank, node=node, score=0.9, why="")


def evidence(number: int) -> Evidence:
    return Evidence(
        role="cause", signature="s", why="", template="", text="", file="a", line=number,
        time=None, who=(), count=1,
    )  # fmt: skip


READ = Read(job=Job(), event_of=EVENTS)


def test_a_named_node_stands_for_its_ranks_and_a_rank_for_its_node() -> None:
    diagnosis = Diagnosis(outcome="failed", nodes=(suspect(2), suspect(None, "n1"), suspect(0)))
    assert ranks_of(case(), diagnosis) == [[2], [3], [0]]
    assert nodes_of(case(), diagnosis) == [["n1"], ["n0"]]
    assert of_diagnosis(case(), READ, diagnosis).ranks == [0.0, 1.0, 1.0, 1.0]


def test_a_diagnosis_is_scored_on_all_that_is_known() -> None:
    known = case(
        cause_class="nan_loss", stage="iterating", labels=tuple(labelled(a1="cause", a2="symptom"))
    )
    diagnosis = Diagnosis(
        outcome="failed", cause="nan", family="nan loss", stage="evaluate", confidence=SURE,
        events=(evidence(5), evidence(4)),
    )  # fmt: skip
    answer = of_diagnosis(known, READ, diagnosis)
    assert answer.events == Counts(found=1, wrong=1, missed=1)
    assert (answer.class_right, answer.stage_right, answer.sure) == (True, True, True)
    assert answer.line_right


def test_sure_of_a_failure() -> None:
    well = case(outcome="healthy", rank=None, node=None)
    for diagnosis, sure in (
        (Diagnosis(outcome="healthy", confidence=0.97), False),
        (Diagnosis(outcome="failed", confidence=SURE - 0.01), False),
        (Diagnosis(outcome="failed", confidence=SURE), True),
        (Diagnosis(outcome="unknown", cause="x", confidence=SURE), True),
        (Diagnosis(outcome="unknown", confidence=SURE), False),
    ):
        answer = of_diagnosis(well, READ, diagnosis)
        assert (answer.sure, answer.events) == (sure, None)


def test_sums_by_hand() -> None:
    some = [Counts(2, 1, 1), Counts(0, 0, 0), Counts(1, 0, 3)]
    assert scoring.micro_f1(some, "abc").point == pytest.approx(2 * 3 / (2 * 3 + 1 + 4))
    assert scoring.macro_f1(some, "abc").point == pytest.approx((2 * 2 / 6 + 2 / 5) / 2)
    # Jobs of one group are drawn together.
    alone, alike = (scoring.mean([0.0, 0.0, 1.0, 1.0], groups) for groups in ("abcd", "aaaa"))
    assert alone.low < 0.5 < alone.high
    assert alike == (0.5, 0.5, 0.5)


FINE = Answer(outcome="healthy", confidence=0.9, sure=False)


def failed(number: int, right: bool) -> JobScores:
    answer = Answer(
        events=Counts(2, 1 - right, 0), ranks=[1.0] * 4 if right else [0.0, 0.0, 0.0, 1.0],
        outcome="failed", cause="x", class_right=right, confidence=0.9, sure=True,
    )  # fmt: skip
    others = {
        "Always rank 0": Answer(ranks=[0.0] * 4),
        "Error_time": Answer(ranks=[0.0, 0.5, 0.5, 1.0]),
        "Grep for errors": Answer(events=Counts(1, 3, 1)),
    }
    answered = dict.fromkeys(VARIANTS, answer) | others
    return JobScores(f"job-{number}", "g", "kill", "failed", 10, answered)


def results(wrong: int = 1) -> Results:
    jobs = [failed(number, right=number >= wrong) for number in range(10)]
    jobs += [
        JobScores(f"job-{number}", "g", "", "healthy", 10, dict.fromkeys(VARIANTS, FINE))
        for number in range(10, 14)
    ]
    return Results(source="injected", split="held_out", jobs=jobs)


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    first = results()
    first.write(tmp_path)
    again = read_results(tmp_path / "injected_held_out.json")
    assert again == first
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="not written by this command"):
        read_results(tmp_path / "x.json")


def test_goals_are_judged_by_what_was_measured() -> None:
    def cells(of: Results) -> dict[str, str]:
        return {str(what): str(cell) for what, cell in measures([of]).rows}

    good, bad = cells(results(wrong=0)), cells(results(wrong=4))
    assert not any("not met" in cell for cell in good.values())
    missed = [what for what, cell in bad.items() if cell.endswith(", not met")]
    assert "Faulty rank first, goal 0.85" in missed
    assert "Faulty rank among five, goal 0.97" in missed
    assert "Faulty rank among five, more often than Error_time" in missed
    assert "Cause class of classified crash logs, goal 0.90" in missed
    assert "Faulty rank first, more often than Always rank 0" not in missed
    assert bad["Healthy jobs accused surely, goal none"] == "0 of 4"
    assert bad["Jobs: failed or slowed, healthy"] == "10, 4"
    of = results()
    of.jobs[-1].answers[WHOLE] = Answer(outcome="failed", confidence=0.9, sure=True)
    assert cells(of)["Healthy jobs accused surely, goal none"] == "1 of 4, not met"
    # Better than Error_time needs the whole interval above nothing.
    of = results(wrong=0)
    for job in of.jobs[1:10]:
        job.answers["Error_time"] = Answer(ranks=[1.0] * 4)
    assert "not met" in cells(of)["Faulty rank first, more often than Error_time"]


def test_the_page_is_that_of_the_results_and_is_short(tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "results"
    shutil.copytree(RESULTS, folder)
    text = PAGE.read_text(encoding="utf-8")
    page.write_text(re.sub(r"(<!-- begin \w+ -->\n).*?(<!-- end -->)", r"\1\2", text, flags=re.S))
    report(folder, page)
    assert page.read_text(encoding="utf-8") == text
    for name in ("written.md", "methods.md"):
        assert (folder / name).read_text() == (RESULTS / name).read_text()
    assert len(text.splitlines()) <= 300
    changed = pd.read_csv(RESULTS / "transformed.csv", index_col="Logs")
    kept = changed[changed["Lost"] == "nothing"]["Another outcome or cause"]
    assert (
        f"of {changed['Jobs'].max()} written jobs at most {kept.max()} get another outcome or "
        "cause by a change that loses nothing."
    ) in " ".join(text.split())


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """A job of the injector, whose first line names the fault; one of two ranks; a healthy one."""
    content = {
        "crash/inject__nan.log": b"injecting nan\nstep 1\nFloatingPointError: nan\n",
        "two/n/rank_0.log": b"fine\n",
        "two/n/rank_1.log.gz": b"fine\nValueError: bad\n",
        "two/well.log": b"done\n",
    }
    for name, text in content.items():
        path = tmp_path / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    names = list(content)
    rows = [
        (names[0], "a", "A", "development", "failed", "failed", "iterating", "nan_loss", ""),
        (names[1], "b", "B", "development", "terminated", "failed", "", "", "rank 1"),
        (names[2], "b", "B", "development", "terminated", "failed", "", "", "rank 1"),
        (names[3], "c", "B", "development", "healthy", "healthy", "", "", ""),
        ("not/there.log", "d", "D", "held_out", "failed", "failed", "", "", ""),
    ]
    columns = "file job case split outcome published_outcome stage cause_class faulty"
    frame = pd.DataFrame(rows, columns=columns.split())
    frame["sha256"] = [hashlib.sha256(content.get(name, b"")).hexdigest() for name in frame["file"]]
    frame.to_csv(path := tmp_path / "failure_logs.csv", index=False)
    labels = pd.DataFrame({"file": [names[0], names[2]], "line": [3, 2], "role": "cause"})
    labels.to_csv(tmp_path / "failure_labels_development.csv", index=False)
    return path


def test_real_jobs_are_laid_out_without_what_tells_or_are_errors(manifest, tmp_path):
    logs = tmp_path / "logs"
    first, second, third = real_jobs("development", logs, tmp_path / "work", manifest)
    assert [path.name for path in first.folder.iterdir()] == ["job.log"]
    assert (first.folder / "job.log").read_bytes() == b"step 1\nFloatingPointError: nan\n"
    assert first.labels == (Label(file="job.log", line=2, role="cause"),)
    assert second.labels == (Label(file="rank_1.log.gz", line=2, role="cause"),)
    assert (second.rank, second.outcome) == (1, "terminated")
    assert second.healthy == (third.folder,)
    assert third.healthy == ()
    assert third.is_healthy
    (logs / "two" / "well.log").write_bytes(b"changed\n")
    (tmp_path / "failure_labels_held_out.csv").write_text("file,line,sha256,role,reason\n")
    for split, words in (
        ("development", r"well\.log.*sha256"),
        ("held_out", r"there\.log.*--logs"),
        ("test", "development and held_out are accepted"),
    ):
        with pytest.raises(ValueError, match=words):
            real_jobs(split, logs, tmp_path / "work", manifest)


TEXT = "[rank3]: step 1\n[rank3]: ValueError: 3 apples\n" * 3


def put(folder: Path, *rows: InjectedJob) -> None:
    """An archive of each split and jobs.csv; every job has the same logs."""
    write_rows(folder / "jobs.csv", InjectedJob, rows)
    for row in rows:
        logs = folder / row.split / row.job / "node-00"
        logs.mkdir(parents=True)
        (logs / "rank_3.log").write_text(TEXT)
        packed(folder / row.split, folder / f"{row.split}.tar.xz")


def injected(job: str, *, split: str = "development", **other: object) -> InjectedJob:
    base = {
        "judged": True, "group": "d00", "outcome": "failed", "kind": "hang", "variant": "stopped",
        "stage": "train", "step": 3, "rank": 3, "world_size": 8, "ranks_per_node": 4,
        "cause": "", "symptom": "", "echo": "", "context": "",
    }  # fmt: skip
    return InjectedJob(split=split, job=job, **{**base, **other})  # type: ignore[arg-type]


def test_injected_jobs_that_cannot_be_used_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"development\.tar\.xz"):
        injected_jobs("development", tmp_path, tmp_path / "work")
    with pytest.raises(ValueError, match="development, held_out, blind are accepted"):
        injected_jobs("test", tmp_path, tmp_path / "work")
    labels = injected("a", cause="node-00/rank_3.log:2,4-5", context="a:7;b:1").labels()
    assert [(label.file, label.line, label.role) for label in labels] == [
        *(("node-00/rank_3.log", line, "cause") for line in (2, 4, 5)),
        ("a", 7, "context"), ("b", 1, "context"),
    ]  # fmt: skip
    put(tmp_path, injected("job-000", outcome="lost"))
    with pytest.raises(ValueError, match=r"jobs\.csv: outcome is 'lost'; healthy, failed"):
        injected_jobs("development", tmp_path, tmp_path / "work")


@pytest.mark.parametrize("split", INJECTED)
def test_the_archive_of_injected_jobs_is_whole(split: str, tmp_path: Path) -> None:
    jobs = injected_jobs(split, ARCHIVES, tmp_path)
    rows = read_rows(ARCHIVES / "jobs.csv", InjectedJob)
    known = {row.job: row for row in rows if row.split == split}
    assert {path.name for path in tmp_path.iterdir()} == known.keys()
    assert 0.2 < sum(job.is_healthy for job in jobs) / len(jobs) < 0.3
    for job in jobs:
        row = known[job.name]
        assert (job.kind, job.rank, job.stage, job.group) == (
            row.kind, row.rank, row.stage, row.group,
        )  # fmt: skip
        assert job.rank is None or job.node == f"node-{job.rank // row.ranks_per_node:02d}"
        assert {known[path.name].group for path in job.healthy} == {job.group}
        assert len(job.healthy) == 3
        assert job.is_healthy == (job.rank is None)
        roles = {label.role for label in job.labels}
        assert not (roles and job.is_healthy), job.name
        # Without times of ranks, nothing shows a slow one.
        assert roles & {"cause", "symptom"} or job.is_healthy or job.kind == "slow", job.name
        texts = {path.relative_to(job.folder).as_posix(): path.read_bytes()
                 for path in job.folder.rglob("*") if path.is_file()}  # fmt: skip
        for label in job.labels:
            assert 1 <= label.line <= texts[label.file].count(b"\n"), (job.name, label)


def test_the_blind_jobs_are_judged_alone(tmp_path, monkeypatch, capsys):
    put(tmp_path, injected("job-000", split="blind"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("studies.diagnosis_benchmark.__main__.JOBS", tmp_path)
    arguments = ["--split", "blind", "--out", "out", "--jobs", "1"]
    assert main(["injected", *arguments]) == 0
    assert "six later kinds" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "out").glob("*.json")}
    assert names == {"injected_blind.json", "provenance.json"}
    assert main(["real", *arguments]) == 2
    assert "split is 'blind'" in capsys.readouterr().err


TORN = """\
[rank0]: 2026-01-02 03:04:05,000 INFO step 1 loss 2.5
[rank1]: 2026-01-02 03:04:05,100 INFO step 1 loss 2.5
[rank1]: Traceback (most recent call last):
[rank0]: 2026-01-02 03:04:06,000 INFO step 2 loss 2.4
[rank1]:   File "train.py", line 7, in <module>
[rank1]:     main(3)

[rank1]: ValueError: 3 apples
[rank0]: 2026-01-02 03:04:09,000 ERROR lost rank 1
"""


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    folder = tmp_path / "torn"
    folder.mkdir()
    (folder / "job.log").write_text(TORN)
    return folder


def test_each_line_has_the_event_of_its_entry(torn: Path) -> None:
    seen = read(torn, SignatureLibrary.shipped())
    event = {number: seen.event_of.get(("job.log", number)) for number in range(1, 10)}
    assert event[1] == event[2] == event[4]
    assert event[3] == event[5] == event[6] == event[8] != event[9]
    assert event[7] is None
    assert "ValueError" in seen.job.events[event[3] or 0].template
    assert [line.rank for line in seen.lines] == [0, 1, 1, 0, 1, 1, None, 1, 0]
    assert [line.time is None for line in seen.lines].count(True) < 9


def test_the_recorded_pass_is_the_pass(torn: Path) -> None:
    (torn / "other.log").write_text("".join(f"tick {n} of 9\n" for n in range(200)) + "Killed\n")
    seen, job = read(torn, SignatureLibrary.shipped()), ingest([torn], SignatureLibrary.shipped())
    assert [(event.template, event.counts) for event in seen.job.events] == [
        (event.template, event.counts) for event in job.events
    ]
    ticks = {at for (file, line), at in seen.event_of.items() if file == "other.log" and line < 200}
    assert len(ticks) == 1
    assert job.events[ticks.pop()].count == 200


def test_a_job_is_judged_by_what_diagnose_says(torn: Path, tmp_path: Path) -> None:
    well = tmp_path / "well"
    well.mkdir()
    steps = "".join(
        f"[rank{rank}]: INFO step {step} loss 2.5\n" for step in range(9) for rank in (0, 1)
    )
    (well / "job.log").write_text(steps)
    known = case(
        folder=torn, healthy=(well,), rank=1, node=None, world_size=2, node_of_rank={},
        labels=(Label(file="job.log", line=8, role="cause"),),
    )  # fmt: skip
    out = score_job(known)
    seen = read(torn, SignatureLibrary.shipped())
    assert out.answers[WHOLE] == of_diagnosis(known, seen, diagnose([torn], healthy=[well]))
    assert out.answers[ALONE] == of_diagnosis(known, seen, diagnose([torn]))
    assert out.answers["Grep for errors"].events == Counts(1, 1, 0)
    assert out.answers["Error_count"].ranks == [0.5, 1.0, 1.0, 1.0]


def test_the_command_from_logs_to_tables(manifest, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("studies.diagnosis_benchmark.__main__.MANIFEST", manifest)
    monkeypatch.chdir(tmp_path)
    arguments = ["real", "--logs", "logs", "--out", "out", "--jobs", "1"]
    assert main(arguments) == 0
    assert "Cause class" in capsys.readouterr().out
    before = (tmp_path / "out" / "real_development.json").read_bytes()
    assert main(arguments) == 0
    assert (tmp_path / "out" / "real_development.json").read_bytes() == before
    assert main([*arguments[:2], "nowhere", *arguments[3:]]) == 2
    assert "is not there; name the logs' folder by --logs" in capsys.readouterr().err


def test_agreement_of_restart_advice_with_both_choices_and_what_goes_wrong() -> None:
    labels = [
        {"action": action, "also": also, "nodes": nodes}
        for action, also, nodes in (
            ("stop", "", ""), ("stop", "restart", ""), ("restart", "", ""), ("restart", "", ""),
            ("restart_without", "", "a b"), ("restart_without", "", "a"),
        )
    ]  # fmt: skip
    given = [
        ("restart", set()), ("restart", set()), ("stop", set()), ("", set()),
        ("restart_without", {"a", "b"}), ("restart_without", {"c"}),
    ]  # fmt: skip
    assert restart_advice.row(labels, given) == (6, 2, 3, 1, 1, 1)
    stored = pd.read_csv(restart_advice.LABELS)
    assert stored["job"].nunique() == len(stored) == 250
    assert set(stored["job"].str.partition("/")[0]) <= set(written_sets())
    assert set(stored["action"]) == {"stop", "restart", "restart_without"}
