"""Which checkpoints a run folder holds, as far as their names and `good.json` say."""

from __future__ import annotations

from dataclasses import dataclass

from rmetric.guard.good import FINAL_NAME, GOOD, candidates
from rmetric.guard.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class LastCheckpoint:
    """Steps; None where there is none, or where the training saves in a form of its own.

    Attributes:
        good: of the newest that calls itself good.
        there: the same, or that of a later one whose `good.json` cannot be read.
    """

    good: int | None = None
    there: int | None = None


def last_checkpoint(folder: RunFolder) -> LastCheckpoint:
    """What is in the folder now; one that cannot be read holds none."""
    try:
        found, _ = candidates(folder.checkpoints)
        named = [
            int(match[1])
            for path in folder.checkpoints.glob(f"*/{GOOD}")
            if (match := FINAL_NAME.fullmatch(path.parent.name))
            and path.parent not in [one.path for one in found]
        ]
    except OSError:
        return LastCheckpoint()
    good = found[0].step if found else None
    return LastCheckpoint(
        good=good, there=max([*named, *([] if good is None else [good])], default=None)
    )
