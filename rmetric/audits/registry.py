"""All audits."""

from __future__ import annotations

from rmetric.audits.batches import Batches
from rmetric.audits.contract import Audit
from rmetric.audits.groups import Groups
from rmetric.audits.modes import Modes
from rmetric.audits.replicas import Replicas
from rmetric.audits.resume import Resume
from rmetric.audits.schedule import Schedule
from rmetric.audits.updates import Updates

AUDITS: dict[str, type[Audit]] = {
    audit.name: audit for audit in (Groups, Updates, Replicas, Batches, Modes, Schedule, Resume)
}


def make_audits(names: object = True) -> list[Audit]:
    """The audits of these names; all for True, none for False.

    Raises:
        TypeError: not a bool or an iterable of names.
        ValueError: an unknown name.

    >>> [audit.name for audit in make_audits(["schedule"])]
    ['schedule']
    """
    if isinstance(names, bool):
        return [audit() for audit in AUDITS.values()] if names else []
    if isinstance(names, str) or not hasattr(names, "__iter__"):
        raise TypeError(f"audits is {names!r}: True, False or names are accepted")
    wanted = list(names)
    if unknown := [name for name in wanted if name not in AUDITS]:
        raise ValueError(f"audits has {unknown[0]!r}: known are {', '.join(AUDITS)}")
    return [AUDITS[name]() for name in wanted]
