"""A known fault of a job: a signature in all of its streams."""

from __future__ import annotations

from dataclasses import dataclass

from rmetric.diagnosis.facts.job import Match, Occurrence
from rmetric.diagnosis.signature import Signature

#: Below this confidence an entry is generic (any error line) and makes nothing a consequence.
GENERIC = 0.5


@dataclass(kw_only=True)
class Fault:
    """A signature in all streams of the job.

    Attributes:
        matches: one a stream, the first in time first.
        last: the last of all its entries.
        survived: the training continued after each of its entries.
        follows: id of the earlier fault of which it is the likely consequence; "" without.
    """

    signature: Signature
    matches: list[Match]
    last: Occurrence
    survived: bool = False
    follows: str = ""

    @property
    def first(self) -> Occurrence:
        return self.matches[0].first

    @property
    def entries(self) -> list[tuple[str, dict[str, str]]]:
        """The stream and the named groups of its entries, each different one once."""
        return [(one.stream, fields) for one in self.matches for fields in one.named]

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(match.stream for match in self.matches)

    @property
    def events(self) -> set[int]:
        """Numbers of its events."""
        return set().union(*(match.events for match in self.matches))

    @property
    def pids(self) -> set[str]:
        """Processes that its entries name."""
        return set().union(*(match.pids for match in self.matches))

    @property
    def count(self) -> int:
        return sum(match.count for match in self.matches)

    @property
    def role(self) -> str:
        return self.signature.role

    @property
    def confidence(self) -> float:
        return self.signature.confidence

    def has(self, trait: str) -> bool:
        """True for a trait of `signature.TRAITS`."""
        return trait in self.signature.traits

    @property
    def is_sure(self) -> bool:
        """It states a cause or an end, more than any error line, and follows from no other."""
        return self.role in ("cause", "ending") and self.confidence >= GENERIC and not self.follows
