"""Convert signature matches into per-rank evidence."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import itemgetter

from rmetric.diagnosis.causes import GENERIC, Cause
from rmetric.diagnosis.facts.statements import expanded
from rmetric.diagnosis.job import Job, Match, short
from rmetric.diagnosis.ordering import Ordering
from rmetric.diagnosis.suspects import RankEvidence, divided

#: Behaviour of more than this share of the ranks is no evidence against one of them.
MAX_COMMON_SHARE = 0.5
#: Least share of ranks in the same collective for the others to be outliers.
MIN_AGREEING_SHARE = 0.75
#: A larger number of ranks is of several nodes where no line states how many a node has.
MAX_PER_NODE = 8
#: Largest share of the ranks that may lack the timeout of all others.
MAX_LACKING_SHARE = 0.25
#: Largest number of ranks in one range.
MAX_RANGE_LENGTH = 10_000
#: Entries of an error in a log without ranks that are of all ranks rather than of one.
BY_ALL = 4
#: Bus and device of a GPU, as the kernel writes them.
_PCI = re.compile(r"(?:\b[0-9a-fA-F]{4,8}:)([0-9a-fA-F]{2}:[0-9a-fA-F]{2})\b")
#: The process of a task of Ray, at the head of its traceback.
_RAY_TASK = re.compile(r"\bray::\S+ \(pid=(?P<pid>\d{1,9}), ip=(?P<ip>[\d.a-f:]+)")
#: Exit by these signals is the process's own doing or a kill from outside; SIGTERM and SIGABRT
#: are also how a launcher and a watchdog end the innocent.
_KILL_SIGNALS = (
    signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE,
)  # fmt: skip


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
        self._job = job
        on_nodes = Counter(job.node_of_rank.values())
        #: several of them run on one node
        self._tasks_are_ranks = not job.tasks_launch and max(on_nodes.values(), default=0) > 1
        self._on_node: dict[str, list[tuple[int, str]]] = {}
        self._whole_name: dict[str, str] = {}
        for one in job.streams.values():
            if one.rank is not None and (node := job.node_of(one)) is not None:
                self._on_node.setdefault(short(node), []).append((one.rank, one.name))
                self._whole_name.setdefault(short(node), node)

    def is_minority(self, count: int) -> bool:
        """Return True if `count` streams are few enough to be suspicious."""
        return count <= MAX_COMMON_SHARE * max(2, len(self.active), self._job.world_size or 0)

    def is_known(self, name: str) -> bool:
        return name in self.active or name in self.silent

    def prefer_known(self, names: dict[str, str]) -> dict[str, str]:
        """Those that the job has, if it has any; a node may have left no log."""
        return {name: words for name, words in names.items() if self.is_known(name)} or names

    def implicated_ranks(self, fields: dict[str, str], stream: str = "") -> list[str]:
        """Streams of the ranks or the nodes that an entry names; they may have no log lines.

        Args:
            fields: of the entry.
            stream: that logged it, which is meant where the field `own` is set; a local rank
                without a node is of its node.
        """
        if _signal(fields) == signal.SIGTERM:  # a launcher's own doing
            return []
        if "own" in fields and stream in self.ranks:  # the entry's prefix names the rank
            return [stream]
        tasks = "" if self._job.tasks_launch else fields.get("tasks", "")
        ranks = numbers_in(fields.get("rank") or tasks)
        known = [name for rank in ranks if self.is_known(name := f"rank {rank}")]
        one_task = self._tasks_are_ranks and len(ranks) == 1
        local = fields.get("local_rank", "")
        return (
            known
            or (self.without_logs(ranks) if fields.get("rank") or one_task else [])
            or [
                name
                for node in expanded(fields.get("node", ""))
                for name in self._streams_on(node, local)
            ]
            or (self._of_local_rank(int(local), stream) if local.isdigit() else [])
        )

    def at(self, node: str, local_rank: str) -> list[str]:
        """Streams of the rank of a number within a node; the node's where that is not known."""
        return self.implicated_ranks({"node": node, "local_rank": local_rank})

    def without_logs(self, ranks: Sequence[int]) -> list[str]:
        """Names of ranks without log lines that the job may have."""
        size = self._job.world_size
        return [f"rank {rank}" for rank in ranks if size is None or rank < size != 1]

    def node_of_all(self, names: Collection[str]) -> str | None:
        """The node, of several, whose ranks these are, all of them; None otherwise."""
        if len(names) < 2:
            return None
        on_nodes = {node: {name for _, name in ranks} for node, ranks in self._on_node.items()}
        for rank, node in self._job.node_of_rank.items():
            self._whole_name.setdefault(short(node), node)
            on_nodes.setdefault(short(node), set()).add(f"rank {rank}")
        found = next((node for node, ranks in on_nodes.items() if ranks == set(names)), None)
        return self._whole_name[found] if found is not None and len(on_nodes) > 1 else None

    def only_node_of(self, matches: Sequence[Match]) -> str | None:
        """The node of these several ranks, where other nodes have ranks too; None otherwise."""
        if len(matches) < 2 or len(self._on_node) < 2:
            return None
        if any(one.stream not in self.ranks for one in matches):
            return None
        nodes = {self._job.node_of(self._job.streams[one.stream]) for one in matches}
        return nodes.pop() if len(nodes) == 1 else None

    def on_node(self, name: str) -> set[str]:
        """Names of the ranks on the node of a stream `node NAME`."""
        return {one for _, one in self._on_node.get(short(name.removeprefix("node ")), [])}

    def _of_local_rank(self, local_rank: int, stream: str) -> list[str]:
        """The rank on the stream's node; where there is one node only, of the same number.

        A log of one launcher alone whose lines state no ranks is taken to be of one node.
        """
        own = self._job.streams.get(stream)
        node = self._job.node_of(own) if own is not None else None
        if node is not None and len(self._on_node) > 1:
            return self._at(sorted(self._on_node.get(short(node), [])), local_rank)
        size = self._job.world_size or max(self.ranks.values(), default=0) + 1
        if node in self._job.nodes and (each := self._job.ranks_per_node) and local_rank < each:
            return self.without_logs([self._job.nodes.index(node) * each + local_rank])
        one_node = len(self._on_node) <= 1 and size <= (self._job.ranks_per_node or MAX_PER_NODE)
        name = f"rank {local_rank}"
        if not one_node:
            return []
        if self.is_known(name):
            return [name]
        alone = not self.ranks and len(self._job.files) == 1
        return self.without_logs([local_rank]) if alone else []

    def _at(self, ranks: Sequence[tuple[int, str]], local_rank: int) -> list[str]:
        """The rank of a number among those of one node, some of which may be silent."""
        each = self._job.ranks_per_node
        in_row = bool(ranks) and ranks[-1][0] - ranks[0][0] == len(ranks) - 1
        if not ranks or len(ranks) == each or (in_row and not each):
            return [name for _, name in ranks[local_rank : local_rank + 1]]
        wanted = ranks[0][0] // (each or MAX_PER_NODE) * (each or MAX_PER_NODE) + local_rank
        # It may be known by another name of its node.
        return [name] if self.is_known(name := f"rank {wanted}") else []

    def _streams_on(self, node: str, local_rank: str) -> list[str]:
        """Streams of a node: its ranks where they are known, else the node itself."""
        for name in (node, short(node)):
            if f"node {name}" in self.active:
                return [f"node {name}"]
            ranks = sorted(self._on_node.get(name, []))
            if ranks and local_rank.isdigit():
                return self._at(ranks, int(local_rank)) or [f"node {node}"]
            if ranks:
                return [one for _, one in ranks]
        # A file of a pod may be called after the end of its name.
        ends = [
            one
            for one in self.active
            if one.startswith("node ") and f"-{node}".endswith(f"-{one[5:]}")
        ]
        return ends if len(ends) == 1 else [f"node {node}"]


def evidence_from_causes(
    job: Job, causes: Sequence[Cause], ordering: Ordering
) -> list[RankEvidence]:
    """Evidence from own causes, reported exits and ranks named in entries."""
    # A rank that waited for another or lost it did not end of itself, whatever a launcher reports.
    # Nor does the first of all ranks that fail in the same way.
    index = RankIndex(job)
    stated = (
        one
        for one in causes
        if one.signature.role == "echo"
        or one.signature.of_two
        or (one.signature.role == "cause" and one.follows and "connection" in one.signature.traits)
        or (one.signature.role == "cause" and not index.is_minority(len(one.streams)))
    )
    index = RankIndex(job, innocent={name for one in stated for name in one.streams})
    own = [one for one in causes if one.signature.role == "cause"]
    none_logged = not any(
        name in index.ranks or name.startswith("node ") for one in own for name in one.streams
    ) and all(one.count == 1 or one.follows for one in own)  # several may be of all ranks
    evidence = []
    for cause in causes:
        # A traceback without its exception may be of any rank.
        if cause.signature.role == "cause" and cause.signature.rank:
            evidence += _from_own_log(cause, index, ordering)
            evidence += _from_writers(cause, index)
            evidence += [*_from_kernel(job, cause), *_from_ray(job, cause)]
        if cause.signature.role == "cause" or "hang" in cause.signature.traits:
            evidence += _from_processes(job, cause, index)
        if cause.signature.role == "symptom" and _of_many(causes, cause, index, ordering):
            continue
        if cause.signature.role != "ending":
            evidence += _from_named(cause, index, none_logged)
    told = [one for one in causes if not _of_many(causes, one, index, ordering)]
    return evidence + _confirmed(causes, index) + _from_launcher(told, index)


def _confirmed(causes: Sequence[Cause], index: RankIndex) -> list[RankEvidence]:
    """Evidence against the only rank that logged a fault of the kind that its node logged."""
    broken = [one for one in causes if one.signature.actor == "hardware"]
    evidence = []
    for of_node in broken:
        family = {
            name for one in broken if one.signature.family == of_node.signature.family
            for name in one.streams
        }  # fmt: skip
        for node in of_node.streams:
            ranks = family & index.on_node(node) if node.startswith("node ") else set()
            if len(ranks) == 1:
                words = f"its node logged: {of_node.signature.title}"
                evidence.append(RankEvidence(ranks.pop(), "confirmed", words))
    return evidence


def _of_many(causes: Sequence[Cause], exits: Cause, index: RankIndex, ordering: Ordering) -> bool:
    """Return True for plain exits of which others may have been the first.

    They stand behind the report of a lost peer, or behind an error of the program that was logged
    many times, by ranks that cannot be told.
    """
    fields = [one for match in exits.matches for one in match.named]
    sure = [one for one in causes if one.signature.role == "cause" and one.score >= GENERIC]
    lost = [one for one in causes if "lost connection" in one.signature.traits]
    behind = (ordering.after(exits.first, one.first) or exits.first.time is None for one in lost)
    if "task exit" in exits.signature.traits and all(one in lost for one in sure) and any(behind):
        return True  # whoever loses another one ends, the first as well as the last
    if any(_signal(one) for one in fields) or exits.signature.role != "symptom" or index.ranks:
        return False
    return any(
        ordering.after(exits.first, one.first)
        and (
            # The launcher that ends the others is an echo too, and says which was the first.
            (one.signature.role == "echo" and "connection" in one.signature.traits)
            or (one.signature.actor == "user" and one.count >= BY_ALL and not one.follows)
        )
        for one in causes
    )


def _from_own_log(cause: Cause, index: RankIndex, ordering: Ordering) -> list[RankEvidence]:
    active = index.active
    # Of one log that may be of the whole job nobody can be told; one of rank 3 has peers.
    alone = len(active) == 1 and not any(index.ranks.values())
    own = [match for match in cause.matches if match.stream in active]
    named = any(fields.get("node") for match in cause.matches for fields in match.named)
    placed = any(name in index.ranks or name.startswith("node ") for name in cause.streams)
    elsewhere = named and ("node failure" in cause.signature.traits or not placed)
    if elsewhere or "stopped process" in cause.signature.traits:
        return []  # who tells of it is another one
    # Of a machine, even where only ranks have logs.
    if cause.signature.actor == "hardware" or "kernel record" in cause.signature.traits:
        nodes = [match for match in cause.matches if match.stream.startswith("node ")]
        alone = alone and not nodes
        own = own or nodes
    if not own or alone:
        return []
    is_minority = len(own) <= MAX_COMMON_SHARE * len(active) or len(own) == len(active) == 1
    strength = cause.score * (1.0 if is_minority else 0.15)
    words = f"logged: {cause.signature.title}"
    if cause.signature.of_two:
        return _from_both_neighbours([match.stream for match in own], strength, words, index)
    hardware = cause.signature.actor == "hardware"
    if hardware and not is_minority and (node := index.only_node_of(own)):
        evidence = [RankEvidence(f"node {node}", "own cause", words, cause.score)]
    else:
        evidence = [RankEvidence(match.stream, "own cause", words, strength) for match in own]
    if len(own) == 1 or ordering.after(own[1].first, own[0].first):
        first = "was the first to log it"
        evidence.append(RankEvidence(own[0].stream, "first", first, cause.score))
        if cause.follows and cause.signature.reason_in:  # its reason was seen by others
            evidence.append(RankEvidence(own[0].stream, "own cause", words))
    return evidence


def _from_both_neighbours(
    reporting: list[str], strength: float, words: str, index: RankIndex
) -> list[RankEvidence]:
    """Evidence of equal strength against the reporting ranks and their ring neighbours."""
    evidence = [RankEvidence(one, "own cause", words, strength / 2) for one in reporting]
    size = max(index.ranks.values(), default=0) + 1
    for one in reporting:
        for step in (-1, 1) if one in index.ranks else ():
            name = f"rank {(index.ranks[one] + step) % size}"
            if name in index.active and name not in reporting:
                by = f"its ring neighbour {one} {words}"
                evidence.append(RankEvidence(name, "implicated", by, strength / 2))
    return evidence


def _from_named(cause: Cause, index: RankIndex, none_logged: bool) -> list[RankEvidence]:
    """Evidence against the ranks named in the entries; stronger where they are fewer.

    Args:
        cause: whose entries they are.
        index: of the job.
        none_logged: no rank or node is known to have logged a cause.
    """
    is_symptom, words = cause.signature.role == "symptom", f"named in: {cause.signature.title}"
    implicated: dict[str, str] = {}
    killed: dict[str, str] = {}
    aborted = False
    agreed = _agreed(cause)
    for stream, fields in ((one.stream, each) for one in cause.matches for each in one.named):
        for name in index.implicated_ranks(fields, stream):
            if not is_symptom or name not in index.innocent or name in agreed:
                implicated[name] = words
                aborted |= _signal(fields) == signal.SIGABRT
            if _signal(fields) in _KILL_SIGNALS:
                killed[name] = f"terminated by {signal.Signals(_signal(fields)).name}"
    implicated, killed = index.prefer_known(implicated), index.prefer_known(killed)
    whole = index.node_of_all(implicated)
    if whole is not None:  # of which no rank is more to blame than another
        implicated = {f"node {whole}": words}
    evidence = []
    if index.is_minority(len(killed)):
        evidence += [RankEvidence(name, "killed", by) for name, by in killed.items()]
    if index.is_minority(len(implicated)):
        # The only exit that no loss and no log of a rank explains is strong evidence, whatever the
        # entry's confidence.
        alone = is_symptom and len(implicated) == 1 and (index.innocent or none_logged)
        score = 1.0 if alone else min(1.0, cause.score + 0.2)
        # A launcher reports consequences too, and watchdogs end processes by an abort.
        states = not cause.follows and not aborted
        evidence += divided(
            implicated, "accused" if states else "implicated", words, 1.0 if states else score
        )
    return evidence


def _agreed(cause: Cause) -> frozenset[str]:
    """The rank that several ranks name alike, as those that hear of a failed checkpoint do."""
    told = [
        (one.stream, each["rank"]) for one in cause.matches for each in one.named if "rank" in each
    ]
    ranks = {rank for _, rank in told}
    streams = {stream for stream, rank in told if stream not in (f"rank {rank}", "")}
    by_ranks = sum(stream.startswith("rank ") for stream in streams)
    return frozenset(f"rank {rank}" for rank in ranks if len(ranks) == 1 and by_ranks > 1)


def _from_ray(job: Job, cause: Cause) -> list[RankEvidence]:
    """Evidence against the worker of Ray whose traceback in the driver's log ends with a cause.

    verl names its workers by their node in the pool and their number on it: "WorkerDict_1:3".
    """
    found = set()
    for match in cause.matches:
        tail = job.streams[match.stream].tail
        before = [entry for entry in tail if entry.order <= match.first.order]
        tasks = [task for entry in before[-2:] for task in _RAY_TASK.findall(entry.text)]
        if tasks and (rank := job.rank_of_pid.get((tasks[-1][1], int(tasks[-1][0])))) is not None:
            found.add(f"rank {rank}")
    words = f"its process raised: {cause.signature.title}"
    each = job.ranks_per_node
    found |= {
        f"rank {int(fields['pool_node']) * each + int(fields['pool_local'])}"
        for match in cause.matches
        for fields in match.named
        if each and "pool_node" in fields
    }
    return divided(sorted(found), "accused", words, cause.score)


def _from_processes(job: Job, cause: Cause, index: RankIndex) -> list[RankEvidence]:
    """Evidence against the ranks whose processes entries name, of which each number is of one."""
    ranks = job.ranks_of_numbers
    found = set()
    for match in cause.matches:
        for fields in match.named:
            number, node = fields.get("pid", ""), match.stream.removeprefix("node ")
            of = ranks.get(int(number), set()) if number.isdigit() else set()
            if node != match.stream:  # of a kernel
                known = job.rank_of_pid.get((node, int(number))) if number.isdigit() else None
                blocked = not {"blocked process", "stopped process"}.isdisjoint(
                    cause.signature.traits
                )
                of = ({known} if known is not None else of) if blocked else set()
                found |= {match.stream} if blocked and len(of) != 1 else set()
            if len(of) == 1:
                found.add(f"rank {min(of)}")
    found -= index.innocent
    if not index.is_minority(len(found)):
        return []
    kind = "accused" if cause.signature.role == "cause" else "implicated"
    return divided(sorted(found), kind, f"its process is named in: {cause.signature.title}")


def _from_writers(cause: Cause, index: RankIndex) -> list[RankEvidence]:
    """Evidence against ranks that state their number in the entry, where the log does not."""
    ranks = {
        int(fields["writer"])
        for match in cause.matches
        if match.stream not in index.ranks
        for fields in match.named
        if "writer" in fields
    }
    names = [f"rank {rank}" for rank in sorted(ranks)]
    names = [name for name in names if index.is_known(name)] or index.without_logs(sorted(ranks))
    if not index.is_minority(len(names)):
        return []
    return divided(names, "accused", f"logged: {cause.signature.title}", cause.score)


def _of_process(job: Job, node: str, pid: int) -> int | None:
    rank = job.rank_of_pid.get((node, pid))
    return job.rank_of_pid.get((None, pid)) if rank is None else rank


def _from_kernel(job: Job, cause: Cause) -> list[RankEvidence]:
    """Evidence against the ranks whose GPUs or processes a node's kernel names."""
    if cause.follows and "kill" not in cause.signature.traits:  # which says several things
        return []
    ranks: dict[int, str] = {}
    for match in cause.matches:
        node = match.stream.removeprefix("node ")
        if node == match.stream:
            continue
        for fields in match.named:
            address, pid = _PCI.search(fields.get("gpu", "")), fields.get("pid", "")
            if address and (rank := job.rank_of_gpu.get((node, address[1].lower()))) is not None:
                ranks[rank] = "GPU"
            elif pid.isdigit() and (rank := _of_process(job, node, int(pid))) is not None:
                ranks[rank] = "process"
    if len({match.stream for match in cause.matches}) > len(ranks):
        return []  # another node's is not known
    title = cause.signature.title
    return [
        RankEvidence(
            f"rank {rank}",
            "kernel",
            f"its {what} is named in: {title}",
            cause.score / len(ranks) ** 0.5,
        )
        for rank, what in sorted(ranks.items())
    ]


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
    reports = []
    for match in (
        match for one in causes if one.signature.role == "symptom" for match in one.matches
    ):
        implicated = [
            one
            for one in index.implicated_ranks(match.fields, match.stream)
            if one not in index.innocent
        ]
        if implicated:
            reports.append((match.first.order, implicated))
    _, first = min(reports, key=itemgetter(0), default=(0, []))
    return divided(first, "failed first", "first failure in the launcher's report")


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
    if number > 224:  # of a byte without a sign
        number -= 256
    return -number if number < 0 else number - 128 if 128 < number < 160 else 0


def evidence_from_endings(job: Job, alone: Collection[str]) -> list[RankEvidence]:
    """Evidence against ranks that reached their planned end while the others failed."""
    others = len(job.active_streams) - len(alone)
    return divided(sorted(alone), "done alone", f"states its planned end; {others} others do not")


def evidence_from_echoes(job: Job, causes: Sequence[Cause]) -> list[RankEvidence]:
    """Evidence against ranks without the lost-peer error that most of their peers report.

    Where nearly all waited in vain for a collective, those that did not are the ones; they may
    have logged that they heard of it.
    """
    index = RankIndex(job)
    echoes = [cause for cause in causes if cause.signature.role == "echo"]
    own = [one for one in echoes if "hearsay" not in one.signature.traits]
    if not any("timeout" in one.signature.traits for one in own):
        own = []
    waiting, others = _reporting(own, index)
    reporting, lacking = _reporting(echoes, index)
    few = max(1, MAX_LACKING_SHARE * len(waiting))
    if len(index.active) >= 3 and 0 < len(others) <= few and set(others) - set(lacking):
        return divided(others, "not waiting", f"does not wait, as {len(waiting)} others do")
    most = max(1, (1.0 - MAX_COMMON_SHARE) * len(index.active))
    if len(index.active) < 3 or not reporting or len(lacking) > most:
        return []
    return divided(lacking, "no echo", f"lacks an error that {len(reporting)} others report")


def _reporting(causes: Sequence[Cause], index: RankIndex) -> tuple[set[str], list[str]]:
    """The streams that report any of these, and those that do not."""
    reporting = index.active & {stream for one in causes for stream in one.streams}
    return reporting, [*sorted(index.active - reporting), *sorted(index.silent)]


def evidence_from_waits(job: Job, causes: Sequence[Cause]) -> list[RankEvidence]:
    """Evidence against ranks for which most waiting ranks wait."""
    index = RankIndex(job)
    evidence = []
    for cause in causes:
        awaited = [
            {
                f"rank {int(remote)}"
                for fields in match.named
                if (remote := fields.get("remote_rank", "")).isdigit()
            }
            for match in cause.matches
        ]
        stated = [names for names in awaited if names]
        counts = Counter(name for names in stated for name in names)
        for name, count in counts.items():
            if index.is_known(name) and count > MAX_COMMON_SHARE * len(stated):
                words = f"{count} of the waiting ranks wait for it"
                evidence.append(RankEvidence(name, "waited for", words, 1.0 if count > 1 else 0.7))
    return evidence


def evidence_from_links(job: Job, causes: Sequence[Cause]) -> list[RankEvidence]:
    """Evidence against the one device at which most of several failed links end, or that was down.

    The rank is known by its process, or by the stream of the entry.
    """
    index = RankIndex(job)
    names: dict[tuple[str, str], str] = {}
    links, places = set(), dict[tuple[str, str], str]()
    down = {
        (stream, each["down_device"]) for stream, each in _entries(causes) if "down_device" in each
    }
    for stream, fields in _entries(causes):
        if fields.keys() >= {"local_host", "local_device", "remote_host", "remote_device"}:
            own = fields["local_host"], fields["local_device"]
            of = job.ranks_of_numbers.get(int(fields.get("pid") or -1), set())
            names.setdefault(own, f"rank {min(of)}" if len(of) == 1 else stream)
            places[stream, own[1]] = names[own]
            links.add(frozenset((own, (fields["remote_host"], fields["remote_device"]))))
    broken = [
        (name, device) for (stream, device), name in places.items() if (stream, device) in down
    ]
    if links and not broken and len(down) == 1:  # by the node's own tool
        broken = [one for one in down if one[0].startswith("node ")]
    if len(broken) == 1:
        ((name, device),) = broken
        node = name.removeprefix("node ")
        where = [name] if node == name else index.at(node, device)
        return divided(where, "kernel", "its device's link was down") if len(where) == 1 else []
    ends = Counter(end for link in links for end in link).most_common(2)
    if len(links) < 2 or ends[0][1] == ends[1][1]:
        return []
    (host, device), count = ends[0]
    known = names.get((host, device))
    where = [known] if known else index.implicated_ranks({"node": host, "local_rank": device})
    words = f"{count} of {len(links)} failed links end at it"
    return divided(where, "accused", words) if len(where) == 1 else []


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
        evidence += _in_other_operations(cause)
    return evidence + _not_enqueued(causes)


def other_operations(causes: Sequence[Cause]) -> dict[str, str]:
    """Rank -> the operation in which it waits and that in which most others do."""
    waiting = (one for one in causes if one.signature.role in ("echo", "symptom"))
    return {one.stream: one.words for cause in waiting for one in _in_other_operations(cause)}


def _in_other_operations(cause: Cause) -> list[RankEvidence]:
    return _deviating_from_majority(cause, "operation", "waits in {}, the others in {}")


def _not_enqueued(causes: Sequence[Cause]) -> list[RankEvidence]:
    """Evidence against ranks that never enqueued the collective for which the others wait."""
    groups: dict[str, dict[str, tuple[int, int]]] = {}
    for stream, fields in _entries(causes):
        if {"enqueued", "completed"} <= fields.keys():
            own = stream if stream.startswith("rank ") else f"rank {fields.get('last_rank', '')}"
            group = groups.setdefault(fields.get("group", ""), {})
            group[own] = int(fields["enqueued"]), int(fields["completed"])
    evidence = _with_nothing_in_flight(groups.values())
    for stated in groups.values():
        waiting = [done for enqueued, done in stated.values() if enqueued > done]
        if len(waiting) < 2:
            continue
        ((done, times),) = Counter(waiting).most_common(1)
        behind = [name for name, (enqueued, _) in stated.items() if enqueued <= done]
        if (
            behind
            and times > 1
            and times >= MIN_AGREEING_SHARE * (len(stated) - len(behind))
            and (len(behind) <= MAX_COMMON_SHARE * len(stated))
        ):
            words = f"did not enqueue collective {done + 1}, for which {times} others wait"
            evidence += divided(behind, "accused", words)
    return evidence


def _with_nothing_in_flight(groups: Iterable[dict[str, tuple[int, int]]]) -> list[RankEvidence]:
    """Evidence against ranks that wait in no group, while nearly all others wait in one."""
    waits: dict[str, bool] = {}
    for stated in groups:
        for name, (enqueued, done) in stated.items():
            waits[name] = waits.get(name, False) or enqueued > done
    idle = sorted(name for name, one in waits.items() if not one)
    others = len(waits) - len(idle)
    if others < 2 or len(idle) > max(1, MAX_LACKING_SHARE * others):
        return []
    return divided(idle, "accused", f"has no collective under way, for which {others} others wait")


def _entries(causes: Sequence[Cause]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the stream and the fields of each entry."""
    for cause in causes:
        for match in cause.matches:
            for fields in match.named:
                yield match.stream, fields


def _deviating_from_majority(cause: Cause, field: str, words: str) -> list[RankEvidence]:
    stated = {}
    for match in cause.matches:
        values = [fields[field] for fields in match.named if fields.get(field)]
        if values:
            stated[match.stream] = values[0]
    if len(stated) < 3:
        return []
    ((usual, times),) = Counter(stated.values()).most_common(1)
    if times < MIN_AGREEING_SHARE * len(stated):
        return []
    others = {
        stream: value
        for stream, value in stated.items()
        if value != usual and (field != "sequence" or _behind(value, usual))
    }
    strength = 1.0 / max(1, len(others)) ** 0.5
    return [
        RankEvidence(stream, "other collective", words.format(value, usual), strength)
        for stream, value in others.items()
    ]


def _behind(value: str, usual: str) -> bool:
    return value.isdigit() and usual.isdigit() and int(value) < int(usual)
