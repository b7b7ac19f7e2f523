"""The line that shows how much has been read: on a terminal, late, and gone at the end."""

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


def shown(monkeypatch, stream: io.StringIO, first: float) -> str:
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(progress, "FIRST", first)
    monkeypatch.setattr(progress, "NEXT", 0.0)
    with reading() as bar:
        time.sleep(0.05)
        bar.update(50_000)
        bar.update(50_000)
    return stream.getvalue()


def test_it_is_written_over_and_gone_at_the_end(monkeypatch):
    written = shown(monkeypatch, Terminal(), 0.0)
    assert "\rreading: 100kB of text so far" in written
    assert written.endswith(" \r")


@pytest.mark.parametrize(("stream", "first"), [(Terminal, 1.5), (io.StringIO, 0.0)])
def test_what_takes_a_moment_and_what_nobody_sees_is_read_without_a_word(
    monkeypatch, stream, first
):
    assert shown(monkeypatch, stream(), first) == ""


@pytest.mark.parametrize("command", [["diagnose"], ["logs", "learn", "--job", "a", "--out"]])
def test_all_bytes_are_counted(command, tmp_path, monkeypatch):
    text = "".join(f"step {number} loss 2.5\n" for number in range(2000))
    log = tmp_path / "a.log"
    log.write_text(text)
    numbers = []
    monkeypatch.setattr(tqdm, "update", lambda self, read: numbers.append(read))
    more = [str(tmp_path / "pool.json")] if "--out" in command else []
    main([*command, *more, str(log)])
    assert sum(numbers) == len(text)


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_replay_shows_the_bytes_of_the_packed_file_and_then_the_records(
    tmp_path: Path, monkeypatch, stream
):
    packed = tmp_path / "run.jsonl.gz"
    lines = "".join(f'{{"step": {n}, "loss": {2 + n % 7 / 10}}}\n' for n in range(9000))
    packed.write_bytes(gzip.compress(lines.encode()))
    errors = stream()
    monkeypatch.setattr("sys.stderr", errors)
    monkeypatch.setattr(progress, "FIRST", 0.0)
    monkeypatch.setattr(progress, "NEXT", 0.0)
    assert main(["replay", str(packed), "--out", str(tmp_path / "out"), "--plots", "none"]) == 0
    printed = errors.getvalue()
    size = f"/{packed.stat().st_size / 1000:.1f}k ["  # of the file is the total
    parts = ("reading: ", size, "B/s", "judging: ", "/9.00k [", "records/s")
    assert [part in printed for part in parts] == [errors.isatty()] * len(parts)
