"""Read dumps of PyTorch's flight recorder and find the ranks that hold up the others.

Each rank writes one dump (`TORCH_NCCL_DUMP_ON_TIMEOUT`), a pickle of plain containers or JSON: the
last collectives of each process group with their number, operation, sizes and state, or only those
that have not ended, and the numbers of the last ones that it entered and ended. A dump is read by
an unpickler that creates nothing but containers, text and numbers.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rmetric._util.errors import LogError
from rmetric._util.printed import counted

#: Larger files are not dumps: a recorder keeps a few thousand collectives.
MAX_BYTES_OF_DUMP = 1 << 29
#: Keys that every dump has.
_DUMP_KEYS = (b"pg_config", b"collective_seq_id")
_PICKLE = b"\x80"
_RANK_OF_FILE = re.compile(r"(\d+)(?:\.\w+)*$")
#: Files of these folders are of a library, not of the training program.
_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python3|^<|/torch/")
#: Operations that no rank of a group ends before all have started; with the broadcast, those that
#: all start with the same sizes.
_OF_ALL = re.compile(r"_?(?:all_?reduce|reduce_scatter|all_?gather(?!v)|barrier)")
_SAME_SIZES = re.compile(rf"{_OF_ALL.pattern}|broadcast")


class Collective(NamedTuple):
    """One collective of one rank; `words` have the line of the training program that called it."""

    operation: str
    sizes: str
    done: bool
    words: str


@dataclass(kw_only=True)
class Dump:
    """The flight recorder of one rank; `groups` has process group -> number -> collective."""

    file: str
    rank: int
    groups: dict[str, dict[int, Collective]] = field(default_factory=lambda: defaultdict(dict))
    members: dict[str, frozenset[int]] = field(default_factory=dict)  # group -> its global ranks
    ids: dict[str, str] = field(default_factory=dict)  # group -> its key in `reached`
    #: key of a group -> numbers of the last collectives that it entered and ended
    reached: dict[str, tuple[int, int]] = field(default_factory=dict)
    receives: bool = False  # it waits for another rank's message, and has ended nothing since

    def last(self, group: str, key: str, *, done: bool = False) -> int:
        """Number of the last collective of a group that it entered, or ended; -1 for none."""
        own = self.groups.get(group, {}).items()
        known = [number for number, collective in own if collective.done or not done]
        return max([self.reached.get(key, (-1, -1))[done], *known])

    def whereabouts(self, group: str, last: int) -> str:
        entry = self.groups.get(group, {}).get(last)
        if entry is None:
            return f"its last is #{last}" if last >= 0 else "it entered none of this group"
        return f"its last is #{last}, {entry.words}" + ("" if entry.done else ", not ended")


class Accused(NamedTuple):
    """A rank that holds up others, which wait for it or are ahead of it."""

    how: str  # "not ended", "not entered" or "other operation"
    words: str
    others: frozenset[int]


class _Plain(pickle.Unpickler):
    """Creates no object but containers, text and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds an object, {module}.{name}")


def is_dump(head: bytes) -> bool:
    """True for the first bytes of a dump, in either format."""
    return head[:1] in (_PICKLE, b"{") and any(key in head for key in _DUMP_KEYS)


def read_dump(path: Path, name: str) -> Dump:
    """One rank's dump, shown as `name`; the file's own name ends with the rank, as torch has it.

    Raises LogError: it cannot be read, holds objects, lacks its keys or names no rank.
    """
    found = _RANK_OF_FILE.search(path.name)
    dump = Dump(file=name, rank=int(found[1]) if found else -1)
    try:
        size = path.stat().st_size
        if size > MAX_BYTES_OF_DUMP:
            raise ValueError(f"{size:,} bytes are too many")
        data = path.read_bytes()
        _fill(dump, _Plain(io.BytesIO(data)).load() if data[:1] == _PICKLE else json.loads(data))
    except OSError as error:
        raise LogError(name, None, f"cannot be read: {error.strerror}") from None
    except Exception as error:  # a damaged pickle may raise any
        raise LogError(name, None, f"no flight recorder's dump can be read: {error!r}") from None
    if dump.rank < 0:
        accepted = "a name such as nccl_trace_rank_3 is accepted"
        raise LogError(name, None, f"a flight recorder's dump of no rank; {accepted}")
    return dump


def _fill(dump: Dump, loaded: Any) -> None:
    for entry in loaded.get("entries", []):
        number = entry.get("collective_seq_id", entry.get("seq_id"))
        backend, _, operation = str(entry["profiling_name"]).rpartition(":")
        # Gloo's states are never updated, only that the work was retired.
        retired = bool(entry.get("retired")) and backend != "nccl"
        done = entry.get("state") == "completed" or retired
        receives = bool(entry.get("is_p2p")) and operation.startswith("recv")
        dump.receives = not done and (receives or dump.receives)
        if not entry.get("is_p2p") and isinstance(number, int):
            group, sizes = _group_name(entry.get("process_group")), entry.get("input_sizes")
            shown = ", ".join(map(str, sizes)) if isinstance(sizes, (list, tuple)) else ""
            words = operation + f" of {shown}" * bool(shown) + _place(entry.get("frames"))
            dump.groups[group][number] = Collective(operation, shown, done, words)
            dump.ids[group] = str(entry.get("pg_id"))
    for key, status in (loaded.get("pg_status") or {}).items():
        last = (status.get(f"last_{did}_collective", -1) for did in ("enqueued", "completed"))
        dump.reached[str(key)] = (int(next(last)), int(next(last)))
    for name, config in (loaded.get("pg_config") or {}).items():
        ranks = config.get("ranks", "")
        ranks = re.findall(r"\d+", ranks) if isinstance(ranks, str) else ranks
        if ranks:
            group = _group_name((config.get("name", name), config.get("desc", "")))
            dump.members[group] = frozenset(map(int, ranks))
    if isinstance(loaded.get("rank"), int):
        dump.rank = loaded["rank"]


def _group_name(group: Any) -> str:
    if isinstance(group, (list, tuple)) and len(group) == 2:
        name, description = map(str, group)
        return description if description == "default_pg" else f"{name} {description}".strip()
    return str(group)


def _place(frames: Any) -> str:
    for frame in frames if isinstance(frames, (list, tuple)) else ():
        file = str(frame.get("filename", ""))
        if file and not _LIBRARY.search(file):
            return f" ({frame.get('name')}, {file.rsplit('/', 1)[-1]}:{frame.get('line')})"
    return ""


def culprits(dumps: Sequence[Dump]) -> dict[int, Accused]:
    """Ranks that hold up others, those first for which most wait, with the reason.

    In each process group a rank does so that has not ended what others of the group ended, that is
    in another operation than most, or that never entered what they entered. Of the last those are
    left out that wait elsewhere themselves: for a collective, or for a message of another rank. Of
    several dumps of one rank the last counts.
    """
    by_rank = {dump.rank: dump for dump in sorted(dumps, key=lambda dump: dump.rank)}
    ids = {group: key for dump in dumps for group, key in dump.ids.items()}
    found: list[tuple[int, Accused]] = []
    for group, key in sorted(ids.items()):
        # Where no dump states a group's ranks, those that were in it.
        stated = frozenset[int]().union(*(dump.members.get(group, ()) for dump in dumps))
        members = {
            rank: dump
            for rank, dump in by_rank.items()
            if (rank in stated if stated else group == "default_pg" or group in dump.groups)
        }
        found += [*_not_ended(group, key, members), *_not_entered(group, key, members)]
    waiting = {rank for _, blame in found if blame.how != "not ended" for rank in blame.others}
    receiving = {rank for rank, dump in by_rank.items() if dump.receives}
    blamed = _blamed(found, waiting | receiving) or _blamed(found, waiting) or _blamed(found, set())
    return dict(sorted(blamed.items(), key=lambda pair: (-len(pair[1].others), pair[0])))


def _blamed(found: Sequence[tuple[int, Accused]], wait: set[int]) -> dict[int, Accused]:
    """Each rank with its first accusation, and all that wait for it; some `wait` elsewhere."""
    blamed: dict[int, Accused] = {}
    for rank, blame in found:
        if blame.how != "not entered" or rank not in wait:
            before = blamed.setdefault(rank, blame)
            blamed[rank] = before._replace(others=before.others | blame.others)
    return blamed


def _not_ended(group: str, key: str, dumps: Mapping[int, Dump]) -> Iterator[tuple[int, Accused]]:
    """Ranks in a collective that others of the group ended, which none can without them."""
    ended = {rank: dump.last(group, key, done=True) for rank, dump in dumps.items()}
    for rank, dump in dumps.items():
        own = dump.groups.get(group, {})
        of_all = [at for at, it in own.items() if not it.done and _OF_ALL.match(it.operation)]
        left = min(of_all, default=0)
        ahead = frozenset(peer for peer, last in ended.items() if peer != rank and last >= left)
        if of_all and ahead:
            what = f"{own[left].words}, #{left} of {group}"
            words = f"did not end {what}, which {counted(len(ahead), 'other')} ended"
            yield rank, Accused("not ended", words, ahead)


def _not_entered(group: str, key: str, dumps: Mapping[int, Dump]) -> Iterator[tuple[int, Accused]]:
    """Ranks that are not in the first collective in which others of the group wait for them."""
    entered = {rank: dump.last(group, key) for rank, dump in dumps.items()}
    for number in sorted({at for dump in dumps.values() for at in dump.groups.get(group, ())}):
        held = {rank: dump.groups.get(group, {}).get(number) for rank, dump in dumps.items()}
        here = {rank: collective for rank, collective in held.items() if collective is not None}
        missing = [rank for rank, last in entered.items() if last < number]
        example, differing = _differing(here)
        waiting = frozenset(rank for rank in here.keys() - differing if not here[rank].done)
        if not waiting or not (missing or differing):
            continue
        what, many = f"#{number} of {group}", counted(len(waiting), "other")
        for rank in differing:
            words = f"entered {here[rank].words} as {what}, {many} {example.words}"
            yield rank, Accused("other operation", words, waiting)
        wait = "waits" if len(waiting) == 1 else "wait"
        for rank in missing:
            where = dumps[rank].whereabouts(group, entered[rank])
            words = f"never entered {example.words}, {what}, in which {many} {wait}: {where}"
            yield rank, Accused("not entered", words, waiting)
        return


def _differing(here: Mapping[int, Collective]) -> tuple[Collective, set[int]]:
    """The collective of most ranks, and who is in another; nobody where there is no majority."""
    names = Counter(collective.operation for collective in here.values())
    ((usual, times),) = names.most_common(1)
    sizes = Counter(collective.sizes for collective in here.values()).most_common(1)[0][0]
    by_sizes = len(names) == 1 and _SAME_SIZES.search(usual)
    alike = [
        rank for rank, collective in here.items()
        if (collective.sizes == sizes if by_sizes else collective.operation == usual)
    ]  # fmt: skip
    split = 2 * times <= len(here) > 2
    return here[alike[0]], set() if split else here.keys() - {*alike}
