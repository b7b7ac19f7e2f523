"""Ranks that deviate from their peers: in their events, their numbers, their settings."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis.patterns.spatial import THRESHOLD, peer_outliers
from rmetric.diagnosis.patterns.values import number_outliers, numbers, setting_outliers
from rmetric.diagnosis.report.result import MAX_NODES
from tests.diagnosis.jobs import Maker, healthy


def odd(job, **options):
    return peer_outliers(job, rng=np.random.default_rng(0), **options)


def failing(world, bad, *, order=None):
    maker = Maker(world).train(order or range(world))
    for template in ("retry <NUM> of link", "link down on <*>"):
        for _ in range(30):
            maker.log(bad, template)
    return maker.job


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8, 64])
def test_nobody_stands_out_in_a_healthy_job(world):
    assert odd(healthy(world, node_of=lambda rank: f"n{rank // 4}")) == []


@pytest.mark.parametrize("world", [4, 8, 32])
def test_the_rank_with_events_of_its_own_whatever_happens_at_random(world):
    job = failing(world, 2)
    (found,) = odd(job)
    assert found.name == "rank 2"
    assert found.score >= THRESHOLD
    assert [job.events[number].counts for number in found.events] == [{"rank 2": 30}] * 2
    assert repr(odd(job)) == repr([found])
    new = frozenset(event.number for event in job.events if "link" in event.template)
    assert odd(job, ordinary=new) == []


def test_a_silent_rank_is_a_zero_vector():
    job = Maker(16).train([rank for rank in range(16) if rank != 5]).job
    (found,) = odd(job)
    assert found.name == "rank 5"
    assert job.events[found.events[0]].template == "step <NUM> loss <NUM>"


def test_the_habits_of_rank_0_are_none_to_blame():
    assert odd(healthy(16, shared=True)) == []
    maker = Maker(16).train(range(16))
    for _ in range(300):
        maker.log(0, "progress <NUM>")
        maker.log(15, "lm loss <NUM>")
    assert odd(maker.job) == []


@pytest.mark.parametrize("many", [8, 9, 20, 40])
def test_at_most_eight_and_never_a_large_group(many):
    maker = Maker(64).train(range(64))
    for rank in range(1, 1 + many):
        for _ in range(30):
            maker.log(rank, "retry <NUM> of link")
    assert len(odd(maker.job)) <= (MAX_NODES if many <= MAX_NODES else 0)


@given(st.permutations(range(1, 11)), st.integers(1, 10))
def test_renaming_ranks_permutes_the_result(names, bad):
    """Ranks 0 and 11 have duties of their own and keep their names."""
    new = [0, *names, 11]
    renamed = {f"rank {rank}": f"rank {new[rank]}" for rank in range(12)}
    first, second = odd(failing(12, bad)), odd(failing(12, new[bad], order=new))
    assert [(renamed[outlier.name], outlier.score) for outlier in first] == [
        (outlier.name, outlier.score) for outlier in second
    ]


@given(st.integers(4, 40), st.integers(1, 30))
def test_more_healthy_ranks_raise_none(world, more):
    for size in (world, world + more):
        assert {outlier.name for outlier in odd(failing(size, 2))} <= {"rank 2"}


# numbers


def values_of(value_of, ranks=8):
    """All ranks write lines of one form at each of six steps, with their own numbers."""
    maker = Maker(ranks=ranks)
    for step in range(6):
        for rank in range(ranks):
            text = f"step {step}: data {value_of(rank, step)} ms | loss=2.5"
            maker.log(rank, "step <N>: data <N> ms | loss=<N>", step=step, quote=text)
    return maker.job


def logged_by(text_of, ranks=8):
    """All ranks write one line of one form, with their own values."""
    maker = Maker(ranks=ranks)
    for rank in range(ranks):
        maker.log(rank, "one form", quote=text_of(rank))
    return maker.job


def test_a_rank_whose_steps_take_long_is_found():
    (found,) = number_outliers(
        values_of(lambda rank, step: 900.0 if rank == 5 and step >= 2 else 10.0 + rank)
    )
    assert (found.stream, found.name, found.value) == ("rank 5", "data", 900.0)
    assert found.steps == 4


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_number_that_is_none_is_odd(value):
    found = number_outliers(values_of(lambda rank, _: value if rank == 2 else 1.0 + 0.01 * rank))
    assert [outlier.stream for outlier in found] == ["rank 2"]


@pytest.mark.parametrize(
    "job",
    [
        values_of(lambda rank, step: 900.0 if (rank, step) == (5, 5) else 10.0),
        values_of(lambda rank, _: 900.0 if rank % 2 else 10.0 + rank),
    ],
    ids=["once", "half of the ranks"],
)
def test_numbers_that_are_not_odd(job):
    assert number_outliers(job) == []


@given(st.lists(st.floats(50.0, 100.0), min_size=8, max_size=8))
def test_numbers_within_a_factor_of_two_are_never_odd(values):
    assert number_outliers(values_of(lambda rank, _: values[rank])) == []


@pytest.mark.parametrize(
    "text",
    ["rank 3 at step 7", "2024-05-01 12:00:00,123 hello", "[Rank 3] node 7", "version 1.2.3"],
)
def test_places_and_times_are_no_numbers(text):
    assert list(numbers(text)) == []


# settings


def test_another_setting_is_found_with_its_name():
    found = setting_outliers(
        logged_by(lambda rank: f"RANK={rank} WORLD_SIZE={9 if rank == 5 else 8} pid {900 + rank}")
    )
    assert found == [("rank 5", "logs WORLD_SIZE 9; 7 others log 8")]
    bare = setting_outliers(logged_by(lambda rank: f"torch version 2.{1 if rank == 3 else 4}"))
    assert bare == [("rank 3", "logs torch version 2.1; 7 others log 2.4")]


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
    assert setting_outliers(logged_by(text_of)) == []


@given(st.integers(4, 40), st.data())
def test_whoever_differs_alone_is_found_but_not_where_it_does_in_a_healthy_job(ranks, data):
    rank = data.draw(st.integers(1, ranks - 1))
    job = logged_by(lambda number: f"batch={2 if number == rank else 1}", ranks)
    assert setting_outliers(job) == [(f"rank {rank}", f"logs batch 2; {ranks - 1} others log 1")]
    assert setting_outliers(job, [job]) == []


def test_scikit_learn_is_not_imported_for_a_job_of_few_ranks():
    code = (
        "import sys; from rmetric.diagnosis import diagnose; "
        "diagnose('studies/diagnosis_benchmark/data/examples/silent_rank', jobs=1); "
        "sys.exit('sklearn' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
