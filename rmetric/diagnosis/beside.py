"""What states where ranks are: flight recorder dumps and stacks, beside the logs or in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rmetric._util.errors import LogError
from rmetric.diagnosis.flight_recorder import (
    Dump,
    Stuck,
    culprits,
    is_dump,
    read_dump,
    stuck_collectives,
)
from rmetric.diagnosis.job import Job, Occurrence
from rmetric.diagnosis.stack_dumps import (
    Stack,
    is_stack_dump,
    odd_stacks,
    read_stacks,
    stacks_in_logs,
)
from rmetric.diagnosis.suspects import RankEvidence, divided

#: Suffixes of files that may be a dump though they are no logs.
DUMP_SUFFIXES = (".json", ".pkl", ".pickle")
#: Larger files are no stacks of a job's processes.
MAX_STACK_BYTES = 1 << 26


@dataclass(kw_only=True)
class BesideLogs:
    """Content of the files beside the logs.

    Attributes:
        notes: files that could not be read.
    """

    dumps: list[Dump] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class BesideFindings(NamedTuple):
    """Findings in them.

    Attributes:
        signs: evidence against ranks.
        stuck: the collective in which ranks wait; None where the dumps show none.
        odd: a rank stands in another function than most, and does not move.
    """

    signs: tuple[RankEvidence, ...] = ()
    stuck: Stuck | None = None
    odd: bool = False


def is_beside(head: bytes) -> bool:
    """True for the first bytes of a file that is read here."""
    return is_dump(head) or is_stack_dump(head)


def read_beside(files: Sequence[tuple[Path, str, int | None]]) -> BesideLogs:
    """Read the files; one that cannot be read becomes a note.

    Args:
        files: path, name as it is shown, and rank as the name states it.
    """
    found = BesideLogs()
    for path, name, rank in files:
        try:
            with path.open("rb") as file:
                stacks = is_stack_dump(file.read(4096))
            if not stacks:
                found.dumps.append(read_dump(path, name))
                continue
            with path.open(encoding="utf-8", errors="replace") as text:
                read = read_stacks(text.read(MAX_STACK_BYTES), name, rank)
            if not read:
                found.notes.append(f"{name}: stacks of no rank; a name such as rank_3 tells it")
            found.stacks += read
        except LogError as error:
            found.notes.append(str(error))
        except OSError as error:
            found.notes.append(f"{name}: cannot be read: {error.strerror}")
    return found


def find_beside(job: Job, after: Callable[[Occurrence, Occurrence], bool]) -> BesideFindings:
    """Evidence of the dumps and stacks of a job.

    Args:
        job: the job.
        after: True for an entry that is certainly later than another.
    """
    beside = job.beside or BesideLogs()
    stuck = stuck_collectives(beside.dumps)
    blamed = culprits(stuck)
    recorded = {f"rank {rank}": words for rank, words in blamed.items()}
    stacks = beside.stacks or stacks_in_logs(job, after)
    odd = odd_stacks(stacks)
    return BesideFindings(
        (*_signs(recorded, "recorder"), *_signs(odd, "stack")),
        stuck[0] if stuck else None,
        any(one.stays for one in stacks if one.stream in odd),
    )


def _signs(words: dict[str, str], kind: str) -> list[RankEvidence]:
    return [one._replace(words=words[one.stream]) for one in divided([*words], kind, "")]
