"""Causes that no line states, inferred from what ranks did or did not do."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

#: Their ids; library/inferred.yaml says the rest.
SILENT = "rank_fell_silent"
FINISHED_ALONE = "rank_finished_early"
STARTED_OTHERWISE = "settings_differ"
NOT_ENTERED = "collective_not_entered"
DIFFERENT = "collectives_differ"
ELSEWHERE = "rank_stands_elsewhere"
NOT_FINITE = "loss_not_finite"
HUNG = "training_hung"

_FILE = Path(__file__).with_name("library") / "inferred.yaml"


class InferredCause(NamedTuple):
    """A cause without a signature: no pattern can match it.

    Attributes:
        title: with {who} for the suspect and {what} for its deviation.
    """

    id: str
    family: str
    title: str
    actor: str
    why: str
    to_do: tuple[str, ...]


@cache
def inferred_causes() -> dict[str, InferredCause]:
    """All of them by id."""
    entries = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return {
        each["id"]: InferredCause(**{**each, "to_do": tuple(each["to_do"])}) for each in entries
    }
