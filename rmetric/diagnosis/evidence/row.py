"""One row of the evidence table, and what every extractor of rows looks at."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rmetric.diagnosis.beside.findings import BesideFindings, find_beside
from rmetric.diagnosis.clock import Ordering
from rmetric.diagnosis.evidence.ranks import RankIndex
from rmetric.diagnosis.faults import Fault
from rmetric.diagnosis.healthy import HealthyReference
from rmetric.diagnosis.job import Job, JobStream, Occurrence
from rmetric.diagnosis.patterns.spatial import PeerOutlier, peer_outliers

#: A cause that these many share is no evidence against one of them.
MAX_COMMON_SHARE = 0.5


class Row(NamedTuple):
    """One piece of evidence.

    Attributes:
        target: the stream that it speaks against; "" for the whole job.
        kind: a key of the weights of model.json.
        words: the reason.
        strength: 0 to 1.
        hypothesis: id of the inferred cause that it speaks for; "" for none.
        entry: the log entry that shows it best.
        stage: in which the job stood, where the evidence tells.
    """

    target: str
    kind: str
    words: str
    strength: float = 1.0
    hypothesis: str = ""
    entry: Occurrence | None = None
    stage: str = ""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A job and what is known of it before any evidence is weighed.

    Attributes:
        faults: known faults that were not survived, the first in time first.
        alone: streams that report a planned end while the others failed.
        notes: on the clocks.
        seed: of the Isolation Forest.
    """

    job: Job
    ordering: Ordering
    faults: Sequence[Fault]
    alone: frozenset[str]
    known: HealthyReference
    notes: tuple[str, ...] = ()
    seed: int = 0

    @cached_property
    def index(self) -> RankIndex:
        return RankIndex(self.job)

    @cached_property
    def beside(self) -> BesideFindings:
        """What flight recorders and stacks show."""
        return find_beside(self.job, self.ordering.after, self.index.at)

    @cached_property
    def outliers(self) -> list[PeerOutlier]:
        """Peers whose events deviate (L4, section 4.2).

        Events by which ranks report that they lost another make no outlier by their wording.
        """
        echoes = {
            event
            for one in self.faults
            if one.role == "echo"
            for match in one.matches
            for event in match.events
        }
        rng, ordinary = np.random.default_rng(self.seed), self.known.ordinary | echoes
        return peer_outliers(self.job, rng=rng, ordinary=ordinary, siblings=self.known.siblings)

    @cached_property
    def matched_events(self) -> frozenset[int]:
        """Numbers of the events of all faults."""
        return frozenset(
            event for one in self.faults for match in one.matches for event in match.events
        )

    def lead(self) -> Fault | None:
        """The surest fault that states a cause or an end, and follows from no other."""
        leads = [one for one in self.faults if one.is_sure]
        return max(leads, key=lambda one: one.confidence, default=None)

    def last_own(self, stream: JobStream, before: Occurrence | None = None) -> Occurrence | None:
        """A stream's last entry that is of no fault: a launcher's report may name it too.

        Before another entry, where one is given.
        """
        own = (one for one in reversed(stream.tail) if one.event not in self.matched_events)
        return next((one for one in own if not before or self.ordering.after(before, one)), None)


def divided(
    streams: Collection[str], kind: str, words: str, strength: float = 1.0, hypothesis: str = ""
) -> list[Row]:
    """The same evidence against several streams; the more there are, the weaker it is."""
    each = strength / max(1, len(streams)) ** 0.5
    return [Row(one, kind, words, each, hypothesis) for one in streams]
