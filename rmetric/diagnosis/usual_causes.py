"""Causes that answers of a kind leave open: a timeout tells that a rank did not come, not why.

Where no line decides, these are listed behind the first cause that has evidence. Their weights were
set by hand, about as often as such a cause was the true one of a wrong answer at the first looks up
to the twenty-fifth written set (the misses in studies/diagnosis_benchmark/results/first_look_*).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from rmetric.diagnosis.inferred_causes import HUNG
from rmetric.diagnosis.result import LEFT_OPEN, SURE, Candidate


class UsualCause(NamedTuple):
    """A cause that no line states.

    Attributes:
        stage: the one that an answer must not have for this to add something; "" for any.
    """

    id: str
    family: str
    title: str
    stage: str = ""


READING = UsualCause("hung_in_reading", "hang in reading", "A rank waits for its data", "load data")
CHECKPOINT = UsualCause(
    "hung_in_checkpoint", "hang in a checkpoint", "A rank hangs in its checkpoint", "checkpoint"
)
HANG = UsualCause(HUNG.id, HUNG.family, "The training hung before it was ended")
DIFFERENT = UsualCause(
    "other_collective", "collective mismatch", "The ranks call different collectives"
)
LIMIT = UsualCause("ended_by_limit", "time limit", "The time limit ended a job that went well")
PREEMPTED = UsualCause("ended_by_preemption", "preempted", "The scheduler took its machines back")
MEMORY = UsualCause(
    "killed_for_memory", "oom killer", "The kernel killed a process for lack of memory"
)
NODE = UsualCause("node_failed", "node failure", "A node failed")
GPU = UsualCause("gpu_failed", "GPU hardware", "A GPU failed")
GPU_MEMORY = UsualCause("gpu_memory_failed", "GPU memory error", "A GPU's memory failed")
FULL = UsualCause("no_space_left", "disk full", "The disk is full")
QUOTA = UsualCause("over_quota", "quota", "The disk quota is used up")
SERVER = UsualCause("file_server_failed", "storage", "The file server does not answer")
STORE = UsualCause("object_store_refuses", "object store", "The object store does not answer")
NAME = UsualCause("name_unknown", "name resolution", "A host's name cannot be resolved")
DAMAGED = UsualCause("data_damaged", "damaged data", "A file of data is damaged")

#: Kind of answer -> what it names ("family" or "family/pattern of ids"); the first that fits is it.
_KINDS: dict[str, tuple[str, ...]] = {
    "waited": (
        "hang",
        "silent rank",
        "collective mismatch",
        "uneven work",
        "collective communication/*timeout",
        "collective communication/*timed_out",
        "collective communication/*stalled",
        "collective communication/*stuck",
        "collective communication/*wait",
        "collective communication/nccl_lagging_rank",
        "collective communication/nccl_heartbeat_monitor",
        "collective communication/monitored_barrier_failed",
        "collective communication/collective_not_entered",
    ),
    "told to end": (
        "cancelled/launcher_received_sigterm",
        "cancelled/terminal_closed",
        "cancelled/paddle_told_to_end",
    ),
    "ended": ("cancelled", "time limit"),
    "killed": ("killed", "launcher/ray_actor_died", "data loading/dataloader_worker_killed"),
    "aborted": ("runtime error/python_aborted", "native crash/*_aborted"),
    "lost": (
        "collective communication",
        "network/ib_*",
        "network/ucx_error",
        "network/libfabric_error",
        "node failure/mpi_daemon_lost",
    ),
    "not met": ("rendezvous", "launcher/ssh_failed", "launcher/mpi_launch_failed"),
    "not written": ("checkpoint/*_write_failed",),
    "not read": ("data loading/dataloader_worker_exception",),
}
#: The kind of an answer without a cause: the log just stops.
_STOPS = "stops"
#: Kind of answer -> causes that it leaves open, with their weights.
_OPEN: dict[str, dict[UsualCause, int]] = {
    "waited": {READING: 15, CHECKPOINT: 5, DIFFERENT: 5, LIMIT: 5, PREEMPTED: 1},
    "told to end": {PREEMPTED: 5, HANG: 4, READING: 3, CHECKPOINT: 1},
    "ended": {READING: 8, HANG: 7, CHECKPOINT: 3, SERVER: 2, DIFFERENT: 1},
    "killed": {MEMORY: 5, DIFFERENT: 2, HANG: 2, PREEMPTED: 1},
    "aborted": {READING: 2, DIFFERENT: 1, CHECKPOINT: 1, GPU: 0},
    "lost": {NODE: 2, GPU_MEMORY: 2, GPU: 1, PREEMPTED: 1, MEMORY: 1},
    "not met": {NAME: 3, NODE: 0},
    "not written": {FULL: 2, QUOTA: 1, SERVER: 1, STORE: 1},
    "not read": {DAMAGED: 2, STORE: 1, MEMORY: 1},
    _STOPS: {HANG: 4, READING: 2, NODE: 2, DIFFERENT: 2, LIMIT: 1},
}
#: All of them.
USUAL = tuple(dict.fromkeys(one for some in _OPEN.values() for one in some))
#: Added to each weight: what was not met yet is possible too.
_UNSEEN = 0.5
#: Share of wrong answers with the right cause among their candidates, at the look at the 26th set.
_LISTED = 0.6
#: Causes that are added to an answer.
MOST_ADDED = 3


def with_usual(
    candidates: Sequence[Candidate],
    cause: str | None,
    family: str,
    *,
    stage: str,
    confidence: float,
    rivals: Collection[str] = (),
    most: int,
) -> tuple[Candidate, ...]:
    """The candidates, with what an answer leaves open: the most frequent first, with its share.

    Of candidates that are no rivals, which are likely consequences, the first comes before them.
    Nothing is added where the answer is sure. The shares are of what its own confidence leaves.

    Args:
        candidates: those with evidence.
        cause: of the answer; None where the log just stops.
        family: of the answer.
        stage: of the answer.
        confidence: of the answer.
        rivals: candidates that are causes by themselves, before all other faults.
        most: number of candidates in all.

    >>> added = with_usual((), "nccl_timeout", "collective communication", stage="train",
    ...                    confidence=0.7, most=2)
    >>> [one.title for one in added]
    ['A rank waits for its data', 'A rank hangs in its checkpoint']
    """
    kind = _STOPS if cause is None else _kind(cause, family)
    if confidence >= SURE or kind is None:
        return tuple(candidates[:most])
    weights = {one: weight + _UNSEEN for one, weight in _OPEN[kind].items()}
    share = _LISTED * (1.0 - confidence) / sum(weights.values())
    added = [
        Candidate(one.id, one.title, round(share * weight, 3), LEFT_OPEN)
        for one, weight in sorted(weights.items(), key=lambda each: -each[1])
        if one.family != family and (not one.stage or one.stage != stage)
    ]
    first = [one for one in candidates if one.cause in rivals]
    later = [one for one in candidates if one.cause not in rivals]
    return tuple([*first, *later[:1], *added[:MOST_ADDED], *later[1:]][:most])


def _kind(cause: str, family: str) -> str | None:
    kinds = (
        kind for kind, named in _KINDS.items() if any(is_named(cause, family, one) for one in named)
    )
    return next(kinds, None)


def is_named(cause: str, family: str, entry: str) -> bool:
    """True if an entry, "family" or "family/pattern of ids", means a cause of a family.

    >>> is_named("nccl_timeout", "collective communication", "collective communication/*timeout")
    True
    """
    of, _, pattern = entry.partition("/")
    return of == family and (not pattern or fnmatchcase(cause, pattern))
