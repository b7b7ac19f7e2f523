"""Find absences: ranks that are silent, stop early or lack events that all others log.

They complement L4's filtering: removing normal events removes the only trace of a fault that is
an absence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp
from statistics import median

from rmetric.diagnosis.evidence.scene import Row, Scene
from rmetric.diagnosis.facts.job import Job
from rmetric.diagnosis.faults import IN_FLIGHT
from rmetric.diagnosis.patterns.spatial import Peer, peers, robust_deviation
from rmetric.diagnosis.signature import SILENT

#: Largest share of the peers that are outliers (or one peer).
MAX_OUTLIER_SHARE = 0.25
#: Least share of the peers that makes a behaviour usual.
MIN_USUAL_SHARE = 0.6
#: Least lead, in seconds, of an early end.
MIN_LAG_SECONDS = 10.0
#: Least lead of an early end, in robust deviations of the peers' ends.
MIN_LAG_DEVIATIONS = 3.0
#: Scale of a lag in steps: one step may be chance, since a job ends between two ranks' lines.
LAG_SCALE_STEPS = 3.0
#: Least entries per peer after a rank's last entry, in a log that all share.
MIN_LAG_ENTRIES = 5.0
#: Least number of peers to compare.
MIN_PEERS = 3
#: Scale, in entries per peer, of the weight of silence: a single expected entry may have been
#: lost where lines of many ranks ran into each other.
ENTRIES_SCALE = 4.0
#: Factor on leaders, which have own duties.
LEADER_STRENGTH = 0.3
#: Least strength of a silence that may explain a failure: it is of one or two ranks, not of many.
MIN_SILENCE = 0.6
#: Entries of the rank that logs fewest, at which a silent rank has 63 % of its weight.
FEWEST_SCALE = 3.0


def absences(scene: Scene) -> list[Row]:
    """Rows against the ranks that lack something, the strongest first.

    Their kinds are "silent", "ended early" and "missing event".
    """
    every = peers(scene.job)
    active = [one for one in every if one.stream is not None]
    absent = [*_silent(every, active), *_ended_early(scene, active)]
    found = [_explaining(scene, row) for row in absent]
    found += _missing(scene.job, active)
    return sorted(found, key=lambda one: (-one.strength, one.target, one.kind))


def _explaining(scene: Scene, row: Row) -> Row:
    """The row, which may explain the failure: the others did not go on without this rank.

    All ranks take part in a step, so that one that was not needed had only nothing to log.
    """
    if row.strength < MIN_SILENCE:
        return row
    stream = scene.job.streams.get(row.target)
    last = stream.last if stream is not None else None
    kept = (entry for one in scene.job.stepping for entry in one.tail if entry.step is not None)
    later = {one.step for one in kept if last is not None and scene.ordering.after(one, last)}
    return row if len(later) > IN_FLIGHT else row._replace(hypothesis=SILENT, entry=last)


def _few(count: int, of: int) -> bool:
    return 0 < count <= max(1.0, MAX_OUTLIER_SHARE * of)


def _weight(active: Sequence[Peer]) -> float:
    """Weight of one peer's silence, 0 to 1, by the entries of the others."""
    usual = median(sum(one.counts.values()) for one in active)
    return 1.0 - exp(-float(usual) / ENTRIES_SCALE)


def _silent(every: Sequence[Peer], active: Sequence[Peer]) -> list[Row]:
    many = len(every) - len(active)
    if not _few(many, len(every)):
        return []
    # Where the others hardly log, as all ranks but the first may, a silence means little.
    fewest = min(sum(one.counts.values()) for one in active)
    weight = min(_weight(active), 1.0 - exp(-float(fewest) / FEWEST_SCALE))
    words = f"logged nothing; {len(active)} of {len(every)} ranks did"
    strength = round(weight / many**0.5, 3)
    return [Row(one.name, "silent", words, strength) for one in every if one.stream is None]


def _ended_early(scene: Scene, active: Sequence[Peer]) -> list[Row]:
    """Those that end long before the median: by time, by step, in a shared log by entries."""
    streams = {one.name: one.stream for one in active if one.stream is not None}
    lasts = {name: one.last for name, one in streams.items() if one.last is not None}
    # Times of entries before the last may be of another zone.
    seconds = scene.ordering.seconds
    times = {name: seconds(one) for name, one in lasts.items() if one.time is not None}
    steps = {name: one.last_step for name, one in streams.items()}
    shared = len(scene.job.files) <= 1
    orders = {name: one.order / len(active) for name, one in lasts.items() if shared}
    measures: tuple[tuple[Mapping[str, float | None], float, float, str], ...] = (
        (times, MIN_LAG_SECONDS, 1.0, "its last entry is {:.0f} s before the others'"),
        (steps, 1.0, LAG_SCALE_STEPS, "its last step is {:.0f} before the others'"),
        (orders, MIN_LAG_ENTRIES, 1.0, "the others logged {:.0f} entries each after its last"),
    )
    found: dict[str, Row] = {}
    for values, least, unit, words in measures:
        ends = {name: end for name, end in values.items() if end is not None}
        if len(ends) < max(MIN_PEERS, MIN_USUAL_SHARE * len(active)):
            continue
        middle = median(ends.values())
        far = max(least, MIN_LAG_DEVIATIONS * robust_deviation(ends.values(), middle))
        behind = {name: middle - end for name, end in ends.items() if middle - end >= far}
        for name, lag in behind.items() if _few(len(behind), len(active)) else ():
            strength = round((1.0 - exp(-lag / max(far, unit))) / len(behind) ** 0.5, 3)
            found.setdefault(name, Row(name, "ended early", words.format(lag), strength))
    return list(found.values())


def _missing(job: Job, active: Sequence[Peer]) -> list[Row]:
    """Events that all peers but a few have."""
    lacks: dict[str, list[str]] = {}
    for event in job.events if len(active) >= MIN_PEERS else ():
        without = [one for one in active if not one.counts.get(event.number)]
        if _few(len(without), len(active)) and len(without) <= MIN_PEERS:
            for one in without:
                lacks.setdefault(one.name, []).append(event.template)
    leads = {one.name for one in active if one.leads}
    found = []
    for name, events in lacks.items():
        strength = _weight(active) * (1.0 - 0.5 ** len(events))
        strength = round(strength * (LEADER_STRENGTH if name in leads else 1.0), 3)
        more = f" (and {len(events) - 1} more)" if len(events) > 1 else ""
        words = f"lacks an event that all others logged: {events[0][:60]}{more}"
        found.append(Row(name, "missing event", words, strength))
    return found
