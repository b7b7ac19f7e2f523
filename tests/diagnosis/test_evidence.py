"""Known faults, what a training survived, and absences: silence, an early end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis.answer import occurrence_text
from rmetric.diagnosis.clock import clock_offsets
from rmetric.diagnosis.evidence.peers import absences as absences_of
from rmetric.diagnosis.faults import ended_alone
from rmetric.diagnosis.signature import Signature
from tests.diagnosis.jobs import USUAL, Maker, healthy, killed, scene_of

HOUR = 3600.0


def absences(job, *, siblings=(), offsets=None):
    return absences_of(scene_of(job, siblings=siblings, offsets=offsets))


def kinds(job, **options):
    found = {}
    for row in absences(job, **options):
        found.setdefault(row.target, {})[row.kind] = row
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("shared", [False, True])
def test_a_healthy_job_lacks_nothing(world, shared):
    job = healthy(world, shared=shared)
    assert absences(job, siblings=[healthy(world)]) == []
    # Who leads may differ from the others without a sibling, but not by much.
    assert all(row.strength < 0.5 for row in absences(job))


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
        maker.log(rank, "memory <NUM>")
    assert kinds(maker.job)["rank 63"]["silent"].strength < 0.3


@pytest.mark.parametrize("world", [4, 16])
@pytest.mark.parametrize("shared", [False, True])
def test_a_rank_that_is_killed(world, shared):
    found = kinds(killed(world, 2, shared=shared))
    ended = found["rank 2"]["ended early"]
    assert ended.strength > 0.6
    assert ended.words == "its last entry is 1802 s before the others'"
    assert all(
        row.strength < 0.5 for name in found if name != "rank 2" for row in found[name].values()
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
                maker.log(rank, USUAL[2], step=step if steps else None)
    found = kinds(maker.job)["rank 5"]["ended early"]
    assert found.words == words
    assert found.strength > (0.9 if steps else 0.7)


def test_files_that_end_one_after_another_are_no_order():
    assert kinds(Maker(8).job) == {}
    maker = Maker(8)
    for rank in range(8):
        for _ in range(20):
            maker.log(rank, "tick")
    assert kinds(maker.job) == {}


def test_a_clock_that_is_wrong_hides_and_blames_nobody():
    job = killed(12, 2, skew={5: -2 * HOUR, 2: 2 * HOUR})
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
    assert {(renamed[row.target], row.kind, row.strength, row.words) for row in first} == {
        (row.target, row.kind, row.strength, row.words) for row in second
    }


@given(st.integers(4, 20), st.integers(1, 20))
def test_more_healthy_ranks_blame_none(world, more):
    for size in (world, world + more):
        strong = {row.target for row in absences(killed(size, 2)) if row.strength >= 0.5}
        assert strong == {"rank 2"}


# faults


def signature(name, role, **more):
    settings = dict(
        family=name, title=f"it was {name}", actor="user", patterns=("x",), gates=("x",),
        to_do=("Look.",),
    )  # fmt: skip
    return Signature(id=name, role=role, **{**settings, **more})


LIBRARY = {
    fault.id: fault
    for fault in (
        signature("oom", "cause"),
        signature("warned", "cause", survivable=True),
        signature("timeout", "echo"),
        signature("exit", "symptom"),
        signature("cancelled", "ending"),
        signature("noise", "harmless"),
        signature("completed", "success"),
    )
}


def faults_of(job):
    return scene_of(job, LIBRARY).faults


@pytest.mark.parametrize(
    ("later_steps", "signature_id", "survived"),
    [
        (1, "warned", True),
        (1, "oom", False),
        (3, "oom", True),
        (0, "warned", False),
        (0, "noise", True),
    ],
)
def test_a_fault_that_the_training_lived_through_explains_nothing(
    later_steps, signature_id, survived
):
    maker = Maker(ranks=4, shared=True)
    maker.steps(0, 9)
    maker.log(1, "a fault", signature=signature_id)
    maker.steps(10, 9 + later_steps)
    assert bool(faults_of(maker.job)) is not survived


@pytest.mark.parametrize(("done", "alone"), [((5,), {"rank 5"}), ((0,), set()), ((7,), set())])
def test_an_end_that_one_rank_alone_reports_is_no_end_of_the_job(done, alone):
    maker = Maker(ranks=8, shared=True)
    for rank in (1, 2):
        maker.log(rank, "timed out", signature="timeout")
    for rank in done:
        maker.log(rank, "all done", signature="completed")
    assert ended_alone(maker.job, LIBRARY) == alone
    assert bool(faults_of(maker.job)) == bool(alone)


def test_a_rank_missing_among_many_is_silent_though_no_size_is_stated():
    maker = Maker(ranks=16, shared=True)
    del maker.job.streams["rank 11"]
    assert maker.job.silent_ranks == [11]
    del maker.job.streams["rank 3"], maker.job.streams["rank 5"]
    assert maker.job.silent_ranks == []


def test_how_often_is_counted_by_ranks_nodes_and_files():
    maker = Maker(ranks=4, shared=True)
    for rank in (0, 1, 1, 3):
        maker.log(rank, "timed out", signature="timeout")
    (cause,) = faults_of(maker.job)
    assert occurrence_text(cause, maker.job) == "logged 4 times by 3 ranks"
    maker.log("launcher", "timed out", signature="timeout")
    (cause,) = faults_of(maker.job)
    assert occurrence_text(cause, maker.job) == "logged 5 times by 3 ranks and 1 file"
    stream = maker.job.streams["launcher"]
    stream.node = "gpu-07"
    assert occurrence_text(cause, maker.job) == "logged 5 times by 3 ranks and 1 node"
    stream.name = "node gpu-07 local 3"
    assert occurrence_text(cause, maker.job) == "logged 5 times by 4 ranks"
