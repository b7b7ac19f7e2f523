"""Recordings played again, other nodes' files followed, and sources put together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.logs import LogError
from rmetric.telemetry.export import JsonlFile
from rmetric.telemetry.lines import LEVELS, GpuVerdict, event_line, read_line, verdict_line
from rmetric.telemetry.reading import GpuSign, Reading
from rmetric.telemetry.sources import AllSources, GpuWatch, ReplayedReadings, VerdictFiles

T = 1_800_000_000.0


def recording(path, *events):
    path.write_bytes(b"".join(event_line(event, node) for node, event in events))
    return path


def readings(node="a", times=(0, 10, 20), gpu=0):
    return [(node, Reading(gpu=gpu, time=T + t, temperature_celsius=60.0)) for t in times]


class TestPlayed:
    def test_every_change_is_reported_in_order_even_at_once(self, tmp_path):
        signs = [GpuSign(gpu=0, time=T + n, kind=f"xid_{x}") for n, x in ((20, 63), (21, 79))]
        path = recording(tmp_path / "r.jsonl", *readings(), *(("a", sign) for sign in signs))
        levels = [change.level for change in ReplayedReadings(path).poll()]
        assert levels == ["healthy", "risk", "fatal"]

    def test_what_was_recorded_while_playing_is_the_recording(self, tmp_path):
        path = recording(
            tmp_path / "r.jsonl", *readings(), ("b", GpuSign(gpu=1, time=T + 21, kind="x"))
        )
        copy = JsonlFile(tmp_path / "copy.jsonl")
        ReplayedReadings(path, record=copy.write_event).poll()
        assert (tmp_path / "copy.jsonl").read_bytes() == path.read_bytes()

    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            (b"{oops\n", "line 4: not JSON"),
            (b'{"event": "READING", "gpu": 0}\n', "line 4: .* required field `time`"),
            (b'{"event": "SIGN", "gpu": 0, "time": 1}\n', "line 4: .* required field `kind`"),
            (b'{"event": "READING", "gpu": 0, "time": 5}\n', "line 4: time 5.0 after"),
            (b'{"event": "READING", "gpu": 0, "time": "NaN"}\n', "line 4: .*time`: found 'NaN'"),
            (b'{"event": "VERDICT", "gpu": 0}\n', "line 4: a verdict has"),
        ],
        ids=str,
    )
    def test_a_line_that_cannot_be_read_is_named(self, tmp_path, line, problem):
        path = recording(tmp_path / "r.jsonl", *readings())
        path.write_bytes(path.read_bytes() + line)
        with pytest.raises(LogError, match=problem):
            ReplayedReadings(path)

    def test_a_file_of_something_else_is_refused(self, tmp_path):
        (tmp_path / "r.jsonl").write_text('{"event": "METRICS", "step": 1}\n')
        with pytest.raises(LogError, match="found no readings"):
            ReplayedReadings(tmp_path / "r.jsonl")


def verdict(level="healthy", gpu=0, node="n1", time=T):
    return GpuVerdict(gpu=gpu, node=node, time=time, level=level)


class TestFollowed:
    @given(st.lists(st.sampled_from(LEVELS), max_size=12), st.lists(st.integers(0, 3000)))
    def test_wherever_it_is_cut_the_same_is_reported(self, tmp_path_factory, levels, cuts):
        folder = tmp_path_factory.mktemp("telemetry")
        whole = b"".join(verdict_line(verdict(level)) for level in levels)
        source, polled = VerdictFiles(folder), []
        for cut in [*sorted(cuts), len(whole)]:
            (folder / "n.jsonl").write_bytes(whole[:cut])
            polled += [change.level for change in source.poll()]
        assert polled == [x for n, x in enumerate(levels) if n == 0 or levels[n - 1] != x]

    def test_a_file_that_was_replaced_is_read_again(self, tmp_path):
        path, source = tmp_path / "n1.jsonl", VerdictFiles(tmp_path)
        path.write_bytes(verdict_line(verdict()) * 3)
        source.poll()
        part = tmp_path / "part"
        part.write_bytes(verdict_line(verdict("risk")))
        part.replace(path)
        assert [change.level for change in source.poll()] == ["risk"]

    def test_a_line_that_cannot_be_read_is_a_problem_and_no_end(self, tmp_path):
        path = tmp_path / "n1.jsonl"
        path.write_bytes(b"\x00\xff\n" + verdict_line(verdict("fatal")))
        source = VerdictFiles(tmp_path)
        assert [change.level for change in source.poll()] == ["fatal"]
        assert "n1.jsonl" in source.problem


class TestTogether:
    def test_all_sources_are_one(self, tmp_path):
        (tmp_path / "n1.jsonl").write_bytes(b"oops\n" + verdict_line(verdict("fatal")))
        played = recording(tmp_path / "r", *readings("n2"))
        source = AllSources([VerdictFiles(tmp_path), ReplayedReadings(played)])
        assert [change.key for change in source.poll()] == ["n1:0", "n2:0"]
        assert set(source.verdicts()) == {"n1:0", "n2:0"}
        assert "oops" in source.problem
        source.close()

    def test_without_a_gpu_a_watch_says_why_and_has_no_verdict(self):
        with GpuWatch(silence=5.0) as watch:
            watch.hardware.ready()
            assert watch.poll() == ()
            assert watch.verdicts() == {}
            assert watch.problem

    @pytest.mark.parametrize("silence", [0.0, -1.0, float("nan")])
    def test_a_silence_that_is_none_is_refused(self, silence):
        with pytest.raises(ValueError, match="silence is"):
            GpuWatch(silence=silence)


class TestJsonl:
    def test_a_line_cut_off_by_a_kill_costs_itself_alone(self, tmp_path):
        path = tmp_path / "f.jsonl"
        path.write_bytes(verdict_line(verdict()) + verdict_line(verdict("risk"))[:30])
        file = JsonlFile(path)
        file.verdict(verdict("fatal"))
        file.close()
        lines = path.read_bytes().splitlines()
        assert len(lines) == 3
        assert read_line(lines[2]) == ("n1", verdict("fatal"))
