"""What lies beside the logs, and the evidence in it against ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rmetric._util.errors import LogError
from rmetric._util.lazy import install_hint
from rmetric.diagnosis.beside.gpus import GpuMonitor, is_monitor, read_monitor
from rmetric.diagnosis.beside.owners import assign
from rmetric.diagnosis.beside.places import OddStack, odd_stacks, stacks_in_logs
from rmetric.diagnosis.beside.recorder import Dump, culprits, is_dump, read_dump
from rmetric.diagnosis.beside.stacks import Stack, is_stack_dump, read_stacks
from rmetric.diagnosis.job import Job, Occurrence
from rmetric.diagnosis.reading.lines import unwrapped
from rmetric.diagnosis.reading.source import LogSource

#: Suffixes of files that may be read here though they are no logs.
BESIDE_SUFFIXES = (".json", ".pkl", ".pickle", ".csv")
#: Bytes that are read of stacks or of a monitor, and those by which their kind is recognised.
MAX_BYTES = 1 << 26
SNIFFED = 4096


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
        recorded: rank that holds up others, by the dumps -> why, and for what share of the most.
        stood: rank -> where its stack stands, unlike most.
        stays: one of these ranks does not move.
        awaited: rank -> what it waits for outside the job, as its stack shows; "" for a process
            of which no more is known.
        unnamed: the stack of that.
        collectives: rank -> where it waits, in another collective than the others.
    """

    recorded: Mapping[str, tuple[str, float]] = {}
    stood: Mapping[str, str] = {}
    stays: bool = False
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
            with one.path.open("rb") as file:
                head = file.read(SNIFFED)
                if is_dump(head):
                    found.dumps.append(read_dump(one.path, one.name))
                    continue
                text = unwrapped(head + file.read(MAX_BYTES - len(head))).decode("utf-8", "replace")
            if is_monitor(head):
                found.monitors.append(read_monitor(text, one.name, one.node))
            else:
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
    blamed = culprits(beside.dumps)
    stacks = assign(job, beside.stacks, on_node) or stacks_in_logs(job, after)
    odd = odd_stacks(stacks)
    most = max((len(one.others) for one in blamed.values()), default=1)
    return BesideFindings(
        recorded={
            f"rank {rank}": (one.words, len(one.others) / most) for rank, one in blamed.items()
        },
        stood={name: one.words for name, one in odd.items() if name},
        stays=any(one.stays for one in stacks if one.stream in odd),
        awaited={name: one.awaits for name, one in odd.items() if one.awaits},
        unnamed=odd.get("", OddStack("", "")),
        collectives={name: one.words for name, one in odd.items() if one.collective},
    )
