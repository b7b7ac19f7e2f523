"""Known faults and what a training survived."""

import pytest

from rmetric.diagnosis.faults import ended_alone
from rmetric.diagnosis.report.evidence import how_often
from rmetric.diagnosis.signature import Signature
from tests.diagnosis.jobs import Maker, scene_of


def signature(name, role, **more):
    settings = dict(
        family=name, title=f"it was {name}", actor="user", patterns=("x",), gates=("x",),
        to_do=("Look.",),
    )  # fmt: skip
    return Signature(id=name, role=role, **{**settings, **more})


LIBRARY = {
    one.id: one
    for one in (
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
    maker.say(1, "a fault", signature=signature_id)
    maker.steps(10, 9 + later_steps)
    found = faults_of(maker.job)
    assert bool(found) is not survived


@pytest.mark.parametrize(("done", "alone"), [((5,), {"rank 5"}), ((0,), set()), ((7,), set())])
def test_an_end_that_one_rank_alone_reports_is_no_end_of_the_job(done, alone):
    maker = Maker(ranks=8, shared=True)
    for rank in (1, 2):
        maker.say(rank, "timed out", signature="timeout")
    for rank in done:
        maker.say(rank, "all done", signature="completed")
    assert ended_alone(maker.job, LIBRARY) == alone
    assert bool(faults_of(maker.job)) == bool(alone)


def test_a_rank_missing_among_many_is_silent_though_no_size_is_told():
    maker = Maker(ranks=16, shared=True)
    del maker.job.streams["rank 11"]
    assert maker.job.silent_ranks == [11]
    del maker.job.streams["rank 3"], maker.job.streams["rank 5"]
    assert maker.job.silent_ranks == []


def test_how_often_is_told_by_ranks_nodes_and_files():
    maker = Maker(ranks=4, shared=True)
    for rank in (0, 1, 1, 3):
        maker.say(rank, "timed out", signature="timeout")
    (cause,) = faults_of(maker.job)
    assert how_often(cause, maker.job) == "logged 4 times by 3 ranks"
    maker.say("launcher", "timed out", signature="timeout")
    (cause,) = faults_of(maker.job)
    assert how_often(cause, maker.job) == "logged 5 times by 3 ranks and 1 file"
    stream = maker.job.streams["launcher"]
    stream.node = "gpu-07"
    assert how_often(cause, maker.job) == "logged 5 times by 3 ranks and 1 node"
    stream.name = "node gpu-07 local 3"
    assert how_often(cause, maker.job) == "logged 5 times by 4 ranks"
