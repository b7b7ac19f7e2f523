"""Joint decisions of the rescues of all ranks."""

from __future__ import annotations

import copy
import logging
import zlib
from dataclasses import replace

from rmetric.guard.ranks import Ranks
from rmetric.rescue.judgement import Judgement
from rmetric.rescue.policy import Evidence, PolicyState
from rmetric.rescue.vote import Ballot, Vote, joint_evidence

logger = logging.getLogger("rmetric")


class DisagreementError(RuntimeError):
    """The ranks cannot decide together any more."""


class Agreement:
    """Exchanges the ballots of all ranks between two steps, so that all decide the same.

    All ranks create it together.

    Args:
        judgement: of this rank.

    Attributes:
        all_back: the loss is back on all ranks, by their last ballots; None before the first.
    """

    def __init__(self, judgement: Judgement) -> None:
        self._judgement, self._vote = judgement, Vote()
        # Of the policy: in the newest ballots, and in those before, on which the ranks agreed.
        self._posted = self._agreed = PolicyState()
        self.all_back: bool | None = None

    @property
    def ranks(self) -> Ranks:
        return self._vote.ranks

    def count(self, step: int) -> bool:
        """Take the ballots of the boundary before; True if what is due is carried out now.

        Args:
            step: steps that the weights have taken.

        Raises:
            DisagreementError: they cannot decide together.
        """
        judgement = self._judgement
        agreed, self._agreed = self._agreed, self._posted
        ballots = self._vote.take()
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
        if judgement.due is None:
            evidence = joint_evidence(ballots, step)
            self.all_back = all(ballot.improving for ballot in ballots)
            judgement.after_step(step, evidence, back=self.all_back)
            return True
        return False

    def _go_back_to_agreement(self, before: PolicyState, apart: int, step: int) -> None:
        """Decide on a step that some ranks took and some left out: their weights differ since.

        It happens where the reduced gradient is bad on one rank alone, as by its memory.

        Args:
            before: state of the policy when the ranks last agreed.
            apart: step that they decided differently about.
            step: steps that the weights have taken now.
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
        """Send this rank's ballot after a step."""
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
        self._vote.post(ballot)

    def most(self, value: int) -> int:
        """The largest value of all ranks; see `Vote.most`."""
        return self._vote.most(value)

    def leave(self) -> None:
        """Send the other ranks the last ballot; they wait for one from each rank."""
        try:
            self._vote.post(Ballot(step=0, leaving=True))
        except Exception as error:
            logger.error("rmetric: rescue: the other ranks cannot be reached: %s", error)
