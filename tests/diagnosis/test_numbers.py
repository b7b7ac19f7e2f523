"""Ranks whose logged numbers deviate from their peers."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis.patterns.values import number_outliers, numbers
from tests.diagnosis.writer import Writer


def job_of(value_of, ranks=8, steps=6):
    """All ranks write one form of line, so one event, with their own numbers."""
    writer = Writer(ranks=ranks)
    for step in range(steps):
        for rank in range(ranks):
            writer.numbers.setdefault(f"form {step} {rank}", 0)
            writer.say(rank, f"form {step} {rank}", step=step)
            stream = writer.job.streams[f"rank {rank}"]
            entry = stream.tail.pop()
            text = f"step {step}: data {value_of(rank, step)} ms | loss=2.5"
            stream.tail.append(msgspec.structs.replace(entry, text=text))
    return writer.job


def test_a_rank_whose_steps_take_long_is_found():
    found = number_outliers(
        job_of(lambda rank, step: 900.0 if rank == 5 and step >= 2 else 10.0 + rank)
    )
    assert [(one.stream, one.name, one.value) for one in found] == [("rank 5", "data", 900.0)]
    assert found[0].steps == 4


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_number_that_is_none_is_odd(value):
    found = number_outliers(job_of(lambda rank, _: value if rank == 2 else 1.0 + 0.01 * rank))
    assert [one.stream for one in found] == ["rank 2"]


def test_once_is_no_habit():
    assert (
        number_outliers(job_of(lambda rank, step: 900.0 if (rank, step) == (5, 5) else 10.0)) == []
    )


def test_what_half_of_the_ranks_have_is_usual():
    assert number_outliers(job_of(lambda rank, _: 900.0 if rank % 2 else 10.0 + rank)) == []


def errors_of(own, ranks=8):
    writer = Writer(ranks=ranks)
    for rank in range(ranks):
        said = f"Traceback (most recent call last):\nRuntimeError: this rank's is {own(rank)}"
        writer.numbers.setdefault(said, 0)
        writer.say(rank, said)
    return writer.job


def test_of_an_exception_that_all_raise_once_is_enough():
    (found,) = number_outliers(errors_of(lambda rank: "6.5e+05" if rank == 3 else 3.0 + 0.1 * rank))
    assert (found.stream, found.name, found.value) == ("rank 3", "rank's is", 6.5e5)
    assert found.steps == 1


def test_numbers_of_exceptions_that_scatter_are_not_odd():
    assert number_outliers(errors_of(lambda rank: 10 ** (rank + 1))) == []


@given(st.lists(st.floats(50.0, 100.0), min_size=8, max_size=8))
def test_numbers_within_a_factor_of_two_are_never_odd(values):
    assert number_outliers(job_of(lambda rank, _: values[rank])) == []


@pytest.mark.parametrize(
    "text",
    ["rank 3 at step 7", "2024-05-01 12:00:00,123 hello", "[Rank 3] node 7", "version 1.2.3"],
)
def test_places_and_times_are_no_numbers(text):
    assert list(numbers(text)) == []
