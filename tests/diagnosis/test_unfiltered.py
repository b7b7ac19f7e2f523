"""Absences: silence, an early end, other last entries, a missing event."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis.clock import clock_offsets
from rmetric.diagnosis.evidence.absences import absences as absences_of
from tests.diagnosis.jobs import USUAL, Maker, healthy, killed, scene_of

HOUR = 3600.0


def absences(job, *, siblings=(), offsets=None):
    return absences_of(scene_of(job, siblings=siblings, offsets=offsets))


def kinds(job, **options):
    found = {}
    for one in absences(job, **options):
        found.setdefault(one.target, {})[one.kind] = one
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("shared", [False, True])
def test_a_healthy_job_lacks_nothing(world, shared):
    job = healthy(world, shared=shared)
    assert absences(job, siblings=[healthy(world)]) == []
    # Who leads may differ from the others without a sibling, but not by much.
    assert all(one.strength < 0.5 for one in absences(job))


def test_a_silent_rank():
    job = Maker(64).train([rank for rank in range(64) if rank != 17]).job
    found = kinds(job)
    assert set(found["rank 17"]) == {"silent"}
    assert found["rank 17"]["silent"].strength > 0.9
    assert found["rank 17"]["silent"].words == "logged nothing; 63 of 64 ranks did"


def test_silence_is_no_sign_where_most_are_silent_or_say_little():
    assert kinds(Maker(64).train([0]).job) == {}
    maker = Maker(64)
    for rank in range(63):
        maker.say(rank, "memory <NUM>")
    assert kinds(maker.job)["rank 63"]["silent"].strength < 0.3


@pytest.mark.parametrize("world", [4, 16])
@pytest.mark.parametrize("shared", [False, True])
def test_a_rank_that_is_killed(world, shared):
    found = kinds(killed(world, 2, shared=shared))
    ended = found["rank 2"]["ended early"]
    assert ended.strength > 0.6
    assert ended.words == "its last entry is 1802 s before the others'"
    assert all(
        one.strength < 0.5 for name in found if name != "rank 2" for one in found[name].values()
    )


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (True, "its last step is 8 before the others'"),
        (False, "the others logged 7 entries each after its last"),
    ],
)
def test_a_rank_that_stops_before_the_others_without_times(steps, words):
    maker = Maker(8, shared=not steps)
    for step in range(20):
        for rank in range(8):
            if rank != 5 or step < 12:
                maker.say(rank, USUAL[2], step=step if steps else None)
    found = kinds(maker.job)["rank 5"]["ended early"]
    assert found.words == words
    assert found.strength > (0.9 if steps else 0.7)


def test_files_that_end_one_after_another_are_no_order():
    assert kinds(Maker(8).job) == {}
    maker = Maker(8)
    for rank in range(8):
        for _ in range(20):
            maker.say(rank, "tick")
    assert kinds(maker.job) == {}


def test_a_clock_that_is_wrong_hides_and_blames_nobody():
    skew = {5: -2 * HOUR, 2: 2 * HOUR}
    job = killed(12, 2, skew=skew)
    right = kinds(job, offsets=clock_offsets(job))
    assert right["rank 2"]["ended early"].strength > 0.6
    assert "ended early" not in right.get("rank 5", {})
    assert "ended early" in kinds(job)["rank 5"], "by its own clock it ended two hours before"


@given(st.permutations(range(1, 11)), st.integers(1, 10))
def test_renaming_ranks_permutes_the_result(names, bad):
    """Ranks 0 and 11 have duties of their own and keep their names."""
    new = [0, *names, 11]
    renamed = {f"rank {rank}": f"rank {new[rank]}" for rank in range(12)}
    first = absences(killed(12, bad))
    second = absences(killed(12, new[bad], order=new))
    assert {(renamed[one.target], one.kind, one.strength, one.words) for one in first} == {
        (one.target, one.kind, one.strength, one.words) for one in second
    }


@given(st.integers(4, 20), st.integers(1, 20))
def test_more_healthy_ranks_blame_none(world, more):
    for size in (world, world + more):
        strong = {one.target for one in absences(killed(size, 2)) if one.strength >= 0.5}
        assert strong == {"rank 2"}
