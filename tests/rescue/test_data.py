"""Positions in data: after a return come the batches that came before."""

import copy
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from rmetric.monitor.actions.checkpoint_file import random_state, set_random_state
from rmetric.rescue.data_position import LoaderPosition
from rmetric.rescue.snapshot import Parts, Snapshots


class Noisy(Dataset):
    """Its samples draw from every generator, as augmentations do."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        noise = random.random() + np.random.rand()  # noqa: NPY002
        return index + 0.1 * torch.rand(1).item() + 0.01 * noise


class Stream(IterableDataset):
    """Without positions; shuffled when it is iterated."""

    def __iter__(self):
        samples = Noisy()
        order = random.sample(range(len(samples)), len(samples))
        return (samples[index] for index in order)


class Counted(Noisy):
    def __init__(self):
        self.loaded = 0

    def __getitem__(self, index):
        self.loaded += 1
        return super().__getitem__(index)


class Stateful:
    """As torchdata's loader: it restores itself."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < 7:
            self.place += 1
            yield torch.tensor([float(self.place)])
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def make(kind):
    generator = torch.Generator().manual_seed(3)
    if kind == "stateful":
        return Stateful()
    if kind == "list":
        return [torch.tensor([float(i)]) for i in range(7)]
    if kind == "distributed":
        data = Noisy()
        sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=True)
        return DataLoader(data, 3, sampler=sampler)
    if kind.startswith("stream"):
        return DataLoader(Stream(), 3, num_workers=int(kind.endswith("workers")))
    more = {
        "shuffled": {"shuffle": True},
        "generator": {"shuffle": True, "generator": generator},
        "workers": {"shuffle": True, "num_workers": 2},
        "in order": {},
        "no batches": {"batch_size": None, "shuffle": True},
    }[kind]
    return DataLoader(Noisy(), **{"batch_size": 3, **more})


KINDS = ["shuffled", "generator", "workers", "in order", "no batches", "stateful", "list",
         "distributed", "stream", "stream of workers"]  # fmt: skip


def values(batch):
    return torch.as_tensor(batch).flatten().tolist()


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [0, 4, 7, 16])
def test_the_batches_after_a_position_come_again(kind, at):
    """Also at the end of an epoch (7 batches of most) and in the third one."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    position = LoaderPosition(make(kind))
    for step in range(1, at + 1):
        position.of_step(step)

    def taken():
        return [values(position.of_step(step)[0]) for step in range(at + 1, at + 10)]

    state, randoms = copy.deepcopy(position.state()), random_state(set())
    expected = taken()
    described = position.describe()
    position.of_step(at + 10)
    position.seek(state)
    set_random_state(randoms)
    assert taken() == expected
    assert position.describe() == described
    position.seek(state, skip=(at + 3, at + 5))
    for _ in range(2):  # it stays left out at a later return
        set_random_state(randoms)
        after = taken()
        assert after[:2] == expected[:2]
        # The epoch that begins next may be shuffled differently.
        same = slice(2, min(6, 2 + max(0, 7 - (at + 5) % 7)))
        if kind in ("stateful", "list"):  # nothing is drawn for a sample
            assert after[2:6] == expected[5:9]
        else:
            assert [int(v) for row in after[same] for v in row] == [
                int(v) for row in expected[5:9][: same.stop - 2] for v in row
            ]
        position.seek(state)


def test_the_samples_before_a_position_are_not_loaded_again():
    data = Counted()
    position = LoaderPosition(DataLoader(data, 3, shuffle=True))
    for _ in range(5):
        next(position)
    state = position.state()
    data.loaded = 0
    position.seek(state)
    assert data.loaded == 0
    next(position)
    assert data.loaded == 3


def test_skipping_counts_the_batches_of_a_step():
    batches = list(range(30))
    position = LoaderPosition(batches, per_step=3)
    state = position.state()
    position.of_step(1)
    position.seek(state, skip=(2, 3))
    assert position.of_step(1) == [0, 1, 2]
    assert position.of_step(2) == [9, 10, 11]


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 12), st.integers(0, 12), st.integers(0, 9)),
        max_size=8,
    ),
    st.integers(1, 3),
)
@settings(max_examples=100, deadline=None)
def test_the_data_of_the_steps_of_the_last_try_are_left_out(course, per_step):
    """The last try's steps that are to come are those that it would have taken.

    Each return leaves out a stretch that begins in a step that was taken; `to_come` steps of it
    were not taken yet.
    """
    count = 2000
    position = LoaderPosition(list(range(count)), per_step=per_step)
    left, step = list(range(count)), 0  # the data that are not left out
    states = {0: position.state()}
    for more, back, out_back, to_come in course:
        for _ in range(more):
            step += 1
            assert position.of_step(step) == left[(step - 1) * per_step : step * per_step]
            states[step] = position.state()
        target = max(0, step - back)
        skip = max(target, step - 1 - out_back) + 1, step + to_come
        if skip[0] <= step:
            del left[(skip[0] - 1) * per_step : skip[1] * per_step]
            position.seek(states[target], skip)
        else:
            position.seek(states[target])
        step = target


def test_a_return_that_is_undone_leaves_no_data_out():
    data, others = LoaderPosition(list(range(30))), {"broken": Broken()}
    model = torch.nn.Linear(1, 1)
    parts = Parts(model, list(model.parameters()), None, others, data, StateOnly())
    snapshots = Snapshots(parts)
    snapshot = snapshots.take(0)
    for step in range(1, 6):
        data.of_step(step)
    with pytest.raises(RuntimeError, match="it is broken"):
        snapshots.restore_small(snapshot, (2, 8))
    assert [data.of_step(step) for step in (6, 7, 8)] == [[5], [6], [7]]


class StateOnly:
    def state_dict(self, **_):
        return {}


class Broken(StateOnly):
    def load_state_dict(self, state):
        raise RuntimeError("it is broken")


@pytest.mark.parametrize(
    ("source", "rewindable"),
    [
        (iter(range(9)), False),
        (iter(DataLoader(Stream())), False),
        (DataLoader(Stream()), True),
        (DataLoader(Noisy()), True),
        (range(9), True),
    ],
)
def test_only_an_iterator_cannot_be_rewound(source, rewindable):
    assert LoaderPosition(source).rewindable == rewindable


def test_a_stream_that_ends_before_goes_on_with_what_it_gives():
    """Its first pass has six batches, each later one two."""

    class Shrinks(IterableDataset):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(range(6 if self.passes == 1 else 2))

    position = LoaderPosition(DataLoader(Shrinks(), batch_size=None))
    assert [position.of_step(step) for step in (1, 2, 3, 4)] == [[0], [1], [2], [3]]
    state = position.state()
    position.of_step(5)
    position.seek(state)
    assert [position.of_step(step) for step in (5, 6, 7)] == [[0], [1], [0]]


def test_an_iterator_and_an_empty_loader_end():
    assert list(LoaderPosition(iter(range(4)))) == list(range(4))
    assert list(LoaderPosition([])) == []
