"""`rmetric logs learn`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmetric.__main__ import main
from rmetric.diagnosis.pool import Pool
from tests.test_diagnosis_ingest import healthy_lines, traceback, write


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def learn(*arguments: str) -> int:
    return main(["logs", "learn", *arguments])


def test_each_path_is_a_job(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here / "one" / "rank_0.log", healthy_lines(0))
    write(here / "one" / "rank_1.log", healthy_lines(1))
    write(here / "two.log", healthy_lines(0))
    assert learn("--job", "llama", "one", "two.log") == 0
    pool = Pool.load(here / "llama.json")
    assert (pool.name, pool.jobs, pool.stages) == ("llama", 2, {"train": 1.0})
    out, err = capsys.readouterr()
    assert out == "2 jobs, 240 lines, 2 events: llama.json\n"
    assert err == ""


def test_out_names_the_file(here: Path) -> None:
    write(here / "a.log", healthy_lines())
    assert learn("--job", "a/b", "a.log", "--out", "mine.json") == 0
    assert Pool.load("mine.json").name == "a/b"


def test_a_failed_job_is_warned_of(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here / "good.log", healthy_lines())
    write(here / "bad.log", [*healthy_lines(), *traceback(0)])
    assert learn("--job", "x", "good.log", "bad.log") == 0
    err = capsys.readouterr().err
    assert "warning: bad.log: this job looks failed: cuda_out_of_memory (bad.log, line 81)" in err
    assert "good.log" not in err


def test_the_same_logs_give_the_same_bytes(here: Path) -> None:
    write(here / "a.log", healthy_lines())
    learn("--job", "x", "a.log", "--out", "one.json")
    learn("--job", "x", "a.log", "--out", "two.json")
    assert (here / "one.json").read_bytes() == (here / "two.json").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--job", "x", "none.log"], 1, "none.log"),
        (["--job", "a/b", "a.log"], 2, "--job 'a/b' cannot name a file: give one with --out"),
        (["--job", " ", "a.log"], 2, "--job: a name is needed"),
        (["--job", "x", "a.log", "--out", "none/x.json"], 1, "none"),
    ],
)
def test_bad_input(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    write(here / "a.log", healthy_lines())
    assert learn(*arguments) == code
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert words in err
    assert len(err.splitlines()) == 1


def test_cores_are_a_number_from_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        learn("--job", "x", "a.log", "--cores", "0")
    assert "a number from 1 is accepted" in capsys.readouterr().err
