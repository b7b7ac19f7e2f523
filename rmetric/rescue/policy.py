"""Rescue policy: a state machine from evidence to decisions. No torch, no clock.

It receives nothing but steps and evidence, so its laws can be tested on streams of events:

- it goes back only to a snapshot of before the evidence, older than the probation;
- a step whose gradient is not finite is never taken;
- the steps that it repeats are bounded by a budget, after which it holds unless the loss is back;
- an incident ends when the loss is back, and not because its level has become usual;
- a run without evidence only has to make snapshots.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from numbers import Integral
from typing import Any

from rmetric._util.errors import as_number, require

#: Kinds of evidence, the most specific first.
KINDS = ("not_finite", "explosion", "no_update", "worker", "settings", "data", "unknown")
#: Kinds whose evidence names its first step, and by how much the other ones may name it too late.
EXACT, _LATE = ("not_finite", "explosion", "no_update"), 10
#: Kinds that the loss does not show.
INVISIBLE_IN_LOSS = ("not_finite", "no_update")
#: Steps by which the evidence of two tries may differ and still be of the same data.
SAME_PLACE = 2
#: Remedies that a policy may be allowed to use.
REMEDIES = ("leave_out", "worker", "settings", "data", "retry", "hold")
#: Value of `RescueConfig.every` for a distance by cost, and the distance that it begins with.
AUTO, _EVERY = "auto", 10
_PROBATION = 20
#: Steps beyond the evidence of which the data are left out at most: each has to be drawn.
_WIDEST = 4096
#: Tries that the budget allows at least, however far apart the snapshots are.
_TRIES = 4


@dataclass(frozen=True, kw_only=True)
class RescueConfig:
    """Settings of the policy, in steps of the optimiser.

    Attributes:
        every: between two snapshots; ``auto`` begins with 10, and takes what their cost allows
            when the first ones are timed (`SnapshotPace`).
        probation: age at which a snapshot counts as good; it must outlast the delay of the
            detector. None for 20, or `every` if that is more.
        far: age of the oldest snapshot that is kept, for what is noticed late; `probation` if
            that is more.
        left_out: steps in a row that are left out before a try from a snapshot.
        budget: repeated steps of one incident, at most.
        share: repeated steps of all incidents, as a share of the steps of the run so far, beyond
            one budget.
        quiet: steps beyond the farthest step without evidence that end an incident.
        observe: steps that a training is followed after the budget is used up, if its loss is back
            or not known.
        worker_out: steps for which a worker is left out; doubled each time it comes back bad.
        most_out: workers that are left out at a time.
        remedies: those that are allowed, see `REMEDIES`.
    """

    every: int | str = AUTO
    probation: int | None = None
    far: int = 80
    left_out: int = 3
    budget: int = 150
    share: float = 0.1
    quiet: int = 20
    observe: int = 30
    worker_out: int = 100
    most_out: int = 1
    remedies: Collection[str] = REMEDIES

    def __post_init__(self) -> None:
        least = dict.fromkeys(["every", "left_out", "budget", "quiet", "observe", "worker_out"], 1)
        least |= {"far": 0, "most_out": 0, "probation": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if (name, value) in (("every", AUTO), ("probation", None)):
                continue
            holds = (
                isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= low
            )
            auto = f" or {AUTO!r}" if name == "every" else ""
            require(name, value, holds, f"a whole number from {low}{auto}")
        if (self.probation or 0) > self.far:
            raise ValueError(
                f"probation is {self.probation} and far is {self.far}: at most far is accepted"
            )
        require("share", self.share, 0 <= as_number(self.share) < inf, "finite and at least 0")
        known = not isinstance(self.remedies, str) and isinstance(self.remedies, Collection)
        known = known and set(self.remedies) <= set(REMEDIES)
        require("remedies", self.remedies, known, f"a collection of names: {', '.join(REMEDIES)}")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A reason not to trust the training: found at `step`, and true since an earlier one.

    `kind` is one of `KINDS`, `words` what was measured, `worker` the rank that differs from the
    others; None unless the kind is ``worker``.
    """

    step: int
    since: int
    kind: str = "unknown"
    words: str = ""
    worker: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}: known are {', '.join(KINDS)}")
        if self.since > self.step:
            raise ValueError(f"since is {self.since}: it must be at most the step, {self.step}")


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The next action of the training.

    Attributes:
        action: ``go_on``, ``leave_out`` (this step), ``go_back`` (to `to`) or ``hold`` (at the
            weights of `to`).
        to: step of the snapshot to restore; None for none.
        skip: first and last step, as counted in the last try, whose data are not used again; the
            last may be to come. None to use all data again.
        workers: ranks that are left out of the gradient from now on.
        settings: the planned settings of the optimiser are set at each step from now on.
        reason: in words; empty for ``go_on``, unless there is no snapshot to hold at.
    """

    action: str = "go_on"
    to: int | None = None
    skip: tuple[int, int] | None = None
    workers: tuple[int, ...] = ()
    settings: bool = False
    reason: str = ""


@dataclass
class Incident:
    """Everything between the first evidence and the first quiet stretch beyond it."""

    onset: int  # earliest step of its evidence
    farthest: int  # latest step of its evidence
    tries: int = 0
    repeated: int = 0  # steps, by the tries
    target: int | None = None  # snapshot of the last try
    observed_until: int | None = None  # after the budget
    place: int = 0  # first step of the evidence of the first try
    window: int = 0  # steps whose data the next try skips; 0 to use them again

    def ends(self, config: RescueConfig) -> int:
        """First step at which it may be over without further evidence."""
        quiet = self.farthest + config.quiet
        return quiet if self.observed_until is None else max(quiet, self.observed_until)

    def loss_not_back(self, step: int) -> Evidence:
        """The evidence that its level lasts, whether or not a detector is used to it by now."""
        words = f"the loss is not back where it was before step {self.onset}"
        return Evidence(step=step, since=min(self.onset, step), words=words)


@dataclass
class PolicyState:
    """Everything that changes, as plain values; `every` is the distance that was found, or 0."""

    snapshots: list[int] = field(default_factory=list)
    incident: Incident | None = None
    left_out_in_a_row: int = 0
    repeated: int = 0
    out: dict[int, tuple[int, int]] = field(default_factory=dict)  # worker: until, length
    settings: bool = False
    held: bool = False
    every: int = 0


class RescuePolicy:
    """Decides what a training does about evidence, step by step.

    Call `before_update` when the gradient of a step is there, `after_step` when the step is
    complete, and `snapshot_due` after that; report a snapshot with `snapshot_taken`. Steps count
    from 1; after a ``go_back`` they are counted from the snapshot again.

    >>> policy = RescuePolicy()
    >>> for step in range(61):
    ...     _ = policy.after_step(step)
    ...     if policy.snapshot_due(step):
    ...         _ = policy.snapshot_taken(step)
    >>> decision = policy.after_step(61, Evidence(step=61, since=58))
    >>> decision.action, decision.to
    ('go_back', 40)
    """

    def __init__(self, config: RescueConfig | None = None) -> None:
        self.config = config or RescueConfig()
        self.state = PolicyState()

    # -- snapshots

    @property
    def every(self) -> int:
        if self.state.every:
            return self.state.every
        return _EVERY if isinstance(self.config.every, str) else self.config.every

    @property
    def probation(self) -> int:
        given = self.config.probation
        return max(_PROBATION, self.every) if given is None else given

    @property
    def budget(self) -> int:
        tries = _TRIES * (self.every + self.probation) if self.state.every else 0
        return max(self.config.budget, tries)

    def snapshot_due(self, step: int) -> bool:
        state = self.state
        if state.held or state.incident is not None or step % self.every:
            return False
        return not state.snapshots or step > state.snapshots[-1]

    def snapshot_taken(self, step: int) -> tuple[int, ...]:
        """Record a snapshot of a later step; returns the steps of the snapshots to drop.

        Kept are those younger than the probation, the newest older one, the oldest that is no older
        than `far` (or the newest that is), and one between these two.
        """
        state, probation = self.state, self.probation
        far_age = max(self.config.far, probation)
        before, state.snapshots = state.snapshots, [*state.snapshots, step]
        young = [s for s in state.snapshots if s > step - probation]
        good = [s for s in state.snapshots if s <= step - probation]
        # The far one moves on when its successor is as old as `far` requires.
        far = [s for s in good if s <= step - far_age][-1:] or good[:1]
        middle = [s for s in good if far and s >= (far[0] + step - probation) / 2][:1]
        state.snapshots = sorted({*young, *good[-1:], *far, *middle})
        return tuple(s for s in before if s not in state.snapshots)

    # -- a step

    def before_update(self, step: int, evidence: Evidence | None = None) -> Decision:
        state = self.state
        if evidence is None:
            state.left_out_in_a_row = 0
            return self._decision()
        state.left_out_in_a_row += 1
        allowed = "leave_out" in self.config.remedies
        if allowed and state.left_out_in_a_row <= self.config.left_out:
            return self._decision("leave_out", f"{evidence.words}: step {step} is left out")
        decision = self._respond(evidence)
        if decision.action == "go_on" and evidence.kind == "not_finite":
            return self._decision("leave_out", f"{evidence.words}: step {step} is left out")
        return decision

    def after_step(
        self, step: int, evidence: Evidence | None = None, *, loss_recovered: bool | None = None
    ) -> Decision:
        """`loss_recovered`: it is where it was before the incident; None if that is not known."""
        state = self.state
        for worker, (until, _) in list(state.out.items()):
            if until <= step:
                state.out[worker] = (-1, state.out[worker][1])
        incident = state.incident
        if evidence is None and incident is not None and step >= incident.ends(self.config):
            if loss_recovered is not False:
                state.incident = None
            else:
                evidence = incident.loss_not_back(step)
        return self._decision() if evidence is None else self._respond(evidence, loss_recovered)

    def at_end(self, step: int, *, loss_recovered: bool | None = None) -> Decision:
        """Before the training ends: an incident whose loss is not back is not over."""
        incident = self.state.incident
        if incident is None or not incident.tries or loss_recovered is not False:
            return self._decision()
        evidence = incident.loss_not_back(step)
        decision = self._respond(evidence)
        return decision if decision.action != "go_on" else self._hold_before(evidence, incident)

    @property
    def workers_out(self) -> tuple[int, ...]:
        return tuple(sorted(w for w, (until, _) in self.state.out.items() if until >= 0))

    # -- decisions

    def _respond(self, evidence: Evidence, loss_recovered: bool | None = None) -> Decision:
        state, config = self.state, self.config
        if state.held:
            return self._decision("hold", evidence.words)
        incident = state.incident
        if incident is None:
            incident = state.incident = Incident(evidence.since, evidence.step)
        incident.onset = min(incident.onset, evidence.since)
        incident.farthest = max(incident.farthest, evidence.step)
        if incident.observed_until is not None:
            return self._observe(incident, evidence, loss_recovered)
        self._apply_remedy(evidence)
        target = self._target(incident, evidence)
        if target is None:
            return self._exhausted(incident, evidence, loss_recovered)
        cost = evidence.step - target
        over = (
            incident.repeated + cost > self.budget
            or state.repeated + cost > self.budget + config.share * evidence.step
        )
        if over or "retry" not in config.remedies:
            return self._exhausted(incident, evidence, loss_recovered)
        incident.tries += 1
        incident.repeated += cost
        state.repeated += cost
        state.snapshots = [s for s in state.snapshots if s <= target]
        state.left_out_in_a_row = 0
        skip = self._data_to_skip(incident, evidence, target)
        words = (
            f"went back from {evidence.step} to {target} because {evidence.words}; "
            f"{cost} steps; try {incident.tries}"
        )
        return self._decision("go_back", words, to=target, skip=skip)

    def _data_to_skip(
        self, incident: Incident, evidence: Evidence, target: int
    ) -> tuple[int, int] | None:
        """First and last step whose data are left out: where evidence comes back at its place."""
        if "data" not in self.config.remedies:
            return None
        if incident.tries == 1:
            incident.place = evidence.since
            return None
        returns = abs(evidence.since - incident.place) <= SAME_PLACE < evidence.since - target
        if not incident.window and incident.tries == 2 and returns:
            incident.window = evidence.step - evidence.since + 1
        if not incident.window:
            return None
        incident.window = min(2 * incident.window, _WIDEST)
        return evidence.since, evidence.step + incident.window

    def _target(self, incident: Incident, evidence: Evidence) -> int | None:
        """The snapshot to go back to: of before the evidence and past its probation."""
        limit = min(evidence.since - 1, incident.onset - 1)
        good = [s for s in self.state.snapshots if s <= limit]
        if incident.target is None:
            late = 0 if evidence.kind in EXACT else min(_LATE, self.probation // 2)
            oldest = good[:1]
            newest = min(evidence.step - self.probation, limit - late)
            good = [s for s in good if s <= newest] or oldest
        if not good:
            return None
        if incident.target is None or incident.target not in good:
            incident.target = good[-1]
        return incident.target

    def _apply_remedy(self, evidence: Evidence) -> None:
        state, config = self.state, self.config
        if evidence.kind == "worker" and evidence.worker is not None:
            room = len({*self.workers_out, evidence.worker}) <= config.most_out
            if "worker" in config.remedies and room:
                _, length = state.out.get(evidence.worker, (-1, config.worker_out // 2))
                state.out[evidence.worker] = (evidence.step + 2 * length, 2 * length)
        if evidence.kind == "settings" and "settings" in config.remedies:
            state.settings = True

    def _exhausted(
        self, incident: Incident, evidence: Evidence, loss_recovered: bool | None
    ) -> Decision:
        """No try is left: hold, or follow the training for a while if the loss is back."""
        if "hold" not in self.config.remedies:
            return self._decision()
        observe = 0 if loss_recovered is False else self.config.observe
        incident.observed_until = evidence.step + observe
        return self._observe(incident, evidence, loss_recovered=None)

    def _observe(
        self, incident: Incident, evidence: Evidence, loss_recovered: bool | None
    ) -> Decision:
        assert incident.observed_until is not None
        if loss_recovered and evidence.kind not in INVISIBLE_IN_LOSS:
            return self._decision()
        if evidence.step < incident.observed_until and evidence.kind != "not_finite":
            return self._decision()
        return self._hold_before(evidence, incident)

    def _hold_before(self, evidence: Evidence, incident: Incident) -> Decision:
        """Hold at a snapshot of before the incident; go on, with a reason, if there is none."""
        good = [s for s in self.state.snapshots if s < incident.onset]
        target = incident.target if incident.target in good else max(good, default=0)
        if not good:
            missing = f"no snapshot of before step {incident.onset} is kept"
            words = f"gives up, neither goes back nor holds: {evidence.words}, and {missing}"
            return self._decision("go_on", words)
        self.state.held = True
        words = f"held at step {target} because {evidence.words} does not pass"
        return self._decision("hold", words, to=target)

    def _decision(self, action: str = "go_on", reason: str = "", **more: Any) -> Decision:
        workers, settings = self.workers_out, self.state.settings
        return Decision(action=action, reason=reason, workers=workers, settings=settings, **more)

    # -- state

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.state) | {"out": [[w, *entry] for w, entry in self.state.out.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        incident = state["incident"]
        self.state = PolicyState(
            **{
                **state,
                "snapshots": list(state["snapshots"]),
                "incident": None if incident is None else Incident(**incident),
                "out": {worker: (until, length) for worker, until, length in state["out"]},
            }
        )
