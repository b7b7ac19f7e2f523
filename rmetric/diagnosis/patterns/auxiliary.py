"""Findings in the files beside the logs: ranks that hold up others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rmetric.diagnosis.auxiliary.files import AuxiliaryFiles
from rmetric.diagnosis.auxiliary.recorder import culprits
from rmetric.diagnosis.facts.job import Job, Occurrence
from rmetric.diagnosis.patterns.odd_stacks import OddStack, odd_stacks, stacks_in_logs
from rmetric.diagnosis.patterns.stack_owners import assign


class AuxiliaryFindings(NamedTuple):
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


def find_in_auxiliary(
    job: Job,
    after: Callable[[Occurrence, Occurrence], bool],
    on_node: Callable[[str, str], Sequence[str]],
) -> AuxiliaryFindings:
    """Evidence of the dumps and stacks of a job.

    Args:
        job: the job.
        after: True for an entry that is certainly later than another.
        on_node: the streams of a node's local rank.
    """
    beside = job.beside or AuxiliaryFiles()
    blamed = culprits(beside.dumps)
    stacks = assign(job, beside.stacks, on_node) or stacks_in_logs(job, after)
    odd = odd_stacks(stacks)
    most = max((len(one.others) for one in blamed.values()), default=1)
    return AuxiliaryFindings(
        recorded={
            f"rank {rank}": (one.words, len(one.others) / most) for rank, one in blamed.items()
        },
        stood={name: one.words for name, one in odd.items() if name},
        stays=any(one.stays for one in stacks if one.stream in odd),
        awaited={name: one.awaits for name, one in odd.items() if one.awaits},
        unnamed=odd.get("", OddStack("", "")),
        collectives={name: one.words for name, one in odd.items() if one.collective},
    )
