"""What needs a whole log: a bound of its records, evaluations at their steps."""

from __future__ import annotations

import csv
import gzip
import json
import tracemalloc
from collections.abc import Iterator
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric import Record, RMetricConfig, Run, Truth
from rmetric.cli.main import main
from rmetric.logs import run_lines
from rmetric.readers import open_log, read_log
from rmetric.readers.whole_log import Thinning
from rmetric.records import HardwareEvent
from tests.readers.test_formats import lines, noted, write

VALUES = {
    "ordinary": {"training_loss": 2.0},
    "evaluation": {"training_loss": 2.0, "validation_loss": 2.5},
    "stated": {"stated_score": 0.1},
    "alarm": {"stated_score": 0.9},
    "nan": {"training_loss": nan},
    "inf": {"gradient_norm": inf},
    "worker": {"worker_gradient_norms": (1.0, nan)},
    "hardware": {"events": (HardwareEvent(1.0, "ecc_corrected"),)},
    "planned": {"planned_events": ("learning_rate",)},
    "skipped": {"training_loss": 2.0, "skipped": True},
}


def records_of(kinds: list[str]) -> list[Record]:
    return [Record(step, **VALUES[kind]) for step, kind in enumerate(kinds)]


def thinned(records: list[Record], most: int, config: dict | None = None) -> Thinning:
    thinning = Thinning(most, {"a": Run(id="a", records=[], config=config or {})})
    thinning.take("a", records)
    return thinning


@given(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=300), st.integers(6, 40))
def test_it_is_bounded_in_order_and_keeps_the_first_that_is_not_finite(kinds, most):
    records = records_of(kinds)
    thinning = thinned(records, most)
    kept = thinning.records("a")
    steps = [record.step for record in kept]
    assert len(kept) <= most + 1
    assert steps == sorted(set(steps))
    assert all(record is records[record.step] for record in kept)
    assert (steps[0], steps[-1]) == (0, len(records) - 1)
    strange = [i for i, kind in enumerate(kinds) if kind in ("nan", "inf", "worker")]
    assert not strange or strange[0] in steps
    assert (thinning.note("a") == "") == (len(records) <= most)
    if len(records) <= most:
        assert kept == records


def test_every_kth_is_kept_and_the_rare_ones_all():
    kinds = ["ordinary"] * 4500
    rare = {77: "evaluation", 78: "hardware", 4321: "planned", 900: "skipped", 901: "nan"}
    for place, kind in rare.items():
        kinds[place] = kind
    thinning = thinned(records_of(kinds), 200)
    kept = {record.step for record in thinning.records("a")}
    assert kept >= {*rare, *range(0, 77, 32), 4499}
    assert len(kept) <= 200
    assert thinning.note("a") == (
        "every 32nd of 4,500 records was judged, and also all 3 records with an event (hardware, "
        "planned change, action, skipped step), the one record with an evaluation, the one record "
        "with a value that is not finite; the log holds more than --most-records 200; "
        "steps between them were not seen; windows count records and span 32 times as many steps"
    )


@pytest.mark.parametrize(("every", "least"), [(2, 90), (3, 100)])
def test_many_evaluations_are_thinned_too(every, least):
    kinds = ["evaluation" if step % every == 0 else "ordinary" for step in range(3000)]
    kept = thinned(records_of(kinds), 300).records("a")
    assert len(kept) <= 301
    assert sum(record.validation_loss is not None for record in kept) >= least
    assert sum(record.validation_loss is None for record in kept) >= 90


def test_the_note_is_of_the_kind_that_is_most_numerous_by_its_own_number():
    kinds = ["evaluation"] * 2002
    kinds[5] = kinds[-1] = "ordinary"
    words = "every 32nd of 2,000 records with an evaluation was judged, and also all 2 records"
    assert thinned(records_of(kinds), 100).note("a").startswith(f"{words} beside these; the log")


def test_a_log_that_states_r_on_every_line_keeps_the_beginning_of_each_alarm():
    records = [Record(step, stated_score=0.1) for step in range(5000)]
    for step in (*range(1001, 1010), *range(3333, 3340)):
        records[step].stated_score = 0.9
    thinning = thinned(records, 100)
    assert {1001, 3333} <= {record.step for record in thinning.records("a")}
    assert "all 2 records with the beginning of an alarm by the logged R" in thinning.note("a")
    own = thinned(records, 100, {"alert_thresholds": {"r_metric": 0.95}})
    assert "alarm" not in own.note("a")


def test_several_runs_share_the_limit():
    thinning = Thinning(100, {})
    for step in range(5000):
        thinning.take("long", [Record(step, training_loss=2.0)])
        if step < 20:
            thinning.take("short", [Record(step, training_loss=2.0)])
    assert thinning.note("short") == ""
    assert len(thinning.records("short")) == 20
    assert 20 < len(thinning.records("long")) <= 81


def test_more_runs_than_records_keep_the_first_of_each():
    thinning = Thinning(5, {})
    for run in range(50):
        thinning.take(str(run), [Record(step, training_loss=2.0) for step in range(3)])
    assert all(thinning.records(str(run))[0].step == 0 for run in range(50))


def plain(count: int, every: int = 1000) -> Iterator[dict[str, float]]:
    """The entries of a training that is evaluated every `every` steps."""
    for step in range(count):
        yield {"step": step, "loss": 2 + step % 7 / 10, "grad_norm": 1 + step % 5 / 10}
        if step % every == every - 1:
            yield {"step": step, "eval_loss": 2.5}


def test_of_a_log_with_more_records_every_kth_is_kept(tmp_path):
    log = read_log(write(tmp_path, "run.jsonl", lines(plain(9000))), most_records=1000)
    evaluated = set(range(999, 9000, 1000))
    assert [r.step for r in log.run.records] == sorted({*range(0, 9000, 16), *evaluated})
    assert {r.step for r in log.run.records if r.validation_loss is not None} == evaluated
    assert [r.training_loss for r in log.run.records[:2]] == [2.0, 2 + 16 % 7 / 10]
    note = (
        "every 16th of 9,000 records was judged, and also all 9 records with an evaluation; the "
        "log holds more than --most-records 1,000; steps between them were not seen; windows "
        "count records and span 16 times as many steps"
    )
    assert note in log.run.notes
    assert log.thinned == {log.run.id: note}


def test_a_log_below_the_limit_is_read_as_without_it(tmp_path):
    path = write(tmp_path, "run.jsonl", lines(plain(3000)))
    limited, free = read_log(path, most_records=3000), read_log(path)
    assert limited == free
    assert not limited.thinned


@pytest.mark.parametrize(
    "read",
    [
        lambda path: len(read_log(path, most_records=1000).run.records) <= 1001,
        lambda path: sum(1 for _ in open_log(path)) >= 20_000,
    ],
    ids=["whole", "stream"],
)
def test_the_memory_of_reading_does_not_grow_with_the_log(tmp_path, read):
    def peak(count: int) -> int:
        path = write(tmp_path, f"{count}.jsonl", lines(plain(count)))
        tracemalloc.start()
        try:
            assert read(path)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(80_000) < 1.3 * peak(20_000)


def test_an_experiment_log_is_bounded_too(tmp_path):
    records = [
        Record(
            step,
            time=float(step),
            training_loss=3.0,
            worker_gradient_norms=(1.0, 1.0),
            events=(HardwareEvent(4321.0, "ecc_corrected", 1),) if step == 4321 else (),
            planned_events=("learning_rate",) if step == 777 else None,
            validation_loss=3.0 if step % 1000 == 500 else None,
        )
        for step in range(6000)
    ]
    records[5123].training_loss = nan
    truth = Truth(fault="LR_SPIKE", onset_step=20, outcome="failed", failure_step=5999)
    run = Run(id="own", records=records, truth=truth)
    path = write(tmp_path, "own.jsonl", b"".join(run_lines(run, RMetricConfig())))
    whole = read_log(path).run
    log = read_log(path, most_records=500)
    kept = {record.step for record in log.run.records}
    assert len(kept) <= 501
    assert kept >= {0, 777, 4321, 5123, 5999, *range(500, 6000, 1000)}
    assert log.run.truth == whole.truth
    assert any("was not checked" in note for note in log.run.notes)
    assert not any("R recomputed" in note for note in log.run.notes)
    assert list(log.thinned) == ["own"]


def test_replay_judges_a_log_of_too_many_records_and_says_what_it_did(tmp_path, capsys):
    entries = list(plain(9000))
    for entry in entries[5008:]:
        if "loss" in entry:
            entry["loss"] = nan
    packed, out = tmp_path / "run.jsonl.gz", tmp_path / "out"
    packed.write_bytes(gzip.compress(lines(entries).encode()))
    command = ["replay", str(packed), "--out", str(out), "--plots", "none"]
    assert main([*command, "--most-records", "2000"]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert f"{packed}: every 8th of 9,000 records was judged, and also" in printed.err
    assert "1 run replayed, 0 failed" in printed.out
    summary = json.loads((out / "run" / "summary.json").read_text())
    assert summary["num_records"] <= 2001
    # The first that is not finite lies between those of the grid.
    assert summary["detectors"]["calibrated"]["first_alarm_step"] == 5003
    note = next(note for note in summary["notes"] if note.startswith("every 8th of 9,000"))
    assert note in (out / "run" / "report.html").read_text()
    with open(out / "index.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["note"], row["problem"]) == (note, "")
    assert "every 8th of 9,000 records" in (out / "index.html").read_text()
    assert "every 8th of 9,000 records" in (out / "index.md").read_text()


TRAINING = [(10 * i, 5 - 0.01 * i, "") for i in range(1, 101)]


def long_table(tmp_path, table):
    cells = "".join(",".join(map(str, row)) + "\n" for row in table)
    return read_log(write(tmp_path, "run.csv", f"step,train_loss,eval_loss\n{cells}"))


@pytest.mark.parametrize(
    ("evaluated", "last", "note"),
    [
        ((0, 250, 500, 755, 1000), [990, 1000], "each was put at its step"),
        ((400, 800, 1010), [1000, 1010], ""),
        ((1, 1720, 72504), [1720, 72504], ""),  # the training is no longer logged there
    ],
)
def test_a_second_counter_is_the_same_run(tmp_path, evaluated, last, note):
    run = long_table(tmp_path, [*TRAINING, *((s, "", 4.5) for s in evaluated)]).run
    steps = [record.step for record in run.records]
    assert steps == sorted(steps)
    assert steps[-2:] == last
    assert run.id == "run"
    assert [r.step for r in run.records if r.validation_loss is not None] == [*evaluated]
    assert sum(r.training_loss is not None for r in run.records) == 100
    assert noted(run, note)
    assert not noted(run, "start again")
    assert not noted(run, "falls back")


def test_two_runs_and_a_resumed_one_stay_what_they_are(tmp_path):
    assert len(long_table(tmp_path, [*TRAINING, *TRAINING]).runs) == 2
    assert noted(long_table(tmp_path, [*TRAINING, *TRAINING[50:]]).run, "falls back")
    mixed = [(s, t, 4.0 if s == 500 else "") for s, t, _ in TRAINING]
    assert len(long_table(tmp_path, [*mixed, *((s, "", 4.5) for s in (0, 250, 500))]).runs) == 2
