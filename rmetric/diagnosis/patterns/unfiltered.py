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

#: Largest share of the peers that are outliers (or one peer).
MAX_OUTLIER_SHARE = 0.25
#: Least share of the peers that makes a behaviour usual.
MIN_USUAL_SHARE = 0.6
#: Least lead, in seconds, of an early end.
MIN_LAG_SECONDS = 10.0
#: Least lead of an early end, in robust deviations of the peers' ends.
MIN_LAG_DEVIATIONS = 3.0
#: Scale of a lag in steps: one step may be chance, since a job ends between two ranks' lines.
LAG_SCALE_STEPS = 3.0
#: Least entries per peer after a rank's last entry, in a log that all share.
MIN_LAG_ENTRIES = 5.0
#: Least number of peers to compare.
MIN_PEERS = 3
#: Scale, in entries per peer, of the weight of silence: a single expected entry may have been
#: lost where lines of many ranks ran into each other.
ENTRIES_SCALE = 4.0
#: Factor on leaders, which have own duties, where there is no healthy job to compare.
LEADER_WEIGHT = 0.3


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
    active = [one for one in who if one.streams]
    if len(active) >= MIN_PEERS:
        found += _ended_early(job, active, offsets or {})
        found += _last_words(job, active, alone=not siblings)
        found += _missing(job, active, siblings)
    return sorted(found, key=lambda one: (-one.strength, one.stream, one.kind))


def _few(count: int, of: int) -> bool:
    return 0 < count <= max(1.0, MAX_OUTLIER_SHARE * of)


def _weight(who: Sequence[Peer]) -> float:
    """0 to 1: how much it means that one of them says nothing, by how much they say."""
    said = median(sum(one.counts.values()) for one in who)
    return 1.0 - exp(-float(said) / ENTRIES_SCALE)


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


def _ended_early(job: Job, active: Sequence[Peer], offsets: Mapping[str, float]) -> list[Absence]:
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
        return None if last is None or len(job.files) > 1 else last.order / len(active)

    found: dict[str, Absence] = {}
    for measure, least, unit, says in (
        (time, MIN_LAG_SECONDS, MIN_LAG_SECONDS, "its last entry is {:.0f} s before the others'"),
        (step, 1.0, LAG_SCALE_STEPS, "its last step is {:.0f} before the others'"),
        (
            order,
            MIN_LAG_ENTRIES,
            MIN_LAG_ENTRIES,
            "the others logged {:.0f} entries each after its last",
        ),
    ):
        for one, lag, strength in _behind(active, measure, least, unit):
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
    active: Sequence[Peer],
    measure: Callable[[Peer], float | None],
    least: float,
    unit: float,
) -> list[tuple[Peer, float, float]]:
    """Those few whose end is before the fellows' middle by far more than the fellows' spread."""
    ends = [(one, end) for one in active if (end := measure(one)) is not None]
    if len(ends) < max(MIN_PEERS, MIN_USUAL_SHARE * len(active)):
        return []
    middle = median(end for _, end in ends)
    far = max(least, MIN_LAG_DEVIATIONS * robust_deviation((end for _, end in ends), middle))
    behind = [(one, middle - end) for one, end in ends if middle - end >= far]
    if not _few(len(behind), len(active)):
        return []
    share = 1.0 / len(behind) ** 0.5
    return [(one, lag, round(share * (1.0 - exp(-lag / max(far, unit))), 3)) for one, lag in behind]


def _last_words(job: Job, active: Sequence[Peer], *, alone: bool) -> list[Absence]:
    """Peers whose last event differs from most; `alone`: there is no healthy job to compare."""
    leads = {one.name for one in active if one.leads and alone}
    ends = {one.name: last.event for one in active if (last := _last(one)) is not None}
    ((usual, times),) = Counter(ends.values()).most_common(1)
    template = {one.number: one.template for one in job.events}
    others = [
        name
        for name, event in ends.items()
        if event != usual and not alike(template.get(event, ""), template.get(usual, ""))
    ]
    if times < MIN_USUAL_SHARE * len(active) or not _few(len(others), len(active)):
        return []
    words = f"its last entry differs from those of {times} of {len(active)} ranks"
    strength = _weight(active) * times / len(active) / len(others) ** 0.5
    return [
        Absence(
            stream=name,
            kind="last words",
            words=words,
            strength=round(strength * (LEADER_WEIGHT if name in leads else 1.0), 3),
            amount=1.0,
            events=(ends[name],),
        )
        for name in others
    ]


def _missing(job: Job, active: Sequence[Peer], siblings: Sequence[Job]) -> list[Absence]:
    """Events that all fellows have and one lacks; with siblings, that it has in all of them."""
    template = {one.number: one.template for one in job.events}
    lacks: dict[str, list[int]] = {}
    for event in job.events:
        without = [one for one in active if not one.counts.get(event.number)]
        if not _few(len(without), len(active)) or len(without) > MIN_PEERS:
            continue
        for one in without:
            if not any(alike(event.template, template[other]) for other in one.counts):
                lacks.setdefault(one.name, []).append(event.number)
    by_name = {one.name: one for one in active}
    before = [(Counterparts(other), same_events(job, other)) for other in siblings]
    found = []
    for name, events in lacks.items():
        habits = _lacked_before(by_name[name], before)
        new = tuple(number for number in events if number not in habits)
        if not new:
            continue
        strength = _weight(active) * (1.0 - 0.5 ** len(new))
        if by_name[name].leads and not siblings:
            strength *= LEADER_WEIGHT
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
