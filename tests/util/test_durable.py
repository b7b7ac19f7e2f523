import os
from pathlib import Path

import pytest

from rmetric._util.background import Background
from rmetric._util.durable import durable_file, write_atomically
from rmetric.cli.main import main
from rmetric.monitor.log_file import MonitorLog


def write_durably(path, pieces):
    with durable_file(path) as file:
        file.writelines(pieces)


@pytest.mark.parametrize("write", [write_durably, write_atomically])
@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_a_writer_that_raises_leaves_what_was_there_before(tmp_path, write, error):
    def pieces():
        yield b"half"
        raise error

    path = tmp_path / "file"
    for before in ({}, {path: b"whole"}):
        with pytest.raises(type(error)):
            write(path, pieces())
        assert {there: there.read_bytes() for there in tmp_path.iterdir()} == before
        write(path, [b"who", b"le"])


def test_the_error_names_the_file_that_was_to_be_written(tmp_path):
    def full():
        yield b"1"
        raise OSError(28, "No space left on device")

    for path, pieces in ((tmp_path / "none" / "a", [b"1"]), (tmp_path / "b", full())):
        with pytest.raises(OSError, match=r"No such file|No space left") as raised:
            write_atomically(path, pieces)
        assert raised.value.filename == str(path)


@pytest.mark.parametrize("mask", [0, 0o022, 0o027, 0o077])
def test_a_result_has_the_mode_that_the_umask_leaves_and_is_not_for_others_to_write(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "result", [b"1"])
    finally:
        os.umask(before)
    assert (tmp_path / "result").stat().st_mode & 0o777 == 0o644 & ~mask


def test_no_file_of_a_replay_follows_a_planted_link(tmp_path):
    (tmp_path / "run.csv").write_text("step,loss\n1,2.0\n2,1.9\n3,1.8\n")
    argv = ["replay", str(tmp_path / "run.csv"), "--plots", "none", "--out", str(tmp_path / "out")]
    code = main(argv)
    files = list((tmp_path / "out" / "run").iterdir())
    target = tmp_path / "outside"
    target.write_text("untouched")
    for path in files:
        path.unlink()
        path.symlink_to(target)
    assert main(argv) == code
    assert target.read_text() == "untouched"
    assert files
    assert not any(map(Path.is_symlink, files))


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(os.devnull)])
def test_no_device_or_pipe_is_replaced_by_a_result(tmp_path, capsys, make):
    path, log = tmp_path / "there.json", tmp_path / "run.csv"
    make(path)
    log.write_text("step,loss\n1,2.0\n2,1.9\n3,1.8\n")
    before = path.lstat()
    for write in (write_atomically, write_durably):
        with pytest.raises(OSError, match="not a file of a disk"):
            write(path, [b"1"])
    for argv in (
        ["calibrate", str(log), "--out"],
        ["replay", str(log), "--out"],
        ["diagnose", str(log), "--json-file"],
        ["logs", "learn", str(log), "--job", "a", "--out"],
    ):
        for given in (str(path), ""):
            with pytest.raises(SystemExit) as ended:
                main([*argv, given])
            assert ended.value.code == 2
    capsys.readouterr()
    after = path.lstat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert not list(tmp_path.glob(".*"))


def test_the_log_of_a_monitor_follows_no_planted_link(tmp_path):
    target = tmp_path / "outside"
    path = tmp_path / "run.jsonl"
    path.symlink_to(target)
    background = Background()
    log = MonitorLog(path, background, b"start\n")
    log.write(b"line\n", now=True)
    log.flush(10.0)
    background.close(10.0)
    assert "it is a symbolic link, which is not followed" in log.problem
    assert not target.exists()


@pytest.mark.parametrize(
    "argv",
    [
        "diagnose {in}.json --json-file {in}.json",
        "diagnose {folder} --json-file {in}.json",
        "diagnose {folder}/./in.json --json-file {in}.json",
        "diagnose {in}.html --page {folder}/./in.html",
        "diagnose {other} --signatures {in}.json --json-file {in}.json",
        "logs learn {in}.json --job a --out {in}.json",
        "calibrate {in}.json {other} --out {in}.json",
        "calibrate {folder} --out {in}.json",
        "telemetry --play {in}.json --jsonl {in}.json",
    ],
)
def test_no_command_writes_over_what_it_reads(tmp_path, capsys, argv):
    text = "".join(f'{{"step": {s}, "loss": {3 - s / 100}}}\n' for s in range(1, 61))
    (tmp_path / "other.jsonl").write_text(text)
    (tmp_path / "logs").mkdir()
    kept = tmp_path / "logs" / ("in.html" if "html" in argv else "in.json")
    kept.write_text(text)
    names = {"in": tmp_path / "logs" / "in", "folder": tmp_path / "logs",
             "other": tmp_path / "other.jsonl"}  # fmt: skip
    assert main(argv.format(**names).split()) == 2
    assert "it is read too, and would be lost" in capsys.readouterr().err
    assert kept.read_text() == text


def test_a_result_in_the_folder_of_the_logs_is_written_again(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"step": {s}, "loss": 2.5}}\n' for s in range(99)))
    for argv in (
        ["diagnose", str(tmp_path), "--json-file", str(tmp_path / "found.json")],
        ["diagnose", str(tmp_path), "--page", str(tmp_path / "found.html")],
        ["calibrate", str(tmp_path), "--force", "--out", str(tmp_path / "thresholds.json")],
    ):
        assert [main(argv) for _ in range(2)] == [0, 0], capsys.readouterr().err
        Path(argv[-1]).unlink()
