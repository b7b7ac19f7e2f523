"""The line that says how much has been read: on a terminal, late, and gone at the end."""

from __future__ import annotations

import gzip
import io
import time
from pathlib import Path

import pytest
from tqdm import tqdm

from rmetric.cli import progress
from rmetric.cli.main import main
from rmetric.cli.progress import reading


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "logs" / "a.log"
    path.parent.mkdir()
    path.write_bytes(b"x" * 1500)
    return path


def told(terminal: io.StringIO, log: Path) -> str:
    with reading([log.parent]) as bar:
        for _ in range(100):
            bar.update(50_000)
            time.sleep(0.01)
            if "MB" in terminal.getvalue() or "0kB" in terminal.getvalue():
                break
    return terminal.getvalue()


def test_it_is_written_over_and_gone_at_the_end(log, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress, "FIRST", 0.0)
    monkeypatch.setattr(progress, "NEXT", 0.01)
    shown = told(terminal, log)
    assert "\rreading 1 file, 1.5 kB: " in shown
    assert "kB of text so far" in shown
    assert shown.endswith(" \r")


@pytest.mark.parametrize(("stream", "first"), [(Terminal, 1.5), (io.StringIO, 0.0)])
def test_what_takes_a_moment_and_what_nobody_sees_is_read_without_a_word(
    log, monkeypatch, stream, first
):
    errors = stream()
    monkeypatch.setattr("sys.stderr", errors)
    monkeypatch.setattr(progress, "FIRST", first)
    with reading([log]) as bar:
        time.sleep(0.05)
        bar.update(1500)
    assert errors.getvalue() == ""


@pytest.mark.parametrize("command", [["diagnose"], ["logs", "learn", "--job", "a", "--out"]])
def test_all_bytes_are_told(command, tmp_path, monkeypatch):
    text = "".join(f"step {number} loss 2.5\n" for number in range(2000))
    log = tmp_path / "a.log"
    log.write_text(text)
    numbers = []
    monkeypatch.setattr(tqdm, "update", lambda self, read: numbers.append(read))
    more = [str(tmp_path / "pool.json")] if "--out" in command else []
    main([*command, *more, str(log)])
    assert sum(numbers) == len(text)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl.gz"
    lines = "".join(f'{{"step": {n}, "loss": {2 + n % 7 / 10}}}\n' for n in range(9000))
    path.write_bytes(gzip.compress(lines.encode()))
    return path


@pytest.mark.long
@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_replay_shows_the_bytes_of_the_packed_file_and_then_the_records(
    packed, tmp_path, monkeypatch, stream
):
    errors = stream()
    monkeypatch.setattr("sys.stderr", errors)
    monkeypatch.setattr(progress, "FIRST", 0.0)
    monkeypatch.setattr(progress, "NEXT", 0.0)
    assert main(["replay", str(packed), "--out", str(tmp_path / "out"), "--plots", "none"]) == 0
    shown = errors.getvalue()
    if not errors.isatty():
        assert shown == ""
        return
    assert f"/{packed.stat().st_size / 1000:.1f}k [" in shown, "the size of the file is the total"
    assert "/9.00k [" in shown
    assert "reading: " in shown
    assert "judging: " in shown
    assert "B/s" in shown
    assert "records/s" in shown
