"""Select the log events to display: events of the causes, and unusual events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rmetric._util.printed import counted
from rmetric.diagnosis.clock import Ordering
from rmetric.diagnosis.facts.job import Event, Job, Occurrence
from rmetric.diagnosis.library.files import compiled
from rmetric.diagnosis.library.load import PATTERN_SECONDS
from rmetric.diagnosis.result import Evidence
from rmetric.diagnosis.signature import Signature

if TYPE_CHECKING:
    from rmetric.diagnosis.faults import Fault

#: Largest number of events, and of their streams.
MAX_EVENTS = 20
MAX_WHO = 8
#: Signatures of less confidence are shown only if there is nothing else, as is any error line.
LEAST = 0.3
#: The order in which roles are shown.
_ORDER = ("cause", "ending", "symptom", "echo", "odd")


def of_causes(job: Job, causes: Sequence[Fault], ordering: Ordering) -> tuple[Evidence, ...]:
    """One for each event that a cause matched, the causes first; generic ones if nothing else."""
    specific = [one for one in causes if one.signature.rank and one.signature.confidence >= LEAST]
    shown: dict[int, Evidence] = {}
    for cause in sorted(specific or causes, key=lambda one: _ORDER.index(one.signature.role)):
        for number in sorted(cause.events - shown.keys()):
            matches = [match for match in cause.matches if number in match.events]
            firsts = [match.first for match in matches if match.first.event == number]
            event, who = job.events[number], [match.stream for match in matches]
            first, signature = [*firsts, event.first][0], cause.signature
            shown[number] = _evidence(event, first, ordering, who, signature.title, signature)
    return tuple(shown.values())[:MAX_EVENTS]


def of_odd(
    job: Job, odd: Iterable[tuple[int | Occurrence, str]], ordering: Ordering
) -> tuple[Evidence, ...]:
    """Events by number, or single entries, that a pattern found, with its reason; each once."""
    shown: dict[int, Evidence] = {}
    for one, why in odd:
        event = job.events[one if isinstance(one, int) else one.event]
        if event.number not in shown:
            often = sorted(event.counts, key=lambda name: (-event.counts[name], name))
            first, who = (event.first, often) if isinstance(one, int) else (one, [one.stream])
            shown[event.number] = _evidence(event, first, ordering, who, why)
    return tuple(shown.values())[:MAX_EVENTS]


def _evidence(
    event: Event, first: Occurrence, ordering: Ordering, who: Sequence[str], why: str,
    signature: Signature | None = None,
) -> Evidence:  # fmt: skip
    return Evidence(
        role=signature.role if signature else "odd",
        signature=signature.id if signature else "",
        why=why,
        template=event.template,
        text=first.text,
        file=first.file,
        line=first.line,
        time=ordering.dated(first),
        who=tuple(who[:MAX_WHO]),
        count=sum(event.counts.get(one, 0) for one in who),
        point=_point(signature.patterns, first.text) if signature else "",
    )


def _point(patterns: Sequence[str], text: str) -> str:
    """Text matched by the first matching pattern; "" on timeout."""
    try:
        found = (compiled(one).search(text, timeout=PATTERN_SECONDS) for one in patterns)
        return next((one[0] for one in found if one), "")
    except TimeoutError:
        return ""


def how_often(cause: Fault, job: Job) -> str:
    """Number of entries of a cause, and of the ranks, nodes and other files that logged it."""
    times = "logged once" if cause.count == 1 else f"logged {cause.count:,} times"
    if len(cause.streams) == 1:
        return times
    # A rank within a node is a rank, though its number is not known.
    kinds = Counter(
        "rank" if one.rank is not None or " local " in one.name else "node" if one.node else "file"
        for one in map(job.streams.__getitem__, cause.streams)
    )
    by = [counted(kinds[kind], kind) for kind in ("rank", "node", "file") if kinds[kind]]
    return f"{times} by {' and '.join(by)}"
