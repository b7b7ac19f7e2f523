"""The graph of identities: which of them the lines of a file, or of all files, tie together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from rmetric.diagnosis.facts.statements import MANY_RANKS, STATEMENTS, Statement, identities
from rmetric.diagnosis.reading.prefixes import Prefix

#: Different identities that are kept of those tied to one.
MOST_TIED = 64
#: Identities of several parts.
_PARTS = {
    "process": ("node", "pid"),
    "child": ("writer", "pid"),
    "gpu": ("node", "bus"),
    "member": ("of", "rank"),
}


def writer_node(prefix: Prefix) -> str | None:
    """The node of a line's writer; where the prefix has a task instead, "task 3"."""
    return prefix.node or (None if prefix.task is None else f"task {prefix.task}")


class IdentityGraph:
    """Ties between identities, each with the number of lines that state it."""

    def __init__(self, file: str = "") -> None:
        self.file = file
        #: (kind of tie, identity) -> those tied to it, in the order of their coming
        self._ties: dict[tuple[str, Hashable], Counter[Any]] = defaultdict(Counter)
        #: stream -> what the lines of a report stated so far
        self._report: dict[Prefix, dict[str, Any]] = {}

    def take(self, text: str, prefix: Prefix, may: Sequence[Statement] = STATEMENTS) -> None:
        """Read a line without its prefix (not a joined entry)."""
        own = {
            "rank": prefix.rank, "pid": prefix.pid, "node": prefix.node, "of": MANY_RANKS,
            "stream": (self.file, prefix), "job": None, "writer": writer_node(prefix),
        }  # fmt: skip
        for one in may:
            for match in one.pattern.finditer(text):
                found = own | identities(match)
                for pair in one.ties:
                    if pair[0] == "report":
                        self._take_report(prefix, pair[1], found)
                    else:
                        self._tie(*pair, found)

    def _take_report(self, prefix: Prefix, name: str, found: dict[str, Any]) -> None:
        if name == "node":
            self._report[prefix] = {"of": MANY_RANKS}
        report = self._report.get(prefix)
        if report is None:
            return
        report[name] = found[name]
        if name == "rank":
            self._tie("rank", "node", report)
        elif name == "pid" and "rank" in report:
            self._tie("process", "member", report)

    def _tie(self, one: str, other: str, found: dict[str, Any]) -> None:
        tied = _identity(other, found)
        keys = found["tasks"] if one == "task" else [_identity(one, found)]
        for key in keys if tied is not None else ():
            if key is None and one not in ("job", "writer"):
                continue
            ties = self._ties[f"{one} {other}", key]
            if tied in ties or len(ties) < MOST_TIED:
                ties[tied] += 1

    def merge(self, other: IdentityGraph) -> None:
        """Add the graph of another file of the same job."""
        for key, ties in other._ties.items():
            self._ties[key].update(ties)

    def of(self, tie: str, identity: Hashable = None) -> Counter[Any]:
        """Identities tied to one, each with the number of lines; that of the job is None."""
        return self._ties.get((tie, identity), Counter())

    def all(self, tie: str) -> Iterator[tuple[Any, Counter[Any]]]:
        """Each identity of a kind of tie, with those tied to it."""
        return ((key[1], ties) for key, ties in self._ties.items() if key[0] == tie)

    def best(self, tie: str) -> dict[Any, Any]:
        """Identity -> the one that most lines tie it to, the first of equals."""
        return {key: max(ties, key=ties.__getitem__) for key, ties in self.all(tie)}


def _identity(name: str, found: dict[str, Any]) -> Any:
    parts = _PARTS.get(name)
    if parts is None:
        return found.get(name)
    whole = tuple(found.get(part) for part in parts)
    # Of a process the node may be unknown.
    return None if None in (whole[1:] if parts[-1] == "pid" else whole) else whole
