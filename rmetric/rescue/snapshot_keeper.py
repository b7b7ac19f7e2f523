"""Takes the snapshots that a policy asks for, at the distance that their cost allows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import ceil
from pathlib import Path
from statistics import median

from rmetric.rescue.data_position import NoData
from rmetric.rescue.evidence import LossLevel
from rmetric.rescue.policy import Decision, RescueConfig, RescuePolicy
from rmetric.rescue.snapshot import Parts, Snapshot, Snapshots

logger = logging.getLogger("rmetric")

#: Share of the time of the training that snapshots may take.
BUDGET = 0.01
#: Snapshots that are timed: the first one has no state of the optimiser.
_TIMED = 3
#: Bounds of the distance, in steps; it is a multiple of the first.
LEAST, MOST = 10, 1000


class SnapshotPace:
    """Finds the distance k of two snapshots from the times of the first ones.

        k = cost / (0.01 step),  from 10 to 1000, rounded up to a multiple of 10

    A step is the median one. The cost of a snapshot is the time until the training goes on, and
    on an accelerator, where the copy runs `beside` the next step, what that step takes longer too.

    >>> pace = SnapshotPace(beside=True)
    >>> for step in range(31):
    ...     if step % 10 == 0:
    ...         pace.snapshot_taken(0.01)
    ...     pace.step_made(0.55 if step % 10 == 0 else 0.2)
    >>> pace.distance, pace.words
    (180, 'a snapshot takes 0.36 s, a step 0.2 s')
    """

    def __init__(self, *, beside: bool) -> None:
        self._beside = beside
        self._snapshots: list[float] = []
        self._after: list[float] = []  # steps after a snapshot, and all others
        self._others: list[float] = []
        self._is_after = False

    def snapshot_taken(self, seconds: float) -> None:
        """Take the time that a snapshot held the training up."""
        self._snapshots.append(seconds)
        self._is_after = True

    def step_made(self, seconds: float) -> None:
        """Take the time from one boundary between two steps to the next."""
        (self._after if self._is_after else self._others).append(seconds)
        self._is_after = False

    @property
    def is_known(self) -> bool:
        return len(self._after) > _TIMED and bool(self._others)

    @property
    def distance(self) -> int:
        """Steps from one snapshot to the next; only where `is_known`."""
        steps = self._cost / (BUDGET * max(self._step, 1e-9))
        return min(max(LEAST, LEAST * ceil(round(steps / LEAST, 6))), MOST)

    @property
    def words(self) -> str:
        return f"a snapshot takes {self._cost:.2g} s, a step {self._step:.2g} s"

    @property
    def _step(self) -> float:
        return median(self._others)

    @property
    def _cost(self) -> float:
        longer = max(median(self._after[1:]) - self._step, 0.0) if self._beside else 0.0
        return median(self._snapshots[1:]) + longer


class SnapshotKeeper:
    """Takes and restores the snapshots of one training.

    `pace` finds their distance, None where `config` has it. `most_of_ranks` gives the largest of
    all ranks' values, from 0; all ask at the same place.
    """

    def __init__(
        self,
        config: RescueConfig,
        where: str | Path,
        pace: SnapshotPace | None,
        most_of_ranks: Callable[[int], int],
    ) -> None:
        self._where, self._pace = where, pace
        self._most_of_ranks, self._most = most_of_ranks, snapshots_kept(config)
        self.snapshots = Snapshots(where, self._most)
        self._ended = 0.0  # time of the end of the last boundary
        self._refused, self._announced = False, 0

    def boundary_begins(self) -> None:
        if self._pace is not None and self._ended:
            self._pace.step_made(time.perf_counter() - self._ended)

    def boundary_ends(self) -> None:
        self._ended = time.perf_counter()

    def take(self, step: int, parts: Parts, policy: RescuePolicy, level: LossLevel) -> None:
        """Take the snapshot that is due after a step, unless a longer distance was just found."""
        if self._pace is not None and self._pace.is_known:
            self._settle_distance(self._pace, policy)
            if not policy.snapshot_due(step):
                return
        if self._most_of_ranks(int(parts.not_finite())):
            if not self._refused:
                logger.warning("rmetric: no snapshot of step %d: weights are not finite", step)
            self._refused = True
            return
        self._refused = False
        self.snapshots.parts = parts
        policy.snapshot_taken(step)
        self.snapshots.keep_only(policy.state.snapshots)
        began = time.perf_counter()
        snapshot = self.snapshots.take(step)
        snapshot.small["losses"] = level.state()  # the snapshot may have completed a record
        seconds = time.perf_counter() - began
        if self._pace is not None:
            self._pace.snapshot_taken(seconds)
        self._announce(snapshot, seconds, policy.every)

    def restore(self, decision: Decision, parts: Parts) -> Snapshot:
        """Restore a snapshot on all ranks, or raise on all and leave the training as it was."""
        assert decision.to is not None
        self.snapshots.parts = parts
        snapshot = self.snapshots.kept[decision.to]
        problem: Exception | None = None
        undo = None
        try:
            undo = self.snapshots.restore_small(snapshot, decision.skip)
        except Exception as error:
            problem = error
        if self._most_of_ranks(int(problem is not None)):
            if undo is not None:
                undo()
            raise problem or RuntimeError("another rank could not go back")
        self.snapshots.restore_rest(snapshot)
        return snapshot

    def _settle_distance(self, pace: SnapshotPace, policy: RescuePolicy) -> None:
        """Go on with the distance that the first snapshots allow, on all ranks with the largest."""
        self._pace, every = None, self._most_of_ranks(pace.distance)
        policy.state.every = every
        logger.info(
            "rmetric: rescue takes a snapshot every %d steps: %s, and %g %% of the time is allowed",
            every, pace.words, 100 * BUDGET,
        )  # fmt: skip

    def _announce(self, snapshot: Snapshot, seconds: float, every: int) -> None:
        if snapshot.size <= self._announced:
            return
        first, self._announced = not self._announced, snapshot.size
        parts, number = self.snapshots.parts, self._most
        grows = first and not snapshot.optimizer_keys and parts.optimizer is not None
        logger.info(
            "rmetric: rescue takes a snapshot of %s every %d steps (%s), at most %d at a time, "
            "%s; this one took %.3g s%s",
            gigabytes(snapshot.size), every, self._where, number, gigabytes(number * snapshot.size),
            seconds,
            "; the state of the optimizer, which does not exist yet, is added" if grows else "",
        )  # fmt: skip
        if first and isinstance(parts.data, NoData):
            logger.warning(
                "rmetric: rescue cannot rewind these data: after a return the training goes on "
                "with the data that come next"
            )


def snapshots_kept(config: RescueConfig) -> int:
    policy, most = RescuePolicy(config), 0
    for step in range(0, 4 * config.far + 4 * policy.every, policy.every):
        policy.snapshot_taken(step)
        most = max(most, len(policy.state.snapshots))
    return most


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
