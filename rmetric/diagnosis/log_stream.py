"""Per-stream state of the pass over one file."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from rmetric.diagnosis.facts.job import MAX_NAMED, MAX_STACKS, STACKS_OF_RANK, STAGES, TAIL
from rmetric.diagnosis.library.stages import next_stage
from rmetric.diagnosis.places import Heads, LineShape, StepPlace
from rmetric.diagnosis.reading.joining import Kind, State
from rmetric.diagnosis.reading.prefixes import Prefix
from rmetric.diagnosis.reading.text import clean
from rmetric.diagnosis.templates import Facts

#: Entries in which a stream's first time is sought; at least `HEAD`.
FIRST_ENTRIES = 50

#: stage that a line states -> stages that it does not change
_STAYS = {
    stated: {now for now in ("", *STAGES) if next_stage(now, stated) == now} for stated in STAGES
}

#: (number, line, template, stream's key, step, stage, text or None for the line's own, form): an
#: entry as it is kept during the pass; those that remain are parsed at its end.
RawEntry = tuple[int, bytes, int, str, "int | None", str, "str | None", "LogLineForm"]


class LogLineForm:
    """Properties of the lines of one form in one file.

    Attributes:
        facts, shape: those that all files share.
        heads, step: find their stream and step; None where they have no prefix, state none.
        stays: the stages that they do not change; None where they state none.
        template: its number in the file; -1 before the first entry.
        slow: they need more than to be counted, and to have their step recorded.
        blank: they are nothing but a part of the entry before them.
        told: they may state what holds for the whole job.
        marked: they are of the log's beginning, and each occurrence is recorded.
        plain: they need no more than to be recorded so, and counted, where they change no stage.
    """

    __slots__ = (
        "blank", "facts", "heads", "marked", "plain", "shape", "slow", "stays", "step", "template",
        "told",
    )  # fmt: skip

    def __init__(self, shape: LineShape, heads: Heads[LogStream] | None) -> None:
        self.shape, self.facts, self.heads = shape, shape.facts, heads
        self.template, self.slow, self.marked, self.plain = -1, True, False, False
        self.blank, self.told = self.facts.kind == Kind.BLANK, self.facts.told
        self.step: StepPlace | None = None
        self.stays = _STAYS[shape.facts.stage] if shape.facts.stage else None

    def begin(self, marked: bool) -> None:
        """Its first entry is met; whether each is to be recorded."""
        self.marked = marked
        self.plain = not (self.slow or self.told or self.step is not None)


class OpenEntry:
    """An entry that may have more lines.

    Attributes:
        facts, leading_facts: of its first line, and of its exception's line.
        look: a signature may match it.
        watched: the watch over iterations has counted it.
        steps_before: number of the file's step lines before it.
    """

    def __init__(self, raw: RawEntry, facts: Facts, text: bytes) -> None:
        self.lines = [clean(text)]
        self.raw, self.facts, self.leading_facts = raw, facts, facts
        self.look, self.states_step, self.watched = facts.look, False, False
        self.last_line, self.steps_before = raw[0], 0


class LogStream:
    """State of one stream while a file is read.

    Attributes:
        templates: of the pending entries, which are not counted yet.
        places: the same entries, each as a line of the block or as it is kept.
        shown: how many of them the watch over iterations knows.
        changes: (pending entry, step and stage of the stream from there on).
        number: the rank or task that the prefix states, -1 for none.
        counters: of its step lines, by their form.
        last_step_at, last_step_line: where the last step was first stated; its last line.
    """

    def __init__(self, key: str, prefix: Prefix) -> None:
        self.key, self.prefix = key, prefix
        stated = (prefix.rank, prefix.local_rank, prefix.task)
        self.number = next((one for one in stated if one is not None), -1)
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Forget all entries."""
        self.counters: dict[str, StepCounter] = {}
        self.counts: Counter[int] = Counter()
        self.templates: list[int] = []
        self.places: list[Any] = []
        self.shown = 0
        self.changes: list[tuple[int, int | None, str]] = [(-1, None, "")]
        self.head: list[RawEntry] = []
        self.tail: deque[RawEntry] = deque(maxlen=TAIL)
        self.state, self.slow = State.PLAIN, False
        self.open: OpenEntry | None = None
        self.step: int | None = None
        self.stage = ""
        self.steps = 0
        self.last_step_at: RawEntry | None = None
        self.last_step_line = 0
        self.stages: list[tuple[str, RawEntry]] = []
        self.first_time: float | None = None
        self.fresh = FIRST_ENTRIES
        self.found: dict[str, MatchTally] = {}
        self.stacks: deque[RawEntry] = deque(
            maxlen=STACKS_OF_RANK if self.number >= 0 else MAX_STACKS
        )

    def reach(self, step: int) -> None:
        """Its entries from now on are of a step."""
        self.step = step
        self.changes.append((len(self.templates), step, self.stage))

    def enter(self, stage: str) -> None:
        """Its entries from now on are of a stage."""
        self.stage = stage
        self.changes.append((len(self.templates), self.step, stage))


@dataclass(slots=True)
class StepCounter:
    """The step lines of one form in a stream: the last one, and seconds between two."""

    last: int
    time: float | None
    longest_pause: float = 0.0
    lines: int = 1


@dataclass(slots=True)
class MatchTally:
    """Running summary of one stream's entries that matched one signature."""

    first: RawEntry
    last: RawEntry
    count: int = 0
    named: list[dict[str, str]] = field(default_factory=list)
    templates: set[int] = field(default_factory=set)

    def add(self, raw: RawEntry, fields: dict[str, str]) -> None:
        self.count += 1
        self.last = raw
        self.templates.add(raw[2])
        if fields and len(self.named) < MAX_NAMED and fields not in self.named:
            self.named.append(fields)
