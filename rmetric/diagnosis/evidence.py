"""Select the log events to display: events of the causes, and unusual events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rmetric._util.printed import counted
from rmetric.diagnosis.causes import Cause
from rmetric.diagnosis.job import Event, Job, Occurrence, Stream
from rmetric.diagnosis.library.files import compiled
from rmetric.diagnosis.library.load import PATTERN_SECONDS
from rmetric.diagnosis.ordering import Ordering
from rmetric.diagnosis.result import Evidence

#: How many are shown, and by whom said.
MAX_EVENTS = 20
MAX_WHO = 8
#: Signatures of less confidence are shown only if there is nothing else, as is any error line.
LEAST = 0.3
#: The order in which roles are shown.
_ORDER = ("cause", "ending", "symptom", "echo", "odd")


def of_causes(job: Job, causes: Sequence[Cause], ordering: Ordering) -> tuple[Evidence, ...]:
    """One for each event that a cause matched, the causes first; generic ones if nothing else."""
    specific = [one for one in causes if one.signature.rank and one.signature.confidence >= LEAST]
    shown: dict[int, Evidence] = {}
    for cause in sorted(specific or causes, key=lambda one: _ORDER.index(one.signature.role)):
        for number in sorted({event for match in cause.matches for event in match.events}):
            if number not in shown:
                shown[number] = _of_cause(job, cause, number, ordering)
    return tuple(shown.values())[:MAX_EVENTS]


def _of_cause(job: Job, cause: Cause, number: int, ordering: Ordering) -> Evidence:
    event = job.events[number]
    firsts = [match.first for match in cause.matches if match.first.event == number]
    return _evidence(
        event,
        firsts[0] if firsts else event.first,
        ordering,
        role=cause.signature.role,
        signature=cause.signature.id,
        why=cause.signature.title,
        who=[match.stream for match in cause.matches if number in match.events],
        patterns=cause.signature.patterns,
    )


def of_odd_events(
    job: Job, odd: Iterable[tuple[int, str]], ordering: Ordering
) -> tuple[Evidence, ...]:
    """Events that a pattern found, with its reason."""
    shown = []
    for number, why in odd:
        event = job.events[number]
        who = sorted(event.counts, key=lambda one: (-event.counts[one], one))
        shown.append(
            _evidence(event, event.first, ordering, role="odd", signature="", why=why, who=who)
        )
    return tuple(shown[:MAX_EVENTS])


def of_places(
    job: Job, places: Iterable[tuple[Occurrence, str]], ordering: Ordering
) -> tuple[Evidence, ...]:
    """Entries that a pattern found, with its reason, each event once."""
    shown: dict[int, Evidence] = {}
    for place, why in places:
        if place.event not in shown:
            event = job.events[place.event]
            shown[place.event] = _evidence(
                event, place, ordering, role="odd", signature="", why=why, who=[place.stream]
            )
    return tuple(shown.values())[:MAX_EVENTS]


def _evidence(
    event: Event,
    first: Occurrence,
    ordering: Ordering,
    *,
    role: str,
    signature: str,
    why: str,
    who: Sequence[str],
    patterns: Sequence[str] = (),
) -> Evidence:
    return Evidence(
        role=role,
        signature=signature,
        why=why,
        template=event.template,
        text=first.text,
        file=first.file,
        line=first.line,
        time=ordering.dated(first),
        who=tuple(who[:MAX_WHO]),
        count=sum(event.counts.get(one, 0) for one in who),
        point=_point(patterns, first.text),
    )


def _point(patterns: Sequence[str], text: str) -> str:
    """Text matched by the first matching pattern; "" on timeout."""
    try:
        found = (compiled(one).search(text, timeout=PATTERN_SECONDS) for one in patterns)
        return next((one[0] for one in found if one), "")
    except TimeoutError:
        return ""


def how_often(cause: Cause, job: Job) -> str:
    """Number of entries of a cause, and of the ranks, nodes and other files that logged it."""
    times = "logged once" if cause.count == 1 else f"logged {cause.count:,} times"
    if len(cause.streams) == 1:
        return times
    kinds = Counter(_kind(job.streams[name]) for name in cause.streams)
    by = [counted(kinds[kind], kind) for kind in ("rank", "node", "file") if kinds[kind]]
    return f"{times} by {' and '.join(by)}"


def _kind(stream: Stream) -> str:
    """A rank within a node is a rank, though its number is not known."""
    if stream.rank is not None or " local " in stream.name:
        return "rank"
    return "node" if stream.node is not None else "file"
