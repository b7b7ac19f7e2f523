"""The verdict on the labelled public logs, which were at hand while its rules were made."""

from __future__ import annotations

import csv
from collections import Counter

from rmetric import Record
from rmetric.evaluation import judge_run
from rmetric.readers import read_log
from tests.authors_data import DATA, LOGS, needs_training_logs

pytestmark = needs_training_logs


def number(cell: str) -> float | None:
    return float(cell) if cell else None


def records(run: str) -> list[Record]:
    with open(LOGS / "parsed" / f"{run}.csv", newline="") as file:
        return [
            Record(step=int(float(row["step"])), training_loss=number(row["train_loss"]),
                   validation_loss=number(row["eval_loss"]))
            for row in csv.DictReader(file)
        ]  # fmt: skip


def test_a_language_model_that_learns_nothing_is_not_healthy():
    (run,) = read_log(DATA / "training_logs_2" / "06_slm_lightning_v7.csv").runs
    assert judge_run(run.records).text == "LEARNS NOTHING: the loss does not fall"


def test_labels_and_verdicts_agree_as_docs_verdict_states():
    found: Counter[tuple[str, str]] = Counter()
    late = {}
    with open(LOGS / "labels.csv", newline="") as file:
        for row in csv.DictReader(file):
            if not (LOGS / "parsed" / f"{row['run']}.csv").is_file():
                continue
            verdict = judge_run(records(row["run"]))
            found[row["label"], verdict.severity] += 1
            if row["onset_step"] and verdict.onset_step is not None and verdict.severity == "bad":
                late[row["run"]] = verdict.onset_step - float(row["onset_step"])
    assert found["healthy", "bad"] == 0
    assert found["healthy", "warning"] <= 3
    assert found["nan", "bad"] == 3
    assert found["diverged", "bad"] >= 9
    assert found["spike-recovered", "bad"] == 0
    assert found["spike-recovered", "warning"] >= 16
    assert sum(abs(steps) <= 50 for steps in late.values()) >= 0.6 * len(late), late
