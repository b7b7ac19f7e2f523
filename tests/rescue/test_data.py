"""Positions in data: after a return come the batches that came before."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from rmetric.monitor.actions.checkpoint_file import random_state, set_random_state
from rmetric.rescue.agreement import DisagreementError
from rmetric.rescue.data_position import OwnLoop
from rmetric.rescue.judgement import LossLevel
from rmetric.rescue.policy import Decision, RescueConfig, RescuePolicy
from rmetric.rescue.snapshot import Parts
from rmetric.rescue.snapshot_keeper import SnapshotKeeper


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


class Stateful:
    """As torchdata's loader: it restores itself."""

    batches, place = [torch.tensor([float(i)]) for i in range(7)], 0

    def __iter__(self):
        while self.place < len(self.batches):
            self.place += 1
            yield self.batches[self.place - 1]
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def own_numbers():
    """Draws from a generator that nobody can find."""
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(2, generator=generator)


def make(kind):
    generator = torch.Generator().manual_seed(3)
    if kind == "stateful":
        return Stateful()
    if kind == "list":
        return Stateful.batches
    if kind == "iterator":
        return own_numbers()
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
        "workers that live on": {"shuffle": True, "num_workers": 1, "persistent_workers": True},
        "no batches": {"batch_size": None, "shuffle": True},
    }[kind]
    return DataLoader(Noisy(), **{"batch_size": 3, **more})


KINDS = ["shuffled", "generator", "workers", "workers that live on", "no batches", "stateful",
         "list", "distributed", "stream", "stream of workers", "iterator"]  # fmt: skip


class Course:
    """The steps of a loop whose rescue does nothing by itself."""

    def __init__(self, loader, per_step=1):
        self.snapshots = [0]
        policy = SimpleNamespace(state=SimpleNamespace(snapshots=self.snapshots))
        rescue = SimpleNamespace(
            boundary=lambda last: False, policy=policy, is_on=True, monitor=None
        )
        self.data = OwnLoop(rescue, loader, per_step, 10**6)

    def of_step(self, step):
        self.data.at_boundary(step - 1)
        return [self.data.next_batch().value for _ in range(self.data.per_step)]

    def state(self, step):
        self.data.at_boundary(step)
        return self.data.state()


def values(batch):
    return torch.as_tensor(batch).flatten().tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [0, 4, 7, 16])
def test_the_batches_after_a_position_come_again(kind, at):
    """Also at the end of an epoch (7 batches of most) and in the third one."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    course = Course(make(kind))
    for step in range(1, at + 1):
        course.of_step(step)

    def taken():
        return [values(course.of_step(step)[0]) for step in range(at + 1, at + 10)]

    state, randoms = course.state(at), random_state(set())
    course.snapshots[:] = [at]
    expected = taken()
    course.of_step(at + 10)
    course.data.seek(state)
    set_random_state(randoms)
    assert taken() == expected
    course.data.at_boundary(at + 9)
    course.data.seek(state, skip=(at + 3, at + 5))
    for _ in range(2):  # it stays left out at a later return
        set_random_state(randoms)
        after = taken()
        assert after[:6] == [*expected[:2], *expected[5:9]]
        course.data.seek(state)


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 12), st.integers(0, 12), st.integers(0, 9)),
        max_size=8,
    ),
    st.integers(1, 3),
    st.booleans(),
)
def test_the_data_of_the_steps_of_the_last_try_are_left_out(moves, per_step, restores_itself):
    """The last try's steps that are to come are those that it would have taken.

    Each return leaves out a stretch that begins in a step that was taken; `to_come` steps of it
    were not taken yet.
    """

    class Numbers(Stateful):
        batches = range(2000)

    course = Course(Numbers() if restores_itself else iter(range(2000)), per_step)
    left, step = list(range(2000)), 0  # the data that are not left out
    states = {0: course.state(0)}
    for more, back, out_back, to_come in moves:
        for _ in range(more):
            step += 1
            assert course.of_step(step) == left[(step - 1) * per_step : step * per_step]
            states[step] = course.state(step)
        target = max(0, step - back)
        skip = max(target, step - 1 - out_back) + 1, step + to_come
        if skip[0] <= step:
            del left[(skip[0] - 1) * per_step : skip[1] * per_step]
            course.data.seek(states[target], skip)
        else:
            course.data.seek(states[target])
        step = target


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, DisagreementError])
def test_a_return_that_is_undone_leaves_no_data_out(error):
    """Where a part fails or is interrupted, and where another rank has left."""

    class StateOnly:
        def state_dict(self, **_):
            return {}

    def fails(*_):
        keeper._most_of_ranks = others["broken"].load_state_dict = lambda value: value
        raise error("it is broken")

    course, model, others = Course(list(range(30))), torch.nn.Linear(1, 1), {"broken": StateOnly()}
    keeper = SnapshotKeeper(RescueConfig(), "host", None, lambda value: value)
    parts = Parts(model, list(model.parameters()), None, others, course.data, StateOnly())
    keeper.take(0, parts, RescuePolicy(), LossLevel())
    for step in range(1, 6):
        course.of_step(step)
    course.data.at_boundary(5)
    others["broken"].load_state_dict = fails
    if error is DisagreementError:
        others["broken"].load_state_dict, keeper._most_of_ranks = (lambda _: None), fails
    with pytest.raises(error, match="it is broken"):
        keeper.restore(Decision(action="go_back", to=0, skip=(2, 8)), parts)
    assert [course.of_step(step) for step in (6, 7, 8)] == [[5], [6], [7]]
