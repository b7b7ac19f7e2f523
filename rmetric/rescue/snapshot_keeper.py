"""Takes the snapshots that a policy asks for, at the distance that their cost allows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path

from rmetric.rescue.loss_level import LossLevel
from rmetric.rescue.policy import Decision, RescueConfig, RescuePolicy
from rmetric.rescue.snapshot import Parts, Snapshot, Snapshots
from rmetric.rescue.snapshot_pace import BUDGET, SnapshotPace

logger = logging.getLogger("rmetric")


class SnapshotKeeper:
    """Takes and restores the snapshots of one training.

    Args:
        config: settings of the policy.
        where: ``host``, ``device``, or a folder.
        pace: finds the distance of the snapshots; None where `config` has it.
        most_of_ranks: the largest of all ranks' values, from 0; all ask at the same place.
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
        self._snapshots: Snapshots | None = None
        self._ended = 0.0  # time of the end of the last boundary
        self._refused, self._announced = False, 0

    def boundary_begins(self) -> None:
        """A step is complete."""
        if self._pace is not None and self._ended:
            self._pace.step_made(time.perf_counter() - self._ended)

    def boundary_ends(self) -> None:
        """The next step begins."""
        self._ended = time.perf_counter()

    def take(self, step: int, parts: Parts, policy: RescuePolicy, level: LossLevel) -> None:
        """Take a snapshot after a step, unless the distance that was just found is longer.

        Args:
            step: that the weights have taken last.
            parts: of the training.
            policy: a snapshot is due by it.
            level: whose losses are kept with it.
        """
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
        if self._snapshots is None:
            self._snapshots = Snapshots(parts, self._where, self._most)
        self._snapshots.parts = parts
        policy.snapshot_taken(step)
        self._snapshots.keep_only(policy.state.snapshots)
        began = time.perf_counter()
        snapshot = self._snapshots.take(step)
        snapshot.small["losses"] = level.state()  # the snapshot may have completed a record
        seconds = time.perf_counter() - began
        if self._pace is not None:
            self._pace.snapshot_taken(seconds)
        self._announce(snapshot, seconds, policy.every)

    def restore(self, decision: Decision, parts: Parts) -> Snapshot:
        """Restore a snapshot on all ranks, or raise on all and leave the training as it was."""
        snapshots = self._snapshots
        assert snapshots is not None
        assert decision.to is not None
        snapshots.parts = parts
        snapshot = snapshots.kept[decision.to]
        problem: Exception | None = None
        undo = None
        try:
            undo = snapshots.restore_small(snapshot, decision.skip)
        except Exception as error:
            problem = error
        if self._most_of_ranks(int(problem is not None)):
            if undo is not None:
                undo()
            raise problem or RuntimeError("another rank could not go back")
        snapshots.restore_rest(snapshot)
        return snapshot

    def wait(self) -> None:
        """Let the present CUDA stream wait for copies that are under way."""
        if self._snapshots is not None:
            self._snapshots.wait()

    def keep_only(self, steps: Collection[int]) -> None:
        """Drop the snapshots of other steps."""
        if self._snapshots is not None:
            self._snapshots.keep_only(steps)

    def clear(self) -> None:
        """Drop all, with their memory and files."""
        if self._snapshots is not None:
            self._snapshots.clear()

    def _settle_distance(self, pace: SnapshotPace, policy: RescuePolicy) -> None:
        """Go on with the distance that the first snapshots allow, on all ranks with the largest."""
        self._pace, every = None, self._most_of_ranks(pace.distance)
        policy.state.every = every
        logger.info(
            "rmetric: rescue takes a snapshot every %d steps: %s, and %g %% of the time is allowed",
            every, pace.words, 100 * BUDGET,
        )  # fmt: skip

    def _announce(self, snapshot: Snapshot, seconds: float, every: int) -> None:
        """Log the cost of the snapshots, again when it grows."""
        if snapshot.size <= self._announced or self._snapshots is None:
            return
        first, self._announced = not self._announced, snapshot.size
        parts, number = self._snapshots.parts, self._most
        grows = first and not snapshot.optimizer_keys and parts.optimizer is not None
        logger.info(
            "rmetric: rescue takes a snapshot of %s every %d steps (%s), at most %d at a time, "
            "%s; this one took %.3g s%s",
            gigabytes(snapshot.size),
            every,
            self._where,
            number,
            gigabytes(number * snapshot.size),
            seconds,
            "; the state of the optimizer, which does not exist yet, is added" if grows else "",
        )
        if first and not parts.data.rewindable:
            logger.warning(
                "rmetric: rescue cannot rewind these data: after a return the training goes on "
                "with the data that come next"
            )


def snapshots_kept(config: RescueConfig) -> int:
    """Largest number of snapshots at a time."""
    policy, most = RescuePolicy(config), 0
    for step in range(0, 4 * config.far + 4 * policy.every, policy.every):
        policy.snapshot_taken(step)
        most = max(most, len(policy.state.snapshots))
    return most


def gigabytes(size: int) -> str:
    """A number of bytes in words."""
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
