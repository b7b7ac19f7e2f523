"""Which rank or node: the signs of all channels, weighed and added up.

A rank is suspect for what it says (a cause of its own), for what is said of it (the launcher's
exit code, a message that names it), for what it no longer says (it fell silent, it lacks the
timeout that its fellows report) and for being unlike its fellows (spatial and temporal pattern).
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from operator import itemgetter
from typing import TypeVar

from rmetric.diagnosis.causes import Cause
from rmetric.diagnosis.job import Job, Occurrence, Stream
from rmetric.diagnosis.moments import Moments
from rmetric.diagnosis.reading.hosts import expanded
from rmetric.diagnosis.result import MAX_NODES, Suspect

#: Kind of sign -> its weight, if it is seen as strongly as can be. The score is
#: 1 - exp(-sum / 3): one strong sign is 0.7 and more, two weak ones about a half.
WEIGHTS = {
    "own cause": 4.0,
    "first": 1.0,
    "accused": 2.5,
    "killed": 4.0,
    "failed first": 1.0,
    "waited for": 2.5,
    "done alone": 3.5,
    "silent": 3.0,
    "ended early": 3.0,
    "no echo": 2.5,
    "amid losses": 4.0,
    "other collective": 3.5,
    "last words": 1.0,
    "missing event": 1.0,
    "unlike": 1.9,
    "numbers": 2.5,
    "settings": 7.0,
    "slow": 2.0,
    "iteration differs": 1.0,
}
#: From this score on a node is named.
NAMED = 0.5
#: A thing that so large a share of the ranks do is no sign against one of them.
COMMON = 0.5
#: A neighbour by a power of two counts so much of one in the ring.
FAR = 0.4
#: Of what can stand amid the losses, what counts.
LEAST_AMID = 0.3
#: Losses are in an order, or of few, if the best place is so many times better than the usual.
ORDERED = 1.2
#: Share of those who name a collective that must name the same, for the rest to stand out.
MOST = 0.75
#: Ranks that a range of them may name.
MOST_NUMBERS = 10_000
#: Exit by these signals is the process's own doing or a kill from outside; SIGTERM and SIGABRT
#: are also how a launcher and a watchdog end the innocent.
_GUILTY_SIGNALS = (
    signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE,
)  # fmt: skip

Named = TypeVar("Named", str, None)


@dataclass(frozen=True, kw_only=True)
class Sign:
    """One thing that speaks against a stream.

    Attributes:
        strength: 0 to 1.
    """

    stream: str
    kind: str
    words: str
    strength: float = 1.0


def suspects(job: Job, signs: Iterable[Sign]) -> tuple[Suspect, ...]:
    """All streams with a sign, the most suspect first; `named` says whom to name."""
    by_stream: dict[str, dict[str, Sign]] = {}
    for sign in signs:
        kinds = by_stream.setdefault(sign.stream, {})
        if sign.kind not in kinds or sign.strength > kinds[sign.kind].strength:
            kinds[sign.kind] = sign
    found = [_suspect(job, name, list(kinds.values())) for name, kinds in by_stream.items()]
    return tuple(sorted(found, key=lambda one: (-one.score, _order(one))))


def named(ranked: Sequence[Suspect]) -> tuple[Suspect, ...]:
    """Those above the threshold, at most `MAX_NODES`; none where too many are as suspect."""
    over = [one for one in ranked if one.score >= NAMED]
    if len(over) > MAX_NODES and over[0].score - over[MAX_NODES].score < 0.05:
        return ()
    return tuple(over[:MAX_NODES])


def _suspect(job: Job, name: str, signs: list[Sign]) -> Suspect:
    signs.sort(key=lambda one: -WEIGHTS[one.kind] * one.strength)
    total = sum(WEIGHTS[one.kind] * one.strength for one in signs)
    stream = job.streams.get(name) or _silent(name)
    return Suspect(
        name=name,
        rank=stream.rank,
        node=job.node_of(stream),
        score=round(1.0 - exp(-total / 3.0), 3),
        why="; ".join(one.words for one in signs[:3]),
    )


def _silent(name: str) -> Stream:
    """A rank that never spoke has no stream."""
    kind, _, rest = name.partition(" ")
    rank = int(rest) if kind == "rank" and rest.isdigit() else None
    return Stream(name=name, rank=rank, node=rest if kind == "node" else None)


def _order(one: Suspect) -> tuple[int, str]:
    return (one.rank if one.rank is not None else -1, one.name)


class _Whom:
    """Who may be at fault, and by what they are called.

    Attributes:
        heard, silent: names of those that speak and of the ranks that never did.
        innocent: of no fault, though a launcher names them.
    """

    def __init__(self, job: Job, innocent: Collection[str] = ()) -> None:
        self.innocent = frozenset(innocent)
        self.heard = {one.name for one in job.speaking}
        self.silent = {f"rank {rank}" for rank in job.silent_ranks}
        self._on_node: dict[str, list[tuple[int, str]]] = {}
        for one in job.streams.values():
            if one.rank is not None and (node := job.node_of(one)) is not None:
                self._on_node.setdefault(node, []).append((one.rank, one.name))

    def few(self, count: int) -> bool:
        """Whether so many doing a thing is a sign against them."""
        return count <= COMMON * max(2, len(self.heard))

    def known_first(self, names: dict[str, Named]) -> dict[str, Named]:
        """Those that the job knows, if it knows any; a node may have left no log."""
        known = {name: said for name, said in names.items() if name in self.heard | self.silent}
        return known or names

    def accused(self, fields: dict[str, str]) -> list[str]:
        """Streams of the ranks or the nodes that an entry names; a node may have none."""
        if _signal(fields) == signal.SIGTERM:  # a launcher's own doing
            return []
        ranks = _numbers(fields.get("rank") or fields.get("tasks", ""))
        names = [f"rank {rank}" for rank in ranks]
        known = [name for name in names if name in self.heard or name in self.silent]
        local = fields.get("local_rank", "")
        return known or [
            name for node in expanded(fields.get("node", "")) for name in self._at(node, local)
        ]

    def _at(self, node: str, local_rank: str) -> list[str]:
        """Who is accused with a node: its ranks, where they are known, or the node."""
        for name in (node, node.partition(".")[0]):
            if f"node {name}" in self.heard:
                return [f"node {name}"]
            if on_node := [one for _, one in sorted(self._on_node.get(name, []))]:
                known = local_rank.isdigit() and int(local_rank) < len(on_node)
                return [on_node[int(local_rank)]] if known else on_node
        return [f"node {node}"]


def signs_of_causes(job: Job, causes: Sequence[Cause], moments: Moments) -> list[Sign]:
    """What the library's matches say: causes of one's own, exits, names that are named."""
    # Who waited for another, lost it or met it did not end of itself, whatever a launcher says.
    told = (one for one in causes if one.signature.role == "echo" or one.signature.of_two)
    whom = _Whom(job, innocent={name for one in told for name in one.streams})
    signs = []
    for cause in causes:
        # A traceback without its exception may be anybody's.
        if cause.signature.role == "cause" and cause.signature.rank:
            signs += _own(cause, whom.heard, moments)
        if cause.signature.role != "ending":
            signs += _accusations(cause, whom)
    return signs + _launchers(causes, whom)


def _own(cause: Cause, heard: set[str], moments: Moments) -> list[Sign]:
    said = [match for match in cause.matches if match.stream in heard]
    if cause.signature.actor == "hardware":  # of a machine, though ranks or it alone be heard
        nodes = [match for match in cause.matches if match.stream.startswith("node ")]
        alone = len(heard) == 1 and not nodes
        said = said or nodes
    else:
        alone = len(heard) == 1
    if not said or alone:
        return []
    few = len(said) <= COMMON * len(heard) or len(said) == len(heard) == 1
    strength = cause.score * (1.0 if few else 0.15)
    if cause.signature.of_two:
        return _either([match.stream for match in said], strength, cause, heard)
    signs = [
        Sign(
            stream=match.stream,
            kind="own cause",
            words=f"says: {cause.signature.title}",
            strength=strength,
        )
        for match in said
    ]
    first = said[0]
    if len(said) == 1 or moments.after(said[1].first, first.first):
        words = "was the first to say so"
        signs.append(Sign(stream=first.stream, kind="first", words=words, strength=cause.score))
    return signs


def _either(who: list[str], strength: float, cause: Cause, heard: set[str]) -> list[Sign]:
    """Against those who say it and, half as much, against their neighbours in the ring."""
    says = f"says: {cause.signature.title}"
    signs = [Sign(stream=one, kind="own cause", words=says, strength=strength / 2) for one in who]
    ranks = {int(rank) for name in heard if (rank := name.removeprefix("rank ")).isdigit()}
    size = max(ranks, default=0) + 1
    for one in who:
        rank = one.removeprefix("rank ")
        for step in (-1, 1) if rank.isdigit() else ():
            name = f"rank {(int(rank) + step) % size}"
            if name in heard and name not in who:
                words = f"its neighbour {one} {says}"
                signs.append(Sign(stream=name, kind="accused", words=words, strength=strength / 2))
    return signs


def _accusations(cause: Cause, whom: _Whom) -> list[Sign]:
    """Against those whom its entries name; fewer is stronger, but for a kill that is told."""
    accused: dict[str, None] = {}
    killed: dict[str, str] = {}
    for fields in (fields for match in cause.matches for fields in match.named):
        for name in whom.accused(fields):
            if cause.signature.role != "symptom" or name not in whom.innocent:
                accused[name] = None
            if _signal(fields) in _GUILTY_SIGNALS:
                killed[name] = signal.Signals(_signal(fields)).name
    accused, killed = whom.known_first(accused), whom.known_first(killed)
    signs = []
    if whom.few(len(killed)):
        for name, how in killed.items():
            signs.append(Sign(stream=name, kind="killed", words=f"ended by {how}"))
    if whom.few(len(accused)):
        # The only exit that no loss explains says much, whatever the entry is worth by itself.
        alone = cause.signature.role == "symptom" and len(accused) == 1 and whom.innocent
        score = 1.0 if alone else min(1.0, cause.score + 0.2)
        strength = score / max(1, len(accused)) ** 0.5
        words = f"named by: {cause.signature.title}"
        for name in accused:
            signs.append(Sign(stream=name, kind="accused", words=words, strength=strength))
    return signs


def _numbers(text: str) -> list[int]:
    """Of a list as launchers write it.

    >>> _numbers("3,8-10")
    [3, 8, 9, 10]
    """
    found: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found += range(int(first), min(int(last or first), int(first) + MOST_NUMBERS) + 1)
    return found


def _launchers(causes: Sequence[Cause], whom: _Whom) -> list[Sign]:
    """The first that the launcher reports as failed."""
    reports = [
        (match.first.order, accused)
        for cause in causes
        if cause.signature.role == "symptom"
        for match in cause.matches
        if (accused := [one for one in whom.accused(match.fields) if one not in whom.innocent])
    ]
    _, first = min(reports, key=itemgetter(0), default=(0, []))
    words = "the launcher saw it fail first"
    return [
        Sign(stream=name, kind="failed first", words=words, strength=1.0 / len(first) ** 0.5)
        for name in first
    ]


def _signal(fields: dict[str, str]) -> int:
    code = fields.get("signal") or fields.get("code") or ""
    if code.upper().startswith("SIG") and code.upper() in signal.Signals.__members__:
        return int(signal.Signals[code.upper()])
    try:
        number = int(code)
    except ValueError:
        return 9 if code.lower() == "killed" else 0
    if "signal" in fields:
        return abs(number)
    return -number if number < 0 else number - 128 if 128 < number < 160 else 0


def signs_of_ends(job: Job, alone: Collection[str]) -> list[Sign]:
    """Who came to its planned end while the others failed."""
    others = len(job.speaking) - len(alone)
    words = f"says that it finished, which {others} others do not"
    return [
        Sign(stream=name, kind="done alone", words=words, strength=1.0 / len(alone) ** 0.5)
        for name in sorted(alone)
    ]


def signs_of_echoes(job: Job, causes: Sequence[Cause]) -> list[Sign]:
    """Who lacks what most of its fellows say when they lose another."""
    whom = _Whom(job)
    if len(whom.heard) < 3:
        return []
    echoes = [cause for cause in causes if cause.signature.role == "echo"]
    said = whom.heard & {stream for one in echoes for stream in one.streams}
    lacking = [*sorted(whom.heard - said), *sorted(whom.silent)]
    if not lacking or not said or len(lacking) > max(1, (1.0 - COMMON) * len(whom.heard)):
        return []
    strength = 1.0 / len(lacking) ** 0.5
    words = f"does not report what {len(said)} others do"
    return [Sign(stream=name, kind="no echo", words=words, strength=strength) for name in lacking]


def signs_of_losses(job: Job, causes: Sequence[Cause]) -> list[Sign]:
    """Amid whom those stand who lost a connection, or who lost it first.

    Ranks pass their data round a ring, or to those a power of two away. So the first to notice
    that one is cut off are its neighbours, and it loses them at the same moment. Where all come
    to say so, the order tells who was first: of their exits, or of the entries in a log that they
    share.
    """
    said = _losses(causes)
    weights: dict[int, float] = {}
    shared: Counter[str] = Counter()
    for name, first in sorted(said.items(), key=lambda one: one[1].order):
        shared[first.file] += 1
        if (rank := job.streams[name].rank) is not None:
            weights[rank] = 1.0 / shared[first.file]
    for place, rank in enumerate((one for one in _exits(causes) if one in weights), 1):
        weights[rank] += 1.0 / place
    ranks = {one.rank for one in job.speaking if one.rank is not None} | set(job.silent_ranks)
    if len(weights) < 2 or len(ranks) < 4:
        return []
    size = max(ranks) + 1
    near = {rank: _near(rank, weights, size) for rank in sorted(ranks)}
    usual = sum(near.values()) / len(near)
    best = sorted(weights.values(), reverse=True)
    most = sum(best[:3]) + FAR * sum(best[3 : 2 * size.bit_length() - 1])
    if most < ORDERED * usual:
        return []  # all lost one, and nothing tells who did first
    words = "stands amid those who lost a connection first"
    return [
        Sign(stream=f"rank {rank}", kind="amid losses", words=words, strength=strength)
        for rank, one in near.items()
        if (strength := (one - usual) / (most - usual)) > LEAST_AMID
    ]


def _losses(causes: Sequence[Cause]) -> dict[str, Occurrence]:
    """Who says that it lost another's connection, and where first."""
    return {
        match.stream: match.first
        for cause in causes
        if cause.signature.role == "echo"
        for match in reversed(cause.matches)
        if any("remote_host" in fields for fields in match.named)
    }


def _exits(causes: Sequence[Cause]) -> list[int]:
    """Ranks in the order in which a launcher that tells of each saw them end."""
    told = [
        rank
        for cause in causes
        for match in cause.matches
        for fields in match.named
        for rank in _numbers(fields.get("tasks", ""))
    ]
    return list(dict.fromkeys(told))


def _near(rank: int, weights: Mapping[int, float], size: int) -> float:
    """How much of the weights stands next to it, or a power of two away."""
    total = 0.0
    for other, weight in weights.items():
        apart = min((rank - other) % size, (other - rank) % size)
        if apart <= 1:
            total += weight
        elif apart & (apart - 1) == 0:
            total += FAR * weight
    return total


def signs_of_waiting(job: Job, causes: Sequence[Cause]) -> list[Sign]:
    """For whom most of those wait who say for whom they do."""
    whom = _Whom(job)
    signs = []
    for cause in causes:
        awaited = [
            {f"rank {rank}" for fields in match.named for rank in _remote(fields)}
            for match in cause.matches
        ]
        told = [names for names in awaited if names]
        counts = Counter(name for names in told for name in names)
        for name, count in counts.items():
            known = name in whom.heard or name in whom.silent
            if known and count > COMMON * len(told):
                words = f"{count} of those who wait wait for it"
                strength = 1.0 if count > 1 else 0.7
                signs.append(Sign(stream=name, kind="waited for", words=words, strength=strength))
    return signs


def _remote(fields: dict[str, str]) -> list[int]:
    remote = fields.get("remote_rank", "")
    return [int(remote)] if remote.isdigit() else []


def signs_of_collectives(causes: Sequence[Cause]) -> list[Sign]:
    """Who waits in another collective than most: behind them, or in a different operation.

    Timeouts name the collective, by its number or its operation; the few that are not where the
    others are kept the others waiting.
    """
    signs = []
    for cause in causes:
        if cause.signature.role not in ("echo", "symptom"):
            continue
        signs += _apart(cause, "sequence", "waits in collective {}, the others in {}")
        signs += _apart(cause, "operation", "waits in {}, the others in {}")
    return signs


def _apart(cause: Cause, field: str, words: str) -> list[Sign]:
    told = {}
    for match in cause.matches:
        values = [fields[field] for fields in match.named if fields.get(field)]
        if values:
            told[match.stream] = values[0]
    if len(told) < 3:
        return []
    ((usual, times),) = Counter(told.values()).most_common(1)
    others = {stream: value for stream, value in told.items() if value != usual}
    if not others or times < MOST * len(told):
        return []
    if field == "sequence":
        others = {one: value for one, value in others.items() if _behind(value, usual)}
    strength = 1.0 / max(1, len(others)) ** 0.5
    return [
        Sign(
            stream=stream,
            kind="other collective",
            words=words.format(value, usual),
            strength=strength,
        )
        for stream, value in others.items()
    ]


def _behind(value: str, usual: str) -> bool:
    return value.isdigit() and usual.isdigit() and int(value) < int(usual)
