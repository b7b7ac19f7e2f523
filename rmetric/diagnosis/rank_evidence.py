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

#: Behaviour of more than this share of the ranks is no evidence against one of them.
MAX_COMMON_SHARE = 0.5
#: Least share of ranks in the same collective for the others to be outliers.
MIN_AGREEING_SHARE = 0.75
#: Largest number of ranks in one range.
MAX_RANGE_LENGTH = 10_000
#: Exit by these signals is the process's own doing or a kill from outside; SIGTERM and SIGABRT
#: are also how a launcher and a watchdog end the innocent.
_KILL_SIGNALS = (
    signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE,
)  # fmt: skip

Value = TypeVar("Value", str, None)


class RankIndex:
    """Names of the ranks and nodes that can be implicated.

    Attributes:
        active, silent: names of streams with log lines, and of ranks without any.
        ranks: name -> rank, of active streams that have one.
        innocent: names to exclude, though a launcher reports them.
    """

    def __init__(self, job: Job, innocent: Collection[str] = ()) -> None:
        self.innocent = frozenset(innocent)
        self.active = {one.name for one in job.active_streams}
        self.ranks = {one.name: one.rank for one in job.active_streams if one.rank is not None}
        self.silent = {f"rank {rank}" for rank in job.silent_ranks}
        self._on_node: dict[str, list[tuple[int, str]]] = {}
        for one in job.streams.values():
            if one.rank is not None and (node := job.node_of(one)) is not None:
                self._on_node.setdefault(node, []).append((one.rank, one.name))

    def is_minority(self, count: int) -> bool:
        """Return True if `count` streams are few enough to be suspicious."""
        return count <= MAX_COMMON_SHARE * max(2, len(self.active))

    def prefer_known(self, names: dict[str, Value]) -> dict[str, Value]:
        """Those that the job knows, if it knows any; a node may have left no log."""
        known = {
            name: own_matches
            for name, own_matches in names.items()
            if name in self.active | self.silent
        }
        return known or names

    def implicated_ranks(self, fields: dict[str, str]) -> list[str]:
        """Streams of the ranks or the nodes that an entry names; a node may have none."""
        if _signal(fields) == signal.SIGTERM:  # a launcher's own doing
            return []
        ranks = numbers_in(fields.get("rank") or fields.get("tasks", ""))
        names = [f"rank {rank}" for rank in ranks]
        known = [name for name in names if name in self.active or name in self.silent]
        local = fields.get("local_rank", "")
        return known or [
            name
            for node in expanded(fields.get("node", ""))
            for name in self._streams_on(node, local)
        ]

    def _streams_on(self, node: str, local_rank: str) -> list[str]:
        """Streams of a node: its ranks where they are known, else the node itself."""
        for name in (node, node.partition(".")[0]):
            if f"node {name}" in self.active:
                return [f"node {name}"]
            if on_node := [one for _, one in sorted(self._on_node.get(name, []))]:
                known = local_rank.isdigit() and int(local_rank) < len(on_node)
                return [on_node[int(local_rank)]] if known else on_node
        return [f"node {node}"]


def evidence_from_causes(
    job: Job, causes: Sequence[Cause], ordering: Ordering
) -> list[RankEvidence]:
    """Evidence from own causes, reported exits and ranks named in entries."""
    # Who waited for another, lost it or met it did not end of itself, whatever a launcher says.
    stated = (one for one in causes if one.signature.role == "echo" or one.signature.of_two)
    index = RankIndex(job, innocent={name for one in stated for name in one.streams})
    evidence = []
    for cause in causes:
        # A traceback without its exception may be anybody's.
        if cause.signature.role == "cause" and cause.signature.rank:
            evidence += _from_own_log(cause, index, ordering)
        if cause.signature.role != "ending":
            evidence += _evidence_from_matches(cause, index)
    return evidence + _from_launcher(causes, index)


def _from_own_log(cause: Cause, index: RankIndex, ordering: Ordering) -> list[RankEvidence]:
    active = index.active
    own_matches = [match for match in cause.matches if match.stream in active]
    if cause.signature.actor == "hardware":  # of a machine, though ranks or it alone be heard
        nodes = [match for match in cause.matches if match.stream.startswith("node ")]
        alone = len(active) == 1 and not nodes
        own_matches = own_matches or nodes
    else:
        alone = len(active) == 1
    if not own_matches or alone:
        return []
    is_minority = (
        len(own_matches) <= MAX_COMMON_SHARE * len(active) or len(own_matches) == len(active) == 1
    )
    strength = cause.score * (1.0 if is_minority else 0.15)
    if cause.signature.of_two:
        return _from_both_neighbours(
            [match.stream for match in own_matches], strength, cause, index
        )
    evidence = [
        RankEvidence(
            stream=match.stream,
            kind="own cause",
            words=f"logged: {cause.signature.title}",
            strength=strength,
        )
        for match in own_matches
    ]
    first = own_matches[0]
    if len(own_matches) == 1 or ordering.after(own_matches[1].first, first.first):
        words = "was the first to log it"
        evidence.append(
            RankEvidence(stream=first.stream, kind="first", words=words, strength=cause.score)
        )
    return evidence


def _from_both_neighbours(
    who: list[str], strength: float, cause: Cause, index: RankIndex
) -> list[RankEvidence]:
    """Evidence of equal strength against the reporting ranks and their ring neighbours."""
    says = f"logged: {cause.signature.title}"
    evidence = [
        RankEvidence(stream=one, kind="own cause", words=says, strength=strength / 2) for one in who
    ]
    size = max(index.ranks.values(), default=0) + 1
    for one in who:
        for step in (-1, 1) if one in index.ranks else ():
            name = f"rank {(index.ranks[one] + step) % size}"
            if name in index.active and name not in who:
                words = f"its ring neighbour {one} {says}"
                evidence.append(
                    RankEvidence(stream=name, kind="implicated", words=words, strength=strength / 2)
                )
    return evidence


def _evidence_from_matches(cause: Cause, index: RankIndex) -> list[RankEvidence]:
    """Evidence against the ranks named in the entries; stronger where they are fewer."""
    implicated: dict[str, None] = {}
    killed: dict[str, str] = {}
    for fields in (fields for match in cause.matches for fields in match.named):
        for name in index.implicated_ranks(fields):
            if cause.signature.role != "symptom" or name not in index.innocent:
                implicated[name] = None
            if _signal(fields) in _KILL_SIGNALS:
                killed[name] = signal.Signals(_signal(fields)).name
    implicated, killed = index.prefer_known(implicated), index.prefer_known(killed)
    evidence = []
    if index.is_minority(len(killed)):
        for name, how in killed.items():
            evidence.append(RankEvidence(stream=name, kind="killed", words=f"terminated by {how}"))
    if index.is_minority(len(implicated)):
        # The only exit that no loss explains says much, whatever the entry is worth by itself.
        alone = cause.signature.role == "symptom" and len(implicated) == 1 and index.innocent
        score = 1.0 if alone else min(1.0, cause.score + 0.2)
        strength = score / max(1, len(implicated)) ** 0.5
        words = f"named in: {cause.signature.title}"
        for name in implicated:
            evidence.append(
                RankEvidence(stream=name, kind="implicated", words=words, strength=strength)
            )
    return evidence


def numbers_in(text: str) -> list[int]:
    """Expand a list of numbers as launchers write it.

    >>> numbers_in("3,8-10")
    [3, 8, 9, 10]
    """
    found: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found += range(int(first), min(int(last or first), int(first) + MAX_RANGE_LENGTH) + 1)
    return found


def _from_launcher(causes: Sequence[Cause], index: RankIndex) -> list[RankEvidence]:
    """Evidence against the first failure in the launcher's report."""
    reports = [
        (match.first.order, implicated)
        for cause in causes
        if cause.signature.role == "symptom"
        for match in cause.matches
        if (
            implicated := [
                one for one in index.implicated_ranks(match.fields) if one not in index.innocent
            ]
        )
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
    """Evidence against ranks that reached their planned end while the others failed."""
    others = len(job.active_streams) - len(alone)
    words = f"states its planned end; {others} others do not"
    return [
        RankEvidence(stream=name, kind="done alone", words=words, strength=1.0 / len(alone) ** 0.5)
        for name in sorted(alone)
    ]


def evidence_from_echoes(job: Job, causes: Sequence[Cause]) -> list[RankEvidence]:
    """Evidence against ranks without the lost-peer error that most of their peers report."""
    index = RankIndex(job)
    if len(index.active) < 3:
        return []
    echoes = [cause for cause in causes if cause.signature.role == "echo"]
    own_matches = index.active & {stream for one in echoes for stream in one.streams}
    lacking = [*sorted(index.active - own_matches), *sorted(index.silent)]
    if (
        not lacking
        or not own_matches
        or len(lacking) > max(1, (1.0 - MAX_COMMON_SHARE) * len(index.active))
    ):
        return []
    strength = 1.0 / len(lacking) ** 0.5
    words = f"lacks an error that {len(own_matches)} others report"
    return [
        RankEvidence(stream=name, kind="no echo", words=words, strength=strength)
        for name in lacking
    ]


def evidence_from_waits(job: Job, causes: Sequence[Cause]) -> list[RankEvidence]:
    """Evidence against ranks for which most waiting ranks wait."""
    index = RankIndex(job)
    evidence = []
    for cause in causes:
        awaited = [
            {f"rank {rank}" for fields in match.named for rank in _remote(fields)}
            for match in cause.matches
        ]
        stated = [names for names in awaited if names]
        counts = Counter(name for names in stated for name in names)
        for name, count in counts.items():
            known = name in index.active or name in index.silent
            if known and count > MAX_COMMON_SHARE * len(stated):
                words = f"{count} of the waiting ranks wait for it"
                strength = 1.0 if count > 1 else 0.7
                evidence.append(
                    RankEvidence(stream=name, kind="waited for", words=words, strength=strength)
                )
    return evidence


def _remote(fields: dict[str, str]) -> list[int]:
    remote = fields.get("remote_rank", "")
    return [int(remote)] if remote.isdigit() else []


def evidence_from_collectives(causes: Sequence[Cause]) -> list[RankEvidence]:
    """Evidence against ranks that wait in another collective than most.

    Timeouts name the collective, by its number or its operation; the few that are not where the
    others are kept the others waiting.
    """
    evidence = []
    for cause in causes:
        if cause.signature.role not in ("echo", "symptom"):
            continue
        evidence += _deviating_from_majority(
            cause, "sequence", "waits in collective {}, the others in {}"
        )
        evidence += _deviating_from_majority(cause, "operation", "waits in {}, the others in {}")
    return evidence


def _deviating_from_majority(cause: Cause, field: str, words: str) -> list[RankEvidence]:
    stated = {}
    for match in cause.matches:
        values = [fields[field] for fields in match.named if fields.get(field)]
        if values:
            stated[match.stream] = values[0]
    if len(stated) < 3:
        return []
    ((usual, times),) = Counter(stated.values()).most_common(1)
    others = {stream: value for stream, value in stated.items() if value != usual}
    if not others or times < MIN_AGREEING_SHARE * len(stated):
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
