"""Replay on logs that nobody here wrote, against values read from them by somebody else."""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from math import isnan, nan
from pathlib import Path

import pytest

from rmetric import Record, Run
from rmetric.replay import read_log
from rmetric.replay.scored_run import score_run

DATA = Path(os.environ.get("RMETRIC_DATA", Path(__file__).parents[2] / "shared" / "data"))
LOGS = DATA / "training_logs"
SUFFIXES = (".json", ".jsonl", ".csv")

pytestmark = pytest.mark.skipif(
    not (LOGS / "labels.csv").is_file(),
    reason="real logs are absent: put them in ../shared/data or name them with RMETRIC_DATA",
)

Row = tuple[float, ...]


def labelled_runs() -> dict[str, list[dict[str, str]]]:
    """The rows of labels.csv by the file that the run is in."""
    by_file = defaultdict(list)
    if (LOGS / "labels.csv").is_file():
        with open(LOGS / "labels.csv", newline="") as file:
            for row in csv.DictReader(file):
                if row["local_file"].endswith(SUFFIXES):
                    by_file[row["local_file"]].append(row)
    return dict(sorted(by_file.items()))


def parsed(run: str) -> dict[str, list[Row]]:
    """What the parsed file holds: training and evaluation rows, None for not logged."""
    rows: dict[str, list[Row]] = {"train": [], "eval": []}
    names = {"train": ("step", "train_loss", "grad_norm"), "eval": ("step", "eval_loss")}
    with open(LOGS / "parsed" / f"{run}.csv", newline="") as file:
        for row in csv.DictReader(file):
            cells = (row[name] for name in names[row["kind"]])
            rows[row["kind"]].append(tuple(float(cell) if cell else None for cell in cells))
    return rows


def replayed(records: list[Record]) -> dict[str, list[Row]]:
    return {
        "train": [
            (r.step, r.training_loss, r.gradient_norm)
            for r in records
            if r.training_loss is not None or r.gradient_norm is not None
        ],
        "eval": [(r.step, r.validation_loss) for r in records if r.validation_loss is not None],
    }


def corrected(run: str, rows: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """The parsed rows, where we read the published bytes otherwise; see each reason."""
    if run.startswith("algoperf_"):
        # The closing line holds the final score and no evaluation: nothing became nan there.
        step, loss = rows["eval"].pop()
        assert isnan(loss)
        assert step >= rows["eval"][-1][0]
    if run.startswith("sweep_"):
        # The last line of each run logs no gradient norm: its cell is blank and not nan.
        step, loss, norm = rows["train"].pop()
        assert isnan(norm)
        rows["train"].append((step, loss, None))
    if run == "snimu_pythia_6":
        # It has 64 training entries and 15 evaluations, spread evenly when parsed. By the
        # tokens that the log counts for both there is one after each 4th of the first 60.
        evaluations = [loss for _, loss in rows["eval"]]
        norms = [norm for _, _, norm in rows["train"] if norm is not None]
        assert len(evaluations) == len(norms) == 15
        rows["eval"] = [(4 * i + 3, loss) for i, loss in enumerate(evaluations)]
        at = {4 * i + 3: norm for i, norm in enumerate(norms)}
        rows["train"] = [(step, loss, at.get(step)) for step, loss, _ in rows["train"]]
    return rows


def comparable(rows: list[Row]) -> list[tuple]:
    """nan as a word, which equals itself."""
    return [tuple("nan" if v is not None and isnan(v) else v for v in row) for row in rows]


def records_of(runs: list[Run], label: dict[str, str]) -> list[Record]:
    """The records of one labelled run, with the parts of a file that holds it twice joined."""
    name, stem = label["run_id_in_file"], Path(label["local_file"]).stem
    ids = {f"{stem}__{name}", f"{stem}__row{name}"}
    return [r for run in runs if not name or run.id in ids for r in run.records]


def test_the_real_logs_are_all_there():
    files = {path.name for path in (LOGS / "raw").iterdir() if path.suffix in SUFFIXES}
    assert files == {Path(file).name for file in labelled_runs()}
    assert len(files) >= 50


@pytest.mark.parametrize("file", labelled_runs())
def test_a_real_log_reads_as_it_was_parsed(file):
    runs = read_log(LOGS / file).runs
    for label in labelled_runs()[file]:
        expected = corrected(label["run"], parsed(label["run"]))
        found = replayed(records_of(runs, label))
        for kind in ("train", "eval"):
            assert comparable(found[kind]) == comparable(expected[kind]), (label["run"], kind)


@pytest.mark.parametrize("file", labelled_runs())
def test_a_real_log_is_scored_within_bounds_and_says_what_is_missing(file):
    for run in read_log(LOGS / file).runs:
        scored = score_run(run)
        assert len(scored.scores) == len(run.records)
        assert all(0 <= score.score <= 1.25 for score in scored.scores)
        assert any("λ is undefined" in note for note in scored.notes), "no real log carries λ"


def test_a_file_with_two_runs_appended_is_two_runs():
    first, second = read_log(LOGS / "raw" / "cs336x_lr_sweep_1e-3_ade6.jsonl").runs
    assert first.records[-1].step == 4990
    assert second.records[0].step == 10
    assert second.records[0].training_loss > 9 > 2 > first.records[-1].training_loss


def test_a_run_that_became_nan_alerts_by_then():
    path = LOGS / "raw" / "algoperf_v05_ext_generalized_adam_s1_conformer_jax_t1.csv"
    (run,) = read_log(path).runs
    first_nan = next(r.step for r in run.records if isnan(r.validation_loss or 0.0))
    assert next(s for s in score_run(run).scores if s.step == first_nan).alarm


def test_nan_is_not_taken_for_equal_to_a_blank():
    assert comparable([(1, nan)]) != comparable([(1, None)])
