"""Joint decisions of the rescues of all ranks: their evidence, exchanged between two steps."""

from __future__ import annotations

import copy
import logging
import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from rmetric.guard.ranks import Ranks
from rmetric.rescue.judgement import Judgement
from rmetric.rescue.policy import KINDS, Evidence, PolicyState

logger = logging.getLogger("rmetric")

_WIDTH = 8
_QUESTION = -1  # step of a ballot of `Vote.most`


class RankLeftError(RuntimeError):
    """The rescue of another rank is switched off, or its ballots are of another course."""


class DisagreementError(RuntimeError):
    """The ranks cannot decide together any more."""


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """Report of one rank after a step.

    Attributes:
        step: steps that its weights have taken.
        evidence: of its detector; None for none.
        improving: its loss is back where it was before the incident.
        due: a decision of the step rules is due: 0 none, else a checksum of it.
        policy: checksum of the state of its policy.
        leaving: its rescue is switched off.
    """

    step: int
    evidence: Evidence | None = None
    improving: bool = False
    due: int = 0
    policy: int = 0
    leaving: bool = False

    def encoded(self) -> list[float]:
        found, about = self.evidence, (-1, 0, -1)
        if found is not None:
            worker = -1 if found.worker is None else found.worker
            about = (found.since, KINDS.index(found.kind), worker)
        own = (self.step, self.improving, self.due, self.policy, self.leaving)
        return [float(number) for number in (*own, *about)]

    @classmethod
    def decoded(cls, row: list[float], words: str) -> Ballot:
        step, improving, due, policy, leaving, since, kind, worker = map(int, row)
        evidence = None
        if since >= 0:
            evidence = Evidence(
                step=step, since=min(since, step), kind=KINDS[kind], words=words,
                worker=None if worker < 0 else worker,
            )  # fmt: skip
        return cls(
            step=step, evidence=evidence, improving=bool(improving), due=due, policy=policy,
            leaving=bool(leaving),
        )  # fmt: skip


class Vote:
    """All-gather of the ranks' ballots: sent after one step, received after the next.

    No rank waits for the message of a step that the others have not ended: all of them have taken
    part in a collective of the training since. Every message is a ballot, so that the last one of a
    rank that leaves answers whatever the others wait for.
    """

    def __init__(self) -> None:
        self.ranks = Ranks()
        self._work: Any = None
        self._taken: Any = None  # kept, as in `Ranks`
        self._words = ""  # of the evidence that was sent last
        self._sent = torch.zeros(_WIDTH, dtype=torch.float64, device="cpu")
        self._gathered = [torch.zeros_like(self._sent) for _ in range(self.ranks.size)]

    def post(self, ballot: Ballot) -> None:
        self._words = "" if ballot.evidence is None else ballot.evidence.words
        self._sent = torch.tensor(ballot.encoded(), dtype=torch.float64, device="cpu")
        self._work = dist.all_gather(
            self._gathered, self._sent, group=self.ranks.group, async_op=True
        )

    def take(self) -> list[Ballot] | None:
        """The ballots that were sent last, by rank; None before the first."""
        work, self._work = self._work, None
        if work is None:
            return None
        work.wait()
        self._taken = work
        # The text does not travel: each rank has its own.
        words = [f"alarm of rank {rank}" for rank in range(self.ranks.size)]
        if self._words:
            words[self.ranks.rank] += f": {self._words}"
        return [Ballot.decoded(row.tolist(), words[i]) for i, row in enumerate(self._gathered)]

    def most(self, value: int) -> int:
        """The largest value of all ranks, from 0; waits for all of them, or RankLeftError."""
        self.post(Ballot(step=_QUESTION, due=value))
        ballots = self.take() or []
        if any(ballot.leaving or ballot.step != _QUESTION for ballot in ballots):
            raise RankLeftError("the rescue of another rank is switched off")
        return max((ballot.due for ballot in ballots), default=value)


class Agreement:
    """Decides the same on all ranks, by the ballots of each; all ranks create it together."""

    def __init__(self, judgement: Judgement) -> None:
        self._judgement, self.vote = judgement, Vote()
        # Of the policy: in the newest ballots, and in those before, on which the ranks agreed.
        self._posted = self._agreed = PolicyState()
        self.all_back: bool | None = None  # the loss, on all ranks, by their last ballots

    @property
    def ranks(self) -> Ranks:
        return self.vote.ranks

    def count(self, step: int) -> bool:
        """Take the ballots of the boundary before; True if what is due is carried out now.

        `step` are the steps that the weights have taken. Raises DisagreementError where the ranks
        cannot decide together.
        """
        judgement = self._judgement
        agreed, self._agreed = self._agreed, self._posted
        ballots = self.vote.take()
        if ballots is None:
            return False
        if any(ballot.leaving for ballot in ballots):
            raise DisagreementError("the rescue of another rank is switched off")
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
        if found := [ballot.evidence for ballot in ballots if ballot.evidence is not None]:
            # That of the first rank with any, since the earliest.
            evidence = replace(found[0], step=step, since=min(each.since for each in found))
        self.all_back = all(ballot.improving for ballot in ballots)
        judgement.after_step(step, evidence, back=self.all_back)
        return True

    def _go_back_to_agreement(self, before: PolicyState, apart: int, step: int) -> None:
        """Decide on the step `apart` that some ranks took and some left out.

        Their weights differ since. It happens where the reduced gradient is bad on one rank alone,
        as by its memory. `before` is the state of the policy when the ranks last agreed.
        """
        judgement = self._judgement
        state = judgement.policy.state
        known = [kept for kept in state.snapshots if kept in before.snapshots]
        judgement.policy.state = replace(before, snapshots=known)
        judgement.due = None
        words = f"the ranks decided differently about step {apart}"
        judgement.after_step(step, Evidence(step=step, since=apart, words=words))
        if judgement.due is None:  # no snapshot is old enough
            raise DisagreementError(words)

    def post(self, step: int) -> None:
        judgement = self._judgement
        self._posted = copy.deepcopy(judgement.policy.state)
        due = 0
        if judgement.due is not None:
            decision, decided_at = judgement.due
            # Without the reason, which names what each rank saw itself.
            equal = (replace(decision, reason=""), decided_at)
            due = zlib.crc32(repr(equal).encode()) or 1
        ballot = Ballot(
            step=step,
            evidence=judgement.unsent,
            improving=judgement.level.is_back is not False,
            due=due,
            policy=zlib.crc32(repr(judgement.policy.state_dict()).encode()),
        )
        judgement.unsent = None
        self.vote.post(ballot)

    def leave(self) -> None:
        """Send the other ranks the last ballot; they wait for one from each rank."""
        try:
            self.vote.post(Ballot(step=0, leaving=True))
        except Exception as error:
            logger.error("rmetric: rescue: the other ranks cannot be reached: %s", error)
