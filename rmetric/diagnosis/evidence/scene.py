"""One row of the evidence table, and what every extractor of rows looks at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from signal import SIGTERM, Signals
from typing import NamedTuple

from rmetric.diagnosis.clock import Ordering
from rmetric.diagnosis.facts.job import Job, Occurrence, short
from rmetric.diagnosis.facts.layout import MOST_PER_NODE
from rmetric.diagnosis.facts.statements import expanded, numbers
from rmetric.diagnosis.faults import Fault
from rmetric.diagnosis.patterns.stacks import OddStack, assign, odd_stacks, stacks_in_logs
from rmetric.diagnosis.patterns.values import NumberOutlier, number_outliers
from rmetric.diagnosis.pool import HealthyReference

#: Behaviour of more than this share of the ranks is not evidence against one of them.
MAX_COMMON_SHARE = 0.5


class Row(NamedTuple):
    """One piece of evidence, with the reason and the log entry that shows it best.

    Attributes:
        target: the stream that it speaks against; "" for the whole job.
        kind: a key of the weights of model.json.
        strength: 0 to 1.
        hypothesis: id of the inferred cause that it speaks for; "" for none.
        stage: in which the job stood, where the evidence states it.
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


class RankIndex:
    """Names of the ranks and nodes that can be implicated; `silent` ones have no log lines."""

    def __init__(self, job: Job) -> None:
        self.active = {log.name for log in job.active_streams}
        self.ranks = {log.name: log.rank for log in job.active_streams if log.rank is not None}
        self.silent = {f"rank {rank}" for rank in job.silent_ranks}
        self._job = job
        on_nodes = Counter(job.node_of_rank.values())
        #: several of them run on one node
        self._tasks_are_ranks = not job.tasks_launch and max(on_nodes.values(), default=0) > 1
        self._on_node: dict[str, list[tuple[int, str]]] = {}
        for log in job.streams.values():
            if log.rank is not None and (node := job.node_of(log)) is not None:
                self._on_node.setdefault(short(node), []).append((log.rank, log.name))

    def is_minority(self, count: int) -> bool:
        """True if `count` streams are few enough to be suspicious."""
        return count <= MAX_COMMON_SHARE * max(2, len(self.active), self._job.world_size or 0)

    def is_known(self, name: str) -> bool:
        return name in self.active or name in self.silent

    def implicated_ranks(self, fields: dict[str, str], stream: str = "") -> list[str]:
        """Streams of the ranks or the nodes that an entry's fields name, perhaps without log lines.

        The `stream` that logged it is meant where the field `own` is set; a local rank without a
        node is of its node.
        """
        if was_ended_by(SIGTERM, fields):  # a launcher's own doing
            return []
        if "own" in fields and stream in self.ranks:  # the entry's prefix names the rank
            return [stream]
        tasks = "" if self._job.tasks_launch else fields.get("tasks", "")
        ranks = [int(rank) for rank in numbers(fields.get("rank") or tasks)]
        known = [name for rank in ranks if self.is_known(name := f"rank {rank}")]
        one_task = self._tasks_are_ranks and len(ranks) == 1
        local = fields.get("local_rank", "")
        return (
            known
            or (self._without_logs(ranks) if fields.get("rank") or one_task else [])
            or [
                name
                for node in expanded(fields.get("node", ""))
                for name in self._streams_on(node, local)
            ]
            or (self._of_local_rank(int(local), stream) if local.isdigit() else [])
        )

    def at(self, node: str, local_rank: str) -> list[str]:
        """Streams of the rank of a number within a node; the node's where that is not known."""
        return self.implicated_ranks({"node": node, "local_rank": local_rank})

    def _without_logs(self, ranks: Sequence[int]) -> list[str]:
        """Names of ranks without log lines that the job may have."""
        size = self._job.world_size
        return [f"rank {rank}" for rank in ranks if size is None or rank < size != 1]

    def on_node(self, name: str) -> set[str]:
        """Names of the ranks on the node of a stream `node NAME`."""
        return {stream for _, stream in self._on_node.get(short(name.removeprefix("node ")), [])}

    def _of_local_rank(self, local_rank: int, stream: str) -> list[str]:
        """The rank on the stream's node; where there is one node only, of the same number."""
        own = self._job.streams.get(stream)
        node = self._job.node_of(own) if own is not None else None
        if node is not None and len(self._on_node) > 1:
            return self._at(sorted(self._on_node.get(short(node), [])), local_rank)
        size = self._job.world_size or max(self.ranks.values(), default=0) + 1
        one_node = len(self._on_node) <= 1 and size <= (self._job.ranks_per_node or MOST_PER_NODE)
        name = f"rank {local_rank}"
        if not one_node or self.is_known(name):
            return [name] if one_node else []
        # A log of one launcher alone whose lines state no ranks is taken to be of one node.
        return self._without_logs([local_rank]) if len(self._job.files) == 1 else []

    def _at(self, ranks: Sequence[tuple[int, str]], local_rank: int) -> list[str]:
        """The rank of a number among those of one node, some of which may be silent."""
        each = self._job.ranks_per_node
        in_row = bool(ranks) and ranks[-1][0] - ranks[0][0] == len(ranks) - 1
        if not ranks or len(ranks) == each or (in_row and not each):
            return [name for _, name in ranks[local_rank : local_rank + 1]]
        wanted = ranks[0][0] // (each or MOST_PER_NODE) * (each or MOST_PER_NODE) + local_rank
        # It may be known by another name of its node.
        return [name] if self.is_known(name := f"rank {wanted}") else []

    def _streams_on(self, node: str, local_rank: str) -> list[str]:
        """Streams of a node: its ranks where they are known, else the node itself."""
        for name in (node, short(node)):
            if f"node {name}" in self.active:
                return [f"node {name}"]
        ranks = sorted(self._on_node.get(short(node), []))
        local = int(local_rank) if local_rank.isdigit() else None
        names = [name for _, name in ranks] if local is None else self._at(ranks, local)
        return names or [f"node {node}"]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A job and what is known of it before any evidence is weighed.

    Attributes:
        faults: known faults that were not survived, the first in time first.
        alone: streams that report a planned end while the others failed.
        notes: on the clocks.
    """

    job: Job
    ordering: Ordering
    faults: Sequence[Fault]
    alone: frozenset[str]
    known: HealthyReference
    notes: tuple[str, ...] = ()
    switches: Switches = Switches()

    @cached_property
    def index(self) -> RankIndex:
        return RankIndex(self.job)

    @cached_property
    def odd_stacks(self) -> dict[str, OddStack]:
        """Ranks whose stack differs from the majority's; "" for an unidentified process."""
        auxiliary = self.job.auxiliary
        stacks = assign(self.job, auxiliary.stacks if auxiliary is not None else [], self.index.at)
        return odd_stacks(stacks or stacks_in_logs(self.job, self.ordering.after))

    @cached_property
    def number_outliers(self) -> list[NumberOutlier]:
        return number_outliers(self.job) if self.switches.spatial else []

    @property
    def entries(self) -> Iterator[tuple[str, dict[str, str]]]:
        """The stream and the named groups of the entries of all faults."""
        return (entry for fault in self.faults for entry in fault.entries)

    @cached_property
    def matched_events(self) -> frozenset[int]:
        """Numbers of the events of all faults."""
        return frozenset().union(*(fault.events for fault in self.faults))


def grouped(rows: Iterable[Row], field: str) -> dict[str, list[Row]]:
    """Rows by what a field of theirs has, in order; without those in which it is empty."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if of := getattr(row, field):
            found.setdefault(of, []).append(row)
    return found


def strongest(rows: Iterable[Row]) -> dict[str, Row]:
    """Kind -> its strongest row."""
    return {row.kind: row for row in sorted(rows, key=lambda row: row.strength)}


def divided(rows: Iterable[Row]) -> list[Row]:
    """The same evidence against several streams; the more there are, the weaker it is."""
    each = list(rows)
    many = len({row.target for row in each}) ** 0.5
    return [row._replace(strength=row.strength / many) for row in each]


def was_ended_by(signal: Signals, fields: dict[str, str]) -> bool:
    """True for a process that a signal ended, as an entry's `signal` or exit `code` states it."""
    if "signal" in fields:
        return fields["signal"].upper() in (signal.name, f"{signal:d}", f"{-signal:d}")
    # A shell adds 128, and a byte has no sign.
    codes = (f"{code:d}" for code in (-signal, 128 + signal, 256 - signal))
    return fields.get("code", "").upper() in (signal.name, *codes)
