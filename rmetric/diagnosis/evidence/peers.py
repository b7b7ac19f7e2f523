"""Ranks that deviate from their peers or lack what all others have, and unusual events.

Absences complement L4's filtering: without normal events, a fault that is an absence has no trace.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp
from statistics import median

import numpy as np

from rmetric.diagnosis.evidence.scene import Row, Scene, divided
from rmetric.diagnosis.facts.job import Iteration, Occurrence
from rmetric.diagnosis.faults import IN_FLIGHT
from rmetric.diagnosis.patterns.recorder import culprits
from rmetric.diagnosis.patterns.spatial import Peer, peer_outliers, peers, robust_deviation
from rmetric.diagnosis.patterns.values import NumberOutlier, loss_not_finite, setting_outliers
from rmetric.diagnosis.reading.text import level
from rmetric.diagnosis.signature import (
    DIFFERENT,
    FINISHED_EARLY,
    NOT_ENTERED,
    NOT_FINITE,
    SETTINGS_DIFFER,
    SILENT,
    STACK_DIFFERS,
)

_LATE_ERROR = "an error, after the last step"
#: Share of its strength that evidence of a recorder has where hardly any other waits.
LEAST_SHARE = 0.9
#: Largest number of unusual events that are kept.
MAX_ODD = 12
#: Events of an outlier that are unusual ones (L4, section 4.3).
MAX_OF_OUTLIER = 3
#: Largest share of the peers that are outliers (or one peer), and least number to compare.
MAX_OUTLIER_SHARE = 0.25
MIN_PEERS = 3
#: Least share of the peers that makes a behaviour usual.
MIN_USUAL_SHARE = 0.6
#: Least lead of an early end: in seconds, in entries per peer of a log that all share, and in
#: robust deviations of the peers' ends.
MIN_LAG_SECONDS = 10.0
MIN_LAG_ENTRIES = 5.0
MIN_LAG_DEVIATIONS = 3.0
#: Scale of a lag in steps: one step may be chance, since a job ends between two ranks' lines.
LAG_SCALE_STEPS = 3.0
#: Scale of the weight of silence, in entries of the peer that logs fewest: a single expected entry
#: may have been lost where lines of many ranks ran into each other.
ENTRIES_SCALE = 4.0
#: Least strength of a silence that may explain a failure: it is of one or two ranks, not of many.
MIN_SILENCE = 0.6


def recorders(scene: Scene) -> list[Row]:
    """Rows against the ranks that hold up others, the stronger the more wait for them."""
    auxiliary = scene.job.auxiliary
    blamed = culprits(auxiliary.dumps) if auxiliary is not None else {}
    most = max((len(blame.others) for blame in blamed.values()), default=1)
    share = {rank: (1 - LEAST_SHARE) * len(blame.others) / most for rank, blame in blamed.items()}
    return divided(
        Row(f"rank {rank}", "recorder", blame.words, LEAST_SHARE + share[rank], NOT_ENTERED)
        for rank, blame in blamed.items()
    )


def stacks(scene: Scene) -> Iterator[Row]:
    """Rows against the ranks whose stack is not that of most."""
    odd = scene.odd_stacks.items()
    kind = "stack" if any(stack.stays for _, stack in odd) else "stack of one that moves"
    yield from divided(
        Row(name, kind, stack.words, 1.0, STACK_DIFFERS, stage=stack.awaits)
        for name, stack in odd
        if name
    )
    unknown = scene.odd_stacks.get("")  # of an unidentified process
    if unknown is not None and unknown.awaits:
        yield Row("", "stack", unknown.words, 1.0, STACK_DIFFERS, stage=unknown.awaits)
    yield from divided(
        Row(name, "stack in a collective", stack.words, 1.0, DIFFERENT)
        for name, stack in odd
        if stack.collective
    )


def unlike_numbers(scene: Scene) -> list[Row]:
    """Rows against ranks whose losses or times are not those of the others."""
    return divided(
        Row(number.stream, "numbers", _compared(number), entry=number.place)
        for number in scene.number_outliers
    )


def _compared(number: NumberOutlier) -> str:
    return f"its {number.name} is {number.value:.4g}, the others' {number.usual:.4g}"


def unlike_settings(scene: Scene) -> list[Row]:
    """Rows against ranks that were started otherwise; a job that reached its steps bore it."""
    odd = setting_outliers(scene.job, scene.known.siblings) if not scene.job.trained else []
    streams, cause = scene.job.streams, SETTINGS_DIFFER
    return divided(
        Row(name, "settings", words, 1.0, cause, streams[name].first) for name, words in odd
    )


def finished_early(scene: Scene) -> list[Row]:
    """Rows against ranks that reached their planned end while the others failed."""
    alone = scene.alone if scene.faults else frozenset()
    words = f"states its planned end; {len(scene.job.active_streams) - len(alone)} others do not"
    return divided(
        Row(name, "finished early", words, 1.0, FINISHED_EARLY, scene.job.streams[name].last)
        for name in sorted(alone)
    )


def not_finite(scene: Scene) -> Iterator[Row]:
    """The row of a loss that never was finite again, whatever ended the job."""
    first = loss_not_finite(scene.job)
    if first is not None:
        last = scene.job.furthest.last_step if scene.job.furthest else None
        since = "to the end" if first.step is None else f"from step {first.step} to {last}"
        yield Row("", "not finite", since, hypothesis=NOT_FINITE, entry=first)


def absences(scene: Scene) -> list[Row]:
    """Rows against the ranks that are silent or end early, the strongest first."""
    every = peers(scene.job)
    active = [peer for peer in every if peer.stream is not None]
    absent = [*_silent(every, active), *_ended_early(scene, active)]
    found = [_explaining(scene, row) for row in absent]
    return sorted(found, key=lambda row: (-row.strength, row.target, row.kind))


def _explaining(scene: Scene, row: Row) -> Row:
    """The row, which may explain the failure: the others did not go on without this rank."""
    if row.strength < MIN_SILENCE:
        return row
    # All ranks take part in a step, so that one that was not needed had only nothing to log.
    stream = scene.job.streams.get(row.target)
    last = stream.last if stream is not None else None
    kept = (entry for other in scene.job.stepping for entry in other.tail if entry.step is not None)
    later = {entry.step for entry in kept if last is not None and scene.ordering.after(entry, last)}
    return row if len(later) > IN_FLIGHT else row._replace(hypothesis=SILENT, entry=last)


def _few(count: int, of: int) -> bool:
    return 0 < count <= max(1.0, MAX_OUTLIER_SHARE * of)


def _silent(every: Sequence[Peer], active: Sequence[Peer]) -> list[Row]:
    many = len(every) - len(active)
    if not _few(many, len(every)):
        return []
    # Where the others hardly log, as all ranks but the first may, a silence means little.
    fewest = min(sum(peer.counts.values()) for peer in active)
    strength = round((1.0 - exp(-fewest / ENTRIES_SCALE)) / many**0.5, 3)
    words = f"logged nothing; {len(active)} of {len(every)} ranks did"
    return [Row(peer.name, "silent", words, strength) for peer in every if peer.stream is None]


def _ended_early(scene: Scene, active: Sequence[Peer]) -> list[Row]:
    """Those that end long before the median: by time, by step, in a shared log by entries."""
    streams = {peer.name: peer.stream for peer in active if peer.stream is not None}
    lasts = {name: stream.last for name, stream in streams.items() if stream.last is not None}
    # Times of entries before the last may be of another zone.
    seconds = scene.ordering.seconds
    times = {name: seconds(entry) for name, entry in lasts.items() if entry.time is not None}
    steps = {name: stream.last_step for name, stream in streams.items()}
    shared = len(scene.job.files) <= 1
    orders = {name: entry.order / len(active) for name, entry in lasts.items() if shared}
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
            if name not in found or strength > found[name].strength:
                found[name] = Row(name, "ended early", words.format(lag), strength)
    return list(found.values())


@dataclass(frozen=True)
class Unusual:
    """Unusual events of a job by number, the oddest first, and entries, each with the reason.

    Each is sought when it is first asked for, by the parts that are not switched off: the forest,
    the dearest, is for answers that show `events`.
    """

    scene: Scene

    @cached_property
    def events(self) -> list[tuple[int, str]]:
        """Events after the last step, and those of outliers."""
        scene, found = self.scene, dict(self._late)
        # Events by which ranks report that they lost another make no outlier by their wording.
        echoes = (fault.events for fault in scene.faults if fault.role == "echo")
        rng, ordinary = np.random.default_rng(0), scene.known.ordinary.union(*echoes)
        spatial, job = scene.switches.spatial, scene.job
        for outlier in peer_outliers(job, rng=rng, ordinary=ordinary) if spatial else ():
            for number in outlier.events[:MAX_OF_OUTLIER]:
                if job.events[number].counts.get(outlier.name):
                    found.setdefault(number, f"makes {outlier.name} differ from its peers")
        return [*found.items()][:MAX_ODD]

    @cached_property
    def errors(self) -> list[tuple[int, str]]:
        """Errors that first occur after the last step; they often describe the failure."""
        events, after, last = self.scene.job.events, self.scene.ordering.after, self._last_step
        errors = [(number, why) for number, why in self._late if why == _LATE_ERROR]
        return [pair for pair in errors if last and after(events[pair[0]].first, last)][:MAX_ODD]

    @property
    def numbers(self) -> list[tuple[Occurrence, str]]:
        """Entries whose numbers deviate from other ranks'."""
        outliers = self.scene.number_outliers
        return [(number.place, f"{number.stream}: {_compared(number)}") for number in outliers]

    @property
    def notes(self) -> list[str]:
        """A note on the first of them."""
        return [
            f"{number.stream}: {_compared(number)}, at {number.steps} of the last steps"
            for number in self.scene.number_outliers[:1]
        ]

    @property
    def slow(self) -> list[tuple[Occurrence, str]]:
        """Steps that took far longer than usual."""
        slow = (odd for odd in self._iterations if odd.seconds is not None)
        words = "step {} took {:.3g} s, usual {:.3g} s".format
        return [(odd.place, words(odd.step, odd.seconds, odd.usual_seconds)) for odd in slow]

    @property
    def first_odd(self) -> Iteration[Occurrence] | None:
        """The first iteration that differs and from which the training did not recover."""
        lasting = (odd for odd in self._iterations if not odd.recovered)
        return min(lasting, key=lambda odd: self.scene.ordering.key(odd.place), default=None)

    @property
    def _iterations(self) -> Collection[Iteration[Occurrence]]:
        return self.scene.job.odd_iterations.values() if self.scene.switches.temporal else ()

    @cached_property
    def _last_step(self) -> Occurrence | None:
        steps = (stream.last_step_at for stream in self.scene.job.streams.values())
        return max(filter(None, steps), key=self.scene.ordering.key, default=None)

    @cached_property
    def _late(self) -> list[tuple[int, str]]:
        """Errors after the last step, and what healthy jobs do not log there."""
        scene, last, found = self.scene, self._last_step, list[tuple[int, str]]()
        key, known = scene.ordering.key, scene.known
        for event in sorted(scene.job.events, key=lambda event: key(event.first)):
            late = last is None or scene.ordering.after(event.last, last)
            if event.number in known.ordinary or not late:
                continue
            if level(event.last.text) == "error":
                found.append((event.number, _LATE_ERROR))
            elif known.pool is not None and last is not None:
                found.append((event.number, "not in healthy jobs, after the last step"))
        return found
