"""What a command does where its standard output takes no more or is closed, or on Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rmetric.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
#: A write there always fails for want of space.
FULL = Path("/dev/full")
#: One command line that prints much or little and works, for those that need no GPU and no time.
WORKING = (
    ["diagnose", "studies/diagnosis_benchmark/data/examples/wrong_shape", "--json"],
    ["calibrate", "--help"],
    *([name, "--help"] for name in COMMANDS if name not in ("diagnose", "calibrate")),
)


def started(arguments, stdout, **more) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "rmetric", *arguments]
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60, **more
    )


@pytest.mark.parametrize("arguments", WORKING, ids=" ".join)
def test_a_reader_that_went_away_and_a_full_disk(arguments):
    read, write = os.pipe()
    os.close(read)
    try:
        done = started(arguments, write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
    if FULL.exists():
        with FULL.open("wb") as full:
            done = started(arguments, full)
        assert done.returncode == 1
        assert done.stderr == "error: standard output: No space left on device\n"


def test_without_a_standard_output_the_exit_code_is_the_same():
    line = f"{sys.executable} -m rmetric {' '.join(WORKING[0][:2])} >&-"
    done = subprocess.run(
        ["sh", "-c", line], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (3, b"")


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
def test_unbuffered_it_is_no_error_of_a_log(tmp_path):
    (tmp_path / "a.log").write_text("".join(f"step {i} loss 1.0\n" for i in range(40)))
    arguments = ["logs", "learn", "--job", "a", str(tmp_path / "a.log"), "--out"]
    with FULL.open("wb") as full:
        done = started(
            [*arguments, str(tmp_path / "a.json")],
            full,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    assert done.returncode == 1
    assert done.stderr == "error: standard output: No space left on device\n"
    assert (tmp_path / "a.json").exists()
