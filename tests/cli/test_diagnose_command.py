"""Command `rmetric diagnose`: output, files and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from datetime import datetime, timedelta

import pytest

import rmetric
from rmetric.cli.diagnose import EXAMPLES, EXIT_CODES, as_json
from rmetric.cli.main import main
from rmetric.diagnosis import decide
from rmetric.diagnosis.report.render import verdict
from rmetric.diagnosis.report.result import OUTCOMES, Diagnosis
from tests.diagnosis.diagnoses import evidence, out_of_memory

OUT_OF_MEMORY = """Traceback (most recent call last):
  File "train.py", line 7, in <module>
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 2 has a total \
capacity of 79.15 GiB of which 1.20 GiB is free.
"""


def stamp(seconds: float) -> str:
    return f"{datetime(2024, 5, 3) + timedelta(seconds=seconds):%Y-%m-%d %H:%M:%S},000"


@pytest.fixture
def broken(tmp_path):
    """A log for each of four ranks; one runs out of memory, and the others wait for it."""
    folder = tmp_path / "broken"
    folder.mkdir()
    for rank in range(4):
        lines = [
            f"{stamp(rank / 10)} INFO initialising process group: rank {rank}, world_size=4",
            f"{stamp(5)} INFO loading the data set",
        ]
        lines += [
            f"{stamp(10 + 3 * step)} INFO step {step} loss {3 - step / 100:.4f} lr 1e-4"
            for step in range(1, 21)
        ]
        waits = (
            f"{stamp(680)} ERROR [Rank {rank}] Watchdog caught collective operation "
            "timeout: WorkNCCL(SeqNum=91, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
            "Timeout(ms)=600000) ran for 600029 milliseconds before timing out.\n"
        )
        end = OUT_OF_MEMORY if rank == 2 else waits
        (folder / f"rank_{rank}.log").write_text("\n".join([*lines, end]))
    return folder


def fake(monkeypatch, diagnosis: Diagnosis) -> list:
    """`diagnose` returns this, and its calls are kept."""
    calls = []

    def diagnose(*given, **named):
        calls.append((given, named))
        return diagnosis

    monkeypatch.setattr(decide, "diagnose", diagnose)
    return calls


def test_a_job_that_ran_out_of_memory(broken, capsys):
    code = main(["diagnose", str(broken)])
    printed = capsys.readouterr()
    first = printed.out.splitlines()[0]
    assert code == EXIT_CODES["failed"] == 3
    assert first.startswith("FAILED")
    assert "rank 2" in first
    assert "memory" in first.lower()
    assert "rank_2.log:23" in printed.out
    assert printed.err == ""
    assert len(printed.out.splitlines()) <= 15


@pytest.mark.parametrize(
    ("last", "message"),
    [(299, "the log stops at step 299 of 5,000"), (4990, "No failure found, last step 4990")],
)
def test_a_log_that_stops_short_is_not_simply_healthy(last, message, tmp_path, capsys):
    log = tmp_path / "train.log"
    log.write_text("".join(f"step {n}/5000 loss 2.5\n" for n in range(last - 50, last + 1)))
    assert main(["diagnose", str(log)]) == 0
    printed = capsys.readouterr().out
    assert message in printed
    assert ("(guess)" in printed) == (last == 299)


def test_json_is_one_document_and_nothing_else(broken, capsys):
    assert main(["diagnose", "--json", str(broken)]) == 3
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document.keys() >= {"cause", "actor", "events", "stage", "iteration", "confidence"}
    assert (document["rmetric"], document["format"]) == (rmetric.__version__, 1)
    assert document["outcome"] == "failed"
    assert document["nodes"][0]["rank"] == 2
    assert printed.err == ""


def test_a_time_without_a_year_is_null_and_as_it_is_written(tmp_path, capsys):
    lines = [f"01-04 02:14:{second:02d} INFO step {second} loss 2.5" for second in range(30)]
    log = tmp_path / "a.log"
    log.write_text("\n".join(lines) + "\n" + OUT_OF_MEMORY)
    main(["diagnose", str(log), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (document["time"], document["clock"]) == (None, "01-04 02:14:29")
    job = document["job"]
    assert (job["last_step_time"], job["last_step_clock"]) == (None, "01-04 02:14:29")
    [stage] = job["stages"]
    assert (stage["time"], stage["clock"]) == (None, "01-04 02:14:00")
    assert job["first_clock"] == "01-04 02:14:00"
    assert document["events"][0]["clock"] == "01-04 02:14:29"
    main(["diagnose", str(log)])
    assert "1970" not in capsys.readouterr().out


def test_json_and_page_are_the_same_each_time_and_with_any_number_of_cores(broken, tmp_path):
    def files(name, *more):
        paths = tmp_path / f"{name}.json", tmp_path / f"{name}.html"
        main(
            ["diagnose", str(broken), "--json-file", str(paths[0]), "--page", str(paths[1]), *more]
        )
        return [path.read_bytes() for path in paths]

    assert files("a", "--jobs", "1") == files("b", "--jobs", "2")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no_such.log"], "no_such.log"),
        (["{log}", "--pool", "no_such.json"], "no_such.json: no such file"),
        (["{log}", "--signatures", "no_such.yaml"], "no_such.yaml: no such file"),
        (["{log}", "--metrics", "{log}"], "--metrics is for --page FILE.html"),
        (["{log}", "--telemetry", "{log}"], "--telemetry is for --page FILE.html"),
        (["{log}", "--json-file", "{log}"], "a file *.json in a folder that is there is accepted"),
        (["{log}", "--page", "{log}"], "a file *.html in a folder that is there is accepted"),
        (["{log}", "--page", "no/such/a.html"], "a folder that is there"),
        (["{log}", "--healthy", "no_such.log"], "no_such.log"),
        (["{log}", "--signatures", "{own}"], "own.yaml"),
        (["{log}", "--page", "{page}", "--telemetry", "{log}"], "rank_2.log"),
    ],
)
def test_wrong_use_is_one_clear_line(arguments, words, broken, tmp_path, capsys):
    log, own, page = broken / "rank_2.log", tmp_path / "own.yaml", tmp_path / "page.html"
    own.write_text("- id: mine\n  role: nonsense\n")
    before = log.read_bytes()
    given = [argument.format(log=log, own=own, page=page) for argument in arguments]
    assert main(["diagnose", *given]) == 2
    assert not page.exists()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert words in printed.err
    assert log.read_bytes() == before


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_each_outcome_has_its_exit_code_and_help_says_it(outcome, monkeypatch, broken, capsys):
    fake(monkeypatch, Diagnosis(outcome=outcome))
    code = main(["diagnose", str(broken)])
    assert code == EXIT_CODES[outcome]
    assert f"{code} {outcome}" in " ".join(EXAMPLES.split())
    assert capsys.readouterr().out == verdict(Diagnosis(outcome=outcome)) + "\n"


def test_options_reach_the_diagnosis(monkeypatch, broken):
    calls, well = fake(monkeypatch, Diagnosis(outcome="healthy")), broken / "rank_0.log"
    main(["diagnose", str(broken), "--healthy", str(well), "--healthy", str(well), "--jobs", "3"])
    given, named = calls[0]
    assert given == ([broken],)
    assert named["healthy"] == [well, well]
    assert (named["pool"], named["signatures"], named["jobs"]) == (None, [], 3)


def test_what_the_library_warns_of_is_a_note(monkeypatch, broken, capsys):
    def diagnose(*given, **named):
        for _ in range(2):
            warnings.warn("own.yaml: slow: switched off", stacklevel=1)
        warnings.warn("not for users", DeprecationWarning, stacklevel=1)
        return Diagnosis(outcome="healthy")

    monkeypatch.setattr(decide, "diagnose", diagnose)
    main(["diagnose", str(broken), "--json"])
    printed = capsys.readouterr()
    assert json.loads(printed.out)["notes"] == ["own.yaml: slow: switched off"]
    assert printed.err == ""


def test_json_and_page_in_files_leave_the_words_on_the_terminal(
    monkeypatch, broken, tmp_path, capsys
):
    fake(monkeypatch, out_of_memory())
    path, page = tmp_path / "verdict.json", tmp_path / "incident.html"
    assert main(["diagnose", str(broken), "--json-file", str(path), "--page", str(page)]) == 3
    assert capsys.readouterr().out == verdict(out_of_memory()) + "\n"
    assert path.read_bytes() == as_json(out_of_memory())
    assert "Lower the micro batch." in page.read_text(encoding="utf-8")


def test_a_failed_write_is_reported_after_the_verdict(monkeypatch, broken, tmp_path, capsys):
    def full(path, lines):
        raise OSError(28, "No space left on device", str(path))

    fake(monkeypatch, out_of_memory())
    monkeypatch.setattr("rmetric.cli.diagnose.write_atomically", full)
    assert main(["diagnose", str(broken), "--page", str(tmp_path / "a.html")]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("FAILED: A GPU ran out of memory")
    assert printed.err.endswith("a.html: No space left on device\n")


def test_an_interrupt_is_no_verdict(monkeypatch, broken, capsys):
    def interrupted(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(decide, "diagnose", interrupted)
    assert main(["diagnose", str(broken)]) == 130
    assert capsys.readouterr().out == ""


def test_json_is_strict_whatever_a_log_brought_along():
    strange = out_of_memory(
        time=float("nan"), events=(evidence(file="r\udcff.log", text="a\x00\x1b\u2028"),)
    )
    document = json.loads(
        as_json(strange).decode("utf-8"), parse_constant=lambda name: pytest.fail(name)
    )
    assert (document["time"], document["clock"]) == (None, "time nan s")
    assert document["events"][0]["file"] == "r?.log"
    assert document["events"][0]["text"] == "a\x00\x1b\u2028"


def test_a_terminal_that_knows_ascii_only_gets_the_words(broken):
    command = [sys.executable, "-m", "rmetric", "diagnose", str(broken / "rank_2.log")]
    environment = {"PYTHONIOENCODING": "ascii", "PATH": ""}
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode == 3, done.stderr
    assert done.stdout.isascii()


def test_standard_input_is_read_as_a_log():
    log = "[rank0]: step 1 loss 2\n[rank1]: step 1 loss 2\n" + OUT_OF_MEMORY
    run = [sys.executable, "-m", "rmetric", "diagnose", "-"]
    done = subprocess.run(run, input=log, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "memory" in done.stdout.splitlines()[0].lower()
    assert "standard-input.log:3" in done.stdout
    assert "/rmetric-" not in done.stdout
    twice = subprocess.run([*run, "-"], input=log, capture_output=True, text=True, check=False)
    assert twice.returncode == 2
    assert "given twice" in twice.stderr
