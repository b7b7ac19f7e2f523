"""Diagnoses for the tests of text, JSON and page output."""

from __future__ import annotations

from rmetric.diagnosis.report.result import Candidate, Diagnosis, Evidence, Suspect

#: 2024-05-03 02:14:07, as seconds since 1970.
THEN = 1714702447.0


def evidence(**changes) -> Evidence:
    usual = dict(
        role="cause", signature="cuda_out_of_memory", why="A GPU ran out of memory",
        template="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate <*> GiB",
        text="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB",
        file="node-03/rank_12.log", line=8812, time=THEN, who=("rank 12",), count=1,
    )  # fmt: skip
    return Evidence(**{**usual, **changes})


def echo(**changes) -> Evidence:
    usual = dict(
        role="echo", signature="nccl_timeout", why="A collective timed out",
        template="Watchdog caught collective operation timeout: <*>",
        text="Watchdog caught collective operation timeout: WorkNCCL(SeqNum=91)",
        file="node-00/rank_0.log", line=9001, time=THEN + 600,
        who=tuple(f"rank {rank}" for rank in range(8)), count=63,
    )  # fmt: skip
    return evidence(**{**usual, **changes})


def suspect(rank: int = 12, node: str | None = "node-03", **changes) -> Suspect:
    usual = dict(name=f"rank {rank}", rank=rank, node=node, score=0.98,
                 why="the only one that raised an exception")  # fmt: skip
    return Suspect(**{**usual, **changes})


def out_of_memory(**changes) -> Diagnosis:
    """Sure of everything: one rank of 64 ran out of memory, the others waited for it."""
    usual = dict(
        outcome="failed", cause="cuda_out_of_memory", family="out of memory",
        title="A GPU ran out of memory.", actor="user", confidence=0.93,
        why="its exception comes 600 s before the collective timeouts of 63 others",
        stage="train", iteration=431, since=429, time=THEN,
        to_do=("Lower the micro batch.", "Look for a batch of unusual length."),
        events=(evidence(), echo()), nodes=(suspect(),),
        candidates=(
            Candidate(cause="nccl_timeout", title="A collective timed out", confidence=0.31,
                      why="63 ranks say so, but after rank 12 had ended"),
        ),
        notes=("the clock of node-05 is 3 h ahead of the others: corrected",),
        job=dict(files=64, lines=1234567, world_size=64, ranks_heard=64,
                 first_time=THEN - 7200, last_time=THEN + 610),
    )  # fmt: skip
    return Diagnosis(**{**usual, **changes})
