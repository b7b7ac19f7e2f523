"""Causes inferred from missing or deviating ranks, without an explicit error line."""

from __future__ import annotations

from typing import NamedTuple


class InferredCause(NamedTuple):
    """A cause without a signature: no pattern can match it.

    Attributes:
        title: with {who} for the suspect and {what} for its deviation.
        confidence: the largest.
    """

    id: str
    family: str
    title: str
    actor: str
    confidence: float
    why: str
    to_do: tuple[str, ...]


SILENCE = InferredCause(
    id="rank_fell_silent",
    family="silent rank",
    title="{who} fell silent while others waited: hung, killed or disconnected",
    actor="platform",
    confidence=0.75,
    why="inferred from a missing rank; no explicit error line",
    to_do=(
        "Look at the node's kernel log (OOM kill, Xid) and at the scheduler's record of the task.",
        "If the process is still there, take its stack (py-spy dump) before you kill it.",
    ),
)
FINISHED_ALONE = InferredCause(
    id="rank_finished_early",
    family="uneven work",
    title="{who} finished before the others, which still waited for it",
    actor="user",
    confidence=0.75,
    why="it logged its planned end; the other ranks report a lost rank",
    to_do=(
        "Compare the steps and the data of this rank with another's: shards of unequal length?",
        "Give all ranks as many batches: drop the last, or let those that are done join.",
    ),
)
STARTED_OTHERWISE = InferredCause(
    id="settings_differ",
    family="configuration",
    title="{who} was started with other settings than its peers: it {what}",
    actor="user",
    confidence=0.65,
    why="its start-up lines differ from all other ranks; no explicit error line",
    to_do=(
        "Compare the environment and the command line of this rank with another's.",
        "Start all ranks by one launcher, from one script and one image.",
    ),
)
NOT_ENTERED = InferredCause(
    id="collective_not_entered",
    family="collective communication",
    title="{who} {what}",
    actor="framework",
    confidence=0.93,
    why="the flight recorders of the ranks",
    to_do=(
        "Look at what this rank did instead: its last lines, its stack, its node's kernel log.",
        "Check that every rank calls the same collectives in the same order and sizes.",
    ),
)
COLLECTIVES_DIFFER = InferredCause(
    id="collectives_differ",
    family="collective mismatch",
    title="{who} {what}",
    actor="user",
    confidence=0.8,
    why="the operations in which the ranks wait, as their watchdogs name them",
    to_do=(
        "Find the branch that only this rank takes: fewer batches, an evaluation, a skipped step.",
        "Give all ranks as many batches, and let all of them enter each collective.",
    ),
)
STANDS_ELSEWHERE = InferredCause(
    id="rank_stands_elsewhere",
    family="hang",
    title="{who} {what}",
    actor="framework",
    confidence=0.7,
    why="the stacks of the ranks; no explicit error line",
    to_do=(
        "Look at what this rank waits for: storage, a lock, another process.",
        "Take a second stack some seconds later to see that it does not move.",
    ),
)
WAITED_FOR = InferredCause(
    id="rank_kept_others_waiting",
    family="hang",
    title="{who} did not come out of what it logged last: {what}",
    actor="framework",
    confidence=0.8,
    why="its last entry, and the timeouts of the ranks that waited for it",
    to_do=(
        "Look at what this rank reads or writes there: storage, a mount, a worker process.",
        "Take its stack while it hangs (py-spy dump). A longer timeout does not help.",
    ),
)
NOT_FINITE = InferredCause(
    id="loss_not_finite",
    family="nan loss",
    title="The loss is not finite {what}",
    actor="user",
    confidence=0.85,
    why="the lines of the steps; it was finite before",
    to_do=(
        "Go back to a checkpoint before this step; skip its batches, or lower the learning rate.",
        "Look at the losses before it (rmetric replay): is it a slow rise, or a jump?",
    ),
)
HUNG = InferredCause(
    id="training_hung",
    family="hang",
    title="The training hung {what}",
    actor="framework",
    confidence=0.9,
    why="no entry and no step for far longer than the longest pause between steps",
    to_do=(
        "Look at the last lines of the rank that is behind or silent, and its node's kernel log.",
        "Take a stack of every rank while it hangs (py-spy dump). A longer limit does not help.",
    ),
)
#: All of them.
INFERRED = (
    SILENCE,
    FINISHED_ALONE,
    STARTED_OTHERWISE,
    NOT_ENTERED,
    COLLECTIVES_DIFFER,
    STANDS_ELSEWHERE,
    WAITED_FOR,
    NOT_FINITE,
    HUNG,
)
