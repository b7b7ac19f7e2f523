"""Known faults, what a training survived, and the order of entries."""

import pytest

from rmetric.diagnosis.clock import Ordering
from rmetric.diagnosis.faults import ended_alone
from rmetric.diagnosis.reading.timestamps import NO_YEAR
from rmetric.diagnosis.report.evidence import how_often
from rmetric.diagnosis.signature import Signature
from tests.diagnosis_scene import scene_of
from tests.diagnosis_writer import Writer


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
    [(1, "warned", True), (1, "oom", False), (3, "oom", True), (0, "warned", False)],
)
def test_a_fault_that_the_training_lived_through_explains_nothing(
    later_steps, signature_id, survived
):
    writer = Writer()
    writer.steps(0, 9)
    writer.say(1, "a fault", signature=signature_id)
    writer.steps(10, 9 + later_steps)
    found = faults_of(writer.job)
    assert bool(found) is not survived


def test_harmless_entries_are_no_causes():
    writer = Writer()
    writer.say(1, "ERROR that is none", signature="noise")
    assert faults_of(writer.job) == []


@pytest.mark.parametrize(("done", "alone"), [((5,), {"rank 5"}), ((0,), set()), ((7,), set())])
def test_an_end_that_one_rank_alone_reports_is_no_end_of_the_job(done, alone):
    writer = Writer(ranks=8)
    for rank in (1, 2):
        writer.say(rank, "timed out", signature="timeout")
    for rank in done:
        writer.say(rank, "all done", signature="completed")
    assert ended_alone(writer.job, LIBRARY) == alone
    assert bool(faults_of(writer.job)) == bool(alone)


def test_a_time_without_a_year_takes_that_of_the_job():
    writer = Writer(one_file=False)
    dated = 1_714_702_447.0  # 2024-05-03 02:14:07
    writer.say(0, "step", time=dated)
    late = writer.say(1, "boom", time=NO_YEAR[0] + (31 + 29 + 31 + 30 + 2) * 86400.0 + 8057.0)
    ordering = Ordering(job=writer.job)
    assert ordering.seconds(late) == pytest.approx(dated + 10.0)
    assert ordering.span == (dated, dated)
    booted = writer.say(2, "boom", time=4821.5)
    assert ordering.seconds(booted) is None
    assert ordering.dated(booted) == 4821.5


def test_in_one_file_the_order_decides_whatever_the_clocks_say():
    writer = Writer()
    first = writer.say(0, "a", time=2e9 + 60.0)
    second = writer.say(1, "b", time=2e9)
    ordering = Ordering(job=writer.job)
    assert ordering.after(second, first)
    assert not ordering.after(first, second)
    assert 0.0 < ordering.later_by(second, first) < 1.0


def test_a_rank_missing_among_many_is_silent_though_no_size_is_told():
    writer = Writer(ranks=16)
    del writer.job.streams["rank 11"]
    assert writer.job.silent_ranks == [11]
    del writer.job.streams["rank 3"], writer.job.streams["rank 5"]
    assert writer.job.silent_ranks == []


def test_how_often_is_told_by_ranks_nodes_and_files():
    writer = Writer()
    for rank in (0, 1, 1, 3):
        writer.say(rank, "timed out", signature="timeout")
    (cause,) = faults_of(writer.job)
    assert how_often(cause, writer.job) == "logged 4 times by 3 ranks"
    writer.say("launcher", "timed out", signature="timeout")
    (cause,) = faults_of(writer.job)
    assert how_often(cause, writer.job) == "logged 5 times by 3 ranks and 1 file"
    stream = writer.job.streams["launcher"]
    stream.node = "gpu-07"
    assert how_often(cause, writer.job) == "logged 5 times by 3 ranks and 1 node"
    stream.name = "node gpu-07 local 3"
    assert how_often(cause, writer.job) == "logged 5 times by 4 ranks"
