"""Joint decisions of the rescues of all ranks: their evidence, exchanged between two steps."""

from __future__ import annotations

import copy
import logging
import zlib
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from rmetric.guard.ranks import Ranks
from rmetric.rescue.judgement import Judgement
from rmetric.rescue.policy import KINDS, Evidence, PolicyState

logger = logging.getLogger("rmetric")

_QUESTION = -1  # step of a ballot of `Agreement.most`
_LEFT = "the rescue of another rank is switched off"


class DisagreementError(RuntimeError):
    """The ranks cannot decide together any more."""


class Ballot(NamedTuple):
    """Report of one rank after a step, in whole numbers, which are exchanged as float64."""

    step: int  # steps that its weights have taken
    loss_recovered: int = 0  # its loss is back where it was before the incident
    due: int = 0  # checksum of what the step rules decided; 0 for nothing
    policy: int = 0  # checksum of the state of its policy
    leaving: int = 0  # its rescue is switched off
    since: int = -1  # first step of the evidence of its detector; -1 for none
    kind: int = 0  # of that evidence, as its place in `KINDS`
    worker: int = -1  # that it names; -1 for none


class Agreement:
    """Decides the same on all ranks, by the ballots of each; all ranks create it together.

    A ballot is sent after one step and received after the next. No rank waits for the message of a
    step that the others have not ended: all of them have taken part in a collective of the training
    since. Every message is a ballot, so that the last one of a rank that leaves answers whatever
    the others wait for.
    """

    def __init__(self, judgement: Judgement) -> None:
        self._judgement, self.ranks = judgement, Ranks()
        # States of the policy in the newest ballots and in those before, which the ranks agreed on.
        self._posted = self._agreed = PolicyState()
        self.has_recovered: bool | None = None  # the loss, on all ranks, by their last ballots
        self._words = ""  # of the evidence that was sent last
        self._work: Any = None
        self._taken: Any = None  # kept, as in `Ranks`
        self._sent = torch.zeros(len(Ballot._fields), dtype=torch.float64, device="cpu")
        self._gathered = [torch.zeros_like(self._sent) for _ in range(self.ranks.size)]

    def send(self, ballot: Ballot) -> None:
        self._sent = torch.tensor(ballot, dtype=torch.float64, device="cpu")
        self._work = dist.all_gather(
            self._gathered, self._sent, group=self.ranks.group, async_op=True
        )

    def receive(self) -> list[Ballot]:
        """The ballots that were sent last, by rank; none before the first."""
        work, self._work = self._work, None
        if work is None:
            return []
        work.wait()
        self._taken = work
        return [Ballot(*map(int, row.tolist())) for row in self._gathered]

    def most(self, value: int) -> int:
        """The largest value of all ranks, from 0; waits for all of them, or DisagreementError."""
        self.send(Ballot(_QUESTION, due=value))
        ballots = self.receive()
        if any(ballot.leaving or ballot.step != _QUESTION for ballot in ballots):
            raise DisagreementError(_LEFT)
        return max(ballot.due for ballot in ballots)

    def count(self, step: int) -> bool:
        """Take the ballots of the boundary before; True if what is due is carried out now.

        `step` are the steps that the weights have taken. Raises DisagreementError where the ranks
        cannot decide together.
        """
        judgement = self._judgement
        agreed, self._agreed = self._agreed, self._posted
        ballots = self.receive()
        if not ballots:
            return False
        if any(ballot.leaving for ballot in ballots):
            raise DisagreementError(_LEFT)
        if len({ballot.step for ballot in ballots}) > 1:
            raise DisagreementError("the ranks disagree about the steps that they have taken")
        if len({(ballot.policy, ballot.due) for ballot in ballots}) > 1:
            self._go_back_to_agreement(agreed, ballots[0].step, step)
            return True
        if ballots[0].due:
            return True
        if judgement.due is not None:
            return False
        evidence = None
        if found := [each for each in map(self._evidence, range(len(ballots)), ballots) if each]:
            # That of the first rank with any, since the earliest.
            evidence = replace(found[0], step=step, since=min(each.since for each in found))
        self.has_recovered = all(ballot.loss_recovered for ballot in ballots)
        judgement.after_step(step, evidence, loss_recovered=self.has_recovered)
        return True

    def _evidence(self, rank: int, ballot: Ballot) -> Evidence | None:
        """The text does not travel: each rank has its own."""
        if ballot.since < 0:
            return None
        own = self._words if rank == self.ranks.rank else ""
        words = f"alarm of rank {rank}" + (f": {own}" if own else "")
        worker = None if ballot.worker < 0 else ballot.worker
        step, since, kind = ballot.step, min(ballot.since, ballot.step), KINDS[ballot.kind]
        return Evidence(step=step, since=since, kind=kind, words=words, worker=worker)

    def _go_back_to_agreement(self, before: PolicyState, apart: int, step: int) -> None:
        """Decide on the step `apart` that some ranks took and some left out: their weights differ.

        `before` is the state of the policy when the ranks last agreed.
        """
        judgement = self._judgement
        known = [kept for kept in judgement.policy.state.snapshots if kept in before.snapshots]
        judgement.policy.state = replace(before, snapshots=known)
        judgement.due = None
        words = f"the ranks decided differently about step {apart}"
        judgement.after_step(step, Evidence(step=step, since=apart, words=words))
        if judgement.due is None:  # no snapshot is old enough
            raise DisagreementError(words)

    def post(self, step: int) -> None:
        judgement, due, about = self._judgement, 0, (-1, 0, -1)
        self._posted = copy.deepcopy(judgement.policy.state)
        if judgement.due is not None:
            decision, decided_at = judgement.due
            # Without the reason, which names what each rank saw itself.
            equal = (replace(decision, reason=""), decided_at)
            due = zlib.crc32(repr(equal).encode()) or 1
        found, judgement.unsent = judgement.unsent, None
        self._words = "" if found is None else found.words
        if found is not None:
            worker = -1 if found.worker is None else found.worker
            about = (found.since, KINDS.index(found.kind), worker)
        loss_recovered = judgement.level.has_recovered is not False
        policy = zlib.crc32(repr(judgement.policy.state_dict()).encode())
        self.send(Ballot(step, loss_recovered, due, policy, 0, *about))

    def leave(self) -> None:
        """Send the other ranks the last ballot; they wait for one from each rank."""
        try:
            self.send(Ballot(0, leaving=1))
        except Exception as error:
            logger.error("rmetric: rescue: the other ranks cannot be reached: %s", error)
