"""Discrete-event simulation of one training job: steps, saves, failures, restarts, repairs.

Saves are decided by `rmetric.guard.policy.CheckpointPolicy` at the end of steps, as in a
training; simpy provides the clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from math import ceil, floor
from typing import Any

import numpy as np

from rmetric.guard.policy import CheckpointPolicy, Vote
from studies.fleet.job_settings import FalseAlarm, FleetJob, NodeFailure, failures, false_alarms

#: Shares of the wall time; they sum to it.
SHARES = ("productive", "lost", "slow", "saving", "restarting", "waiting")
#: Tolerance for equal times with different rounding, seconds.
TINY = 1e-6
FAILED, WARNED = "failed", "warned"
Events = Generator[Any, Any, None]


@dataclass(frozen=True, kw_only=True)
class JobOutcome:
    """Outcome of one job.

    Attributes:
        wall: seconds from the first step to the last.
        spent: seconds by `SHARES`. Productive: computing at full speed whose steps were kept to
            the end or, if the job was given up, to its last durable save; lost: those that were
            rolled back or incomplete; slow: additional, while the job was shrunk; restarting: from
            a failure, a drop or growth to the first step, without waiting for nodes.
        finished: False if the job was given up at `longest_seconds`.
        counts: numbers of "failures", "relapses" among them, "warned" and "averted" (by
            dropping the node) ones, of "false_alarms", and of saves, such as "saves_emergency".
    """

    wall: float
    spent: dict[str, float]
    finished: bool
    counts: dict[str, int]

    @property
    def ettr(self) -> float:
        """Effective training time ratio."""
        return self.spent["productive"] / self.wall


def replicate(job: FleetJob, seed: int) -> JobOutcome:
    rng = np.random.default_rng([seed, 2])
    return simulate(job, failures(job, seed), false_alarms(job, seed), rng)


def simulate(
    job: FleetJob,
    node_failures: Iterable[NodeFailure],
    alarms: Iterable[FalseAlarm] = (),
    rng: np.random.Generator | None = None,
) -> JobOutcome:
    """Simulate the job with failures and false alarms in order of time; `rng` draws repairs."""
    if rng is None and (job.fleet.repairs or job.fleet.relapse_share):
        raise ValueError("rng is None: repairs and relapses are drawn from a Generator")
    return _Run(job, rng).outcome(node_failures, alarms)


class _Leave(Exception):
    """Voluntary restart of the job right after a durable save."""


class _Run:
    """State of one job. Failures interrupt it in every phase but `waiting`."""

    def __init__(self, job: FleetJob, rng: np.random.Generator | None) -> None:
        import simpy

        self.job, self.fleet, self.rng = job, job.fleet, rng
        self.env = simpy.Environment()
        self.interrupted = simpy.Interrupt
        self.config = job.policy_config()
        self.spent = dict.fromkeys(SHARES, 0.0)
        self.counts: Counter[str] = Counter()
        self.phase, self.since = "waiting", 0.0
        self.step, self.nodes, self.down = 0, 0, 0
        self.policy: CheckpointPolicy | None = None
        self.durable_at = 0.0
        self.standing: dict[str, None] = {}
        self.dropped: set[str] = set()
        self.repaired: Any = None

    def outcome(
        self, node_failures: Iterable[NodeFailure], alarms: Iterable[FalseAlarm]
    ) -> JobOutcome:
        self.training = self.env.process(self._life())
        self.env.process(self._failures(node_failures))
        self.env.process(self._false_alarms(alarms))
        end: Any = self.training
        if self.job.longest_seconds < float("inf"):
            end = self.training | self.env.timeout(self.job.longest_seconds)
        self.env.run(end)
        finished = self.step >= self.job.num_steps
        if not finished:
            self._enter("given up")
            self._roll_back()
        kept = self.step * self.job.step_seconds
        return JobOutcome(
            wall=self.env.now,
            finished=finished,
            counts=dict(sorted(self.counts.items())),
            spent=self.spent
            | {"productive": kept, "lost": max(self.spent["productive"] - kept, 0.0)},
        )

    # The job itself

    def _life(self) -> Events:
        first = True
        while self.step < self.job.num_steps:
            try:
                yield from self._start(0.0 if first else self.fleet.restart_seconds)
                yield from self._train()
            except (self.interrupted, _Leave):
                self._roll_back()
            first = False
        self._enter("finished")

    def _start(self, restart_seconds: float) -> Events:
        self._enter("waiting")
        while not self.fleet.nodes_for(self._available()):
            self.repaired = self.env.event()
            yield self.repaired
        self.nodes = self.fleet.nodes_for(self._available())
        self._enter("restarting")
        yield self.env.timeout(restart_seconds)
        self.policy = CheckpointPolicy(self.config, now=self.env.now, step=self.step)
        self._ask_again()

    def _train(self) -> Events:
        policy = self._the_policy()
        while True:
            yield from self._compute(self._steps_to_next_question())
            if self.step >= self.job.num_steps:
                return
            self._settle()
            if self.job.predictor.repeats and not policy.pending:
                self._ask_again()
            vote = policy.vote(self.env.now, self.step)
            if vote is not Vote.NOTHING:
                yield from self._save(vote)

    def _compute(self, num_steps: int) -> Events:
        """So many steps, or up to the boundary after a warning."""
        self._enter("productive")
        begin, took = self.env.now, self._step_takes()
        goal = num_steps
        while goal:
            try:
                yield self.env.timeout(max(begin + goal * took - self.env.now, 0.0))
                break
            except self.interrupted as news:
                done = (self.env.now - begin) / took
                if news.cause == FAILED:
                    self.step += min(floor(done), goal)
                    raise
                goal = min(goal, floor(done) + 1)
        self.step += goal
        self._enter("between steps")

    def _save(self, vote: Vote) -> Events:
        policy = self._the_policy()
        suspects = [entry.reason for entry in policy.pending.values() if self.job.predictor.drops]
        grows = self.fleet.grows and self.fleet.nodes_for(self._available()) > self.nodes
        leaves = bool(suspects) or grows
        policy.begin(self.env.now, self.step, vote)
        self.counts[f"saves_{vote.name.lower()}"] += 1
        self.durable_at = self.env.now + self.job.saves.durable_seconds
        self._enter("saving")
        # Steps beyond a save after which the job leaves would be thrown away.
        saves = self.job.saves
        yield self.env.timeout(saves.durable_seconds if leaves else saves.blocking_seconds)
        self._settle()
        if leaves:
            for key in suspects:
                self.standing.pop(key, None)
                self.dropped.add(key)
                self._lose_node()
            raise _Leave

    def _steps_to_next_question(self) -> int:
        """Steps until the policy could request a save, without other events before."""
        policy, interval = self._the_policy(), self.config.interval_steps or 1
        saved = policy.in_flight.step if policy.in_flight else policy.durable_step
        repeats = self.standing and self.job.predictor.repeats
        if repeats and (policy.in_flight or not policy.pending):
            steps = 1  # it asks again as soon as it is answered
        elif policy.pending:
            steps = saved + ceil(self.config.least_gap * interval) - self.step
        else:
            steps = saved + interval - self.step
        if policy.in_flight:
            until_durable = (self.durable_at - TINY - self.env.now) / self._step_takes()
            steps = max(steps, ceil(until_durable))
        steps = max(steps, 1)
        return min(steps, self.job.num_steps - self.step)

    # What happens to it

    def _failures(self, node_failures: Iterable[NodeFailure]) -> Events:
        for number, failure in enumerate(node_failures):
            key = f"failure {number}"
            if failure.lead is not None:
                yield self._at(max(failure.time - failure.lead, self.env.now))
                self._warn(key, failure.slot)
            yield self._at(failure.time)
            self.standing.pop(key, None)
            self._strike(key, failure)

    def _strike(self, key: str, failure: NodeFailure) -> bool:
        """Whether it ended the job."""
        if self.phase == "waiting" or failure.slot >= self.nodes:
            return False
        if key in self.dropped:
            self.counts["averted"] += 1
            return False
        self.counts["failures"] += 1
        self.counts["warned"] += failure.lead is not None
        self._lose_node()
        if self.training.is_alive:
            self.training.interrupt(FAILED)
        return True

    def _false_alarms(self, alarms: Iterable[FalseAlarm]) -> Events:
        for number, alarm in enumerate(alarms):
            yield self._at(alarm.time)
            self.counts["false_alarms"] += 1
            key = f"false alarm {number}"
            self._warn(key, alarm.slot)
            if key in self.standing:
                self.env.process(self._ends(key, alarm.lasts))

    def _ends(self, key: str, lasts: float) -> Events:
        yield self.env.timeout(lasts)
        self.standing.pop(key, None)

    def _warn(self, key: str, slot: int) -> None:
        """Pass a warning to a job with a state to save; a starting job gets active ones later."""
        if self.phase == "waiting" or slot >= self.nodes:
            return
        self.standing[key] = None
        if self.policy is not None:
            self.policy.request("risk", key)
        if self.phase == "productive":
            self.training.interrupt(WARNED)

    def _ask_again(self) -> None:
        """Repeat active warnings under new keys, because the policy answers each key once."""
        for reason in self.standing:
            key = f"{reason}, step {self.step}"
            self._the_policy().request("risk", reason, key=key)

    def _lose_node(self) -> None:
        if self.fleet.num_spares is not None:
            self.down += 1
            self.env.process(self._repair())

    def _repair(self) -> Events:
        fleet, rng = self.fleet, self.rng
        repairs = fleet.repairs or (fleet.repair_seconds,)
        yield self.env.timeout(repairs[rng.integers(len(repairs)) if rng else 0])
        self.down -= 1
        if self.repaired is not None:
            self.repaired.succeed()
            self.repaired = None
        if rng and rng.random() < fleet.relapse_share:
            yield self.env.timeout(fleet.relapse_gaps[rng.integers(len(fleet.relapse_gaps))])
            # Any node that is there. A relapse of a spare, or while the job waits, ends no job.
            again = NodeFailure(self.env.now, int(rng.integers(max(self._available(), 1))))
            if self._strike("relapse", again):
                self.counts["relapses"] += 1
            else:
                self._lose_node()

    # Book-keeping

    def _settle(self) -> None:
        """Report a save to the policy once it is durable."""
        policy = self.policy
        if policy and policy.in_flight and self.env.now >= self.durable_at - TINY:
            policy.committed()

    def _roll_back(self) -> None:
        """Return to the last durable step; the computation since then is lost."""
        self._enter("waiting")
        if self.policy is None:
            return
        self._settle()
        self.step, self.policy = self.policy.durable_step, None

    def _enter(self, phase: str) -> None:
        """Book the time since the last change of phase."""
        spent = self.env.now - self.since
        if self.phase == "productive":
            full_speed = spent * self.nodes / self.fleet.num_nodes
            self.spent["slow"] += spent - full_speed
            self.spent["productive"] += full_speed
        elif self.phase in self.spent:
            self.spent[self.phase] += spent
        self.phase, self.since = phase, self.env.now

    def _available(self) -> int:
        if self.fleet.num_spares is None:
            return self.fleet.num_nodes
        return self.fleet.num_nodes + self.fleet.num_spares - self.down

    def _step_takes(self) -> float:
        return self.job.step_seconds * self.fleet.num_nodes / self.nodes

    def _the_policy(self) -> CheckpointPolicy:
        assert self.policy is not None
        return self.policy

    def _at(self, time: float) -> Any:
        return self.env.timeout(max(time - self.env.now, 0.0))
