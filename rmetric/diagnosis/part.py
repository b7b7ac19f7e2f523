"""Result of the pass over one file, before streams are named and events are numbered."""

from __future__ import annotations

from dataclasses import dataclass, field

from rmetric.diagnosis.job import Iteration, Occurrence
from rmetric.diagnosis.reading.prefixes import Prefix
from rmetric.diagnosis.reading.source import Source
from rmetric.diagnosis.reading.world import World


@dataclass(kw_only=True)
class PartMatch:
    """A signature in the entries of one speaker.

    Attributes:
        templates: index of each template that it matched -> the first entry.
    """

    signature: str
    count: int
    first: Occurrence
    last: Occurrence
    named: list[dict[str, str]]
    templates: dict[int, Occurrence]


@dataclass(kw_only=True)
class StreamPart:
    """One stream within one file; fields as in `job.Stream` and `job.Job`.

    Attributes:
        counts: index of template -> how often it was said.
        stages: the stages that it entered, with the entry that tells it.
    """

    prefix: Prefix
    counts: dict[int, int]
    head: list[Occurrence]
    tail: list[Occurrence]
    first_time: float | None
    last_time: float | None
    steps: int
    first_step: int | None
    last_step: int | None
    last_step_at: Occurrence | None
    stage: str
    stages: list[tuple[str, Occurrence]]
    found: list[PartMatch]
    iterations: list[Iteration]


@dataclass(kw_only=True)
class Template:
    """A masked text of one class (`Events.number`), as one file has it."""

    text: str
    cls: str
    first: Occurrence
    last: Occurrence


@dataclass(kw_only=True)
class Part:
    """Content of one file. An `Occurrence` refers to its stream by index in `streams`, its
    event by the index in `templates`, and its order by the line.

    Attributes:
        job_ids: numbers of scheduler's jobs that it names -> line.
        left_out: entries that were too different from all others to be kept apart.
    """

    source: Source
    lines: int
    streams: list[StreamPart]
    templates: list[Template]
    world: World
    job_ids: dict[str, int]
    succeeded: Occurrence | None
    unmatched: int = 0
    notes: list[str] = field(default_factory=list)
