"""Reading logs for a diagnosis: files found, unpacked, in lines; and what they may be instead."""

from __future__ import annotations

import bz2
import gzip
import lzma
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis import diagnose
from rmetric.diagnosis.input_files import find
from rmetric.diagnosis.reading.source import Lines, LogSource, _layers, decoded, unwrapped
from rmetric.logs import LogError
from studies.diagnosis_benchmark.written_sets import opened

TEXT = b"step 1 loss 2.5\nstep 2 loss 2.4\nValueError: no\n"


def source(path: Path, content: bytes) -> LogSource:
    path.write_bytes(content)
    return LogSource(path=path, name=path.name, size=len(content))


def read(path: Path, content: bytes) -> tuple[list[bytes], LogSource]:
    log = source(path, content)
    return [line for chunk in log.chunks() for line in chunk], log


def in_blocks(content: bytes, size: int, longest: int = 1 << 16) -> tuple[list[bytes], Lines]:
    reader = Lines(longest)
    blocks = iter([content[at : at + size] for at in range(0, len(content), size)])
    return [line for chunk in reader.lists(decoded(blocks)) for line in chunk], reader


PARTS = [b"a", b"\r", b"\n", b"\r\n", b"\x1b[31m", b"\x1b[0K", b"\0", b" 3: ", b"\xc3\xa9"]
ODD = st.lists(st.sampled_from(PARTS)).map(lambda parts: b"log\n" + b"".join(parts))


@given(ODD, st.integers(1, 9))
def test_blocks_may_end_anywhere(content, size):
    lines, reader = in_blocks(content, size)
    assert lines == in_blocks(content, 1 << 20)[0]
    assert reader.count == len(lines) == content.count(b"\n") + (not content.endswith(b"\n"))
    if not set(content) & set(b"\r\x1b\0"):
        assert b"\n".join(lines) == content.removesuffix(b"\n")


@given(st.lists(st.text("ab\r", max_size=30)), st.integers(1, 50))
def test_no_line_is_longer_than_is_kept(lines, size):
    content = "\n".join(lines).encode()
    longest = 8
    got, reader = in_blocks(content, size, longest)
    assert got == in_blocks(content, 1 << 20, longest)[0]
    assert all(len(line) <= longest for line in got)
    left = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    assert reader.cut[0] == sum(len(line) > longest for line in left)


def test_what_a_carriage_return_and_colours_leave(tmp_path):
    bar = b"  0%|  | 0/9\r 50%|# | 4/9\r100%|##| 9/9\n"
    assert read(tmp_path / "a", bar + b"next\r\nlast\r\r\n")[0] == [
        b"100%|##| 9/9",
        b"next",
        b"last",
    ]
    # srun writes its prefix once, the bar many times.
    assert read(tmp_path / "b", b" 3:   0%\r 50%\r100%\n3: a\r3: b\n")[0] == [b" 3: 100%", b"3: b"]
    coloured = b"\x1b[1;31mERROR\x1b[0m: \x1b]8;;http://x\x07link\x1b]8;;\x07\n"
    assert read(tmp_path / "c", coloured)[0] == [b"ERROR: link"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16_is_recoded(tmp_path, encoding):
    text = "step 1 loss 2.5\nValueError: größer\n" * 40
    lines, log = read(tmp_path / "a.log", text.encode(encoding))
    assert lines == text.encode().split(b"\n")[:-1]
    assert find([tmp_path]).sources
    assert log.sample() == lines


@pytest.mark.parametrize(
    "foreign", ["größer".encode("latin-1"), b"cut \xe2\x82", "损坏".encode("gb18030")]
)
def test_other_encodings_are_read_and_noted(tmp_path, foreign):
    lines, log = read(tmp_path / "a.log", b"fine\n" + foreign + b"\nfine \xc3\xa9\n")
    assert lines == [b"fine", foreign, b"fine \xc3\xa9"]
    assert log.notes == [
        "1 lines, the first is line 2, hold bytes that are not UTF-8: they were replaced"
    ]
    assert find([tmp_path]).sources


def test_empty_and_one_line(tmp_path):
    for name, content, expected in (("empty", b"", []), ("one", b"Killed", [b"Killed"])):
        lines, log = read(tmp_path / name, content)
        assert lines == log.sample() == expected
        assert (log.lines, log.notes) == (len(expected), [])
    assert source(tmp_path / "zeros.log", b"\0" * 3_000_000).sample() == []
    (tmp_path / "zeros.log").unlink()
    assert [s.name for s in find([tmp_path]).sources] == ["empty", "one"]


def test_a_sample_is_of_the_beginning_and_the_rest_and_takes_no_line_away(tmp_path):
    lines = [b"line %07d %s" % (at, b"x" * 50) for at in range(40_000)]
    log = source(tmp_path / "a", b"\n".join(lines))
    sample = log.sample()
    assert len(sample) < len(lines)
    assert sample[:1000] == lines[:1000]
    assert set(sample) <= set(lines)
    assert any(lines[30_000] < line < lines[35_000] for line in sample)
    assert [line for some in log.chunks() for line in some] == lines
    assert (log.lines, log.notes) == (len(lines), [])


MEASURE = """
import resource, sys
from pathlib import Path
from rmetric.diagnosis.reading.source import LogSource
path = Path(sys.argv[1])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
log = LogSource(path=path, name="a", size=path.stat().st_size)
log.sample()
lengths = [len(line) for lines in log.chunks() for line in lines]
print(lengths, log.notes, (peak() - before) // 1024)
"""


@pytest.mark.parametrize(
    ("filled", "printed"),
    [
        (b"x", "[5, 65536, 3] ['1 lines, the first is line 2, are longer than 65,536"),
        (b"\0", "[5, 5, 3] ['104,857,600 zero bytes"),
        (b"50% |##\r", "[5, 7, 3] []"),
    ],
    ids=["text", "hole", "progress"],
)
def test_a_line_of_100_megabytes_needs_few(tmp_path, filled, printed):
    path = tmp_path / "a"
    with path.open("wb") as file:
        file.write(b"begin\nlong ")
        if filled == b"\0":
            file.seek(100 << 20, 1)  # sparse: takes no room on the disk
        else:
            for _ in range(100):
                file.write(filled * ((1 << 20) // len(filled)))
        file.write(b"\nend\n")
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, path], capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith(printed)
    assert int(run.stdout.split()[-1]) < 24


def test_packed_files_are_unpacked(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    expected = TEXT.split(b"\n")[:-1]
    assert read(tmp_path / "a.gz", gzip.compress(TEXT))[0] == expected
    assert read(tmp_path / "b.zst", zstandard.compress(TEXT + b"\n"))[0] == [*expected, b""]
    # By the content, whatever it is called.
    assert read(tmp_path / "c.log", gzip.compress(TEXT + b"c"))[1].sample() == [*expected, b"c"]
    assert read(tmp_path / "d.xz", lzma.compress(TEXT + b"d") + b"\0" * 4)[0] == [*expected, b"d"]
    assert read(tmp_path / "e.bz2", bz2.compress(TEXT + b"e"))[0] == [*expected, b"e"]
    (tmp_path / "f.gz").write_bytes(b"\x1f\x8b\x08")
    found = find([tmp_path])
    assert [s.name for s in found.sources] == ["a.gz", "b.zst", "c.log", "d.xz", "e.bz2"]
    assert "f.gz: compressed and damaged or cut off" in found.notes[0]
    for pack in (gzip.compress, bz2.compress, lzma.compress, zstandard.compress):
        lines, log = read(tmp_path / "a.log", pack(b"one\n") + pack(b"two\n"))
        assert (lines, log.cut_off) == ([b"one", b"two"], "")


@pytest.mark.parametrize("packer", ["gzip", "bz2", "lzma", "zstandard"])
def test_a_cut_off_file_gives_what_there_is(tmp_path, packer):
    rolls = np.random.default_rng(0).integers(1 << 62, size=50_000)
    numbers = b"".join(b"line %d of a log\n" % roll for roll in rolls)
    settings = {"compresslevel": 1} if packer == "bz2" else {}  # small blocks
    whole = pytest.importorskip(packer).compress(numbers, **settings)
    lines, log = read(tmp_path / "a.log", whole[: len(whole) // 2])
    assert numbers.startswith(b"\n".join(lines))
    assert len(lines) > 10_000
    assert "damaged or cut off" in log.cut_off
    assert read(tmp_path / "b.log", whole)[1].cut_off == ""


def test_a_zst_cut_within_its_first_block_has_no_line_and_says_so(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    rolls = np.random.default_rng(0).integers(1 << 62, size=1000)
    whole = zstandard.compress(b"".join(b"line %d of a log\n" % roll for roll in rolls))
    path = tmp_path / "a.log.zst"
    path.write_bytes(whole[: len(whole) // 2])
    found = diagnose(path, jobs=1)
    assert (found.outcome, found.job["lines"]) == ("unknown", 0)
    assert any("nothing of it can be unpacked" in note for note in found.notes), found.notes


def test_zst_without_its_package_is_one_clear_error(tmp_path):
    path = tmp_path / "a.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd rest")
    with mock.patch.dict(sys.modules, {"zstandard": None}):
        with pytest.raises(LogError, match=r"a\.zst: compressed with zstd: pip install zstandard"):
            find([path])
        with pytest.raises(LogError, match="pip install zstandard"):
            find([tmp_path])


@pytest.mark.parametrize(
    "content",
    [
        bytes(at * at * 7919 % 65521 % 256 for at in range(5000)),
        b"\x89PNG\r\n\x1a\n" + b"text " * 100,
        (80).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}}',
        b"PK\x03\x04" + b"text" * 100,
    ],
    ids=["core", "picture", "weights", "archive"],
)
def test_binary_rubbish_is_no_log(tmp_path, content):
    path = tmp_path / "core"
    path.write_bytes(content)
    with pytest.raises(
        LogError, match=r"not a text log but binary; text, \.gz, \.bz2, \.xz and \.zst are accepted"
    ):
        find([path])
    with pytest.raises(LogError, match=r"no text log to read here .*1 binary"):
        find([tmp_path])
    (tmp_path / "train.log").write_bytes(TEXT)
    found = find([tmp_path])
    assert [s.name for s in found.sources] == ["train.log"]
    assert found.notes == ["non-log files were left out: 1 binary"]


def test_of_a_folder_only_logs_are_read(tmp_path):
    logs = ["a.log", "run.out", "err/rank_0.err", "notes.txt", "plain", "old.log.1", "c.jsonl"]
    others = ["a.bin", "config.json", "a.py", "a.png", "requirements.txt", ".git/x.log"]
    for at, name in enumerate([*logs, *others]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"number %d\n" % at)
    (tmp_path / "run.jsonl").write_bytes(b'{"step": 0, "event": "EXPERIMENT_START"}\n')
    found = find([tmp_path])
    assert sorted(s.name for s in found.sources) == sorted(logs)
    assert "1 logs of numbers, for rmetric replay" in found.notes[0]
    # Named, a file is read whatever its suffix.
    assert [s.path for s in find([tmp_path / "config.json"]).sources] == [tmp_path / "config.json"]
    with pytest.raises(LogError, match="not a text log but logs of numbers, for rmetric replay"):
        find([tmp_path / "run.jsonl"])


def test_duplicates_are_read_once_and_noted(tmp_path):
    (tmp_path / "a.log").write_bytes(TEXT)
    (tmp_path / "b.log").write_bytes(TEXT)
    (tmp_path / "c.log").write_bytes(TEXT.replace(b"2.4", b"2.3"))
    (tmp_path / "latest").symlink_to("c.log")
    found = find([tmp_path, tmp_path / "a.log"])
    assert [s.path.name for s in found.sources] == ["a.log", "c.log"]
    assert len(found.notes) == 3
    assert "b.log has the content of " in "".join(found.notes)
    assert "latest has the content of " in "".join(found.notes)


def test_ranks_that_say_the_same_are_no_duplicates_and_in_order(tmp_path):
    for rank in (10, 9, 100):
        (tmp_path / f"rank_{rank}.log").write_bytes(TEXT)
    found = find([tmp_path])
    assert [(s.name, s.rank) for s in found.sources] == [
        (f"rank_{rank}.log", rank) for rank in (9, 10, 100)
    ]
    assert found.notes == []


def test_loops_of_links_end(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_bytes(TEXT)
    (tmp_path / "logs" / "again").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "gone.log").symlink_to(tmp_path / "nowhere")
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    assert [s.name for s in find([tmp_path]).sources] == ["logs/a.log"]
    with pytest.raises(LogError, match="itself: cannot be read"):
        find([tmp_path / "itself"])


def test_what_cannot_be_read_is_noted(tmp_path):
    (tmp_path / "a.log").write_bytes(TEXT)
    refused = tmp_path / "b.log"
    refused.write_bytes(TEXT + b"b")
    # Root may read everything, so the refusal is played.
    real = open

    def guarded(path, *rest, **named):
        if Path(path) == refused:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *rest, **named)

    with mock.patch("builtins.open", guarded):
        found = find([tmp_path])
        assert [s.name for s in found.sources] == ["a.log"]
        assert found.notes == [f"{refused}: cannot be read: Permission denied"]
        with pytest.raises(LogError, match=r"b\.log: cannot be read: Permission denied"):
            find([refused])


def test_paths_that_are_none(tmp_path):
    with pytest.raises(LogError, match=r"nowhere\.log: cannot be read: No such file"):
        find([tmp_path / "nowhere.log"])
    with pytest.raises(LogError, match="no text log to read here"):
        find([tmp_path])
    with pytest.raises(LogError, match="no path"):
        find([])


# What a tool puts before every line

WRAPPED = ["> {line}", "> > {line}", "{at:6d}\t{line}", "{at}:{line}", "[{at}] {line}",
           "[stdout] {line}", "    {line}", "> \t{line}"]  # fmt: skip
LOG = [
    "Traceback (most recent call last):", '  File "fit.py", line 3, in main', "    run()",
    "KeyError: 'x'", "", "step 3 loss 2.1", "[rank3] lost a peer", "srun: error: n7: task 3",
]  # fmt: skip


@pytest.mark.parametrize("form", [*WRAPPED, "\x1b[32m{line}\x1b[0m", "{line}  "])
def test_an_answer_is_that_of_the_log_without_it(tmp_path, form):
    def answer(job, wrap):
        to = tmp_path / job.case.name / wrap.encode().hex()
        for path in sorted(job.case.folder.rglob("*.*")):
            data = path.read_bytes()
            if data.count(b"\n") >= 3 and b"\r" not in data and path.suffix != ".gz":
                lines = enumerate(data.decode().splitlines(), 1)
                text = "".join(f"{wrap.format(at=at, line=line)}\n" for at, line in lines)
                copy = to / path.relative_to(job.case.folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(text)
        found = diagnose([to], jobs=1)
        where = [suspect.name for suspect in found.nodes]
        return found.outcome, found.title, found.stage, found.iteration, where

    with opened(["development"]) as jobs:
        for job in jobs[::5]:
            assert answer(job, form) == answer(job, "{line}")


@given(st.integers(1, 10**6), st.sampled_from(WRAPPED))
def test_it_is_removed_wherever_the_numbers_begin(first, form):
    text = "\n".join(form.format(at=first + at, line=line) for at, line in enumerate(LOG))
    assert unwrapped(text.encode()).decode().split("\n") == LOG


@pytest.mark.parametrize(
    "lines",
    [
        [f"{step}: loss {4 - step / 50}" for step in range(1, 99)],
        [f"{step}:loss {4 - step / 50}" for step in range(1, 99)],
        [f"[{step}] loss {4 - step / 50}" for step in range(1, 99)],
        [f"{rank}: hello from gpu {rank}" for rank in range(1, 17)],
        [f"[{rank}] NCCL INFO comm {rank} ready" for rank in range(8)],
        [f"{rank}: {word}" for rank, word in enumerate(["some", "words", "of", "ranks"])],
        [f"{1700000000 + at} INFO event {'abcdefgh'[at % 8]}" for at in range(40)],
        [f" iteration {at}/ 500 | lm loss: 2.1 |" for at in range(40)],
        [f"12:00:{at:02d} INFO {'abcdefgh'[at % 8]}" for at in range(40)],
        [f"[rank{at % 8}] > step {at}" for at in range(40)],
        [f">>> print({at})" for at in range(40)],
        ["> a", "b", "c", "> d"],
    ],
)
def test_ranks_steps_and_times_stay(lines):
    assert not _layers([line.encode() for line in lines])
    text = "\n".join(lines).encode()
    assert unwrapped(text) == text


def test_what_was_done_is_noted(tmp_path):
    (tmp_path / "a.log").write_text("".join(f"> {line}\n" for line in LOG * 3))
    notes = " ".join(diagnose([tmp_path], jobs=1).notes)
    assert "a mark, number or indent before every line was left out" in notes


def test_lines_without_it_stay_as_they_are():
    lines = ["> a", "> b", "> c"] * 9 + ["d", "  e"]
    assert unwrapped("\n".join(lines).encode()).decode().split("\n")[-2:] == ["d", "  e"]


def test_two_folders_with_files_of_one_name(tmp_path):
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.log").write_bytes(folder.encode())
    names = [s.name for s in find([tmp_path / "first", tmp_path / "second"]).sources]
    assert len(set(names)) == 2
    assert all(name.endswith("train.log") for name in names)


def test_a_log_that_begins_with_a_hole_is_found(tmp_path):
    """As one that was emptied while its writer went on."""
    lines, log = read(tmp_path / "a.log", b"\0" * 100_000 + TEXT)
    assert lines == TEXT.split(b"\n")[:-1]
    assert log.notes == ["100,000 zero bytes were left out"]
    assert len(find([tmp_path]).sources) == 1


def test_numbers_before_lines_are_taken_off_the_whole_sample(tmp_path):
    content = b"".join(b"%6d\tpod ready %d\n" % (at, at) for at in range(100_000))
    assert {line[:9] for line in source(tmp_path / "a.log", content).sample()} == {b"pod ready"}
