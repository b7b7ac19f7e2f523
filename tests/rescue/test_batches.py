"""Batches that are kept so that a training can use them again."""

import random
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rmetric.monitor.actions.checkpoint_file import set_random_state
from rmetric.rescue.recent_batches import (
    KeptBatch,
    RecentBatches,
    _copy,
    bytes_of,
    host_random_state,
    same_state,
)

Pair = namedtuple("Pair", "inputs labels")


def source():
    numbers = iter(range(1000))
    return lambda: KeptBatch(torch.tensor([next(numbers)]), {})


def take(batches, draw, count):
    return [int(batches.next(draw).value) for _ in range(count)]


def test_no_more_bytes_than_the_limit_are_kept():
    batches, draw = RecentBatches(limit=3 * 8), source()
    take(batches, draw, 10)
    assert batches.first == 7
    assert "24 bytes" in batches.problem


def test_a_batch_that_the_training_changes_comes_back_as_it_was():
    batches = RecentBatches()
    value = {"ids": torch.ones(2), "more": [torch.zeros(1), "text"]}
    first = batches.next(lambda: KeptBatch(value, {})).value
    first["ids"].zero_()
    first.pop("more")
    for _ in range(2):
        assert batches.set_back(0)
        again = batches.next(pytest.fail).value
        assert again["ids"].tolist() == [1.0, 1.0]
        assert again["more"][0].tolist() == [0.0]
        again["ids"].zero_()


@dataclass
class Batch:
    rows: torch.Tensor
    names: tuple


def test_a_copy_is_of_any_class_and_has_not_the_rest_of_a_slices_memory():
    whole = torch.zeros(1_000_000)
    pair = Pair(whole[:2], (whole[2:3], None))
    made = _copy(pair)
    assert isinstance(made, Pair)
    assert bytes_of(pair) == 12
    assert made.inputs.untyped_storage().size() == 8
    batch = Batch(torch.zeros(10, 10), (np.zeros(25), b"12345", "ä"))
    made = _copy(batch)
    assert bytes_of(batch) == 400 + 200 + 5 + 1
    assert bytes_of(torch.eye(4).to_sparse()) == 64  # as a dense one: it has no `nbytes`
    assert made.rows.data_ptr() != batch.rows.data_ptr()
    assert made.names[0] is not batch.names[0]


def test_a_batch_that_cannot_be_copied_is_passed_on_and_not_kept():
    class Odd:
        def __deepcopy__(self, memory):
            raise RuntimeError("no copies")

    odd, batches = Odd(), RecentBatches()
    assert batches.next(lambda: KeptBatch(odd, {})).value is odd
    assert "no copies" in batches.problem
    assert not batches.set_back(0)


def test_drawing_moves_the_random_state_again():
    def draw():
        return KeptBatch(torch.rand(2) + random.random() + np.random.rand(), {})  # noqa: NPY002

    batches, before = RecentBatches(), host_random_state()
    batches.next(draw)
    after = host_random_state()
    assert not same_state(before, after)
    set_random_state(before)
    assert batches.set_back(0)
    batches.next(pytest.fail)
    assert same_state(host_random_state(), after)
