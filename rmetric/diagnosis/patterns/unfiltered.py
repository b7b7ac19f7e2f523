"""Find absences: ranks that are silent, stop early or lack events that all others log.

This channel complements L4's filtering: removing normal events removes the only trace of a fault
that is an absence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from statistics import median

from rmetric.diagnosis.job import Job, Occurrence
from rmetric.diagnosis.ordering import Ordering
from rmetric.diagnosis.patterns.baseline import robust_deviation
from rmetric.diagnosis.patterns.peers import (
    Counterparts,
    Peer,
    alike,
    peers,
    same_events,
)

#: A thing is odd if at most this share of the speakers does it, or one of them.
FEW = 0.25
#: A thing is usual if at least this share of the fellows does it.
MOST = 0.6
#: Stopping early counts from so many seconds on, and from so many times the fellows' spread.
LEAST_SECONDS, SPREADS = 10.0, 3.0
#: One step behind may be chance, for a job ends between two ranks' lines; so many hardly are.
SURE_STEPS = 3.0
#: Entries, per speaker, that a log shared by all must go on for after a rank's last.
LEAST_ENTRIES = 5.0
#: Fewer speakers than that say nothing of what is usual.
FEWEST = 3
#: Ranks that say so many entries are surely missed when they say none; of one that would have
#: said a single entry, it may have been lost where lines of many ranks ran into each other.
TALKATIVE = 4.0
#: Who leads has duties of its own, so its words count so much less where no healthy job is known.
LEADER = 0.3


@dataclass(frozen=True, kw_only=True)
class Absence:
    """One absence.

    Attributes:
        stream: name of the stream, of a silent rank the name it would have.
        kind: "silent", "ended early", "last words" or "missing event".
        strength: 0 to 1.
        amount: how much: seconds, steps, entries or events by which it differs.
        events: numbers of the events it is about.
    """

    stream: str
    kind: str
    words: str
    strength: float
    amount: float = 0.0
    events: tuple[int, ...] = ()


def absences(
    job: Job, *, siblings: Sequence[Job] = (), offsets: Mapping[str, float] | None = None
) -> list[Absence]:
    """All absences of a job, the strongest first.

    Args:
        siblings: healthy jobs of similar settings.
        offsets: file -> seconds that its clock is ahead, of `clocks.clock_offsets`.
    """
    who = peers(job)
    if len(who) < 2:
        return []
    found = _silent(who)
    heard = [one for one in who if one.streams]
    if len(heard) >= FEWEST:
        found += _ended_early(job, heard, offsets or {})
        found += _last_words(job, heard, alone=not siblings)
        found += _missing(job, heard, siblings)
    return sorted(found, key=lambda one: (-one.strength, one.stream, one.kind))


def _few(count: int, of: int) -> bool:
    return 0 < count <= max(1.0, FEW * of)


def _weight(who: Sequence[Peer]) -> float:
    """0 to 1: how much it means that one of them says nothing, by how much they say."""
    said = median(sum(one.counts.values()) for one in who)
    return 1.0 - exp(-float(said) / TALKATIVE)


def _silent(who: Sequence[Peer]) -> list[Absence]:
    silent = [one for one in who if not one.streams]
    if not _few(len(silent), len(who)):
        return []
    words = f"logged nothing; {len(who) - len(silent)} of {len(who)} ranks did"
    strength = round(_weight([one for one in who if one.streams]) / len(silent) ** 0.5, 3)
    return [
        Absence(stream=one.name, kind="silent", words=words, strength=strength) for one in silent
    ]


def _last(one: Peer) -> Occurrence | None:
    said = [stream.last for stream in one.streams if stream.last is not None]
    return max(said, key=lambda each: each.order, default=None)


def _ended_early(job: Job, heard: Sequence[Peer], offsets: Mapping[str, float]) -> list[Absence]:
    """Early ends by time, by step and, in a shared log, by entries; the strongest per peer."""
    ordering = Ordering(job=job, offsets=offsets)

    def time(one: Peer) -> float | None:
        last = _last(one)
        # Times of other entries may be of another zone: what stands here or nothing.
        return None if last is None or last.time is None else ordering.seconds(last)

    def step(one: Peer) -> float | None:
        steps = [each.last_step for each in one.streams if each.last_step is not None]
        return float(max(steps)) if steps else None

    def order(one: Peer) -> float | None:
        last = _last(one)
        return None if last is None or len(job.files) > 1 else last.order / len(heard)

    found: dict[str, Absence] = {}
    for measure, least, unit, says in (
        (time, LEAST_SECONDS, LEAST_SECONDS, "its last entry is {:.0f} s before the others'"),
        (step, 1.0, SURE_STEPS, "its last step is {:.0f} before the others'"),
        (
            order,
            LEAST_ENTRIES,
            LEAST_ENTRIES,
            "the others logged {:.0f} entries each after its last",
        ),
    ):
        for one, lag, strength in _behind(heard, measure, least, unit):
            words = says.format(lag)
            kept = found.get(one.name)
            if kept is None or strength > kept.strength:
                found[one.name] = Absence(
                    stream=one.name,
                    kind="ended early",
                    words=words,
                    strength=strength,
                    amount=round(lag, 3),
                )
    return list(found.values())


def _behind(
    heard: Sequence[Peer],
    measure: Callable[[Peer], float | None],
    least: float,
    unit: float,
) -> list[tuple[Peer, float, float]]:
    """Those few whose end is before the fellows' middle by far more than the fellows' spread."""
    ends = [(one, end) for one in heard if (end := measure(one)) is not None]
    if len(ends) < max(FEWEST, MOST * len(heard)):
        return []
    middle = median(end for _, end in ends)
    far = max(least, SPREADS * robust_deviation((end for _, end in ends), middle))
    behind = [(one, middle - end) for one, end in ends if middle - end >= far]
    if not _few(len(behind), len(heard)):
        return []
    share = 1.0 / len(behind) ** 0.5
    return [(one, lag, round(share * (1.0 - exp(-lag / max(far, unit))), 3)) for one, lag in behind]


def _last_words(job: Job, heard: Sequence[Peer], *, alone: bool) -> list[Absence]:
    """Peers whose last event differs from most; `alone`: there is no healthy job to compare."""
    leads = {one.name for one in heard if one.leads and alone}
    ends = {one.name: last.event for one in heard if (last := _last(one)) is not None}
    ((usual, times),) = Counter(ends.values()).most_common(1)
    template = {one.number: one.template for one in job.events}
    others = [
        name
        for name, event in ends.items()
        if event != usual and not alike(template.get(event, ""), template.get(usual, ""))
    ]
    if times < MOST * len(heard) or not _few(len(others), len(heard)):
        return []
    words = f"its last entry differs from those of {times} of {len(heard)} ranks"
    strength = _weight(heard) * times / len(heard) / len(others) ** 0.5
    return [
        Absence(
            stream=name,
            kind="last words",
            words=words,
            strength=round(strength * (LEADER if name in leads else 1.0), 3),
            amount=1.0,
            events=(ends[name],),
        )
        for name in others
    ]


def _missing(job: Job, heard: Sequence[Peer], siblings: Sequence[Job]) -> list[Absence]:
    """Events that all fellows have and one lacks; with siblings, that it has in all of them."""
    template = {one.number: one.template for one in job.events}
    lacks: dict[str, list[int]] = {}
    for event in job.events:
        without = [one for one in heard if not one.counts.get(event.number)]
        if not _few(len(without), len(heard)) or len(without) > FEWEST:
            continue
        for one in without:
            if not any(alike(event.template, template[other]) for other in one.counts):
                lacks.setdefault(one.name, []).append(event.number)
    by_name = {one.name: one for one in heard}
    before = [(Counterparts(other), same_events(job, other)) for other in siblings]
    found = []
    for name, events in lacks.items():
        habits = _lacked_before(by_name[name], before)
        new = tuple(number for number in events if number not in habits)
        if not new:
            continue
        strength = _weight(heard) * (1.0 - 0.5 ** len(new))
        if by_name[name].leads and not siblings:
            strength *= LEADER
        shown = template[new[0]][:60] + (f" (and {len(new) - 1} more)" if len(new) > 1 else "")
        found.append(
            Absence(
                stream=name,
                kind="missing event",
                words=f"lacks an event that all others logged: {shown}",
                strength=round(strength, 3),
                amount=float(len(new)),
                events=new,
            )
        )
    return found


def _lacked_before(one: Peer, before: Sequence[tuple[Counterparts, Mapping[int, int]]]) -> set[int]:
    """Events that the same rank lacks in a healthy sibling where others have them."""
    lacked = set()
    for theirs, number in before:
        counts = theirs.of(one)
        if counts is not None:
            lacked |= {ours for other, ours in number.items() if not counts.get(other)}
    return lacked
