"""One row of the evidence table, and what every extractor of rows looks at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rmetric.diagnosis.clock import Ordering
from rmetric.diagnosis.evidence.ranks import RankIndex
from rmetric.diagnosis.facts.job import Job, Occurrence
from rmetric.diagnosis.faults import Fault
from rmetric.diagnosis.patterns.spatial import PeerOutlier, peer_outliers
from rmetric.diagnosis.patterns.stacks import OddStack, assign, odd_stacks, stacks_in_logs
from rmetric.diagnosis.patterns.values import NumberOutlier, number_outliers
from rmetric.diagnosis.pool import HealthyReference


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
class Switches:
    """Parts of the method, to be turned off one by one in an ablation."""

    cross_job: bool = True
    spatial: bool = True
    temporal: bool = True
    library: bool = True
    unfiltered: bool = True
    places: bool = True
    ends: bool = True


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A job and what is known of it before any evidence is weighed.

    Attributes:
        faults: known faults that were not survived, the first in time first.
        alone: streams that report a planned end while the others failed.
        notes: on the clocks.
        switches: parts of the method that are used.
        seed: of the Isolation Forest.
    """

    job: Job
    ordering: Ordering
    faults: Sequence[Fault]
    alone: frozenset[str]
    known: HealthyReference
    notes: tuple[str, ...] = ()
    switches: Switches = Switches()
    seed: int = 0

    @cached_property
    def index(self) -> RankIndex:
        return RankIndex(self.job)

    @cached_property
    def odd_stacks(self) -> dict[str, OddStack]:
        """The ranks, and "" for a process of which no more is known, that stand unlike most."""
        beside = self.job.beside
        stacks = assign(self.job, beside.stacks if beside is not None else [], self.index.at)
        return odd_stacks(stacks or stacks_in_logs(self.job, self.ordering.after))

    @cached_property
    def outliers(self) -> list[PeerOutlier]:
        """Peers whose events deviate (L4, section 4.2).

        Events by which ranks report that they lost another make no outlier by their wording.
        """
        echoes = (one.events for one in self.faults if one.role == "echo")
        rng, ordinary = np.random.default_rng(self.seed), self.known.ordinary.union(*echoes)
        return peer_outliers(self.job, rng=rng, ordinary=ordinary)

    @cached_property
    def number_outliers(self) -> list[NumberOutlier]:
        """Ranks whose losses or times are not those of the others."""
        return number_outliers(self.job)

    @property
    def entries(self) -> Iterator[tuple[str, dict[str, str]]]:
        """The stream and the named groups of the entries of all faults."""
        return (entry for fault in self.faults for entry in fault.entries)

    @cached_property
    def matched_events(self) -> frozenset[int]:
        """Numbers of the events of all faults."""
        return frozenset().union(*(one.events for one in self.faults))


def grouped(rows: Iterable[Row], field: str) -> dict[str, list[Row]]:
    """Rows by what a field of theirs has, in order; without those in which it is empty."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if of := getattr(row, field):
            found.setdefault(of, []).append(row)
    return found


def strongest(rows: Iterable[Row]) -> dict[str, Row]:
    """Kind -> its strongest row."""
    return {row.kind: row for row in sorted(rows, key=lambda one: one.strength)}


def divided(rows: Iterable[Row]) -> list[Row]:
    """The same evidence against several streams; the more there are, the weaker it is."""
    each = list(rows)
    many = len({row.target for row in each}) ** 0.5
    return [row._replace(strength=row.strength / many) for row in each]
