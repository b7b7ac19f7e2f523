"""`rmetric logs learn`."""

from __future__ import annotations

import pytest

from rmetric.cli.main import main
from rmetric.diagnosis import ingest
from rmetric.diagnosis.pool import Pool
from tests.diagnosis.test_ingest import healthy_lines, traceback, write


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def learn(*arguments):
    return main(["logs", "learn", *arguments])


def test_each_path_is_a_job(here, capsys):
    write(here / "one" / "rank_0.log", healthy_lines(0))
    write(here / "one" / "rank_1.log", healthy_lines(1))
    write(here / "two.log", healthy_lines(0))
    assert learn("--job", "llama", "one", "two.log") == 0
    pool = Pool.load(here / "llama.json")
    assert (pool.name, pool.jobs, pool.stages) == ("llama", 2, {"train": 1.0})
    out, err = capsys.readouterr()
    assert out == "2 jobs, 240 lines, 2 events: llama.json\n"
    assert err == ""


OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB."
CANCELLED = "slurmstepd: error: *** JOB 77 ON node-01 CANCELLED AT 2024-05-03T02:14:07 ***"


@pytest.mark.parametrize(
    ("others", "end", "why"),
    [
        ([[]], traceback(0), "FAILED: GPU out of memory"),
        ([], [OUT_OF_MEMORY], ""),
        ([], [CANCELLED], ""),
        ([], [f"step {step} loss nan" for step in range(81, 85)], ""),
        ([["INFO training completed successfully"]], [], "it does not say that"),
    ],
)
def test_a_job_that_failed_or_does_not_end_like_the_others_is_warned_of(
    here, capsys, others, end, why
):
    write(here / "bad.log", [*healthy_lines(), *end])
    for lines in others:
        write(here / "good.log", [*healthy_lines(), *lines])
    assert learn("--job", "x", *["good.log"] * len(others), "bad.log") == 0
    err = capsys.readouterr().err
    assert f"warning: bad.log: this job does not look healthy: {why}" in err
    assert "good.log" not in err


def test_from_an_empty_log_nothing_is_learnt(here, capsys):
    write(here / "good.log", healthy_lines())
    (here / "empty.log").write_text("\n")
    assert learn("--job", "x", "good.log", "empty.log") == 1
    assert capsys.readouterr() == ("", "error: empty.log: empty: there is nothing to learn from\n")
    assert not (here / "x.json").exists()


def test_an_interrupt_leaves_no_pool(here, capsys, monkeypatch):
    def interrupted(*given, **named):
        raise KeyboardInterrupt

    write(here / "a.log", healthy_lines())
    monkeypatch.setattr(ingest, "ingest", interrupted)
    assert learn("--job", "x", "a.log") == 130
    assert capsys.readouterr() == ("", "stopped: no pool was written\n")
    assert [path.name for path in here.iterdir()] == ["a.log"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--job", "x", "none.log"], 1, "none.log"),
        (["--job", "a/b", "a.log"], 2, "--job 'a/b' cannot name a file: give one with --out"),
        (["--job", " ", "a.log"], 2, "--job: a name is needed"),
        (["--job", "x", "a.log", "--out", "none/x.json"], 1, "--out none/x.json: no such folder"),
        (["--job", "x", "a.log", "--out", "."], 1, "error: ."),
    ],
)
def test_bad_input(here, capsys, arguments, code, words):
    write(here / "a.log", healthy_lines())
    assert learn(*arguments) == code
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert words in err
    assert len(err.splitlines()) == 1
