"""Convert signature matches into per-rank evidence."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import TypeVar

from rmetric.diagnosis.causes import Cause
from rmetric.diagnosis.job import Job
from rmetric.diagnosis.ordering import Ordering
from rmetric.diagnosis.reading.hosts import expanded
from rmetric.diagnosis.suspects import RankEvidence

#: A thing that so large a share of the ranks do is no sign against one of them.
COMMON = 0.5
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


class RankIndex:
    """Who may be at fault, and by what they are called.

    Attributes:
        heard, silent: names of those that speak and of the ranks that never did.
        ranks: name -> rank of those that speak and have one.
        innocent: of no fault, though a launcher names them.
    """

    def __init__(self, job: Job, innocent: Collection[str] = ()) -> None:
        self.innocent = frozenset(innocent)
        self.heard = {one.name for one in job.active_streams}
        self.ranks = {one.name: one.rank for one in job.active_streams if one.rank is not None}
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
        ranks = numbers_in(fields.get("rank") or fields.get("tasks", ""))
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


def evidence_from_causes(
    job: Job, causes: Sequence[Cause], ordering: Ordering
) -> list[RankEvidence]:
    """What the library's matches say: causes of one's own, exits, names that are named."""
    # Who waited for another, lost it or met it did not end of itself, whatever a launcher says.
    told = (one for one in causes if one.signature.role == "echo" or one.signature.of_two)
    whom = RankIndex(job, innocent={name for one in told for name in one.streams})
    signs = []
    for cause in causes:
        # A traceback without its exception may be anybody's.
        if cause.signature.role == "cause" and cause.signature.rank:
            signs += _own(cause, whom, ordering)
        if cause.signature.role != "ending":
            signs += _evidence_from_matches(cause, whom)
    return signs + _launchers(causes, whom)


def _own(cause: Cause, whom: RankIndex, ordering: Ordering) -> list[RankEvidence]:
    heard = whom.heard
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
        return _either([match.stream for match in said], strength, cause, whom)
    signs = [
        RankEvidence(
            stream=match.stream,
            kind="own cause",
            words=f"logged: {cause.signature.title}",
            strength=strength,
        )
        for match in said
    ]
    first = said[0]
    if len(said) == 1 or ordering.after(said[1].first, first.first):
        words = "was the first to log it"
        signs.append(
            RankEvidence(stream=first.stream, kind="first", words=words, strength=cause.score)
        )
    return signs


def _either(who: list[str], strength: float, cause: Cause, whom: RankIndex) -> list[RankEvidence]:
    """Against those who say it and, half as much, against their neighbours in the ring."""
    says = f"logged: {cause.signature.title}"
    signs = [
        RankEvidence(stream=one, kind="own cause", words=says, strength=strength / 2) for one in who
    ]
    size = max(whom.ranks.values(), default=0) + 1
    for one in who:
        for step in (-1, 1) if one in whom.ranks else ():
            name = f"rank {(whom.ranks[one] + step) % size}"
            if name in whom.heard and name not in who:
                words = f"its ring neighbour {one} {says}"
                signs.append(
                    RankEvidence(stream=name, kind="accused", words=words, strength=strength / 2)
                )
    return signs


def _evidence_from_matches(cause: Cause, whom: RankIndex) -> list[RankEvidence]:
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
            signs.append(RankEvidence(stream=name, kind="killed", words=f"terminated by {how}"))
    if whom.few(len(accused)):
        # The only exit that no loss explains says much, whatever the entry is worth by itself.
        alone = cause.signature.role == "symptom" and len(accused) == 1 and whom.innocent
        score = 1.0 if alone else min(1.0, cause.score + 0.2)
        strength = score / max(1, len(accused)) ** 0.5
        words = f"named in: {cause.signature.title}"
        for name in accused:
            signs.append(RankEvidence(stream=name, kind="accused", words=words, strength=strength))
    return signs


def numbers_in(text: str) -> list[int]:
    """Of a list as launchers write it.

    >>> numbers_in("3,8-10")
    [3, 8, 9, 10]
    """
    found: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found += range(int(first), min(int(last or first), int(first) + MOST_NUMBERS) + 1)
    return found


def _launchers(causes: Sequence[Cause], whom: RankIndex) -> list[RankEvidence]:
    """The first that the launcher reports as failed."""
    reports = [
        (match.first.order, accused)
        for cause in causes
        if cause.signature.role == "symptom"
        for match in cause.matches
        if (accused := [one for one in whom.accused(match.fields) if one not in whom.innocent])
    ]
    _, first = min(reports, key=itemgetter(0), default=(0, []))
    words = "first failure in the launcher's report"
    return [
        RankEvidence(
            stream=name, kind="failed first", words=words, strength=1.0 / len(first) ** 0.5
        )
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


def evidence_from_endings(job: Job, alone: Collection[str]) -> list[RankEvidence]:
    """Who came to its planned end while the others failed."""
    others = len(job.active_streams) - len(alone)
    words = f"states its planned end; {others} others do not"
    return [
        RankEvidence(stream=name, kind="done alone", words=words, strength=1.0 / len(alone) ** 0.5)
        for name in sorted(alone)
    ]


def evidence_from_echoes(job: Job, causes: Sequence[Cause]) -> list[RankEvidence]:
    """Who lacks what most of its fellows say when they lose another."""
    whom = RankIndex(job)
    if len(whom.heard) < 3:
        return []
    echoes = [cause for cause in causes if cause.signature.role == "echo"]
    said = whom.heard & {stream for one in echoes for stream in one.streams}
    lacking = [*sorted(whom.heard - said), *sorted(whom.silent)]
    if not lacking or not said or len(lacking) > max(1, (1.0 - COMMON) * len(whom.heard)):
        return []
    strength = 1.0 / len(lacking) ** 0.5
    words = f"lacks an error that {len(said)} others report"
    return [
        RankEvidence(stream=name, kind="no echo", words=words, strength=strength)
        for name in lacking
    ]


def evidence_from_waits(job: Job, causes: Sequence[Cause]) -> list[RankEvidence]:
    """For whom most of those wait who say for whom they do."""
    whom = RankIndex(job)
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
                words = f"{count} of the waiting ranks wait for it"
                strength = 1.0 if count > 1 else 0.7
                signs.append(
                    RankEvidence(stream=name, kind="waited for", words=words, strength=strength)
                )
    return signs


def _remote(fields: dict[str, str]) -> list[int]:
    remote = fields.get("remote_rank", "")
    return [int(remote)] if remote.isdigit() else []


def evidence_from_collectives(causes: Sequence[Cause]) -> list[RankEvidence]:
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


def _apart(cause: Cause, field: str, words: str) -> list[RankEvidence]:
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
        RankEvidence(
            stream=stream,
            kind="other collective",
            words=words.format(value, usual),
            strength=strength,
        )
        for stream, value in others.items()
    ]


def _behind(value: str, usual: str) -> bool:
    return value.isdigit() and usual.isdigit() and int(value) < int(usual)
