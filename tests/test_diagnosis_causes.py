"""Causes, their order, and the rank evidence from signature matches."""

import msgspec
import pytest
from rmetric.diagnosis.causes import collect, ended_alone, weigh
from rmetric.diagnosis.lost_connections import evidence_from_lost_connections
from rmetric.diagnosis.rank_evidence import (
    evidence_from_causes,
    evidence_from_collectives,
    evidence_from_echoes,
)

from rmetric.diagnosis.evidence import how_often
from rmetric.diagnosis.ordering import Ordering
from rmetric.diagnosis.reading.timestamps import NO_YEAR
from rmetric.diagnosis.report.evidence import how_often
from rmetric.diagnosis.signature import Signature
from rmetric.diagnosis.suspects import NAMED, WEIGHTS, RankEvidence, named, suspects
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
        signature("any_exception", "cause", rank=1, confidence=0.6),
        signature("warned", "cause", survivable=True),
        signature("timeout", "echo"),
        signature("mismatch", "cause", of_two=True),
        signature("exit", "symptom"),
        signature("cancelled", "ending"),
        signature("noise", "harmless"),
        signature("completed", "success"),
    )
}


def causes_of(job, offsets=None):
    ordering = Ordering(job=job, offsets=offsets or {})
    alone = ended_alone(job, LIBRARY)
    found = weigh(collect(job, LIBRARY, ordering, alone), ordering)
    return found, ordering


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
    found, _ = causes_of(writer.job)
    assert bool(found) is not survived


def test_harmless_entries_are_no_causes():
    writer = Writer()
    writer.say(1, "ERROR that is none", signature="noise")
    assert causes_of(writer.job)[0] == []


def ranked(writer):
    found, ordering = causes_of(writer.job)
    signs = [
        *evidence_from_causes(writer.job, found, ordering),
        *evidence_from_echoes(writer.job, found),
    ]
    signs += evidence_from_collectives(found)
    return suspects(writer.job, signs)


@pytest.mark.parametrize("code", ["-9", "137", "-11"])
def test_an_exit_code_tells_who_was_killed(code):
    writer = Writer(ranks=8)
    for rank in range(8):
        writer.say(rank, "step")
    for rank, how in ((0, "1"), (4, code), (1, "1"), (2, "-15")):
        fields = {"rank": str(rank), "code": how}
        writer.say("launcher", f"rank {rank} exited", signature="exit", fields=fields)
    found = ranked(writer)
    assert found[0].rank == 4
    assert "terminated by SIG" in found[0].why
    assert all(one.rank != 2 for one in found)


def test_a_mismatch_of_two_speaks_against_both_neighbours_too():
    writer = Writer(ranks=8)
    writer.say(3, "sizes differ", signature="mismatch")
    found = ranked(writer)
    assert found[0].name == "rank 3"
    assert {one.name for one in found} == {"rank 2", "rank 3", "rank 4"}


def test_an_exit_that_no_loss_explains_names_its_rank():
    writer = Writer(ranks=8)
    for rank in (1, 2, 3):
        writer.say(rank, "timed out", signature="timeout")
    for rank in (2, 3, 6, 1):
        fields = {"rank": str(rank), "code": "1"}
        writer.say("launcher", f"rank {rank} exited", signature="exit", fields=fields)
    assert [one.name for one in named(ranked(writer))] == ["rank 6"]


@pytest.mark.parametrize(("done", "alone"), [((5,), {"rank 5"}), ((0,), set()), ((7,), set())])
def test_an_end_that_one_rank_alone_reports_is_no_end_of_the_job(done, alone):
    writer = Writer(ranks=8)
    for rank in (1, 2):
        writer.say(rank, "timed out", signature="timeout")
    for rank in done:
        writer.say(rank, "all done", signature="completed")
    assert ended_alone(writer.job, LIBRARY) == alone
    assert bool(causes_of(writer.job)[0]) == bool(alone)


LOST = {"remote_host": "10.0.0.7", "port": "4000"}


def amid(writer):
    signs = evidence_from_lost_connections(writer.job, causes_of(writer.job)[0])
    return [one.name for one in suspects(writer.job, signs)]


def test_the_rank_between_those_who_lost_a_connection_is_the_first():
    writer = Writer(ranks=16, one_file=False)
    for rank in (4, 5, 6):
        writer.say(rank, "timed out", signature="timeout", fields=LOST)
    assert amid(writer)[0] == "rank 5"


def test_a_silent_rank_between_two_that_lost_a_connection_is_the_first():
    writer = Writer(ranks=16, one_file=False)
    for rank in (15, 1):
        writer.say(rank, "timed out", signature="timeout", fields=LOST)
    assert amid(writer)[0] == "rank 0"


def test_where_all_lost_a_connection_the_order_of_writing_tells_who_was_first():
    writer = Writer(ranks=16)
    outwards = sorted(range(16), key=lambda rank: min((rank - 9) % 16, (9 - rank) % 16))
    for rank in outwards:
        writer.say(rank, "timed out", signature="timeout", fields=LOST)
    assert amid(writer)[0] == "rank 9"


@pytest.mark.parametrize("cut", [1, 9, 30])
def test_losses_that_run_round_the_ring_name_the_rank_that_they_come_from(cut):
    writer = Writer(ranks=32, one_file=False)
    outwards = sorted(range(32), key=lambda rank: min((rank - cut) % 32, (cut - rank) % 32))
    for rank in range(32):  # each node's ranks share a log, in the order of their losses
        writer.job.streams[f"rank {rank}"].node = f"n{rank // 8}"
    for rank in outwards[1:]:
        writer.one_file = True
        entry = writer.say(rank, "timed out", signature="timeout", fields=LOST)
        match = writer.job.matches["timeout", f"rank {rank}"]
        match.first = match.last = msgspec.structs.replace(entry, file=f"n{rank // 8}.log")
    assert amid(writer)[0] == f"rank {cut}"


def test_where_all_lost_a_connection_the_order_of_their_exits_tells_who_was_first():
    writer = Writer(ranks=16, one_file=False)
    for rank in range(16):
        writer.say(rank, "timed out", signature="timeout", fields=LOST)
    for tasks in ("6", "4", "7", "3,5", "8", "2,9,1", "10-15", "0"):
        writer.say("launcher", f"tasks {tasks}", signature="exit", fields={"tasks": tasks})
    assert amid(writer)[0] == "rank 5"


def test_where_all_lost_a_connection_in_logs_of_their_own_nobody_stands_out():
    writer = Writer(ranks=16, one_file=False)
    for rank in range(16):
        writer.say(rank, "timed out", signature="timeout", fields=LOST)
    assert amid(writer) == []


def test_a_sign_more_never_lowers_the_score():
    job = Writer().job
    signs = [RankEvidence(stream="rank 1", kind=kind, words=kind) for kind in WEIGHTS]
    scores = [suspects(job, signs[: n + 1])[0].score for n in range(len(signs))]
    assert scores == sorted(scores)
    assert scores[0] > NAMED


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
    ((cause,), _) = causes_of(writer.job)
    assert how_often(cause, writer.job) == "logged 4 times by 3 ranks"
    writer.say("launcher", "timed out", signature="timeout")
    ((cause,), _) = causes_of(writer.job)
    assert how_often(cause, writer.job) == "logged 5 times by 3 ranks and 1 file"
    stream = writer.job.streams["launcher"]
    stream.node = "gpu-07"
    assert how_often(cause, writer.job) == "logged 5 times by 3 ranks and 1 node"
    stream.name = "node gpu-07 local 3"
    assert how_often(cause, writer.job) == "logged 5 times by 4 ranks"
