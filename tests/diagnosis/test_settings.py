"""Ranks whose logged settings deviate from their peers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis.patterns.values import setting_outliers
from tests.diagnosis.writer import Writer


def job_of(text_of, ranks=8):
    """All ranks write one form of line, so one event, with their own values."""
    writer = Writer(ranks=ranks)
    for rank in range(ranks):
        writer.numbers.setdefault(text_of(rank), 0)
        writer.say(rank, text_of(rank))
    return writer.job


def test_another_world_size_is_found_with_its_name():
    (found,) = setting_outliers(
        job_of(lambda rank: f"RANK={rank} WORLD_SIZE={9 if rank == 5 else 8} pid {900 + rank}")
    )
    assert (found.stream, found.name) == ("rank 5", "WORLD_SIZE")
    assert (found.value, found.usual, found.others) == ("9", "8", 7)


def test_a_bare_value_is_named_by_the_words_before_it():
    (found,) = setting_outliers(
        job_of(lambda rank: f"torch version {'2.1' if rank == 3 else '2.4'}")
    )
    assert (found.name, found.value) == ("torch version", "2.1")


@pytest.mark.parametrize(
    "text_of",
    [
        lambda rank: f"rank {rank} has records {rank % 3}",
        lambda rank: f"master of {8 if rank == 0 else 0}",
        lambda rank: f"started at 12:00:0{rank == 3:d}",
        lambda rank: f"read in {rank == 3:d}.5s",
        lambda rank: f"seed {rank == 3 or rank == 4:d}",
    ],
    ids=["many differ", "only rank 0 differs", "a time", "a duration", "two of eight differ"],
)
def test_what_differs_by_chance_or_by_duty_is_no_setting(text_of):
    assert setting_outliers(job_of(text_of)) == []


def test_what_differs_in_a_healthy_job_too_is_left_out():
    def records(rank):
        return f"shard of records: {11 if rank == 7 else 12}"

    assert setting_outliers(job_of(records))
    assert setting_outliers(job_of(records), [job_of(records)]) == []


@given(st.integers(4, 40), st.data())
def test_whoever_differs_alone_is_found(ranks, data):
    rank = data.draw(st.integers(1, ranks - 1))
    (found,) = setting_outliers(job_of(lambda one: f"batch={2 if one == rank else 1}", ranks))
    assert (found.stream, found.others) == (f"rank {rank}", ranks - 1)
