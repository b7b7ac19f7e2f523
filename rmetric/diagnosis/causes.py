"""Which known fault explains the failure: causes before their echoes, survivors set aside.

A job that failed has written down many faults: the one that ended it, what others said when they
lost it, what the launcher said of both, and some that the training lived through. The explanation
is a cause that was not survived and that no other explains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rmetric.diagnosis.job import Job, Match, Occurrence
from rmetric.diagnosis.moments import Moments
from rmetric.diagnosis.signature import Signature

#: A cause that follows an earlier one counts so much less: it is the likely consequence.
FOLLOWS = 0.55
#: Seconds after which it follows no more: the longest that collectives usually wait.
FOLLOWS_WITHIN = 1800.0
#: Roles that explain, and how much each counts where all else is equal.
EXPLAINS = {"cause": 1.0, "ending": 1.0, "echo": 0.6, "symptom": 0.45}
#: Below this confidence an entry is generic (any error line) and makes nothing a consequence.
GENERIC = 0.5


@dataclass(kw_only=True)
class Cause:
    """A signature as the job shows it, in all streams.

    Attributes:
        first, last: of all its entries.
        survived: the training went on after each of its entries.
        follows: id of the earlier cause whose consequence it seems to be; "" without.
        score: how well it explains the failure, 0 to 1.
    """

    signature: Signature
    matches: list[Match]
    first: Occurrence
    last: Occurrence
    survived: bool = False
    follows: str = ""
    score: float = 0.0
    streams: tuple[str, ...] = field(default=())

    @property
    def count(self) -> int:
        return sum(match.count for match in self.matches)


def collect(job: Job, signatures: dict[str, Signature], moments: Moments) -> list[Cause]:
    """The signatures found in a job, the first in time first; no success, nothing harmless."""
    found: dict[str, list[Match]] = {}
    for match in job.matches.values():
        if signatures[match.signature].role in EXPLAINS:
            found.setdefault(match.signature, []).append(match)
    causes = []
    for name, matches in found.items():
        matches.sort(key=lambda one: moments.key(one.first))
        causes.append(
            Cause(
                signature=signatures[name],
                matches=matches,
                first=matches[0].first,
                last=max((one.last for one in matches), key=moments.key),
                survived=all(_survived(job, one, signatures[name], moments) for one in matches),
                streams=tuple(one.stream for one in matches),
            )
        )
    return sorted(causes, key=lambda one: moments.key(one.first))


def _survived(job: Job, match: Match, signature: Signature, moments: Moments) -> bool:
    """Whether the training went on after the last time that it was said."""
    if job.succeeded is not None and moments.after(job.succeeded, match.last):
        return True
    if signature.role == "ending":
        return False
    own = job.streams[match.stream]
    if own.steps:
        return _went_on(own.last_step_at, match.last, signature, moments)
    told = [one.last_step_at for one in job.streams.values() if one.steps]
    return any(_went_on(one, match.last, signature, moments) for one in told)


def _went_on(
    step: Occurrence | None, last: Occurrence, signature: Signature, moments: Moments
) -> bool:
    """A step told after it: one for what is often survived, else more than one in flight."""
    if step is None or not moments.after(step, last):
        return False
    if signature.survivable or step.step is None or last.step is None:
        return True
    return step.step - last.step > 1


def weigh(causes: Sequence[Cause], moments: Moments) -> list[Cause]:
    """Give each its score; returned the best first, those survived left out."""
    live = [one for one in causes if not one.survived]
    for one in live:
        one.score = one.signature.confidence * EXPLAINS[one.signature.role]
        before = _explained_by(one, live, moments)
        if before is not None:
            one.follows = before.signature.id
            one.score *= FOLLOWS
    return sorted(live, key=lambda one: (-round(one.score, 3), moments.key(one.first)))


def _explained_by(one: Cause, live: Iterable[Cause], moments: Moments) -> Cause | None:
    """An earlier cause of which this is the likely consequence."""
    for other in live:
        if other is one or other.signature.role not in ("cause", "ending"):
            continue
        if other.signature.confidence < GENERIC or not moments.after(one.first, other.first):
            continue
        if (moments.later_by(one.first, other.last) or 0.0) > FOLLOWS_WITHIN:
            continue
        if other.signature.rank < min(one.signature.rank, 10) and _together(one, other):
            continue  # the same thing said again, in more precise words
        return other
    return None


def _together(one: Cause, other: Cause) -> bool:
    return bool(set(one.streams) & set(other.streams))
