"""Data model of a job after one pass over its logs: streams, events and signature matches.

Lines are not kept; the size grows with the number of streams and templates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from rmetric.diagnosis.reading.timestamps import NO_YEAR

if TYPE_CHECKING:
    from rmetric.diagnosis.input_files import AuxiliaryFiles

#: Different values of a signature's named groups that are kept of one stream.
MAX_NAMED = 100
#: Entries with stacks that are kept of a rank, and of a stream that may be of several ranks.
STACKS_OF_RANK = 2
MAX_STACKS = 64
#: First and last entries of a stream that are kept.
HEAD = 30
TAIL = 20

#: Least number of ranks with log lines, to count a gap among them as a silent rank.
MIN_RANKS = 4
#: The stages of a job, in their usual order (L4, section 4.4); "" where none is known.
STAGES = (
    "launch", "initialise", "load data", "compile", "train", "evaluate", "checkpoint", "tear-down",
)  # fmt: skip

Place = TypeVar("Place")


def short(node: str) -> str:
    """A node's name without its domain: "gpu-07" of "gpu-07.cluster.local"; not of an address."""
    return node if node[:1].isdigit() else node.partition(".")[0]


# A job has many, and a dataclass takes ten times as long to make.
class Occurrence(msgspec.Struct, kw_only=True, gc=False):
    """One log entry, where it stands; not to be changed once its `Job` is complete.

    Attributes:
        file: as the user gave it or below the folder given.
        line: its first line, from 1.
        stream: key of its stream in `Job.streams`.
        time: seconds since 1970 as the log states them (UTC where it names no zone), or since
            boot in a kernel's log; None where it states none.
        order: place among all entries of the job; within one file it is the order of writing.
        event: number of its event.
        text: without rank prefix and colours, lines joined, at most `MAX_TEXT` characters.
        step, stage: the last ones of its stream; None, "" before the first.
    """

    file: str
    line: int
    stream: str
    time: float | None
    order: int
    event: int
    text: str
    step: int | None = None
    stage: str = ""


@dataclass(kw_only=True)
class JobStream:
    """Log stream of a rank, or of a node, or of a file where no more is known.

    Attributes:
        name: "rank 3", "node gpu-07" or the file's name; the key in `Job.streams`. A rank within
            a node that no line ties to a global one is "node gpu-07 local 3".
        head, tail: the first and the last entries, at most `HEAD` and `TAIL`.
        steps: how many step lines it wrote; `counts_samples`: they are numbers of samples.
        last_step_at: the entry that first states the last step; heartbeats may repeat it.
        longest_pause: seconds, the longest between two steps; 0.0 where none is known.
        stacks: the last entries that hold stacks.
    """

    name: str
    rank: int | None = None
    node: str | None = None
    files: set[str] = field(default_factory=set)
    entries: int = 0
    first_time: float | None = None
    last_time: float | None = None
    head: list[Occurrence] = field(default_factory=list)
    tail: deque[Occurrence] = field(default_factory=lambda: deque(maxlen=TAIL))
    steps: int = 0
    last_step: int | None = None
    counts_samples: bool = False
    last_step_at: Occurrence | None = None
    longest_pause: float = 0.0
    stage: str = ""
    stacks: list[Occurrence] = field(default_factory=list)

    @property
    def first(self) -> Occurrence | None:
        return self.head[0] if self.head else None

    @property
    def last(self) -> Occurrence | None:
        return self.tail[-1] if self.tail else None


@dataclass(kw_only=True)
class Event:
    """One template of Drain within this job (L4, section 4.1).

    Attributes:
        template: with <*> and named masks for what varies.
        counts: stream -> number of entries.
    """

    number: int
    template: str
    first: Occurrence
    last: Occurrence
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(self.counts.values())


@dataclass(kw_only=True)
class Match:
    """A signature of the fault library found in one stream (the key is both).

    Attributes:
        events: numbers of the events that it matched.
        named: what the pattern's named groups caught, e.g. rank, xid: each different one once,
            in the order of their coming, at most `MAX_NAMED`.
    """

    signature: str
    stream: str
    count: int
    first: Occurrence
    last: Occurrence
    traits: tuple[str, ...] = ()
    events: set[int] = field(default_factory=set)
    named: list[dict[str, str]] = field(default_factory=list)

    @property
    def pids(self) -> set[str]:
        return {fields["pid"] for fields in self.named if fields.get("pid")}


def span_of(streams: Iterable[JobStream]) -> tuple[float, float] | None:
    """First and last time with a year; without any, of all; None where nothing states one."""
    ends = list[float | None]()
    for log in streams:
        ends += log.first_time, log.last_time, log.last_step_at.time if log.last_step_at else None
    return span_of_times([end for end in ends if end is not None])


def span_of_times(times: Sequence[float]) -> tuple[float, float] | None:
    """The first and the last with a year; without any, of all; None of none."""
    dated = [time for time in times if time >= NO_YEAR[1]] or times
    return (min(dated), max(dated)) if dated else None


@dataclass(frozen=True, kw_only=True)
class Iteration(Generic[Place]):
    """An iteration that differs from those before it (L4, section 4.4).

    Attributes:
        place: the step line that began it.
        seconds, usual_seconds: its duration and the median of those before, if it took far longer.
        recovered: many usual iterations followed.
    """

    step: int
    place: Place
    seconds: float | None = None
    usual_seconds: float | None = None
    recovered: bool = False


@dataclass(kw_only=True)
class Job:
    """One job, as read from its logs; its properties are of the complete job.

    Attributes:
        files: name -> number of lines.
        spans: name -> first and last time, of the files that state any.
        world_size, ranks_per_node: numbers of ranks, where lines state them.
        tasks_launch: an srun task is a launcher that starts the ranks of its node.
        nodes: in the order of their ranks, where a list was given.
        rank_of_gpu: (node, bus and device of its GPU: "bb:00") -> rank.
        rank_of_pid: (node, process) -> rank.
        matches: (signature, stream) -> match.
        odd_iterations: stream -> its first iteration that differs.
        stages: (stage, its first occurrence), whenever the job as a whole enters one.
        auxiliary: flight recorder dumps and stacks beside the logs.
        cut_off: names of files of which the end is missing.
        succeeded: the entry that states the planned end.
        not_finite: the first line of a training loss that is not finite.
    """

    files: dict[str, int] = field(default_factory=dict)
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    streams: dict[str, JobStream] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    matches: dict[tuple[str, str], Match] = field(default_factory=dict)
    world_size: int | None = None
    ranks_per_node: int | None = None
    tasks_launch: bool = False
    node_of_rank: dict[int, str] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=list)
    rank_of_gpu: dict[tuple[str, str], int] = field(default_factory=dict)
    rank_of_pid: dict[tuple[str | None, int], int] = field(default_factory=dict)
    odd_iterations: dict[str, Iteration[Occurrence]] = field(default_factory=dict)
    stages: list[tuple[str, Occurrence]] = field(default_factory=list)
    cut_off: list[str] = field(default_factory=list)
    auxiliary: AuxiliaryFiles | None = None
    succeeded: Occurrence | None = None
    not_finite: Occurrence | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def lines(self) -> int:
        return sum(self.files.values())

    @cached_property
    def active_streams(self) -> list[JobStream]:
        """Streams to compare: ranks where there are any, else nodes, else all streams."""
        every = list(self.streams.values())
        ranks = [stream for stream in every if stream.rank is not None]
        return ranks or [stream for stream in every if stream.node is not None] or every

    @cached_property
    def trained(self) -> bool:
        """True if any stream logged more than one step."""
        return any(stream.steps > 1 for stream in self.streams.values())

    @cached_property
    def traits(self) -> frozenset[str]:
        """The traits of the signatures found in any stream."""
        return frozenset(trait for match in self.matches.values() for trait in match.traits)

    @cached_property
    def pids_named_by_programs(self) -> frozenset[str]:
        """Process numbers in matches other than a kernel's kill."""
        pids = (match.pids for match in self.matches.values() if "kernel kill" not in match.traits)
        return frozenset[str]().union(*pids)

    @cached_property
    def stepping(self) -> list[JobStream]:
        """Streams that log steps."""
        return [stream for stream in self.streams.values() if stream.steps]

    @cached_property
    def of_node(self) -> dict[str | None, list[JobStream]]:
        """Node, None where it is not known -> its streams."""
        found: dict[str | None, list[JobStream]] = {}
        for stream in self.streams.values():
            found.setdefault(self.node_of(stream), []).append(stream)
        return found

    @cached_property
    def most_steps(self) -> int:
        return max((stream.steps for stream in self.stepping), default=0)

    @cached_property
    def furthest(self) -> JobStream | None:
        """Stream with the greatest last step; None without step lines."""
        return max(self.stepping, key=lambda stream: stream.last_step or 0, default=None)

    def node_of(self, stream: JobStream) -> str | None:
        """The stream's own, or its rank's; None where not known."""
        if stream.node is not None or stream.rank is None:
            return stream.node
        if stream.rank in self.node_of_rank:
            return self.node_of_rank[stream.rank]
        each = self.ranks_per_node or 0
        whole = stream.rank < len(self.nodes) * each == self.world_size
        return self.nodes[stream.rank // each] if whole else None

    @cached_property
    def ranks_of_numbers(self) -> dict[int, set[int]]:
        """Process number -> the ranks that have it, on whichever node."""
        ranks: dict[int, set[int]] = {}
        for (_, pid), rank in self.rank_of_pid.items():
            ranks.setdefault(pid, set()).add(rank)
        return ranks

    @property
    def silent_ranks(self) -> list[int]:
        """Ranks below the world size without log lines, where other ranks have some.

        Where no size is stated, the greatest active rank counts, if few are missing.
        """
        active = {stream.rank for stream in self.streams.values() if stream.rank is not None}
        size = self.world_size
        if size is None and len(active) >= MIN_RANKS:
            size = max(active) + 1
            size = size if size - len(active) <= max(1, len(active) // 8) else None
        if size is None or not active:
            return []
        return [rank for rank in range(size) if rank not in active]
