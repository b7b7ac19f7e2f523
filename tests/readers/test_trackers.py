"""Logs of experiment trackers; `trackers.tar.xz` was written by MLflow 3.17, trackio 0.43 and Comet
3.58, and has other paths and names of users. The file of W&B is written here block by block."""

from __future__ import annotations

import csv
import json
import sqlite3
import tarfile
import zlib
from math import isnan
from pathlib import Path

import pytest

from rmetric._util.errors import LogError
from rmetric.cli.main import main
from rmetric.evaluation import judge_run
from rmetric.readers import UnknownFormat, find_logs, read_log


@pytest.fixture(scope="module")
def trackers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trackers")
    with tarfile.open(Path(__file__).with_name("trackers.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


def test_the_folder_of_an_mlflow_run_is_one_log(trackers):
    logs = [log for log in find_logs([trackers / "mlruns"]) if log.is_dir()]
    assert len(logs) == 3
    runs = {run.id.rpartition("__")[2]: run for log in logs for run in read_log(log).runs}
    assert len(runs["good"].records) == 60
    assert runs["good"].records[9].validation_loss == pytest.approx(2.77, abs=0.1)
    assert runs["good"].records[9].gradient_norm is not None
    assert judge_run(runs["good"].records).kind == "healthy"
    assert judge_run(runs["bad"].records).text == "NOT FINITE from step 45 to the end"
    text = "DIVERGED at step 26: never came back, in cls_loss"
    assert judge_run(runs["parts"].records).text == text
    [log] = find_logs([next(logs[0].glob("metrics/train/*"))])
    assert log == logs[0]


@pytest.mark.parametrize(
    ("name", "run", "since"),
    [("trackio.db", "trackio__bad", 45), ("mlflow.db", "mlflow__bad", 30),
     ("messages.json", "messages", 30)],
)  # fmt: skip
def test_databases_and_the_messages_of_comet(trackers, name, run, since):
    log = read_log(trackers / name)
    [bad] = [run_ for run_ in log.runs if run_.id.endswith(run)]
    assert judge_run(bad.records).text == f"NOT FINITE from step {since} to the end"
    assert isnan(bad.records[-1].training_loss)
    assert bad.records[0].step == 1
    assert not any("zero bytes" in note for note in bad.notes)


def test_another_database_is_no_log_and_a_damaged_one_an_error(tmp_path):
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE metrics (step INTEGER, loss REAL)")
    with pytest.raises(UnknownFormat, match="without the metrics of trackio or of MLflow"):
        read_log(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(LogError, match=r"no SQLite file that can be read|without the metrics"):
        read_log(path)


LONG = [("train_loss", step, 3.0 - step / 20) for step in range(1, 41)]
LONG += [("val_loss", step, 2.9) for step in (10, 20, 30)]


def exports(folder):
    """One table as it is exported: MLflow's two ways, Comet's, and torchtitan's trace."""
    rows = [
        {"key": name, "value": value, "timestamp": 1, "step": step} for name, step, value in LONG
    ]
    (folder / "history.json").write_text(json.dumps(rows))
    with open(folder / "plot.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["run_id", *rows[0]])
        writer.writeheader()
        writer.writerows({"run_id": run, **row} for run in ("a", "b") for row in rows)
    comet = [
        {"metricName": name, "metricValue": str(value), "step": step, "epoch": None}
        for name, step, value in LONG
    ]
    comet.insert(0, {"metricName": "sys.ram", "metricValue": "3", "step": None, "epoch": None})
    own = {"rank": 0, "source": "training", "time": 1795950315, "caller": "trainer.py:864:step"}
    trace = [own | {"log_type": "instant", "log_type_name": "started", "event_name": None}]
    span = {"log_type": "event", "log_type_name": "fwd_bwd_end", "event_name": None, "value": 12.5}
    scalar = {"log_type": "instant", "log_type_name": "metric_value"}
    for name, step, value in (("local_valid_tokens", 1, 2048.0), *LONG):
        at = own | {"step": step, "relative_step": step, "step_tags": ["gc"]}
        trace += [at | span, at | scalar | {"event_name": name, "value": value}]
    for name, entries in (("comet.jsonl", comet), ("trace.jsonl", trace)):
        (folder / name).write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))


@pytest.mark.parametrize("name", ["history.json", "plot.csv", "comet.jsonl", "trace.jsonl"])
def test_a_table_in_long_form_is_a_record_a_step(tmp_path, name):
    exports(tmp_path)
    runs = read_log(tmp_path / name).runs
    assert len(runs) == (2 if name == "plot.csv" else 1)
    for run in runs:
        assert [record.step for record in run.records] == [*range(1, 41)]
        assert run.records[9].training_loss == 2.5
        assert [r.step for r in run.records if r.validation_loss == 2.9] == [10, 20, 30]


def test_rows_with_a_name_and_a_loss_are_no_long_form(tmp_path):
    path = tmp_path / "run.jsonl"
    rows = [{"name": "a", "value": 1, "step": step, "train_loss": 3.0 - step} for step in range(3)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert [record.training_loss for record in read_log(path).run.records] == [3.0, 2.0, 1.0]


BLOCK = 32768


def varint(number: int) -> bytes:
    low = bytearray()
    while number > 127:
        low.append(number & 127 | 128)
        number >>= 7
    return bytes([*low, number])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def entry(values: dict, *, nested: bool) -> bytes:
    items = b""
    for name, value in values.items():
        names = name.split("/") if nested else [name]
        key = b"".join(field(2 if nested else 1, part.encode()) for part in names)
        items += field(1, key + field(16, json.dumps(value).encode()))
    step = field(2, varint(1 << 3) + varint(values["_step"]))
    return varint(1 << 3) + varint(values["_step"] + 1) + field(2, items + step)


def in_blocks(messages: list[bytes]) -> bytes:
    file = bytearray(b":W&B\xe1\xbe\x00")
    for message in messages:
        rest, first = message, True
        while rest or first:
            left = BLOCK - len(file) % BLOCK
            if left < 7:
                file += bytes(left)
                left = BLOCK
            part, rest = rest[: left - 7], rest[left - 7 :]
            kind = (1 if not rest else 2) if first else (4 if not rest else 3)
            check = zlib.crc32(bytes([kind]) + part)
            file += check.to_bytes(4, "little") + len(part).to_bytes(2, "little")
            file += bytes([kind]) + part
            first = False
    return bytes(file)


def run_file(count: int = 600, *, nested: bool = False, text: int = 150) -> bytes:
    settings = field(17, field(1, b"abc12345"))
    rows = [
        entry(
            {
                "_step": i,
                "train/loss": float("nan") if i == 7 else 5 - i / count,
                "train/global_step": 10 * i,
                "note": "x" * (70_000 if i == 300 else text),
            }
            | ({"eval/loss": 4.5} if i % 50 == 0 else {}),
            nested=nested,
        )
        for i in range(count)
    ]
    return in_blocks([settings, *rows])


@pytest.mark.parametrize("nested", [False, True])
def test_the_history_is_read_over_the_borders_of_blocks(tmp_path, nested):
    path = tmp_path / "run-abc12345.wandb"
    path.write_bytes(run_file(nested=nested))
    log = read_log(path)
    records = log.run.records
    assert (log.format, log.run.id) == ("W&B run file (.wandb)", "run-abc12345")
    assert [record.step for record in records] == list(range(0, 6000, 10))
    assert isnan(records[7].training_loss)
    assert records[599].training_loss == pytest.approx(5 - 599 / 600)
    assert sum(record.validation_loss == 4.5 for record in records) == 12
    assert not any("could not be read" in note for note in log.run.notes)


def test_a_damaged_block_and_a_cut_end_cost_their_records_alone(tmp_path):
    content = bytearray(run_file())
    content[BLOCK + 500] ^= 255
    path = tmp_path / "run.wandb"
    path.write_bytes(content[:-40])
    run = read_log(path).run
    assert 350 < len(run.records) < 600
    assert any("2 records of the file could not be read" in note for note in run.notes)


@pytest.mark.parametrize(
    "content",
    [b":W&B\xe1\xbe\x00", in_blocks([field(17, b"")]), b":W&B\xe1\xbe\x00" + b"\xff" * 99],
)
def test_a_file_without_a_history_says_in_one_line_what_to_do(tmp_path, capsys, content):
    folder = tmp_path / "wandb" / "offline-run-20261101_101010-abc12345"
    folder.mkdir(parents=True)
    path = folder / "run-abc12345.wandb"
    path.write_bytes(content)
    with pytest.raises(LogError, match="wandb sync"):
        read_log(path)
    assert main(["replay", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "wandb sync" in error
    assert error.count("\n") == 1


def test_in_a_folder_it_comes_after_a_history_and_before_what_was_printed(tmp_path):
    folder = tmp_path / "wandb" / "run-20261101_101010-abc12345"
    (folder / "files").mkdir(parents=True)
    own, printed = folder / "run-abc12345.wandb", folder / "files" / "output.log"
    printed.write_text("step 1 loss 2\n")
    own.write_bytes(b":W&B\xe1\xbe\x00")
    assert find_logs([tmp_path]) == [printed]
    own.write_bytes(run_file(30))
    assert find_logs([tmp_path]) == [own]
    (folder / "files" / "wandb-history.jsonl").write_text('{"_step": 1, "loss": 2}\n')
    assert find_logs([tmp_path]) == [folder / "files" / "wandb-history.jsonl"]


def test_the_link_to_the_latest_run_is_a_folder_of_a_run(tmp_path):
    folder = tmp_path / "run-20261101_101010-abc12345"
    folder.mkdir()
    (folder / "run-abc12345.wandb").write_bytes(run_file(30))
    (tmp_path / "latest-run").symlink_to(folder.name)
    assert find_logs([tmp_path]) == [folder / "run-abc12345.wandb"]
    latest = tmp_path / "latest-run"
    assert find_logs([latest]) == [latest / "run-abc12345.wandb"]
