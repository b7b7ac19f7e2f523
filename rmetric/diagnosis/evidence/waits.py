"""Ranks wait for others: who does not wait, for whom, and in which collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rmetric.diagnosis.evidence.ranks import MAX_COMMON_SHARE
from rmetric.diagnosis.evidence.row import Row, Scene, divided
from rmetric.diagnosis.faults import Fault
from rmetric.diagnosis.inferred import DIFFERENT, SILENT

#: Least share of ranks in the same collective for the others to be outliers.
MIN_AGREEING_SHARE = 0.75
#: Largest share of the ranks that may lack the timeout of all others.
MAX_LACKING_SHARE = 0.25


def lacking_echoes(scene: Scene) -> list[Row]:
    """Rows against ranks without the lost-peer error that most of their peers report.

    Where nearly all waited in vain for a collective, those that did not are the ones; they may
    have logged that they heard of it.
    """
    active = scene.index.active
    echoes = [fault for fault in scene.faults if fault.role == "echo"]
    own = [one for one in echoes if not one.has("hearsay")]
    if not any(one.has("timeout") for one in own):
        own = []
    waiting, others = _reporting(scene, own)
    reporting, lacking = _reporting(scene, echoes)
    few = max(1, MAX_LACKING_SHARE * len(waiting))
    if len(active) >= 3 and 0 < len(others) <= few and set(others) - set(lacking):
        words = f"does not wait, as {len(waiting)} others do"
        return divided(Row(name, "not waiting", words) for name in others)
    most = max(1, (1.0 - MAX_COMMON_SHARE) * len(active))
    if len(active) < 3 or not reporting or len(lacking) > most:
        return []
    words = f"lacks an error that {len(reporting)} others report"
    return divided(Row(name, "no echo", words, hypothesis=SILENT) for name in lacking)


def _reporting(scene: Scene, faults: Sequence[Fault]) -> tuple[set[str], list[str]]:
    """The streams that report any of these, and those that do not."""
    index = scene.index
    reporting = index.active & {stream for one in faults for stream in one.streams}
    return reporting, [*sorted(index.active - reporting), *sorted(index.silent)]


def collectives(scene: Scene) -> Iterator[Row]:
    """Rows against ranks that wait in another collective than most.

    Timeouts name the collective, by its number or its operation; the few that are not where the
    others are kept the others waiting. What holds up one rank holds up its group in another
    operation.
    """
    awaited = {name for name, one in scene.odd_stacks.items() if one.awaits}
    rows: list[Row] = []
    for fault in scene.faults:
        if fault.role in ("echo", "symptom"):
            words = "waits in collective {}, the others in {}"
            rows += _unlike_most(fault, "sequence", words)
            rows += _unlike_most(fault, "operation", "waits in {}, the others in {}", DIFFERENT)
    return (one for one in rows if not awaited or one.target in awaited)


def _unlike_most(fault: Fault, field: str, words: str, hypothesis: str = "") -> list[Row]:
    stated = dict[str, str]()
    for stream, fields in fault.entries:
        if fields.get(field):
            stated.setdefault(stream, fields[field])
    if len(stated) < 3:
        return []
    ((usual, times),) = Counter(stated.values()).most_common(1)
    if times < MIN_AGREEING_SHARE * len(stated):
        return []
    numbers = field == "sequence" and all(map(str.isdigit, stated.values()))
    return divided(
        Row(name, "other collective", words.format(value, usual), 1.0, hypothesis)
        for name, value in stated.items()
        if value != usual and (not numbers or int(value) < int(usual))
    )
