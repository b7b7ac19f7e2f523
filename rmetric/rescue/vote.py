"""Evidence of all ranks, exchanged between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rmetric.guard.ranks import Ranks
from rmetric.rescue.policy import KINDS, Evidence

_WIDTH = 9
_QUESTION = -1  # step of a ballot of `Vote.most`


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
        found = self.evidence
        about = (0.0, 0.0, 0.0, 0.0)
        if found is not None:
            worker = -1 if found.worker is None else found.worker
            about = (1.0, float(found.since), float(KINDS.index(found.kind)), float(worker))
        own = (float(self.step), float(self.improving), float(self.due), float(self.policy))
        return [*own, float(self.leaving), *about]

    @classmethod
    def decoded(cls, row: list[float], words: str) -> Ballot:
        step, improving, due, policy, leaving, there, since, kind, worker = map(int, row)
        evidence = None
        if there:
            evidence = Evidence(
                step=step,
                since=min(since, step),
                kind=KINDS[kind],
                words=words,
                worker=None if worker < 0 else worker,
            )
        return cls(
            step=step,
            evidence=evidence,
            improving=bool(improving),
            due=due,
            policy=policy,
            leaving=bool(leaving),
        )


class RankLeftError(RuntimeError):
    """The rescue of another rank is switched off, or its ballots are of another course."""


class Vote:
    """All-gather of the ranks' ballots: sent after one step, received after the next.

    No rank waits for the message of a step that the others have not ended: all of them have
    taken part in a collective of the training since. All ranks create it together.

    Every message is a ballot, so that the last one of a rank that leaves answers whatever the
    others wait for at that moment.
    """

    def __init__(self) -> None:
        self.ranks = Ranks()
        self._work: Any = None
        self._taken: Any = None  # kept, as in `Ranks`
        self._words = ""  # of the evidence that was sent last
        self._sent = torch.zeros(_WIDTH, dtype=torch.float64, device="cpu")
        self._gathered = [torch.zeros_like(self._sent) for _ in range(self.ranks.size)]

    def post(self, ballot: Ballot) -> None:
        """Send this rank's ballot."""
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
        """The largest value of all ranks, from 0; waits for all of them.

        Raises:
            RankLeftError: a rank has sent another kind of ballot.
        """
        self.post(Ballot(step=_QUESTION, due=value))
        ballots = self.take() or []
        if any(ballot.leaving or ballot.step != _QUESTION for ballot in ballots):
            raise RankLeftError("the rescue of another rank is switched off")
        return max((ballot.due for ballot in ballots), default=value)


def joint_evidence(ballots: list[Ballot], step: int) -> Evidence | None:
    """The evidence that all ranks act upon: that of the first rank with any, since the earliest.

    Args:
        ballots: of all ranks, by rank.
        step: steps that the weights have taken now.
    """
    found = [ballot.evidence for ballot in ballots if ballot.evidence is not None]
    if not found:
        return None
    first = found[0]
    since = min(evidence.since for evidence in found)
    return Evidence(step=step, since=since, kind=first.kind, words=first.words, worker=first.worker)
