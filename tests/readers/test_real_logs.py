"""All real logs of the folder, against values read from them by somebody else.

`FAULTS` lists where the parsed files are wrong; each is checked to be still there.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable
from fnmatch import fnmatch
from functools import cache
from itertools import pairwise
from math import isnan, nan
from pathlib import Path

import pytest

from rmetric import Record, Run
from rmetric.readers import ReadLog, read_log
from rmetric.replay.scored_run import score_run
from tests.authors_data import LOGS, needs_training_logs

pytestmark = needs_training_logs

Row = tuple[float, ...]
Rows = dict[str, list[Row]]


def labelled_runs() -> dict[str, list[dict[str, str]]]:
    """The rows of labels.csv by the file that the run is in."""
    by_file = defaultdict(list)
    if (LOGS / "labels.csv").is_file():
        with open(LOGS / "labels.csv", newline="") as file:
            for row in csv.DictReader(file):
                by_file[row["local_file"]].append(row)
    return dict(sorted(by_file.items()))


@cache
def read(file: str) -> ReadLog:
    """The log, read once for all tests; by the plain public function, without any --map."""
    return read_log(LOGS / file)


def parsed(run: str) -> Rows:
    """What the parsed file holds: training and evaluation rows, None for not logged."""
    rows: Rows = {"train": [], "eval": []}
    names = {"train": ("step", "train_loss", "grad_norm"), "eval": ("step", "eval_loss")}
    with open(LOGS / "parsed" / f"{run}.csv", newline="") as file:
        for row in csv.DictReader(file):
            cells = (row[name] for name in names[row["kind"]])
            rows[row["kind"]].append(tuple(float(cell) if cell else None for cell in cells))
    return rows


def replayed(records: list[Record]) -> Rows:
    return {
        "train": [
            (r.step, r.training_loss, r.gradient_norm)
            for r in records
            if r.training_loss is not None or r.gradient_norm is not None
        ],
        "eval": [(r.step, r.validation_loss) for r in records if r.validation_loss is not None],
    }


def without_closing_line(run: str, rows: Rows) -> None:
    """An evaluation of nan at the end: that line holds the final score, and nothing became nan."""
    step, loss = rows["eval"].pop()
    assert isnan(loss)
    assert step >= rows["eval"][-1][0]


def without_norm_at_the_end(run: str, rows: Rows) -> None:
    """A norm of nan at the end: the cell is blank, as in every row that does not log one."""
    step, loss, norm = rows["train"].pop()
    assert isnan(norm)
    rows["train"].append((step, loss, None))


def placed_by_tokens(run: str, rows: Rows) -> None:
    """15 evaluations spread evenly: by the tokens there is one after each 4th of the first 60."""
    evaluations = [loss for _, loss in rows["eval"]]
    norms = [norm for _, _, norm in rows["train"] if norm is not None]
    assert len(evaluations) == len(norms) == 15
    placed = [(4 * i + 3, loss) for i, loss in enumerate(evaluations)]
    assert rows["eval"] != placed
    rows["eval"] = placed
    at = {4 * i + 3: norm for i, norm in enumerate(norms)}
    rows["train"] = [(step, loss, at.get(step)) for step, loss, _ in rows["train"]]


def with_its_validations(run: str, rows: Rows) -> None:
    """No evaluation: the log holds two lines of validation loss."""
    assert rows["eval"] == []
    text = (LOGS / "raw" / f"{run}.out").read_text(errors="replace")
    found = re.findall(r"validation loss at iteration (\d+) \| lm loss value: (\S+)", text)
    assert len(found) == 2
    rows["eval"] = [(int(step), float(loss)) for step, loss in found]


#: Runs whose parsed files are not what the published bytes say -> what mends their rows, and
#: asserts that the fault is there.
FAULTS: dict[str, Callable[[str, Rows], None]] = {
    "algoperf_*": without_closing_line,
    "sweep_*": without_norm_at_the_end,
    "snimu_pythia_6": placed_by_tokens,
    "bigsci_871e9d": with_its_validations,
    "bigsci_a610b8": with_its_validations,
}
#: No parsed file: the log has no loss of a step.
NOT_PARSED = {"dsex_sft_opt1.3b"}


def differences(label: dict[str, str], runs: list[Run]) -> list[str]:
    """What replay reads otherwise than the corrected parsed file, in words."""
    expected = parsed(label["run"])
    for name, mend in FAULTS.items():
        if fnmatch(label["run"], name):
            mend(label["run"], expected)
    found = replayed(records_of(runs, label))
    diff = []
    for kind in ("train", "eval"):
        ours, theirs = comparable(found[kind]), comparable(expected[kind])
        if len(ours) != len(theirs):
            diff.append(f"{kind}: {len(ours)} rows, {len(theirs)} expected")
        diff += [f"{kind}: {a}, expected {b}" for a, b in zip(ours, theirs, strict=False) if a != b]
    return diff


def comparable(rows: list[Row]) -> list[tuple]:
    """nan as a word, which equals itself."""
    return [tuple("nan" if v is not None and isnan(v) else v for v in row) for row in rows]


def records_of(runs: list[Run], label: dict[str, str]) -> list[Record]:
    """The records of one labelled run, with the parts of a file that holds it twice joined."""
    name, stem = label["run_id_in_file"], Path(label["local_file"]).stem
    ids = {f"{stem}__{name}", f"{stem}__row{name}"}
    return [r for run in runs if not name or run.id in ids for r in run.records]


def test_the_real_logs_are_all_there():
    assert {path.name for path in (LOGS / "raw").iterdir()} == {
        Path(file).name for file in labelled_runs()
    }
    assert sum(map(len, labelled_runs().values())) == 143


def test_each_fault_is_of_a_run_that_is_there():
    names = [label["run"] for labels in labelled_runs().values() for label in labels]
    for runs in FAULTS:
        assert any(fnmatch(name, runs) for name in names), runs
    assert {name for name in names if not (LOGS / "parsed" / f"{name}.csv").is_file()} == NOT_PARSED


@pytest.mark.parametrize("file", labelled_runs())
def test_a_real_log_reads_as_it_was_parsed(file):
    for label in labelled_runs()[file]:
        if label["run"] not in NOT_PARSED:
            assert differences(label, read(file).runs)[:5] == [], label["run"]


def test_the_log_without_a_loss_keeps_its_steps_and_what_was_left_out():
    (run,) = read("raw/dsex_sft_opt1.3b.log").runs
    steps = [r for r in run.records if r.skipped is not None]
    assert [r.step for r in steps] == list(range(10, 7361, 10))
    text = (LOGS / "raw" / "dsex_sft_opt1.3b.log").read_text()
    counts = [0, *map(int, re.findall(r"step=\d+, skipped=(\d+)", text))]
    grew = [after > before for before, after in pairwise(counts)]
    assert [r.skipped for r in steps] == grew
    assert any("perplexity" in note for note in run.notes)


@pytest.mark.parametrize("file", labelled_runs())
def test_a_real_log_is_scored_within_bounds_and_says_what_is_missing(file):
    for run in read(file).runs:
        if len(run.records) > 2000:
            continue
        scored = score_run(run)
        assert len(scored.scores) == len(run.records)
        assert all(0 <= score.score <= 1.25 for score in scored.scores)
        assert any("λ is undefined" in note for note in scored.notes), "no real log carries λ"


def test_a_file_with_two_runs_appended_is_two_runs():
    first, second = read("raw/cs336x_lr_sweep_1e-3_ade6.jsonl").runs
    assert first.records[-1].step == 4990
    assert second.records[0].step == 10
    assert second.records[0].training_loss > 9 > 2 > first.records[-1].training_loss


def test_a_run_that_became_nan_alerts_by_then():
    (run,) = read("raw/algoperf_v05_ext_generalized_adam_s1_conformer_jax_t1.csv").runs
    first_nan = next(r.step for r in run.records if isnan(r.validation_loss or 0.0))
    assert next(s for s in score_run(run).scores if s.step == first_nan).alarm


def test_nan_is_not_taken_for_equal_to_a_blank():
    assert comparable([(1, nan)]) != comparable([(1, None)])
