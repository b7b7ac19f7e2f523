"""Clocks: order, years, one offset a file, two jobs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis.clock import Ordering, clock_notes, clock_offsets, two_jobs
from rmetric.diagnosis.facts.job import Job
from rmetric.diagnosis.reading.timestamps import NO_YEAR
from tests.diagnosis.jobs import Maker, healthy, killed

HOUR = 3600.0


@given(st.dictionaries(st.integers(0, 11), st.floats(-9 * HOUR, 9 * HOUR), max_size=5))
def test_offsets_are_found_by_what_all_do_at_one_moment(skew):
    offsets = clock_offsets(killed(12, 3, skew=skew))
    for rank in range(12):
        assert offsets.get(f"rank_{rank}.log", 0.0) == pytest.approx(skew.get(rank, 0.0), abs=0.5)


@pytest.mark.parametrize("by", [3 * HOUR, 30 * HOUR])
def test_half_of_the_ranks_hours_apart_is_one_job(by):
    job = Maker(8, skew=dict.fromkeys(range(4, 8), by)).train(range(8)).job
    assert two_jobs(job) is None
    offsets = clock_offsets(job)
    assert {name for name, offset in offsets.items() if abs(offset) > HOUR} == {
        f"rank_{rank}.log" for rank in range(4, 8)
    }
    assert clock_notes(offsets)[0].startswith("The clocks of 4 files differ: ")
    assert clock_notes(clock_offsets(killed(12, 2, skew={5: -2 * HOUR, 2: 2 * HOUR}))) == [
        "The clocks of 2 files differ: rank_5.log is 2.0 h behind the others; corrected for."
    ]


def test_the_same_ranks_hours_apart_are_two_jobs():
    job = Maker(8, skew=dict.fromkeys(range(4, 8), 5 * HOUR)).train(range(8)).job
    assert two_jobs(job) is None
    for rank in range(4, 8):  # they are the other job's ranks 0 to 3
        stream, same = job.streams.pop(f"rank {rank}"), job.streams[f"rank {rank - 4}"]
        same.files |= stream.files
        same.tail.extend(stream.tail)
    assert two_jobs(job) == ("rank_0.log", "rank_4.log")
    assert clock_offsets(job) == {}
    # So are more ranks than the world has.
    job = Maker(4, skew=dict.fromkeys(range(4, 8), 5 * HOUR)).train(range(8)).job
    assert two_jobs(job) == ("rank_0.log", "rank_4.log")


def test_clocks_that_agree_and_seconds_since_boot_are_no_skew():
    assert clock_offsets(Job()) == clock_offsets(healthy(8)) == {}
    assert clock_notes({}) == []
    maker = Maker(3, skew={2: 5000.0 - 1.7e9})
    for rank in range(3):
        maker.log(rank, f"hello from <*> {rank}", time=0.0)
    assert clock_offsets(maker.job) == {}


def test_a_time_without_a_year_takes_that_of_the_job():
    writer = Maker(epoch=0.0)
    dated = 1_714_702_447.0  # 2024-05-03 02:14:07
    writer.log(0, "step", time=dated)
    late = writer.log(1, "boom", time=NO_YEAR[0] + (31 + 29 + 31 + 30 + 2) * 86400.0 + 8057.0)
    ordering = Ordering(job=writer.job)
    assert ordering.seconds(late) == pytest.approx(dated + 10.0)
    assert ordering.span == (dated, dated)
    booted = writer.log(2, "boom", time=4821.5)
    assert ordering.seconds(booted) is None
    assert ordering.dated(booted) == 4821.5


def test_in_one_file_the_order_decides_whatever_the_clocks_say():
    writer = Maker(shared=True, epoch=0.0)
    first = writer.log(0, "a", time=2e9 + 60.0)
    second = writer.log(1, "b", time=2e9)
    ordering = Ordering(job=writer.job)
    assert ordering.after(second, first)
    assert not ordering.after(first, second)
    assert 0.0 < ordering.later_by(second, first) < 1.0
