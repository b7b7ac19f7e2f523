"""The one pass over the logs of a job."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rmetric.diagnosis import entries
from rmetric.diagnosis import ingest as ingesting
from rmetric.diagnosis.facts.job import TAIL, Job
from rmetric.diagnosis.ingest import ingest
from rmetric.diagnosis.input_files import find, other_by_content
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.merging import merged
from rmetric.diagnosis.one_pass import FilePass
from rmetric.diagnosis.reading import source as source_module
from rmetric.diagnosis.templates.events import OTHERS
from rmetric.diagnosis.templates.facts import SHORTEST_FORM, BoundedCache, LineAnalyser

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
    return merged([FilePass(source, LineAnalyser(LIBRARY)).read()])


def read(path: Path) -> Job:
    return ingest([path], LIBRARY)


def said(job: Job) -> dict[str, int]:
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
    return merged([_Slow(source, analyser).read() for source in find([path]).sources])


class TestStreams:
    def test_ranks_in_one_file_are_read_apart(self, tmp_path: Path) -> None:
        """Tracebacks of two ranks, line by line in turns."""
        lines = [f"{at % 4}: waiting for data of part {at}" for at in range(40)]
        both = zip(traceback(1), traceback(3, "ValueError: bad shard"), strict=True)
        lines += [line for one, three in both for line in (f"1: {one}", f"3: {three}")]
        job = read(write(tmp_path / "all.log", lines))
        assert set(job.streams) == {"rank 0", "rank 1", "rank 2", "rank 3"}
        assert ("cuda_out_of_memory", "rank 1") in job.matches
        assert ("cuda_out_of_memory", "rank 3") not in job.matches
        last = job.streams["rank 1"].last
        assert last is not None
        assert last.text == "\n".join(traceback(1))
        assert last.line == 41
        assert job.events[last.event].template.startswith("torch.OutOfMemoryError:")

    def test_lines_without_a_prefix_continue_the_line_before_them(self, tmp_path: Path) -> None:
        """A report of torch in several lines has the prefix of its rank in the first only."""
        lines = ["/opt/a.py:3: FutureWarning: old", "  warnings.warn(", "  and more"]
        lines += [f"[rank{at % 4}]: waiting for data of part {at}" for at in range(40)]
        lines += ["[rank5]:[E819 04:27:07.93 ProcessGroupNCCL.cpp:1515] [PG ID 2 Rank 5] "]
        lines += ["\t - [5] Timeout at collective: ALLREDUCE, #18361"]
        lines += ["\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the "]
        lines[-1] += "desync are:"
        lines += ["\t   - [21] finished collective #18360, but didn't join collective #18361"]
        lines += ["[rank2]: waiting for data of part 41"]
        job = read(write(tmp_path / "all.log", lines))
        assert job.matches["nccl_lagging_rank", "rank 5"].named == [{"rank": "21"}]
        last = job.streams["rank 5"].last
        assert last is not None
        assert last.text.count("\n") == 3

    def test_glued_tracebacks_without_prefixes_still_tell_their_exceptions(
        self, tmp_path: Path
    ) -> None:
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
        errors = sum(count for text, count in said(job).items() if "ValueError: no shard" in text)
        assert errors == 3

    def test_a_file_for_each_rank(self, tmp_path: Path) -> None:
        for rank in range(4):
            write(tmp_path / f"rank_{rank}.log", healthy_lines(rank))
        job = read(tmp_path)
        assert list(job.streams) == [f"rank {rank}" for rank in range(4)]
        assert {one.entries for one in job.streams.values()} == {80}
        one = job.streams["rank 2"]
        assert (one.last_step, one.steps, one.stage) == (40, 40, "train")
        assert one.first_time is not None
        assert one.last_time == one.first_time + 39
        assert len(one.tail) == TAIL
        assert one.last_step_at is not None
        assert one.last_step_at.line == 79

    def test_orders_are_unique_and_rise_with_the_files(self, tmp_path: Path) -> None:
        for rank in range(3):
            write(tmp_path / f"rank_{rank}.log", healthy_lines(rank))
        job = read(tmp_path)
        orders = [place.order for one in job.streams.values() for place in one.tail]
        assert orders == sorted(set(orders))

    def test_occurrences_name_their_event_and_stream(self, tmp_path: Path) -> None:
        write(tmp_path / "rank_0.log", healthy_lines() + traceback(0))
        job = read(tmp_path)
        for event in job.events:
            assert (event.first.event, event.last.event) == (event.number, event.number)
            assert event.first.order <= event.last.order
            assert set(event.counts) <= set(job.streams)
        for (signature, stream), match in job.matches.items():
            assert (match.signature, match.stream, match.first.stream) == (
                signature, stream, stream,
            )  # fmt: skip
            assert match.first.event in match.events


class TestMatches:
    def test_count_first_and_last(self, tmp_path: Path) -> None:
        lines = [*traceback(0), *healthy_lines(steps=5), *traceback(0)]
        job = read(write(tmp_path / "a.log", lines))
        (match,) = [one for one in job.matches.values() if one.signature == "cuda_out_of_memory"]
        assert (match.count, match.first.line, match.last.line) == (2, 1, 15)
        assert match.last.step == 5

    def test_the_last_line_of_a_file_is_looked_at(self, tmp_path: Path) -> None:
        path = tmp_path / "a.log"
        path.write_text(f"fine\n{OOM}")
        assert ("cuda_out_of_memory", path.name) in read(path).matches or any(
            name == "cuda_out_of_memory" for name, _ in read(path).matches
        )

    def test_what_digits_decide_is_looked_at_each_time(self, tmp_path: Path) -> None:
        """Lines of one form, of which one alone is a fault."""
        lines = [f"NVRM: Xid (PCI:0000:3b:00): {xid}, pid=7, x" for xid in (13, 13, 79, 13)]
        job = read(write(tmp_path / "a.log", lines))
        counts = {name: match.count for (name, _), match in job.matches.items()}
        assert sum(counts.values()) == 4
        assert len(counts) == 2
        assert 1 in counts.values()

    def test_a_continuation_that_matches_takes_the_entry_along(self, tmp_path: Path) -> None:
        lines = ["worker says:", f"    {OOM}", "worker says:", "    all is well", "end of log"]
        job = read(write(tmp_path / "a.log", lines))
        (match,) = job.matches.values()
        assert match.first.line == 1
        assert match.count == 1
        assert sum(said(job).values()) == 3


class TestStages:
    def test_stages_are_told_in_order(self, tmp_path: Path) -> None:
        lines = ["> building train, validation, and test datasets ...", *healthy_lines(steps=3)]
        job = read(write(tmp_path / "a.log", lines))
        assert [stage for stage, _ in job.stages] == ["load data", "train"]
        assert job.stages[1][1].line == 2


PARTS = st.lists(
    st.one_of(
        st.builds(lambda at: [step(at)], st.integers(1, 400)),
        st.builds(lambda at, by: [f"queue {at} waited {by}.5 ms"], st.integers(0), st.integers(0)),
        st.builds(lambda rank: traceback(rank), st.integers(0, 9)),
        st.builds(lambda xid: [f"NVRM: Xid (PCI:0000:3b:00): {xid}, x"], st.integers(1, 120)),
        st.sampled_from([[""], ["    indented"], ["-" * 30], ["saving checkpoint to /ckpt/5"]]),
        st.builds(lambda text: [text], st.text("ab1 :.\t-", max_size=SHORTEST_FORM - 1)),
    ),
    max_size=30,
)
PREFIXES = st.sampled_from(["", "[rank{}]: ", "[default{}]: "])


class TestLaws:
    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(PARTS, PREFIXES, st.lists(st.integers(0, 12), min_size=1, max_size=5))
    def test_the_fast_way_is_the_slow_way(
        self, tmp_path: Path, parts: list[list[str]], prefix: str, ranks: list[int]
    ) -> None:
        lines = [
            prefix.format(ranks[at % len(ranks)]) + line
            for at, part in enumerate(parts * 2)
            for line in part
        ]
        path = write(tmp_path / "a.log", [*lines, "end"])
        fast, slow = in_one_pass(path), slowly(path)
        slow.notes = fast.notes
        assert fast == slow

    @pytest.mark.long
    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(PARTS, st.integers(1, 200))
    def test_borders_of_chunks_do_not_matter(
        self, tmp_path: Path, parts: list[list[str]], size: int
    ) -> None:
        path = write(tmp_path / "a.log", [line for part in parts for line in part] + ["end"])
        whole = read(path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(source_module, "BLOCK", size)
            assert read(path) == whole

    @pytest.mark.long
    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(PARTS)
    def test_what_is_forgotten_is_learnt_again(
        self, tmp_path: Path, parts: list[list[str]]
    ) -> None:
        path = write(tmp_path / "a.log", [line for part in parts * 2 for line in part] + ["end"])
        whole = read(path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(entries, "BoundedCache", lambda *_: BoundedCache(2))
            assert read(path) == whole

    def test_an_empty_line_is_no_number(self, tmp_path: Path) -> None:
        job = read(write(tmp_path / "a.log", ["7", "", "1234567", "", "", "8"]))
        assert said(job) == {"<N>": 3}

    def test_every_entry_is_counted_once(self, tmp_path: Path) -> None:
        lines = healthy_lines(steps=100) + traceback(0)
        job = read(write(tmp_path / "a.log", lines))
        assert sum(event.count for event in job.events) == 201
        assert sum(one.entries for one in job.streams.values()) == 201
        assert job.lines == 204

    @pytest.mark.long
    def test_several_cores_give_the_same(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ingesting, "WORTH_PROCESSES", 0)
        for rank in range(5):
            extra = traceback(rank) if rank == 3 else []
            write(tmp_path / f"rank_{rank}.log", healthy_lines(rank) + extra)
        one = ingest([tmp_path], LIBRARY, cores=1)
        assert ingest([tmp_path], LIBRARY, cores=2) == one
        assert ingest([tmp_path], LIBRARY, cores=1) == one


#: Lines of like forms that differ in what a form without digits does not show.
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
    ]
)  # fmt: skip
NUMBERS = st.sampled_from(
    ["", "0", "7", "13", "79", "137", "00012", "2024", "1690730461", "٣", "x"]
)
ENDS = st.sampled_from(
    [b"\n", b"\r\n", b"\0\n", b"\xff\xfe\n", b" \xe2\x82\n", b"y" * 9000 + b"\n"]
)


class TestHardLines:
    @pytest.mark.long
    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.lists(st.tuples(FORMS, NUMBERS, NUMBERS, NUMBERS, ENDS), max_size=40),
        st.sampled_from(["", "[rank{}]: ", "{}: ", "node-{}: "]),
    )
    def test_the_fast_way_is_the_slow_way(
        self, tmp_path: Path, said: list[tuple[str, str, str, str, bytes]], prefix: str
    ) -> None:
        path = tmp_path / "a.log"
        written = b"".join(
            prefix.format(at % 3).encode() + form.format(*numbers).encode() + end
            for at, (form, *numbers, end) in enumerate(said * 2)
        )
        path.write_bytes(b"begin\n" + written + b"end\n")
        assume(not other_by_content(path.read_bytes()))
        fast, slow = in_one_pass(path), slowly(path)
        slow.notes = fast.notes
        assert fast == slow

    def test_digits_of_other_scripts_make_no_time_however_long_the_line(
        self, tmp_path: Path
    ) -> None:
        """A form of so many bytes is not remembered."""
        lines = ["begin", f"2024-07-01 1\u0663:00:01 train {'y' * 9000}", "end"]
        path = write(tmp_path / "a.log", lines)
        fast, slow = in_one_pass(path), slowly(path)
        slow.notes = fast.notes
        assert fast == slow
        assert fast.spans == {}


class TestBounds:
    def test_random_text_ends_in_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(entries, "MAX_TEXTS", 20)
        words = [f"{chr(97 + at // 26)}{chr(97 + at % 26)}x" for at in range(300)]
        job = read(write(tmp_path / "a.log", [f"{word} says {word}" for word in words]))
        assert said(job)[OTHERS] == 280
        assert sum(said(job).values()) == 300
        assert any(OTHERS in note for note in job.notes)

    def test_memory_does_not_grow_with_lines(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.log", healthy_lines(steps=5_000))
        (source,) = find([path]).sources
        one = FilePass(source, LineAnalyser(LIBRARY))
        one.read()
        assert len(one.forms) < 100
        assert len(one.template_of) < 10
        assert all(len(stream.tail) <= TAIL for stream in one.streams.values())
        assert not any(stream.templates for stream in one.streams.values())

    def test_long_lines_keep_head_and_end(self, tmp_path: Path) -> None:
        job = read(write(tmp_path / "a.log", [f"begins {'x' * 60_000} {OOM}", "next"]))
        assert any(name == "cuda_out_of_memory" for name, _ in job.matches)
        assert all(len(one.text) <= 4000 for one in next(iter(job.streams.values())).tail)

    @pytest.mark.parametrize(
        "line", ["[rank{}]: Error", "world size: {}", "step {} loss 2", "{}%|# | {}/{} [{}:{}<{}]"]
    )
    @pytest.mark.parametrize("digits", [400, 5000])
    def test_numbers_of_any_length_are_read(self, tmp_path: Path, line: str, digits: int) -> None:
        """Python refuses to read an integer of more than 4,300 digits."""
        said_twice = [line.replace("{}", "9" * digits)] * 2
        job = read(write(tmp_path / "a.log", ["begin", *said_twice, "end"]))
        assert list(job.files.values()) == [4]


class TestNotes:
    def test_two_jobs_by_the_schedulers_numbers(self, tmp_path: Path) -> None:
        write(tmp_path / "a.log", ["SLURM_JOB_ID=4711", "running"])
        write(tmp_path / "b.log", ["SLURM_JOB_ID=4712", "running"])
        (note,) = [note for note in read(tmp_path).notes if "scheduler" in note]
        assert "2 jobs" in note
        assert "4711 in a.log, line 1" in note
        assert "4712 in b.log, line 1" in note

    def test_two_jobs_by_their_times(self, tmp_path: Path) -> None:
        for name, day in (("a", 1), ("b", 2)):
            write(tmp_path / f"{name}.log", [f"2024-04-0{day} 10:00:00 {name}", "more"])
        (note,) = [note for note in read(tmp_path).notes if "with nothing between" in note]
        assert "a.log ends at 2024-04-01 10:00:00" in note
        assert "b.log begins at 2024-04-02 10:00:00" in note

    def test_a_last_line_without_a_year_is_of_the_same_job(self, tmp_path: Path) -> None:
        lines = [f"2024-05-03 02:14:{i:02d} INFO step {i} loss 1.0" for i in range(40)]
        write(tmp_path / "a.log", [*lines, "W0503 02:15:01.000000 1 api.py:719] shutting down"])
        assert not [note for note in read(tmp_path).notes if "two jobs" in note]

    def test_clocks_hours_apart_are_no_two_jobs(self, tmp_path: Path) -> None:
        for rank in range(4):
            hour = 10 if rank < 2 else 15
            lines = [f"2024-04-01 {hour}:00:{at:02d} step {at} loss 2.5" for at in range(40)]
            write(tmp_path / f"rank_{rank}.log", lines)
            write(tmp_path / f"rank_{rank}.err", [f"2024-04-01 {hour}:00:00 ready"])
        job = read(tmp_path)
        assert job.notes == []
        assert job.spans["rank_3.log"][0] - job.spans["rank_0.log"][0] == 5 * 3600.0

    def test_one_job_gives_none(self, tmp_path: Path) -> None:
        for rank in range(3):
            write(tmp_path / f"rank_{rank}.log", ["SLURM_JOB_ID=4711", *healthy_lines(rank)])
        assert read(tmp_path).notes == []

    @pytest.mark.parametrize(("text", "entries"), [("", 0), ("\n\n", 0), ("one line", 1)])
    def test_hardly_any_input(self, tmp_path: Path, text: str, entries: int) -> None:
        path = tmp_path / "a.log"
        path.write_text(text)
        job = read(path)
        assert sum(one.entries for one in job.streams.values()) == entries
        assert job.matches == {}


def test_a_log_that_does_not_reach_its_end_is_told_first(tmp_path: Path) -> None:
    whole = gzip.compress(("\n".join(healthy_lines()) + "\n").encode())
    (tmp_path / "rank_0.log.gz").write_bytes(whole[:-40])
    (tmp_path / "rank_1.log.gz").write_bytes(whole)
    (tmp_path / "rank_2.log.gz").write_bytes(whole)
    for job in (read(tmp_path), ingest([tmp_path], SignatureLibrary.shipped(), cores=2)):
        assert job.cut_off == ["rank_0.log.gz"]
        assert job.notes[0].startswith("rank_0.log.gz does not reach its end: ")
