"""Spatial outliers: none in a healthy job, else the deviating rank, whatever its name."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric.diagnosis.patterns.spatial import THRESHOLD, peer_outliers
from rmetric.diagnosis.result import MAX_NODES
from tests.diagnosis.jobs import Maker, healthy


def odd(job, **options):
    return peer_outliers(job, rng=np.random.default_rng(0), **options)


def failing(world, bad, *, order=None, times=30, **options):
    maker = Maker(world, **options).train(order or range(world))
    for template in ("retry <NUM> of link", "link down on <*>"):
        for _ in range(times):
            maker.say(bad, template)
    return maker.job


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8, 32, 64])
def test_nobody_stands_out_in_a_healthy_job(world):
    job = healthy(world, node_of=lambda rank: f"n{rank // 4}")
    assert odd(job) == []


@pytest.mark.parametrize("world", [4, 8, 32])
def test_the_rank_with_events_of_its_own(world):
    job = failing(world, 2)
    (found,) = odd(job)
    assert found.name == "rank 2"
    assert found.score >= THRESHOLD
    assert [job.events[one].counts for one in found.events] == [{"rank 2": 30}] * 2


def test_a_silent_rank_is_a_zero_vector():
    job = Maker(16).train([rank for rank in range(16) if rank != 5]).job
    found = odd(job)
    assert [one.name for one in found] == ["rank 5"]
    assert job.events[found[0].events[0]].template == "step <NUM> loss <NUM>"


def test_the_habits_of_rank_0_are_none_to_blame():
    assert odd(healthy(16, shared=True)) == []
    maker = Maker(16).train(range(16))
    for _ in range(300):
        maker.say(0, "progress <NUM>")
        maker.say(15, "lm loss <NUM>")
    assert odd(maker.job) == []


def test_ordinary_events_are_set_aside():
    job = failing(16, 3)
    new = frozenset(one.number for one in job.events if "link" in one.template)
    assert odd(job, ordinary=new) == []


def test_at_most_eight_and_never_a_large_group():
    for many in (8, 9, 20, 40):
        maker = Maker(64).train(range(64))
        for rank in range(1, 1 + many):
            for _ in range(30):
                maker.say(rank, "retry <NUM> of link")
        found = odd(maker.job)
        assert len(found) <= MAX_NODES
        if many > MAX_NODES:
            assert found == []


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(st.permutations(range(1, 11)), st.integers(1, 10))
def test_renaming_ranks_permutes_the_result(names, bad):
    """Ranks 0 and 11 have duties of their own and keep their names."""
    new = [0, *names, 11]
    first = odd(failing(12, bad))
    second = odd(failing(12, new[bad], order=new))
    renamed = {f"rank {rank}": f"rank {new[rank]}" for rank in range(12)}
    assert [(renamed[one.name], one.score) for one in first] == [
        (one.name, one.score) for one in second
    ]


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(st.integers(4, 40), st.integers(1, 30))
def test_more_healthy_ranks_raise_none(world, more):
    for size in (world, world + more):
        assert {one.name for one in odd(failing(size, 2))} <= {"rank 2"}


def test_the_same_seed_gives_the_same():
    assert repr(odd(failing(32, 7))) == repr(odd(failing(32, 7)))


@pytest.mark.long
def test_scikit_learn_is_not_imported_for_a_job_of_few_ranks():
    code = (
        "import sys; from rmetric.diagnosis import diagnose; "
        "diagnose('studies/diagnosis_benchmark/logs/silent_rank', jobs=1); "
        "sys.exit('sklearn' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
