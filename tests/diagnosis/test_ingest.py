"""The one pass over the logs of a job."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from rmetric.diagnosis import ingest as ingesting
from rmetric.diagnosis import one_pass
from rmetric.diagnosis.facts.job import TAIL, Job
from rmetric.diagnosis.ingest import ingest
from rmetric.diagnosis.input_files import find, other_by_content
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.one_pass import FilePass
from rmetric.diagnosis.parts import merged
from rmetric.diagnosis.reading import source as source_module
from rmetric.diagnosis.reading.text import MAX_LINES
from rmetric.diagnosis.templates import OTHERS, BoundedCache, LineAnalyser

LIBRARY = SignatureLibrary.shipped()
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79 GiB"


def traceback(rank: int, error: str = OOM) -> list[str]:
    return [
        "Traceback (most recent call last):",
        f'  File "/opt/train{rank}.py", line {10 + rank}, in <module>',
        "    main()",
        error,
    ]


def step(number: int) -> str:
    time = f"2024-04-08 02:{number // 60:02d}:{number % 60:02d},000"
    return f"[{time}] iteration {number}/ 500 | loss {number}.5"


def healthy_lines(rank: int = 0, steps: int = 40) -> list[str]:
    return [
        line
        for at in range(1, steps + 1)
        for line in (step(at), f"[INFO] rank {rank}: queue {at % 7} waited {at}.{rank} ms")
    ]


def write(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def in_one_pass(path: Path) -> Job:
    """Without the division into attempts."""
    [source] = find([path]).sources
    return merged(FilePass(source, LineAnalyser(LIBRARY)).read_attempts(starts=()))


def read(path: Path) -> Job:
    return ingest([path], LIBRARY)


def counted(job: Job) -> dict[str, int]:
    """Template -> how often."""
    counts: Counter[str] = Counter()
    for event in job.events:
        counts[event.template] += event.count
    return dict(counts)


class _Slow(FilePass):
    """Every line the slow way."""

    def _take(self, lines: list[bytes], keys: list[bytes]) -> None:
        for line in lines:
            form = self._form(line)
            self._slow(self.number + 1, line, form, *self.stream(line, form))
            self.number, self.line_before = self.number + 1, line


def slowly(path: Path) -> Job:
    analyser = LineAnalyser(LIBRARY)
    passes = [_Slow(source, analyser) for source in find([path]).sources]
    return merged([part for reader in passes for part in reader.read_attempts(starts=())])


def test_ranks_in_one_file_are_read_apart(tmp_path: Path) -> None:
    """Tracebacks of two ranks, line by line in turns."""
    lines = [f"{at % 4}: waiting for data of part {at}" for at in range(40)]
    both = zip(traceback(1), traceback(3, "ValueError: bad shard"), strict=True)
    lines += [line for first, third in both for line in (f"1: {first}", f"3: {third}")]
    job = read(write(tmp_path / "all.log", lines))
    assert set(job.streams) == {"rank 0", "rank 1", "rank 2", "rank 3"}
    assert ("cuda_out_of_memory", "rank 1") in job.matches
    assert ("cuda_out_of_memory", "rank 3") not in job.matches
    last = job.streams["rank 1"].last
    assert last is not None
    assert (last.text, last.line) == ("\n".join(traceback(1)), 41)
    assert job.events[last.event].template.startswith("torch.OutOfMemoryError:")


def test_lines_without_a_prefix_continue_the_line_before_them(tmp_path: Path) -> None:
    """A report of torch in several lines has the prefix of its rank in the first only."""
    lines = ["/opt/a.py:3: FutureWarning: old", "  warnings.warn(", "  and more"]
    lines += [f"[rank{at % 4}]: waiting for data of part {at}" for at in range(40)]
    lines += [
        "[rank5]:[E819 04:27:07.93 ProcessGroupNCCL.cpp:1515] [PG ID 2 Rank 5] ",
        "\t - [5] Timeout at collective: ALLREDUCE, #18361",
        "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:",
        "\t   - [21] finished collective #18360, but didn't join collective #18361",
        "[rank2]: waiting for data of part 41",
    ]
    job = read(write(tmp_path / "all.log", lines))
    assert job.matches["nccl_lagging_rank", "rank 5"].named == [{"rank": "21"}]
    last = job.streams["rank 5"].last
    assert last is not None
    assert last.text.count("\n") == 3


def test_glued_tracebacks_without_prefixes_still_show_their_exceptions(tmp_path: Path) -> None:
    lines = [
        "Traceback (most recent call last):Traceback (most recent call last):",
        '  File "/opt/a.py", line 3, in main',
        '  File "/opt/a.py", line 3, in main    raise ValueError("no shard 3")',
        "",
        "ValueError: no shard 3",
        "    x = read(3)ValueError: no shard 7",
        "  File ValueError: no shard 9",
    ]
    job = read(write(tmp_path / "all.log", lines))
    errors = sum(count for text, count in counted(job).items() if "ValueError: no shard" in text)
    assert errors == 3


@pytest.mark.parametrize("cores", [1, 2])
def test_a_file_for_each_rank(cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingesting, "WORTH_PROCESSES", 0)
    for rank in range(4):
        extra = traceback(rank) if rank == 3 else []
        write(tmp_path / f"rank_{rank}.log", ["SLURM_JOB_ID=4711", *healthy_lines(rank), *extra])
    job = ingest([tmp_path], LIBRARY, cores=cores)
    assert list(job.streams) == [f"rank {rank}" for rank in range(4)]
    assert [stream.entries for stream in job.streams.values()] == [81, 81, 81, 82]
    assert job.notes == []
    rank_2 = job.streams["rank 2"]
    assert (rank_2.last_step, rank_2.steps, rank_2.stage) == (40, 40, "train")
    assert rank_2.first_time is not None
    assert rank_2.last_time == rank_2.first_time + 39
    assert len(rank_2.tail) == TAIL
    assert rank_2.last_step_at is not None
    assert rank_2.last_step_at.line == 80
    orders = [place.order for stream in job.streams.values() for place in stream.tail]
    assert orders == sorted(set(orders))
    for event in job.events:
        assert (event.first.event, event.last.event) == (event.number, event.number)
        assert set(event.counts) <= set(job.streams)
    for (signature, stream), match in job.matches.items():
        assert (match.signature, match.stream, match.first.stream) == (signature, stream, stream)
        assert match.first.event in match.events
    assert job == ingest([tmp_path], LIBRARY, cores=1)


def test_a_match_has_its_count_its_first_and_its_last_entry(tmp_path: Path) -> None:
    lines = [*traceback(0), *healthy_lines(steps=5), *traceback(0)]
    path = tmp_path / "a.log"
    path.write_text("\n".join(lines))  # the last line has no end
    job = read(path)
    (match,) = [match for match in job.matches.values() if match.signature == "cuda_out_of_memory"]
    assert (match.count, match.first.line, match.last.line) == (2, 1, 15)
    assert match.last.step == 5
    assert sum(event.count for event in job.events) == 12
    assert sum(stream.entries for stream in job.streams.values()) == 12
    assert job.lines == 18


def test_an_entry_of_too_many_lines_is_two(tmp_path: Path) -> None:
    lines = ["Traceback (most recent call last):", *['  File "a.py", line 3, in f'] * MAX_LINES]
    assert [log.entries for log in read(write(tmp_path / "a.log", lines)).streams.values()] == [2]


def test_what_digits_decide_is_looked_at_each_time(tmp_path: Path) -> None:
    """Lines of one form, of which one alone is a fault."""
    lines = [f"NVRM: Xid (PCI:0000:3b:00): {xid}, pid=7, x" for xid in (13, 13, 79, 13)]
    job = read(write(tmp_path / "a.log", lines))
    assert sorted(match.count for match in job.matches.values()) == [1, 3]


def test_a_continuation_that_matches_takes_the_entry_along(tmp_path: Path) -> None:
    lines = ["worker says:", f"    {OOM}", "worker says:", "    all is well", "end of log"]
    job = read(write(tmp_path / "a.log", lines))
    (match,) = job.matches.values()
    assert (match.first.line, match.count) == (1, 1)
    assert sum(counted(job).values()) == 3


#: Lines, of like forms that differ in what a form without digits does not show.
FORMS = st.sampled_from(
    [
        "NVRM: Xid (PCI:0000:3b:00): {}, pid={}, x", "exited with exit code {} on node-{}",
        "Signal {} (SIG{}) received", "HTTP status {} of shard {}", "err{}or: code {}",
        "2024-0{}-01 1{}:00:01 train", "2024-04-0{} 02:{}:00,000 step", "E05{} 12:00:{} wait",
        "rank {} of {}", "comm 0x7f{} rank {} nranks 8 busId {}a - Init COMPLETE", "world_size={}",
        "RANK={} LOCAL_RANK={}", "rank={} world size {}", "rank {} on node-{}", "SLURM_JOB_ID={}",
        "Reducing dynamic loss scale from {}.0 to {}.0", "update {} step {} of loss 2.{}",
        "step {} | loss {}.5", "Epoch {}/9, Step {}/7 loss 1", "{}: {}", "[rank{}]: step {} loss",
        "  indented {}", "{}", "", "\t", "}}", "+ export WORLD_SIZE={}", "++ srun --label {} a.py",
        *traceback(7), "-" * 30, "saving checkpoint to /ckpt/{}",
    ]
)  # fmt: skip
NUMBERS = st.sampled_from(["", "0", "7", "79", "137", "00012", "2024", "1690730461", "٣", "x"])
ENDS = st.sampled_from(
    [b"\n", b"\r\n", b"\0\n", b"\xff\xfe\n", b" \xe2\x82\n", b"y" * 9000 + b"\n"]
)
ENTRIES = st.lists(st.tuples(FORMS, NUMBERS, NUMBERS, NUMBERS, ENDS), max_size=40)
PREFIXES = st.sampled_from(["", "[rank{}]: ", "[default{}]: ", "{}: ", "node-{}: "])
#: A form of so many bytes is not remembered, and digits of other scripts make no time.
LONG = ("2024-07-01 1{}:00:01 train", "٣", "", "", b"y" * 9000 + b"\n")
of_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def log_of(path: Path, entries: list[tuple[str, str, str, str, bytes]], prefix: str = "") -> Path:
    written = b"".join(
        prefix.format(at % 3).encode() + form.format(*numbers).encode() + end
        for at, (form, *numbers, end) in enumerate(entries * 2)
    )
    path.write_bytes(b"begin\n" + written + b"end\n")
    assume(not other_by_content(path.read_bytes()))
    return path


@of_one_folder
@given(ENTRIES, PREFIXES)
@example([LONG], "")
def test_the_fast_way_is_the_slow_way(
    tmp_path: Path, entries: list[tuple[str, str, str, str, bytes]], prefix: str
) -> None:
    path = log_of(tmp_path / "a.log", entries, prefix)
    fast, slow = in_one_pass(path), slowly(path)
    slow.notes = fast.notes
    assert fast == slow


@of_one_folder
@given(ENTRIES, st.integers(1, 200))
def test_neither_borders_of_chunks_matter_nor_what_was_forgotten(
    tmp_path: Path, entries: list[tuple[str, str, str, str, bytes]], size: int
) -> None:
    # Where lines differ in a missing number alone, the remembered one names the event.
    entries = [(form, *(n or "0" for n in numbers), end) for form, *numbers, end in entries]
    path = log_of(tmp_path / "a.log", entries)
    whole = read(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_module, "BLOCK", size)
        assert read(path) == whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_pass, "BoundedCache", lambda *_: BoundedCache(2))
        assert read(path) == whole


def test_an_empty_line_is_no_number(tmp_path: Path) -> None:
    assert counted(read(write(tmp_path / "a.log", ["7", "", "1234567", "", "", "8"]))) == {"<N>": 3}


def test_random_text_ends_in_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_pass, "MAX_TEXTS", 20)
    words = [f"{chr(97 + at // 26)}{chr(97 + at % 26)}x" for at in range(300)]
    job = read(write(tmp_path / "a.log", [f"{word} says {word}" for word in words]))
    assert counted(job)[OTHERS] == 280
    assert sum(counted(job).values()) == 300
    assert any(OTHERS in note for note in job.notes)


def test_memory_does_not_grow_with_lines(tmp_path: Path) -> None:
    (source,) = find([write(tmp_path / "a.log", healthy_lines(steps=5_000))]).sources
    reader = FilePass(source, LineAnalyser(LIBRARY))
    reader.read_attempts(starts=())
    assert len(reader.forms) < 100
    assert len(reader.template_of) < 10
    assert all(len(stream.tail) <= TAIL for stream in reader.streams.values())
    assert not any(stream.templates for stream in reader.streams.values())


def test_long_lines_keep_head_and_end(tmp_path: Path) -> None:
    job = read(write(tmp_path / "a.log", [f"begins {'x' * 60_000} {OOM}", "next"]))
    assert any(name == "cuda_out_of_memory" for name, _ in job.matches)
    assert all(len(entry.text) <= 4000 for entry in next(iter(job.streams.values())).tail)


@pytest.mark.parametrize(
    "line", ["[rank{}]: Error", "world size: {}", "step {} loss 2", "{}%|# | {}/{} [{}:{}<{}]"]
)
@pytest.mark.parametrize("digits", [400, 5000])
def test_numbers_of_any_length_are_read(tmp_path: Path, line: str, digits: int) -> None:
    """Python refuses to read an integer of more than 4,300 digits."""
    twice = [line.replace("{}", "9" * digits)] * 2
    assert list(read(write(tmp_path / "a.log", ["begin", *twice, "end"])).files.values()) == [4]


def test_two_jobs_are_noted_by_the_schedulers_numbers_and_by_their_times(tmp_path: Path) -> None:
    for name, day in (("a", 1), ("b", 2)):
        lines = [f"2024-04-0{day} 10:00:00 {name}", f"SLURM_JOB_ID=471{day}", "more"]
        write(tmp_path / f"{name}.log", lines)
    notes = " ".join(read(tmp_path).notes)
    assert "2 jobs" in notes
    assert "4711 in a.log, line 2" in notes
    assert "4712 in b.log, line 2" in notes
    assert "a.log ends at 2024-04-01 10:00:00" in notes
    assert "b.log begins at 2024-04-02 10:00:00" in notes


def test_a_last_line_without_a_year_is_of_the_same_job(tmp_path: Path) -> None:
    lines = [f"2024-05-03 02:14:{i:02d} INFO step {i} loss 1.0" for i in range(40)]
    write(tmp_path / "a.log", [*lines, "W0503 02:15:01.000000 1 api.py:719] shutting down"])
    assert not [note for note in read(tmp_path).notes if "two jobs" in note]


@pytest.mark.parametrize(("text", "entries"), [("", 0), ("\n\n", 0), ("one line", 1)])
def test_hardly_any_input(tmp_path: Path, text: str, entries: int) -> None:
    path = tmp_path / "a.log"
    path.write_text(text)
    job = read(path)
    assert sum(stream.entries for stream in job.streams.values()) == entries
    assert job.matches == {}


def test_a_log_that_does_not_reach_its_end_is_noted_first(tmp_path: Path) -> None:
    whole = gzip.compress(("\n".join(healthy_lines()) + "\n").encode())
    (tmp_path / "rank_0.log.gz").write_bytes(whole[:-40])
    (tmp_path / "rank_1.log.gz").write_bytes(whole)
    (tmp_path / "rank_2.log.gz").write_bytes(whole)
    for job in (read(tmp_path), ingest([tmp_path], SignatureLibrary.shipped(), cores=2)):
        assert job.cut_off == ["rank_0.log.gz"]
        assert job.notes[0].startswith("rank_0.log.gz does not reach its end: ")


@pytest.mark.parametrize(
    ("stated", "world", "ranks"),
    [
        ({0: "rank 0", 1: "rank 0", 2: "rank 0", 3: "rank 0"}, 4, {0: 0, 1: 1, 2: 2, 3: 3}),
        ({0: "ready", 3: "ready"}, 8, {0: 0, 3: 3}),
        ({0: "rank 5", 1: "rank 9", 2: "ready"}, 16, {0: 5, 1: 9, 2: None}),
    ],
    ids=["one number for all", "two of eight", "no common distance"],
)
def test_ranks_of_a_node_are_those_that_its_lines_can_mean(tmp_path, stated, world, ranks):
    lines = [f"[default{at}]:{text}, world size {world}" for at, text in stated.items()]
    lines += [f"[default{at}]:step 1 loss 3.{at}" for at in stated]
    (tmp_path / "job.log").write_text("\n".join(lines) + "\n")
    job = ingest([tmp_path], LIBRARY)
    assert {stream.tail[-1].text[-1]: stream.rank for stream in job.streams.values()} == {
        str(at): rank for at, rank in ranks.items()
    }
