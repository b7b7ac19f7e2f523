"""A simulated job: settings of fleet, saves and predictor, and its events. Times in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil, gamma, inf, isinf
from typing import NamedTuple

import numpy as np

from rmetric.guard.policy import PolicyConfig

DAY = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Fleet of GPUs: failure rates, spares and repair.

    Attributes:
        num_gpus: of the job, a multiple of `gpus_per_node`.
        failures_per_node_day: each ends the job and takes one node away; at least 0.
        weibull_shape: of the time between two failures of the whole job: 1 is exponential,
            below 1 failures come in bursts.
        restart_seconds: from a failure to the first new step, once there are nodes: noticing it,
            launching, loading, warming up. A failure in between begins it again.
        num_spares: further nodes that stand by; None where one is always there.
        repair_seconds: until a node that failed is back.
        repairs: if there are any, each repair takes one of these, drawn, instead.
        relapse_share: of the repaired nodes, from 0 to below 1, that fail again, after one of
            `relapse_gaps`, drawn, in the job or beside it. First failures are fewer by this
            share, so that as many nodes fail in all.
        shrinks: whether the job goes on with the nodes that are there; else it waits for all.
        replica_nodes: nodes of one data-parallel replica; a shrunken job has whole replicas.
        grows: whether a shrunken job restarts after a save when a replica more is there;
            else only when it restarts anyway.
    """

    num_gpus: int
    gpus_per_node: int = 8
    failures_per_node_day: float = 6.50e-3
    weibull_shape: float = 1.0
    restart_seconds: float = 600.0
    num_spares: int | None = None
    repair_seconds: float = DAY
    repairs: tuple[float, ...] = ()
    relapse_share: float = 0.0
    relapse_gaps: tuple[float, ...] = ()
    shrinks: bool = False
    replica_nodes: int = 1
    grows: bool = True

    @property
    def num_nodes(self) -> int:
        return self.num_gpus // self.gpus_per_node

    @property
    def seconds_between_failures(self) -> float:
        """Mean, of the whole job; inf without failures."""
        rate = self.num_nodes * self.failures_per_node_day / DAY
        return 1.0 / rate if rate else inf

    def nodes_for(self, available: int) -> int:
        """Nodes that the job takes where so many are available; 0: it waits."""
        if self.shrinks:
            # More may be down than there are: warnings drop nodes that have failed already.
            usable = min(max(available, 0), self.num_nodes)
            return usable // self.replica_nodes * self.replica_nodes
        return self.num_nodes if available >= self.num_nodes else 0


@dataclass(frozen=True, kw_only=True)
class Saves:
    """Checkpoints.

    Attributes:
        interval_seconds: computing between two regular saves, at full speed; None: none at all.
        blocking_seconds: that the training stands still for a save.
        durable_seconds: from the beginning of a save until a restart can use it, at least
            `blocking_seconds`; equal to it where saves are synchronous.
        least_gap, most_per_hour: as in `rmetric.guard.policy.PolicyConfig`.
    """

    interval_seconds: float | None
    blocking_seconds: float
    durable_seconds: float
    least_gap: float = 0.25
    most_per_hour: int = 6


@dataclass(frozen=True, kw_only=True)
class FailurePredictor:
    """Failure predictor: recall, lead time and false alarms.

    Attributes:
        recall: share of failures with a warning, from 0 to 1.
        mean_lead_seconds: mean time from a warning to its failure, exponentially distributed;
            no warning precedes the previous failure. A false alarm lasts as long.
        false_alarms_per_gpu_day: at least 0.
        repeats: a warning requests again after each save until it ends; otherwise, as in the
            guard, it is answered once.
        drops: after an emergency save the suspected node is removed and the job restarts
            without it, so that its failure has no effect.
    """

    recall: float = 0.0
    mean_lead_seconds: float = 600.0
    false_alarms_per_gpu_day: float = 0.0
    repeats: bool = False
    drops: bool = False


@dataclass(frozen=True, kw_only=True)
class FleetJob:
    """A training job of `work_seconds` of computing at full speed.

    Attributes:
        work_seconds: above 0; rounded up to whole steps.
        step_seconds: duration of a step at full speed; saves happen between steps.
        longest_seconds: wall time after which the job is given up.
    """

    fleet: Fleet
    saves: Saves
    work_seconds: float
    predictor: FailurePredictor = field(default_factory=FailurePredictor)
    step_seconds: float = 10.0
    longest_seconds: float = inf

    @property
    def num_steps(self) -> int:
        return ceil(self.work_seconds / self.step_seconds - 1e-9)

    def policy_config(self) -> PolicyConfig:
        """Settings of the checkpoint policy, in whole steps."""
        if self.saves.interval_seconds is None:
            interval = self.num_steps + 1
        else:
            interval = max(round(self.saves.interval_seconds / self.step_seconds), 1)
        return PolicyConfig(
            interval_steps=interval,
            least_gap=self.saves.least_gap,
            most_per_hour=self.saves.most_per_hour,
        )


# -- sampled failures, warnings and false alarms

#: Numbers drawn at once, since a Generator is slow for single numbers.
BLOCK = 256


class NodeFailure(NamedTuple):
    """Failure of the node in `slot`, `lead` seconds after its warning; None without one."""

    time: float
    slot: int
    lead: float | None = None


class FalseAlarm(NamedTuple):
    """Warning without a failure, on the node in `slot` from `time`, for `lasts` seconds."""

    time: float
    slot: int
    lasts: float


def failures(job: FleetJob, seed: int) -> Iterator[NodeFailure]:
    """Endless failures in order of time; more recall adds warnings and changes nothing else."""
    fleet, predictor = job.fleet, job.predictor
    mean = fleet.seconds_between_failures / (1.0 - fleet.relapse_share)
    if isinf(mean):
        return
    shape = fleet.weibull_shape
    scale = mean / gamma(1.0 + 1.0 / shape)
    time = 0.0
    for gap, slot, mark, lead in _draws(np.random.default_rng([seed, 0]), shape, fleet):
        time += scale * gap
        warned = mark < predictor.recall
        yield NodeFailure(time, slot, predictor.mean_lead_seconds * lead if warned else None)


def false_alarms(job: FleetJob, seed: int) -> Iterator[FalseAlarm]:
    """Endless sequence of false alarms, in order of time."""
    fleet, predictor = job.fleet, job.predictor
    if not predictor.false_alarms_per_gpu_day:
        return
    mean = DAY / (predictor.false_alarms_per_gpu_day * fleet.num_gpus)
    time = 0.0
    for gap, slot, _, lasts in _draws(np.random.default_rng([seed, 1]), 1.0, fleet):
        time += mean * gap
        yield FalseAlarm(time, slot, predictor.mean_lead_seconds * lasts)


def _draws(
    rng: np.random.Generator, shape: float, fleet: Fleet
) -> Iterator[tuple[float, int, float, float]]:
    """Gap (Weibull of scale 1), slot, mark (uniform), duration (exponential of mean 1)."""
    while True:
        yield from zip(
            rng.weibull(shape, BLOCK).tolist(),
            rng.integers(fleet.num_nodes, size=BLOCK).tolist(),
            rng.random(BLOCK).tolist(),
            rng.exponential(size=BLOCK).tolist(),
            strict=True,
        )
