"""Logs of very many records: judged in bounded memory."""

from __future__ import annotations

import csv
import gzip
import json
import tracemalloc
from collections.abc import Iterator
from math import nan
from pathlib import Path

import pytest

from rmetric import Record, RMetricConfig, Run, Truth
from rmetric.cli.main import main
from rmetric.logs import run_lines
from rmetric.readers import open_log, read_log
from rmetric.records import HardwareEvent


def plain(count: int, every: int = 1000) -> Iterator[dict[str, float]]:
    """The entries of a training that is evaluated every `every` steps."""
    for step in range(count):
        yield {"step": step, "loss": 2 + step % 7 / 10, "grad_norm": 1 + step % 5 / 10}
        if step % every == every - 1:
            yield {"step": step, "eval_loss": 2.5}


def written(path: Path, entries: Iterator[dict[str, float]]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_of_a_log_with_more_records_every_kth_is_kept(tmp_path):
    log = read_log(written(tmp_path / "run.jsonl", plain(9000)), most_records=1000)
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
    path = written(tmp_path / "run.jsonl", plain(3000))
    limited, free = read_log(path, most_records=3000), read_log(path)
    assert limited == free
    assert not limited.thinned


@pytest.mark.long
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
        path = written(tmp_path / f"{count}.jsonl", plain(count))
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
    path = tmp_path / "own.jsonl"
    run = Run(id="own", records=records, truth=truth)
    path.write_bytes(b"".join(run_lines(run, RMetricConfig())))
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
    lines = "".join(json.dumps(entry) + "\n" for entry in entries)
    packed.write_bytes(gzip.compress(lines.encode()))
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
