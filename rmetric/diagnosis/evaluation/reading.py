"""A job's logs in the diagnosis' own pass: who wrote each line, and which event it is."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from rmetric.diagnosis.evaluation.baselines import Line
from rmetric.diagnosis.evaluation.scoring import Place
from rmetric.diagnosis.job import Job, Stream


@dataclass(kw_only=True)
class Read:
    """A job and its lines.

    Attributes:
        event_of: line -> number of its event in `job`.
        lines: (place, stream, time, text), in the order of files and lines.
    """

    job: Job
    event_of: dict[Place, int] = field(default_factory=dict)
    lines: list[tuple[Place, str, float | None, str]] = field(default_factory=list)

    def lines_by(self, who: str) -> list[Line]:
        """The lines, of ranks or of nodes (`who` is "rank" or "node")."""
        names = {name: self._is(stream, who) for name, stream in self.job.streams.items()}
        return [
            Line(place, names.get(stream), time, text) for place, stream, time, text in self.lines
        ]

    def _is(self, stream: Stream, who: str) -> Hashable | None:
        if who == "rank":
            return stream.rank
        if stream.node is None and stream.rank is not None:
            return self.job.node_of_rank.get(stream.rank)
        return stream.node
