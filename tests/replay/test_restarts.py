"""Restarts in a log and between logs: what was lost is named, and a good resume is not blamed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rmetric import Record, Run
from rmetric.cli.main import main
from rmetric.replay.restarts import Restarts

SAVED, REACHED, END = 250, 300, 500


def rate(step: int) -> float:
    return 1e-3 * min(step / 40, 0.5 * (1 + np.cos(np.pi * step / 1000)))


def losses(steps: np.ndarray, seed: int = 0) -> np.ndarray:
    noise = 0.03 * np.random.default_rng(seed).standard_normal(END + 1)[steps]
    return 2 + 3 * np.exp(-steps / 80) + noise


def run(lost: str = "", seed: int = 0, source: str = "run.jsonl", parts: str = "both") -> Run:
    """A run that stopped at step 300 and was taken up from its checkpoint of step 250."""
    before, after = np.arange(1, REACHED + 1), np.arange(SAVED + 1, END + 1)
    since = after - SAVED
    values = losses(after, seed)
    rates = [rate(int(step)) for step in after]
    if lost == "weights":
        values = losses(since, seed)
    elif lost == "moments":
        values = values + 0.8 * np.exp(-since / 8)
    elif lost == "data":
        values = values - 0.3
    elif lost == "another state":
        values = values + 0.3
    elif lost == "scheduler":
        rates = [rate(int(step)) for step in since]
    elif lost == "rate":
        rates = [1e-3] * len(after)
    first = [*zip(before, losses(before, seed), map(rate, map(int, before)), strict=True)]
    second = [*zip(after, values, rates, strict=True)]
    rows = {"both": first + second, "first": first[:SAVED], "second": second}[parts]
    records = [
        Record(step=int(step), training_loss=float(loss), learning_rate=float(lr))
        for step, loss, lr in rows
    ]
    return Run(id="run", records=records, source=Path(source))


MEANINGS = {
    "": "",
    "weights": "the loss begins as that of an untrained model: usually the weights were lost",
    "moments": "steps: usually the optimizer's moments were lost",
    "data": "the loss is lower than before: usually batches that were trained on come again",
    "another state": "is not back at the end of the log: usually other weights or other data",
    "scheduler": "the rate warms up again: usually the scheduler began anew",
    "rate": "the rate is another: usually the scheduler was not restored, if it is not planned",
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lost", MEANINGS)
def test_what_was_lost_is_named(lost, seed):
    (restart,) = Restarts().of(run(lost, seed))
    assert (restart.step, restart.reached) == (SAVED + 1, REACHED)
    assert restart.meaning.endswith(MEANINGS[lost])
    assert bool(restart.meaning) == bool(lost)


@pytest.mark.parametrize("lost", MEANINGS)
def test_two_logs_of_one_run_are_compared(lost):
    restarts = Restarts()
    assert restarts.of(run(source="logs/run_1/log.csv", parts="first")) == []
    (restart,) = restarts.of(run(lost, source="logs/run_2_resumed/log.csv", parts="second"))
    assert (restart.reached, restart.log) == (SAVED, "log.csv")
    assert restart.meaning.endswith(MEANINGS[lost]) or lost == "data"  # no same steps, less to see


def test_a_rise_says_when_the_loss_was_back():
    (restart,) = Restarts().of(run("moments"))
    assert "the loss rises to" in restart.meaning
    steps = int(restart.meaning.split("is back after ")[1].split()[0])
    assert 8 <= steps <= 40


def test_logs_that_may_be_of_other_runs_are_not_compared():
    second = {"source": "b_2.csv", "parts": "second"}
    for others in (["a_1.csv"], ["b_1.csv", "b_3.csv"], []):
        restarts = Restarts()
        for source in others:
            restarts.of(run(source=source, parts="first"))
        assert restarts.of(run("weights", **second)) == []
    restarts = Restarts()
    restarts.of(run(source="b_1.csv", parts="first"))
    other = run(source="b_2.csv", parts="first")
    assert restarts.of(other) == [], "it begins at the beginning"


def test_what_is_no_restart_and_what_proves_nothing():
    interleaved = [Record(step=s + 7 * (s % 2), training_loss=2.0) for s in range(200)]
    assert Restarts().of(Run(id="a", records=interleaved)) == []
    few = [Record(step=s, training_loss=2.0) for s in (1, 2, 3, 4, 5, 6, 3, 4)]
    assert Restarts().of(Run(id="b", records=few)) == []
    assert Restarts().of(Run(id="c", records=[Record(step=1, validation_loss=1.0)])) == []


def test_losses_that_are_not_finite_and_rates_that_are_missing_end_nothing():
    lost = run("weights")
    for record in lost.records[:20]:
        record.learning_rate = None
    for record in lost.records[-249:]:
        record.training_loss = float("nan")
    (restart,) = Restarts().of(lost)
    assert (restart.loss, restart.meaning) == (None, "")


def test_console_summary_and_page_have_it(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    rows = [
        {"step": r.step, "loss": r.training_loss, "lr": r.learning_rate}
        for r in run("scheduler").records
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(["replay", str(path), "--out", str(tmp_path / "out"), "--plots", "none"])
    words = "restart at step 251 after step 300: loss 2.1"
    assert words in capsys.readouterr().out
    summary = json.loads((tmp_path / "out/run/summary.json").read_text())
    (restart,) = summary["restarts"]
    assert restart["meaning"] == MEANINGS["scheduler"]
    assert restart["rate"][1] < 0.1 * restart["rate"][0]
    page = (tmp_path / "out/run/report.html").read_text()
    assert "<h2>Restarts</h2>" in page
    assert MEANINGS["scheduler"] in page


@pytest.mark.parametrize(
    ("name", "first", "joined"),
    [("run_resumed.jsonl", SAVED - 20, True), ("run_2.jsonl", SAVED, True),
     ("run_2.jsonl", SAVED - 20, False), ("other.jsonl", SAVED, False)],
)  # fmt: skip
def test_a_run_in_two_logs_is_judged_as_one(tmp_path, capsys, name, first, joined):
    """One that begins before the other's end may be another run, unless its name says otherwise."""
    folder = tmp_path / "logs"
    folder.mkdir()
    courses = {"run_1.jsonl": np.arange(1, SAVED + 1), name: np.arange(first + 1, END + 1)}
    courses["run_resumed.jsonl" if "resumed" in name else name] = courses.pop(name)
    if "resumed" in name:
        courses["run.jsonl"] = courses.pop("run_1.jsonl")
    for log, steps in courses.items():
        values = losses(steps) + (steps > 450)  # it fails long after the restart
        rows = zip(steps.tolist(), values.tolist(), strict=True)
        text = "".join(json.dumps({"step": s, "loss": v}) + "\n" for s, v in rows)
        (folder / log).write_text(text)
    out = tmp_path / "out"
    main(["replay", str(folder), "--out", str(out)])
    output = capsys.readouterr().out
    assert ("1 run: " in output, "judged as one run" in output) == (joined, joined)
    summaries = [json.loads(path.read_text()) for path in out.glob("*/summary.json")]
    if joined:
        [summary] = summaries
        assert (summary["first_step"], summary["last_step"]) == (1, END)
        assert summary["num_records"] == END + SAVED - first
        assert summary["restarts"][0]["step"] == first + 1
        (page,) = out.glob("*/report.html")
        assert all(log in page.read_text() for log in courses), "the command reads both"
    else:
        assert len(summaries) == 2
