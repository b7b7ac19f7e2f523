"""Logs that are streamed: the same records as in one piece, many formats, and bad input."""

from __future__ import annotations

import gzip
import os
import resource
import sys
from importlib import import_module
from pathlib import Path

import orjson
import pytest

from rmetric import Record, RMetricConfig, Run
from rmetric.logs import LogError, run_lines
from rmetric.readers import UnknownFormat, find_logs, open_log, read_log, read_runs
from tests.readers.test_formats import noted, only, read, rows, write

LINES = [
    {
        "step": s, "train/loss": 3.0 - s / 1e3, "train/grad_norm": 1.0 + s % 7, "lr": 1e-3,
        "host": "a", "tokens": s * 100,
    }
    for s in range(1, 901)
]  # fmt: skip


def jsonl(entries) -> bytes:
    return b"".join(orjson.dumps(entry) + b"\n" for entry in entries)


def test_a_column_that_first_comes_late_is_read_from_there(tmp_path):
    entries = [*LINES, {"step": 900, "val_loss": 2.2}]
    many = [e | {"pad": "x" * 600} for e in entries]
    run = only(read(tmp_path, jsonl(many)))
    assert run.records[-1].validation_loss == 2.2
    assert noted(run, "later in the log: 'val_loss' as eval_loss")


def test_a_mapped_column_may_come_late_and_must_come(tmp_path):
    many = [e | {"pad": "x" * 600} for e in [*LINES, {"step": 901, "xe": 2.2, "lr": 1.0}]]
    path = write(tmp_path, "log", jsonl(many))
    assert only(read_runs(path, mapping={"eval_loss": "xe"})).records[-1].validation_loss == 2.2
    with pytest.raises(LogError, match="--map eval_loss=absent: no such column"):
        read_runs(path, mapping={"eval_loss": "absent"})


@pytest.mark.parametrize("again", [1, 40, 850])
def test_steps_that_start_again_are_split_in_the_stream_too(tmp_path, again):
    path = write(tmp_path, "log.jsonl", jsonl(LINES + LINES[again - 1 : again + 300]))
    log = open_log(path)
    ids = dict.fromkeys(id for id, _ in log)
    runs = [run.id for run in log.runs.values()]
    if again <= 2:
        assert [*ids] == [f"{tmp_path.name}__log", f"{tmp_path.name}__log__part2"]
        assert runs == [f"{tmp_path.name}__log__part{n}" for n in (1, 2)]
    else:
        assert len(ids) == 1
        assert noted(next(iter(log.runs.values())), "the step falls back 1 times")


def test_the_stream_of_an_own_log_is_what_is_read_whole(tmp_path):
    records = [
        Record(step=s, time=1.0 * s, validation_loss=3.0 + 1 / s, worker_gradient_norms=(1.0, s),
               events=(), loss_scale=1024.0, skipped=s % 5 == 0)
        for s in range(1, 300)
    ]  # fmt: skip
    records[7].training_loss = float("inf")
    path = write(tmp_path, "a", b"".join(run_lines(Run(id="x", records=records), RMetricConfig())))
    (run,) = read_log(path).runs
    assert run.records == records
    assert list(open_log(path)) == [("x", record) for record in records]


def test_what_comes_before_a_broken_line_has_been_read(tmp_path):
    broken = LINES[0] | {"train/loss": "high"}
    path = write(tmp_path, "log", jsonl([*LINES, broken, *LINES]))
    found = []

    def keep():
        for _, record in open_log(path):
            found.append(record.step)

    with pytest.raises(LogError, match="line 901: 'train/loss' is 'high'"):
        keep()
    assert found == list(range(1, 900)), "the last one waits for what the next line adds"


def test_a_wandb_chart_holds_many_runs_and_its_step_is_noted_to_be_no_step(tmp_path):
    text = (
        '"Step","a - b - train/loss","a - b - train/loss__MIN","a - b - train/loss__MAX",'
        '"c - train/loss","c - train/loss__MIN","c - train/loss__MAX"\n'
        '"0","3","1","9","4","4","4"\n"7","","","","NaN","",""\n'
    )
    first, other = read(tmp_path, text, "export.csv")
    assert (first.id, rows(first)) == ("export__a - b", [(0, 3.0, None, None)])
    assert (other.id, rows(other)) == ("export__c", [(0, 4.0, None, None), (7, "nan", None, None)])
    assert noted(first, "'_step' counts calls of the logger")


def event_file(folder: Path, values: dict[int, dict[str, float]], suffix: str = "") -> Path:
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    files = writer.EventFileWriter(str(folder), filename_suffix=suffix)
    for step, scalars in values.items():
        for tag, value in scalars.items():
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            files.add_event(Event(wall_time=100.0 + step, step=step, summary=summary))
    files.close()
    return next(path for path in sorted(folder.iterdir()) if path.name.endswith(suffix))


def test_tensorboard_events_are_a_run_and_are_seen_by_content(tmp_path):
    values = {10: {"train/loss": 3.0, "grad_norm": 1.0}, 20: {"train/loss": float("nan")}}
    path = event_file(tmp_path / "run", values, ".x").rename(tmp_path / "odd.txt")
    run = only(read_runs(path))
    assert rows(run) == [(10, 3.0, None, 1.0), (20, "nan", None, None)]
    assert [record.time for record in run.records] == [0.0, 10.0]


def test_an_event_file_is_named_by_its_folder(tmp_path):
    path = event_file(tmp_path / "tuesday" / "version_0", {10: {"loss": 3.0}})
    assert "tfevents" in path.name
    assert only(read_runs(path)).id == "tuesday__version_0"


def test_the_event_files_of_a_folder_are_one_run(tmp_path):
    event_file(tmp_path / "run", {10: {"loss": 3.0}, 20: {"loss": 2.5}}, ".a")
    event_file(tmp_path / "run", {30: {"loss": 2.0}}, ".b")
    write(tmp_path / "run", "other.csv", "step,loss\n1,2\n")
    found = find_logs([tmp_path])
    assert found == [tmp_path / "run", tmp_path / "run" / "other.csv"]
    run = only(read_runs(found[0]))
    assert run.id == "run"
    assert sorted(record.step for record in run.records) == [10, 20, 30]


def test_a_damaged_event_file_is_an_error_or_its_beginning(tmp_path):
    path = event_file(tmp_path / "run", {s: {"loss": 3.0} for s in range(1, 50)}, ".a")
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert 40 < len(only(read_runs(path)).records) < 50
    path.write_bytes(whole[:200] + b"\xff" * 50 + whole[250:])
    assert len(only(read_runs(path)).records) < 49, "the package stops where it is damaged"


def test_without_tensorboard_there_is_one_sentence(tmp_path, monkeypatch):
    path = event_file(tmp_path / "run", {1: {"loss": 3.0}}, ".a")
    for name in [module for module in sys.modules if module.partition(".")[0] == "tensorboard"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(LogError, match=r"pip install tensorboard$"):
        read_runs(path)


def test_loss_scale_and_left_out_steps_are_read(tmp_path):
    lines = [
        {"step": 1, "loss": 3.0, "loss_scale": 65536, "skipped": False},
        {"step": 2, "loss_scale": 32768, "skipped": 1},
        {"step": 3, "loss": 2.9, "loss_scale": 32768},
    ]
    run = only(read(tmp_path, jsonl(lines)))
    assert [(r.step, r.loss_scale, r.skipped) for r in run.records] == [
        (1, 65536.0, False), (2, 32768.0, True), (3, 32768.0, None),
    ]  # fmt: skip


def test_an_unknown_text_is_read_with_the_map_that_the_error_names(tmp_path):
    text = "loading\n" + "".join(f"<{s}> xent_loss={3 - s / 9:.3f} it={s}\n" for s in (1, 2, 3))
    path = write(tmp_path, "x.log", text)
    try:
        run = only(read_runs(path))
    except UnknownFormat as error:
        hint = str(error).split("it would be read with ")[1].split(";")[0]
        mapping = dict(part.split("=") for part in hint.replace("--map ", "").split())
        run = only(read_runs(path, mapping=mapping))
    assert [record.training_loss for record in run.records] == [2.889, 2.778, 2.667]


def test_a_mapped_text_needs_no_step(tmp_path):
    text = "".join(f"loss 9 train/ce: {3 - s / 4}\n" for s in range(3))
    run = only(read_runs(write(tmp_path, "x.log", text), mapping={"loss": "train/ce"}))
    assert [(record.step, record.training_loss) for record in run.records] == [
        (0, 3.0), (1, 2.75), (2, 2.5),
    ]  # fmt: skip


TABLE = "step,loss\n" + "".join(f"{s},{3 - s / 100}\n" for s in range(1, 101))


@pytest.mark.parametrize("head", [b"", TABLE.encode(), jsonl(LINES[:3]), b"step:1 loss:2\n"])
def test_a_line_of_any_length_is_refused_in_constant_memory(tmp_path, head):
    path = tmp_path / "log"
    with open(path, "wb") as file:
        file.write(head)
        for _ in range(40):
            file.write(b"x" * (1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(LogError, match="longer than 1,000,000 bytes") as caught:
        list(open_log(path, longest_line=1_000_000))
    assert caught.value.line == head.count(b"\n") + 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 16_000, f"{grown} KiB for a line of 40 MiB"


@pytest.mark.parametrize("form", ["utf-8-sig", "utf-16", "\r\n", "\r"])
@pytest.mark.parametrize("text", [TABLE, jsonl(LINES).decode()])
def test_a_byte_order_mark_says_the_encoding_and_line_ends_are_of_every_kind(tmp_path, form, text):
    plain = only(read(tmp_path, text))
    changed = text.encode(form) if form.startswith("utf") else text.replace("\n", form)
    assert only(read(tmp_path, changed)).records == plain.records


def test_a_carriage_return_at_the_end_of_a_block_is_half_of_a_line_end(tmp_path, monkeypatch):
    monkeypatch.setattr("rmetric.readers.source.BLOCK", 7)
    text = TABLE.replace("\n", "\r\n").replace("50,", "x,")
    with pytest.raises(LogError, match="line 51"):
        read(tmp_path, text)


def test_a_foreign_byte_beside_the_numbers_is_replaced_and_noted(tmp_path):
    lines = jsonl([e | {"host": "Köln"} for e in LINES]).splitlines(keepends=True)
    lines[4] = lines[4].replace("ö".encode(), b"\xf6")
    run = only(read(tmp_path, b"".join(lines)))
    assert [record.step for record in run.records] == list(range(1, 901))
    run = only(read(tmp_path, b"step,loss,host\n1,3.0,K\xf6ln\n2,2.0,x\n"))
    assert len(run.records) == 2
    assert noted(run, "1 lines, the first is line 2, hold bytes that are not UTF-8")


def test_steps_that_only_fall_are_one_run_and_noted(tmp_path):
    run = only(read(tmp_path, jsonl(LINES[:50][::-1])))
    assert [record.step for record in run.records] == list(range(50, 0, -1))
    assert noted(run, "falls back 49 times")


def test_strings_for_numbers_are_read_and_other_words_are_errors(tmp_path):
    lines = [{"step": str(e["step"]), "loss": str(e["train/loss"])} for e in LINES]
    assert only(read(tmp_path, jsonl(lines))).records[4].training_loss == LINES[4]["train/loss"]
    with pytest.raises(LogError, match="line 901: 'loss' is 'n/o'"):
        read(tmp_path, jsonl([*lines, {"step": "901", "loss": "n/o"}]))


@pytest.mark.parametrize("text", [TABLE.encode() * 1, jsonl(LINES)])
def test_a_gz_that_is_cut_keeps_what_comes_before(tmp_path, text):
    whole = len(only(read(tmp_path, text)).records)
    packed = gzip.compress(text)
    run = only(read(tmp_path, packed[: len(packed) * 2 // 3]))
    assert 0 < len(run.records) < whole
    assert noted(run, "compressed file is damaged or cut off")
    broken = packed[:-8] + b"\0" * 8
    run = only(read(tmp_path, broken))
    assert len(run.records) == whole
    assert noted(run, "compressed file is damaged or cut off")


@pytest.mark.parametrize("packer", ["bz2", "lzma", "zstandard"])
def test_bz2_xz_and_zstd_are_unpacked(tmp_path, packer):
    load = pytest.importorskip if packer == "zstandard" else import_module
    packed = load(packer).compress(jsonl(LINES))
    assert len(only(read(tmp_path, packed)).records) == 900
    if packer != "zstandard":  # one frame holds all of it
        run = only(read(tmp_path, packed[:-8]))
        assert noted(run, "compressed file is damaged or cut off")


def test_a_file_that_vanishes_or_is_no_file_is_one_error(tmp_path):
    path = write(tmp_path, "x.csv", TABLE)
    (found,) = find_logs([path])
    path.unlink()
    with pytest.raises(LogError, match="cannot be read: No such file"):
        read_runs(found)
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(LogError, match="no scalars"):
        read_runs(folder)


def test_a_file_that_grows_or_shrinks_while_it_is_read(tmp_path):
    lines = [e | {"pad": "x" * 600} for e in LINES]  # more than what is read to find the format
    path = write(tmp_path, "x.jsonl", jsonl(lines))
    log = iter(open_log(path))
    first = next(log)
    with open(path, "ab") as file:
        file.write(jsonl([e | {"step": 900 + e["step"]} for e in lines]) + b'{"step": 18')
    found = [first, *log]
    assert [record.step for _, record in found] == list(range(1, 1801))
    log = iter(open_log(path))
    next(log)
    os.truncate(path, 400_000)
    assert 0 < len(list(log)) < 900
