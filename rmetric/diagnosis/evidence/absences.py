"""Find absences: ranks that are silent, stop early or lack events that all others log.

They complement L4's filtering: removing normal events removes the only trace of a fault that is
an absence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp
from statistics import median

from rmetric.diagnosis.clock import Ordering
from rmetric.diagnosis.evidence.row import Row, Scene
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


def absences(scene: Scene) -> list[Row]:
    """Rows against the ranks that lack something, the strongest first.

    Their kinds are "silent", "ended early" and "missing event".
    """
    every = peers(scene.job)
    if len(every) < 2:
        return []
    found = _silent(every)
    active = [one for one in every if one.stream is not None]
    if len(active) >= MIN_PEERS:
        found += _ended_early(scene.job, active, scene.ordering)
        found += _missing(scene.job, active)
    found = [_silence(scene, one) for one in found]
    return sorted(found, key=lambda one: (-one.strength, one.target, one.kind))


def _silence(scene: Scene, row: Row) -> Row:
    """The row, which may explain the failure: the others did not go on without this rank.

    All ranks take part in a step, so that one that was not needed had only nothing to log.
    """
    stream = scene.job.streams.get(row.target)
    if row.kind not in ("silent", "ended early") or row.strength < MIN_SILENCE:
        return row
    last = stream.last if stream is not None else None
    kept = (entry for one in scene.job.stepping for entry in one.tail if entry.step is not None)
    later = {one.step for one in kept if last is not None and scene.ordering.after(one, last)}
    return row if len(later) > IN_FLIGHT else row._replace(hypothesis=SILENT, entry=last)


#: Entries of the rank that logs fewest, at which a silent rank has 63 % of its weight.
FEWEST_SCALE = 3.0


def _few(count: int, of: int) -> bool:
    return 0 < count <= max(1.0, MAX_OUTLIER_SHARE * of)


def _weight(active: Sequence[Peer]) -> float:
    """Weight of one peer's silence, 0 to 1, by the entries of the others."""
    usual = median(sum(one.counts.values()) for one in active)
    return 1.0 - exp(-float(usual) / ENTRIES_SCALE)


def _silent(every: Sequence[Peer]) -> list[Row]:
    silent = [one for one in every if one.stream is None]
    if not _few(len(silent), len(every)):
        return []
    words = f"logged nothing; {len(every) - len(silent)} of {len(every)} ranks did"
    active = [one for one in every if one.stream is not None]
    # Where the others hardly log, as all ranks but the first may, a silence means little.
    fewest = min((sum(one.counts.values()) for one in active), default=0)
    weight = min(_weight(active), 1.0 - exp(-float(fewest) / FEWEST_SCALE))
    strength = round(weight / len(silent) ** 0.5, 3)
    return [Row(one.name, "silent", words, strength) for one in silent]


def _ended_early(job: Job, active: Sequence[Peer], ordering: Ordering) -> list[Row]:
    """Early ends by time, by step and, in a shared log, by entries; the strongest per peer."""
    streams = {one.name: one.stream for one in active if one.stream is not None}
    ends = {name: one.last for name, one in streams.items() if one.last is not None}
    # Times of entries before the last may be of another zone.
    times = {name: ordering.seconds(one) for name, one in ends.items() if one.time is not None}
    steps = {name: one.last_step for name, one in streams.items()}
    shared = len(job.files) <= 1
    orders = {name: one.order / len(active) for name, one in ends.items() if shared}
    seconds, entries = MIN_LAG_SECONDS, MIN_LAG_ENTRIES
    found: dict[str, Row] = {}
    for values, least, unit, words in (
        (times, seconds, seconds, "its last entry is {:.0f} s before the others'"),
        (steps, 1.0, LAG_SCALE_STEPS, "its last step is {:.0f} before the others'"),
        (orders, entries, entries, "the others logged {:.0f} entries each after its last"),
    ):
        for name, lag, strength in _behind(values, len(active), least, unit):
            if name not in found or strength > found[name].strength:
                found[name] = Row(name, "ended early", words.format(lag), strength)
    return list(found.values())


def _behind(
    values: Mapping[str, float | None], active: int, least: float, unit: float
) -> list[tuple[str, float, float]]:
    """Peers that end before the median end by far more than its spread, with lag and strength."""
    ends = [(name, end) for name, end in values.items() if end is not None]
    if len(ends) < max(MIN_PEERS, MIN_USUAL_SHARE * active):
        return []
    middle = median(end for _, end in ends)
    far = max(least, MIN_LAG_DEVIATIONS * robust_deviation((end for _, end in ends), middle))
    behind = [(name, middle - end) for name, end in ends if middle - end >= far]
    if not _few(len(behind), active):
        return []
    share = 1.0 / len(behind) ** 0.5
    return [
        (name, lag, round(share * (1.0 - exp(-lag / max(far, unit))), 3)) for name, lag in behind
    ]


def _missing(job: Job, active: Sequence[Peer]) -> list[Row]:
    """Events that all peers but one have."""
    template = {one.number: one.template for one in job.events}
    lacks: dict[str, list[int]] = {}
    for event in job.events:
        without = [one for one in active if not one.counts.get(event.number)]
        if not _few(len(without), len(active)) or len(without) > MIN_PEERS:
            continue
        for one in without:
            lacks.setdefault(one.name, []).append(event.number)
    leads = {one.name for one in active if one.leads}
    found = []
    for name, events in lacks.items():
        strength = _weight(active) * (1.0 - 0.5 ** len(events))
        strength = round(strength * (LEADER_STRENGTH if name in leads else 1.0), 3)
        more = f" (and {len(events) - 1} more)" if len(events) > 1 else ""
        words = f"lacks an event that all others logged: {template[events[0]][:60]}{more}"
        found.append(Row(name, "missing event", words, strength))
    return found
