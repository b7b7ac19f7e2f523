"""Event statistics of successful jobs: the cross-job pattern (L4, section 4.2).

Learnt once (`rmetric logs learn`), stored as JSON, and subtracted when such a job fails.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from rmetric._util.durable import write_atomically
from rmetric._util.errors import LogError
from rmetric._util.strict_json import items, mapping, number, parse_line, shown, text, whole_number
from rmetric.diagnosis.job import Event, Job
from rmetric.diagnosis.templates.events import OTHERS, Events

FORMAT = 1
#: An event that this share of the pool's jobs have is ordinary ("frequently" in L4).
FREQUENT = 0.5

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class PoolEvent:
    """An event of the pool.

    Attributes:
        template: with <*> and named masks for what varies.
        signature: the one that matched it, by id; "" without.
        jobs: share of the jobs that have it, above 0 to 1.
        mean: mean number of entries in a job.
    """

    template: str
    signature: str
    jobs: float
    mean: float


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Event statistics of jobs of similar settings.

    Attributes:
        name: the owner's name for such a job.
        jobs: number of jobs that it was learnt from.
        succeeded: number of those whose logs state their planned end.
        stages: stage -> share of the jobs that entered it.
        events: the most frequent first.
    """

    name: str
    jobs: int
    succeeded: int
    stages: Mapping[str, float]
    events: tuple[PoolEvent, ...]

    @cached_property
    def _index(self) -> tuple[Events, dict[int, PoolEvent]]:
        known = Events(max_events=len(self.events) + 1)
        by_number: dict[int, PoolEvent] = {}
        for one in self.events:
            by_number.setdefault(known.number(one.template, one.signature), one)
        return known, by_number

    def find(self, template: str, signature: str = "") -> PoolEvent | None:
        """The event of the pool with these words; None where there is none."""
        known, by_number = self._index
        number = known.like(template, signature)
        return None if number is None else by_number[number]

    def save(self, path: Path) -> None:
        """Raises OSError where it cannot be written."""
        write_atomically(path, [(json.dumps(as_json(self), indent=1) + "\n").encode()])

    @classmethod
    def load(cls, path: Path | str) -> Pool:
        """Raises LogError that names the file, the field, what was found and what is accepted."""
        try:
            return _from_json(mapping(parse_line(Path(path).read_bytes())))
        except OSError as error:
            raise LogError(Path(path), None, f"cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise LogError(Path(path), None, f"no pool of rmetric logs learn: {error}") from None


def learn(name: str, jobs: Sequence[Job]) -> Pool:
    """The pool of jobs that succeeded. Raises ValueError for no jobs or an empty name."""
    if not jobs or not name.strip():
        raise ValueError("a pool needs a name and at least one job")
    events = Events()
    counts: list[Counter[int]] = [Counter() for _ in jobs]
    class_of: dict[int, str] = {}
    for job, count in zip(jobs, counts, strict=True):
        for event, signature in _with_signatures(job):
            if event.template != OTHERS:
                at = events.number(event.template, signature)
                class_of[at] = signature
                count[at] += event.count
    number_of = len(jobs)
    usual = [
        PoolEvent(
            template=events.template(at),
            signature=signature,
            jobs=sum(at in count for count in counts) / number_of,
            mean=sum(count[at] for count in counts) / number_of,
        )
        for at, signature in class_of.items()
    ]
    usual.sort(key=lambda one: (-one.jobs, -one.mean, one.template, one.signature))
    stages = [{stage for stage, _ in job.stages} for job in jobs]
    return Pool(
        name=name,
        jobs=number_of,
        succeeded=sum(job.succeeded is not None for job in jobs),
        stages={
            stage: sum(stage in those for those in stages) / number_of
            for stage in sorted(set().union(*stages))
        },
        events=tuple(usual),
    )


def ordinary(job: Job, pool: Pool) -> set[int]:
    """The job's events that are frequent in the pool: at least `FREQUENT` of its jobs have them."""
    usual = ((event, pool.find(event.template, id)) for event, id in _with_signatures(job))
    return {event.number for event, one in usual if one is not None and one.jobs >= FREQUENT}


def as_json(pool: Pool) -> dict[str, Any]:
    """As the file holds it."""
    return {
        "format": FORMAT,
        "job": pool.name,
        "jobs": pool.jobs,
        "succeeded": pool.succeeded,
        "stages": dict(pool.stages),
        "events": [
            {"template": one.template}
            | ({"signature": one.signature} if one.signature else {})
            | {"jobs": round(one.jobs, 6), "mean": round(one.mean, 6)}
            for one in pool.events
        ],
    }


def _from_json(content: dict[str, Any]) -> Pool:
    """The pool of a file; ValueError names the field."""
    _read(content, "format", _format)
    stages = _read(content, "stages", mapping)
    events = _read(content, "events", items)
    return Pool(
        name=_read(content, "job", text),
        jobs=_read(content, "jobs", _number_of_jobs),
        succeeded=_read(content, "succeeded", whole_number),
        stages={stage: _read(stages, stage, _share, "stages.") for stage in stages},
        events=tuple(_event(one, f"events[{at}]") for at, one in enumerate(events)),
    )


def _event(content: Any, where: str) -> PoolEvent:
    within, one = f"{where}.", {"signature": ""} | _read({where: content}, where, mapping)
    return PoolEvent(
        mean=_read(one, "mean", number, within),
        template=_read(one, "template", text, within),
        signature=_read(one, "signature", text, within),
        jobs=_read(one, "jobs", _share, within),
    )


def _read(
    content: Mapping[str, Any], key: str, read: Callable[[Any], Value], within: str = ""
) -> Value:
    if key not in content:
        raise ValueError(f"{within + key!r} is missing")
    try:
        return read(content[key])
    except ValueError as error:
        raise ValueError(f"{within + key!r}: {error}") from None


def _format(value: Any) -> None:
    if value != FORMAT:
        again = "learn it again with this version"
        raise ValueError(f"found {shown(value)}; {FORMAT} is accepted: {again}")


def _number_of_jobs(value: Any) -> int:
    if whole_number(value) < 1:
        raise ValueError(f"found {shown(value)}; a number from 1 is accepted")
    return int(value)


def _share(value: Any) -> float:
    if not 0.0 < number(value) <= 1.0:
        raise ValueError(f"found {shown(value)}; a share above 0, at most 1, is accepted")
    return float(value)


def _with_signatures(job: Job) -> Iterator[tuple[Event, str]]:
    """The job's events, each with the signature that matched it, "" without one."""
    matched = {
        event: match.signature for match in job.matches.values() for event in sorted(match.events)
    }
    for event in job.events:
        yield event, matched.get(event.number, "")
