"""Lines that are none of the log's own cost themselves and nothing else, and that is said."""

from __future__ import annotations

import json

import pytest

from rmetric import Record, RMetricConfig, Run
from rmetric.cli.main import main
from rmetric.logs import LogError, run_lines
from rmetric.logs import read_log as read_own
from tests.readers.test_formats import only, read, said

CRASH = [
    "Traceback (most recent call last):",
    '  File "train.py", line 7, in <module>, step, loss',
    "",
    "torch.OutOfMemoryError: CUDA out of memory, tried to allocate",
]


def jsonl(first: int, last: int) -> list[str]:
    return [json.dumps({"step": s, "loss": 2.0 + 0.01 * (s % 3)}) for s in range(first, last + 1)]


def csv(first: int, last: int) -> list[str]:
    return [f"{s},2.0" for s in range(first, last + 1)]


def own(first: int, last: int) -> list[str]:
    records = [Record(step=s, training_loss=2.0) for s in range(1, last + 1)]
    lines = b"".join(run_lines(Run(id="run", records=records), RMetricConfig()))
    return lines.decode().splitlines()[first:]


HEADS = {jsonl: [], csv: ["step,loss"], own: own(0, 0)}


@pytest.mark.parametrize("lines", HEADS)
def test_a_crash_and_lines_in_one_another_cost_themselves_alone(tmp_path, lines):
    broken = lines(1, 60)[50][:12] + "\x1b[31m, " + lines(1, 61)[60]
    written = [*HEADS[lines], *lines(1, 50), broken, *lines(53, 60), *CRASH]
    run = only(read(tmp_path, "\n".join(written) + "\n"))
    assert [r.step for r in run.records] == [*range(1, 51), *range(53, 61)]
    first = len(HEADS[lines]) + 51
    assert said(run, f"4 lines could not be read and were left out, the first is line {first}: ")
    assert not any("\x1b" in note for note in run.notes)


@pytest.mark.parametrize("lines", HEADS)
def test_a_log_whose_lines_are_mostly_bad_is_refused(tmp_path, lines):
    half = [*HEADS[lines], *lines(1, 5), *["oh, no"] * 4, *lines(6, 9)]
    assert len(only(read(tmp_path, "\n".join(half))).records) == 9
    more = [*HEADS[lines], *lines(1, 4), *["oh, no"] * 8, *lines(5, 6)]
    with pytest.raises(LogError, match=r"8 of \d+ lines could not be read, half are allowed; the "):
        read(tmp_path, "\n".join(more))


def test_what_a_crash_prints_at_the_end_does_not_count_against_the_log(tmp_path):
    run = only(read(tmp_path, "\n".join([*jsonl(1, 5), *["  File x"] * 90, ""])))
    assert len(run.records) == 5
    assert said(run, "90 lines could not be read and were left out, the first is line 6: ")


def test_the_study_s_own_reader_stays_strict(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join([*own(0, 3), "Traceback", *own(4, 4)]) + "\n")
    with pytest.raises(LogError, match="line 5: not JSON"):
        read_own(path)


def test_watch_goes_on_and_says_it_once_and_how_many_at_the_end(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    lines = [*jsonl(1, 40), "loading", *jsonl(41, 60), json.dumps({"step": 61, "loss": 9.0})]
    path.write_text("\n".join([*lines, json.dumps({"step": 62, "loss": 9.0}), *CRASH, ""]))
    code = main(["watch", str(path), "--stop-after", "0", "--detector", "loss_ewma"])
    found = capsys.readouterr()
    assert code == 0
    assert "ALARM run: step 61: " in found.out
    assert "run.jsonl: a line could not be read and was left out, line 41: " in found.err
    assert "run.jsonl: 4 lines could not be read and were left out, the first is" in found.err
