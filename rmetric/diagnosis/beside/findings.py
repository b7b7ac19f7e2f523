"""What states where ranks are: flight recorder dumps, stacks, and tables of the GPUs' load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rmetric._util.errors import LogError
from rmetric._util.lazy import install_hint
from rmetric.diagnosis.beside.gpus import GpuMonitor, is_monitor, read_monitor
from rmetric.diagnosis.beside.recorder import (
    Dump,
    Stuck,
    culprits,
    is_dump,
    read_dump,
    stuck_collectives,
)
from rmetric.diagnosis.beside.stacks import (
    OddStack,
    Stack,
    assign,
    is_stack_dump,
    odd_stacks,
    read_stacks,
    stacks_in_logs,
)
from rmetric.diagnosis.job import Job, Occurrence
from rmetric.diagnosis.reading.lines import unwrapped
from rmetric.diagnosis.reading.source import LogSource
from rmetric.diagnosis.suspects import RankEvidence, divided

#: Suffixes of files that may be read here though they are no logs.
BESIDE_SUFFIXES = (".json", ".pkl", ".pickle", ".csv")
#: Bytes that are read of stacks or of a monitor.
MAX_BYTES = 1 << 26


@dataclass(kw_only=True)
class BesideLogs:
    """Content of the files beside the logs.

    Attributes:
        notes: files that could not be read.
    """

    dumps: list[Dump] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=list)
    monitors: list[GpuMonitor] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class BesideFindings(NamedTuple):
    """Findings in them.

    Attributes:
        signs: evidence against ranks.
        stuck: the collective in which ranks wait; None where the dumps show none.
        odd: a rank stands in another function than most, and does not move.
        awaited: rank -> what it waits for outside the job, as its stack shows; "" for a process
            of which no more is known.
        unnamed: the stack of that.
        collectives: rank -> where it waits, in another collective than the others.
    """

    signs: tuple[RankEvidence, ...] = ()
    stuck: Stuck | None = None
    odd: bool = False
    awaited: Mapping[str, str] = {}
    unnamed: OddStack = OddStack("", "")
    collectives: Mapping[str, str] = {}


def is_beside(head: bytes) -> bool:
    """True for the first bytes of a file that is read here."""
    return is_dump(head) or is_stack_dump(head) or is_monitor(head)


def read_beside(files: Sequence[LogSource]) -> BesideLogs:
    """Read the files; one that cannot be read becomes a note."""
    found = BesideLogs()
    for one in files:
        try:
            head = one.path.open("rb").read(4096)
            if is_dump(head):
                found.dumps.append(read_dump(one.path, one.name))
                continue
            with one.path.open("rb") as file:
                text = unwrapped(file.read(MAX_BYTES)).decode("utf-8", "replace")
            if is_monitor(head):
                found.monitors.append(read_monitor(text, one.name, one.node))
                continue
            found.stacks += read_stacks(text, one.name, one.rank, one.node)
        except LogError as error:
            found.notes.append(str(error))
        except ModuleNotFoundError as error:
            hint = install_hint(error.name)
            found.notes.append(f"{one.name}: cannot be read without {error.name}: {hint}")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            found.notes.append(f"{one.name}: cannot be read: {why}")
    return found


def find_beside(
    job: Job,
    after: Callable[[Occurrence, Occurrence], bool],
    on_node: Callable[[str, str], Sequence[str]],
) -> BesideFindings:
    """Evidence of the dumps and stacks of a job.

    Args:
        job: the job.
        after: True for an entry that is certainly later than another.
        on_node: the streams of a node's local rank.
    """
    beside = job.beside or BesideLogs()
    stuck = stuck_collectives(beside.dumps)
    blamed = culprits(stuck)
    recorded = {f"rank {rank}": words for rank, words in blamed.items()}
    stacks = assign(job, beside.stacks, on_node) or stacks_in_logs(job, after)
    odd = odd_stacks(stacks)
    stood = {name: one.words for name, one in odd.items() if name}
    return BesideFindings(
        (*_signs(recorded, "recorder"), *_signs(stood, "stack")),
        stuck[0] if stuck else None,
        any(one.stays for one in stacks if one.stream in odd),
        {name: one.awaits for name, one in odd.items() if one.awaits},
        odd.get("", BesideFindings().unnamed),
        {name: one.words for name, one in odd.items() if one.collective},
    )


def _signs(words: dict[str, str], kind: str) -> list[RankEvidence]:
    return [one._replace(words=words[one.stream]) for one in divided([*words], kind, "")]
