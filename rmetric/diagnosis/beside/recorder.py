"""Read dumps of PyTorch's flight recorder and find the collective that some ranks did not enter.

Each rank writes one dump (`TORCH_NCCL_DUMP_ON_TIMEOUT`), a pickle of plain containers or JSON: the
last collectives of each process group with their number, operation, sizes and state. A dump is
read by an unpickler that creates nothing but containers, text and numbers.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rmetric._util.errors import LogError

#: Larger files are no dumps: a recorder keeps a few thousand collectives.
MAX_BYTES = 1 << 29
#: Keys that every dump has.
_KEYS = (b"pg_config", b"collective_seq_id")
_PICKLE = b"\x80"
_RANK = re.compile(r"(?i)(?:rank[_-]?(\d+)|(\d+))(?:\.\w+)*$")
#: Files of these folders are of a library, not of the training program.
_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python3|^<|/torch/")
#: Operations that all ranks of a group start with the same sizes.
_SAME_SIZES = re.compile(r"all_?reduce|broadcast|reduce_scatter|_?all_?gather(?!v)|barrier")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of one rank.

    Attributes:
        operation: without its backend: "all_reduce".
        sizes: of the inputs, as text.
        done: it ended.
        started: its kernel began.
        place: line of the training program that called it, "" where no stack was recorded.
    """

    operation: str
    sizes: str
    done: bool
    started: bool
    place: str

    @property
    def words(self) -> str:
        """The operation, its sizes and its place."""
        sizes = f" of {self.sizes}" if self.sizes else ""
        return f"{self.operation}{sizes}" + (f" ({self.place})" if self.place else "")


@dataclass(frozen=True, kw_only=True)
class Dump:
    """The flight recorder of one rank.

    Attributes:
        file: its name.
        groups: process group -> number -> collective.
        members: process group -> global ranks, of the groups that state them.
    """

    file: str
    rank: int
    groups: Mapping[str, Mapping[int, Collective]]
    members: Mapping[str, frozenset[int]]


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """A collective in which some ranks of its group wait and others do not.

    Attributes:
        group: the process group's description.
        number: of the collective in its group.
        collective: as most ranks state it.
        waiting: ranks that entered it and did not leave it.
        missing: ranks of the group that never entered it -> where they are instead.
        differing: ranks that are in another operation of this number -> that operation.
    """

    group: str
    number: int
    collective: Collective
    waiting: tuple[int, ...]
    missing: Mapping[int, str]
    differing: Mapping[int, str]


class _Plain(pickle.Unpickler):
    """Creates no object but containers, text and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds an object, {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to another file")


def is_dump(head: bytes) -> bool:
    """True for the first bytes of a dump, in either format.

    >>> is_dump(b'{"comm_lib_version":"","entries":[{"collective_seq_id":1,')
    True
    """
    return head[:1] in (_PICKLE, b"{") and any(key in head for key in _KEYS)


def read_dump(path: Path, name: str) -> Dump:
    """Read one rank's dump.

    Args:
        path: the file. Its name ends with the rank, as torch names it.
        name: as it is shown.

    Raises:
        LogError: it cannot be read, holds objects, lacks its keys or names no rank.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise LogError(name, None, f"a flight recorder's dump of {size:,} bytes is too large")
        data = path.read_bytes()
        loaded = _Plain(io.BytesIO(data)).load() if data.startswith(_PICKLE) else json.loads(data)
    except OSError as error:
        raise LogError(name, None, f"cannot be read: {error.strerror}") from None
    except LogError:
        raise
    except Exception as error:  # a damaged pickle may raise any
        raise LogError(name, None, f"no flight recorder's dump can be read: {error}") from None
    try:
        groups = _groups(loaded)
        members = _members(loaded.get("pg_config"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise LogError(
            name, None, f"a flight recorder's dump without its entries ({error!r})"
        ) from None
    rank, found = loaded.get("rank"), _RANK.search(path.name)
    if not isinstance(rank, int):
        if found is None:
            raise LogError(
                name, None, "a flight recorder's dump of no rank; a name such as "
                "nccl_trace_rank_3 is accepted",
            )  # fmt: skip
        rank = int(found[1] or found[2])
    return Dump(file=name, rank=rank, groups=groups, members=members)


def _groups(loaded: Any) -> dict[str, dict[int, Collective]]:
    groups: dict[str, dict[int, Collective]] = defaultdict(dict)
    for entry in loaded.get("entries", []):
        number = entry.get("collective_seq_id", entry.get("seq_id"))
        if entry.get("is_p2p") or not isinstance(number, int):
            continue
        backend, _, operation = str(entry["profiling_name"]).rpartition(":")
        state = str(entry.get("state", ""))
        # Gloo's states are never updated, only that the work was retired.
        done = state == "completed" or (bool(entry.get("retired")) and backend != "nccl")
        groups[_group_name(entry.get("process_group"))][number] = Collective(
            operation=operation,
            sizes=_sizes(entry.get("input_sizes")),
            done=done,
            started=done or state == "started",
            place=_place(entry.get("frames")),
        )
    return dict(groups)


def _group_name(group: Any) -> str:
    if isinstance(group, (list, tuple)) and len(group) == 2:
        name, description = map(str, group)
        return description if description == "default_pg" else f"{name} {description}".strip()
    return str(group)


def _sizes(sizes: Any) -> str:
    return ", ".join(map(str, sizes)) if isinstance(sizes, (list, tuple)) else ""


def _place(frames: Any) -> str:
    for frame in frames if isinstance(frames, (list, tuple)) else ():
        file = str(frame.get("filename", ""))
        if file and not _LIBRARY.search(file):
            return f"{frame.get('name')}, {file.rsplit('/', 1)[-1]}:{frame.get('line')}"
    return ""


def _members(config: Any) -> dict[str, frozenset[int]]:
    found = {}
    for name, one in (config or {}).items():
        ranks = one.get("ranks", "")
        ranks = re.findall(r"\d+", ranks) if isinstance(ranks, str) else ranks
        if ranks:
            group = _group_name((one.get("name", name), one.get("desc", "")))
            found[group] = frozenset(map(int, ranks))
    return found


def stuck_collectives(dumps: Sequence[Dump]) -> list[Stuck]:
    """The first collective of each group in which ranks wait for others or differ from them.

    Groups whose missing ranks wait in no other group come first: they hold up the others.

    Args:
        dumps: one a rank; of several of one rank the last counts.
    """
    by_rank = {one.rank: one for one in dumps}
    found = []
    for group in sorted({group for one in dumps for group in one.groups}):
        stated = [one.members[group] for one in dumps if group in one.members]
        members = frozenset().union(*stated) or (
            frozenset(by_rank)
            if group == "default_pg"
            else frozenset(rank for rank, one in by_rank.items() if group in one.groups)
        )
        if (stuck := _stuck(group, members, by_rank)) is not None:
            found.append(stuck)
    waiting = {rank for one in found for rank in one.waiting}
    found.sort(key=lambda one: (not (set(one.missing) - waiting or one.differing), one.group))
    return found


def _stuck(group: str, members: frozenset[int], by_rank: Mapping[int, Dump]) -> Stuck | None:
    own = {rank: by_rank[rank].groups.get(group, {}) for rank in sorted(members) if rank in by_rank}
    numbers = sorted({number for some in own.values() for number in some})
    for number in numbers:
        entered = {rank: some[number] for rank, some in own.items() if number in some}
        # A recorder forgets its oldest collectives.
        missing = [rank for rank, some in own.items() if max(some, default=-1) < number]
        usual, times = Counter(one.operation for one in entered.values()).most_common(1)[0]
        example = next(one for one in entered.values() if one.operation == usual)
        differing = {rank: one.words for rank, one in entered.items() if one.operation != usual}
        if not differing and _SAME_SIZES.search(usual):
            sizes = Counter(one.sizes for one in entered.values()).most_common(1)[0][0]
            differing = {rank: one.words for rank, one in entered.items() if one.sizes != sizes}
            example = next(one for one in entered.values() if one.sizes == sizes)
        if 2 * times <= len(entered) and len(entered) > 2:
            differing = {}
        waiting = tuple(
            rank for rank, one in entered.items() if not one.done and rank not in differing
        )
        if waiting and (missing or differing):
            return Stuck(
                group=group,
                number=number,
                collective=example,
                waiting=waiting,
                missing={rank: _whereabouts(own[rank]) for rank in missing},
                differing=differing,
            )
    return None


def _whereabouts(own: Mapping[int, Collective]) -> str:
    if not own:
        return "it entered none of this group"
    last = max(own)
    return f"its last is #{last}, {own[last].words}" + ("" if own[last].done else ", not ended")


def culprits(stuck: Sequence[Stuck]) -> dict[int, str]:
    """Ranks that hold up the first stuck collective, with the reason.

    Args:
        stuck: as `stuck_collectives` returns it.
    """
    if not stuck:
        return {}
    first = stuck[0]
    waiting = {rank for one in stuck for rank in one.waiting}
    others = f"{len(first.waiting)} other{'s' * (len(first.waiting) != 1)}"
    what = f"#{first.number} of {first.group}"
    if first.differing:
        return {
            rank: f"entered {words} as {what}, {others} {first.collective.words}"
            for rank, words in first.differing.items()
        }
    # Of those that wait elsewhere the others are not the cause.
    missing = {rank: words for rank, words in first.missing.items() if rank not in waiting}
    return {
        rank: f"never entered {first.collective.words}, {what}, in which {others} "
        f"wait{'s' * (len(first.waiting) == 1)}: {words}"
        for rank, words in (missing or first.missing).items()
    }
