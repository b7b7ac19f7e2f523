"""Retention of checkpoints: which are suspect, and which are surplus. Pure: no clock, no files.

An alarm makes suspect what was saved from its onset on. A suspect checkpoint never takes the
place of a clean one: each kind has a quota of its own. The last clean one before a suspect stays
as long as the suspect does, so that an alarm which ends too early costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar


@dataclass(frozen=True, kw_only=True)
class SuspectMark:
    """Mark of a checkpoint that was saved during an alarm.

    Attributes:
        since: first step whose state is suspect, the onset of the alarm.
        reason: text of the alarm.
    """

    since: int
    reason: str

    def __str__(self) -> str:
        return f"suspect since step {self.since} ({self.reason})"


def suspect_note(suspect: SuspectMark, clean: Path | None) -> str:
    """What to know of a suspect checkpoint; `clean` is the newest clean one."""
    which = f"the newest clean one is {clean}" if clean else "there is no clean one"
    return f"is {suspect}; {which}"


class Kept(Protocol):
    """Fields of a checkpoint that retention depends on."""

    @property
    def step(self) -> int: ...

    @property
    def suspect(self) -> SuspectMark | None: ...


AnyKept = TypeVar("AnyKept", bound=Kept)


def surplus(
    newest_first: Sequence[AnyKept],
    *,
    keep: int,
    keep_suspect: int,
    damaged: Collection[AnyKept] = (),
) -> list[AnyKept]:
    """Checkpoints to delete.

    The first is always kept. Of the clean ones the newest `keep` are kept, of the suspect
    ones the newest `keep_suspect`, and the newest clean one that is older than these. A damaged
    one is kept only where its quota has room.

    Args:
        newest_first: good checkpoints of one model, the newest first.
        keep: quota of clean ones, at least 1.
        keep_suspect: quota of suspect ones, at least 1.
        damaged: those among them that were found damaged.
    """
    kept = set(list(range(len(newest_first)))[:1])
    places = [n for n, checkpoint in enumerate(newest_first) if checkpoint not in damaged]
    places += [n for n, checkpoint in enumerate(newest_first) if checkpoint in damaged]
    for quota, wanted in ((keep, False), (keep_suspect, True)):
        kept.update([n for n in places if (newest_first[n].suspect is not None) is wanted][:quota])
    suspects = [n for n in kept if newest_first[n].suspect is not None]
    older = (
        n for n in places if newest_first[n].suspect is None and suspects and n > max(suspects)
    )
    kept.update(list(older)[:1])
    return [checkpoint for n, checkpoint in enumerate(newest_first) if n not in kept]


def suspects_of(newest_first: Sequence[AnyKept], *, since: int, step: int) -> list[AnyKept]:
    """Clean checkpoints that an alarm makes suspect: ancestors of the state from `since` on.

    A checkpoint is no ancestor if training went back before it afterwards: its successor in
    the order of writing has the same or an earlier step.

    Args:
        newest_first: good checkpoints of one model, the newest first.
        since: first suspect step.
        step: current step.
    """
    found, earliest = [], step + 1
    for checkpoint in newest_first:
        if checkpoint.step < earliest:
            earliest = checkpoint.step
            if checkpoint.step >= since and checkpoint.suspect is None:
                found.append(checkpoint)
    return found
