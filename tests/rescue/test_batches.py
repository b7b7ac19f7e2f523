"""Batches that are kept so that a training can use them again."""

import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric.rescue.recent_batches import RecentBatches, copied, host_random_state, same_state

Pair = namedtuple("Pair", "inputs labels")


def source(count=1000):
    numbers = iter(range(count))
    return lambda: torch.tensor([next(numbers)])


def take(batches, draw, count):
    return [int(batches.next(draw).value) for _ in range(count)]


def test_the_same_batches_come_again_and_then_new_ones():
    batches, draw = RecentBatches(), source()
    assert take(batches, draw, 5) == [0, 1, 2, 3, 4]
    assert batches.set_back(2)
    assert batches.waiting
    assert take(batches, draw, 5) == [2, 3, 4, 5, 6]
    assert not batches.waiting


def test_skipped_batches_never_come_again():
    batches, draw = RecentBatches(), source()
    take(batches, draw, 6)
    assert [int(one.value) for one in batches.skip(2, 5)] == [2, 3, 4]
    assert batches.set_back(2)
    assert take(batches, draw, 3) == [5, 6, 7]
    assert batches.skip(2, 4) == []
    assert batches.set_back(0)
    assert take(batches, draw, 4) == [0, 1, 5, 6]


def test_a_stretch_whose_end_is_to_come_is_passed_over_when_it_is_drawn():
    batches, draw = RecentBatches(), source()
    take(batches, draw, 4)
    assert [int(one.value) for one in batches.skip(2, 7)] == [2, 3]
    assert batches.set_back(1)
    assert take(batches, draw, 3) == [1, 7, 8]
    assert batches.set_back(0)
    assert take(batches, draw, 4) == [0, 1, 7, 8]
    assert batches.used(0, 9) == 4


def test_forgotten_batches_cannot_be_reached():
    batches, draw = RecentBatches(), source()
    take(batches, draw, 6)
    batches.forget(4)
    assert batches.first == 4
    assert not batches.set_back(3)
    assert batches.position == 6
    assert batches.set_back(4)
    assert take(batches, draw, 3) == [4, 5, 6]


def test_no_more_bytes_than_the_limit_are_kept():
    batches, draw = RecentBatches(limit=3 * 8), source()
    take(batches, draw, 10)
    assert batches.first == 7
    assert "24 bytes" in batches.problem


def test_a_batch_that_the_training_changes_comes_back_as_it_was():
    batches = RecentBatches()
    first = batches.next(lambda: {"ids": torch.ones(2), "more": [torch.zeros(1), "text"]}).value
    first["ids"].zero_()
    first.pop("more")
    for _ in range(2):
        assert batches.set_back(0)
        again = batches.next(pytest.fail).value
        assert again["ids"].tolist() == [1.0, 1.0]
        assert again["more"][0].tolist() == [0.0]
        again["ids"].zero_()


def test_a_slice_is_copied_without_the_rest_of_its_memory():
    whole = torch.zeros(1_000_000)
    made, size = copied(Pair(whole[:2], (whole[2:3], None)))
    assert isinstance(made, Pair)
    assert size == 12
    assert made.inputs.untyped_storage().size() == 8


def test_a_batch_that_cannot_be_copied_is_passed_on_and_not_kept():
    class Odd:
        def __deepcopy__(self, memory):
            raise RuntimeError("no copies")

    odd, batches = Odd(), RecentBatches()
    assert batches.next(lambda: odd).value is odd
    assert "no copies" in batches.problem
    assert not batches.set_back(0)


def test_drawing_moves_the_random_state_again():
    def draw():
        return torch.rand(2) + random.random() + np.random.rand()  # noqa: NPY002

    batches, before = RecentBatches(), host_random_state()
    batches.next(draw)
    after = host_random_state()
    assert not same_state(before, after)
    torch.set_rng_state(before[2])
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002
    assert batches.set_back(0)
    batches.next(pytest.fail)
    assert same_state(host_random_state(), after)


@pytest.mark.long
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 12), st.booleans(), st.integers(0, 4)),
        max_size=12,
    )
)
@settings(max_examples=60, deadline=None)
def test_the_order_of_the_data_is_kept_on_any_course(course):
    """What comes is the data in their order, without what was skipped."""
    batches, draw, skipped = RecentBatches(), source(), set()
    for count, back, leave_out, to_come in course:
        start = batches.position
        values = take(batches, draw, count)
        expected = [n for n in range(start, values[-1] + 1) if n not in skipped]
        assert values == expected
        target = max(0, batches.position - back)
        if leave_out:
            end = batches.position + to_come
            skipped |= set(range(target, end))
            batches.skip(target, end)
        assert batches.set_back(target)
