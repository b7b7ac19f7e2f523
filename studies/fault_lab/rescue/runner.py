"""Run a branch of the laboratory under a policy, against its exact twin.

Faults act by executed steps: a step that is repeated meets the fault of its own time, so a fault
that passes does, and one that stays stays. Announced changes belong to the schedule and act by it.

Most steps need no training. Until a policy acts for the first time, its run is the branch without
a policy, which is trained once. After it has gone back to a state of before the onset, and the
fault is over, its run is the control.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rmetric.records import Record
from rmetric.rescue.policy import Decision
from rmetric.rescue.recent_batches import position_after
from studies.fault_lab.branches import Disturbance, gradients, rounded, take_step
from studies.fault_lab.faults import fault
from studies.fault_lab.spec import LabSpec
from studies.fault_lab.training import Average, Settings, Snapshot, Training

EVERY = 10  # steps between two saved states of a control
GO_ON = Decision()
#: A run that has computed so many times the steps of its branch is stopped, and lost.
MOST = 2


class State(NamedTuple):
    """All that a branch is after a step; `executed` steps are the clock of the fault."""

    training: Snapshot
    executed: int
    fault: Any


class Lineage(NamedTuple):
    """A run that is trained already: all its records, and the states after some steps."""

    records: list[Record]
    states: dict[int, State]


class Control(NamedTuple):
    """A control; `losses` are on the whole held-out batch, at multiples of `EVERY`."""

    spec: LabSpec
    training: Training
    lineage: Lineage
    losses: dict[int, float]


@dataclass
class Outcome:
    """Result of one run under one policy.

    Attributes:
        end: ``finished``, ``held`` or ``not_finite``.
        step: of the final weights.
        above: nats of their validation loss above the twin's at that step; nan if not finite.
        executed: steps that were computed, from the onset of the fault on.
        extra: of these, those beyond the steps that the run has advanced.
        actions: executed step, step, kind and words of what the policy did.
    """

    end: str
    step: int
    above: float
    executed: int
    extra: int
    actions: list[tuple[int, int, str, str]]


class Untreated(NamedTuple):
    """A branch without a policy: its steps, with a state at each from the onset on, and its end."""

    lineage: Lineage
    outcome: Outcome


def train_control(spec: LabSpec, onsets: set[int]) -> Control:
    """Train the control of a seed, with its states before `onsets` and at multiples of `EVERY`."""
    training = Training(spec)
    lineage = Lineage([], {0: State(training.snapshot(), 0, None)})
    losses = {}
    for step in range(1, spec.total_steps + 1):
        lineage.records.append(take_step(training))
        if step % EVERY == 0 or step + 1 in onsets:
            lineage.states[step] = State(training.snapshot(), step, None)
        if step % EVERY == 0:
            losses[step] = validation_loss(training)
    return Control(spec, training, lineage, losses)


def validation_loss(training: Training) -> float:
    """Loss on the whole held-out batch, nats per token, whatever a fault does to evaluations."""
    return training.model.evaluate(*training.held_out)


def twin_loss(control: Control, step: int) -> float:
    """Validation loss of the control's weights after `step`."""
    if step not in control.losses:
        training = control.training
        present = training.snapshot()
        training.restore(_nearest(control.lineage, step).training)
        while training.step < step:
            take_step(training)
        control.losses[step] = validation_loss(training)
        training.restore(present)
    return control.losses[step]


def _nearest(lineage: Lineage, step: int) -> State:
    return lineage.states[max(s for s in lineage.states if s <= step)]


class Branch:
    """A branch trained step by step; `left_out` are batches not used: first, one after the last."""

    def __init__(self, control: Control, spec: LabSpec) -> None:
        onset, duration = spec.onset_step, spec.duration_steps
        assert onset is not None
        assert duration is not None
        self.control, self.spec, self.training = control, spec, control.training
        self._disturbance = Disturbance(spec)
        kind = fault(spec.fault or "")
        self._by_schedule = kind.planned is not None
        # A fault that lasts to the end of a run lasts beyond it if steps are repeated.
        self._disturbance.forever = not kind.duration_steps
        self._fault_end = onset + duration if kind.duration_steps else inf
        self.executed = 0
        self.left_out: list[tuple[int, int]] = []
        self.load(control.lineage.states[onset - 1])

    @property
    def step(self) -> int:
        """Steps of the schedule that the weights have taken."""
        return self.training.step

    @property
    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.training.model.weights_N).all())

    @property
    def fault_is_over(self) -> bool:
        """No step from the next one on is disturbed, however often it is repeated."""
        return not self._by_schedule and self.executed + 1 >= self._fault_end

    def gradients(
        self, adjust: Callable[[Settings], None] = lambda settings: None
    ) -> tuple[Settings, Tensor, Tensor]:
        """`branches.gradients` for the next step."""
        self.executed += 1
        clock = self.step + 1 if self._by_schedule else self.executed
        batch = self.batch_of(self.step + 1)
        return gradients(self.training, self._disturbance, clock=clock, batch=batch, adjust=adjust)

    def take(self, settings: Settings, average: Average, *, update: bool = True) -> Record:
        """Take the step, or count it without an update: its batch is used; its record."""
        record = rounded(self.training.finish_step(settings, average, update=update))
        if not update:
            record.skipped = True
        return record

    def advance(self) -> Record:
        """Take the next step as the run itself would."""
        settings, losses_W, gradients_WN = self.gradients()
        return self.take(settings, self.training.average(losses_W, gradients_WN))

    def state(self) -> State:
        fault_state = copy.deepcopy(self._disturbance.state)
        return State(self.training.snapshot(), self.executed, fault_state)

    def load(self, state: State) -> None:
        """Continue from a state as if nothing had come after it."""
        self.training.restore(state.training)
        self.executed = state.executed
        if state.fault is not None:
            self._disturbance.state = copy.deepcopy(state.fault)

    def leave_out_data(self, first: int, last: int) -> None:
        """Leave out the batches of these steps from now on."""
        self.left_out = [*self.left_out, (self.batch_of(first), self.batch_of(last) + 1)]

    def batch_of(self, step: int) -> int:
        return position_after(1, step, self.left_out) - 1

    def outcome(self, actions: list[tuple[int, int, str, str]], *, held: bool = False) -> Outcome:
        """Outcome with the present weights as the final ones."""
        step, before = self.step, (self.spec.onset_step or 1) - 1
        above, end = nan, "not_finite"
        if self.is_finite:
            above = validation_loss(self.training) - twin_loss(self.control, step)
            end = "finished" if step >= self.spec.total_steps else end
        executed = self.executed - before
        extra = executed - (step - before)
        return Outcome("held" if held else end, step, above, executed, extra, actions)


def train_untreated(control: Control, spec: LabSpec) -> Untreated:
    """Train a branch without a policy, to its end or to the first weights that are not finite."""
    branch = Branch(control, spec)
    before = control.lineage.records[: branch.step]
    lineage = Lineage(before, {branch.step: branch.state()})
    while branch.step < spec.total_steps and branch.is_finite:
        lineage.records.append(branch.advance())
        lineage.states[branch.step] = branch.state()
    return Untreated(lineage, branch.outcome([]))


# -- policies


class Seen(NamedTuple):
    """Measurements of a step before its update; loss and norm are of all workers."""

    step: int
    loss: float
    norm: float

    @property
    def finite(self) -> bool:
        return isfinite(self.loss) and isfinite(self.norm)

    @classmethod
    def of(cls, record: Record) -> Seen:
        assert record.training_loss is not None
        assert record.gradient_norm is not None
        return cls(record.step, record.training_loss, record.gradient_norm)


class Treatment:
    """One policy in one branch; with `every_step` it may change any gradient: no step is shared."""

    every_step = False
    total_steps = 0

    def before(self, seen: Seen) -> Decision:
        """Decide on a step whose gradient is there."""
        return GO_ON

    def after(self, record: Record) -> Decision:
        """Decide after a step."""
        return GO_ON

    def settings(self, settings: Settings) -> None:
        """Change the settings of the next step."""

    def combine(self, training: Training, losses_W: Tensor, gradients_WN: Tensor) -> Average:
        return training.average(losses_W, gradients_WN)

    def clip(self, training: Training, average: Average) -> Average:
        """Change a gradient that is about to be used."""
        return average

    @property
    def changes_steps(self) -> bool:
        """`settings` or `combine` change something at present."""
        return self.every_step

    def snapshot_due(self, step: int) -> bool:
        return False

    def snapshot_taken(self, step: int) -> tuple[int, ...]:
        """Steps of the snapshots that are dropped now."""
        return ()

    def state(self) -> Any:
        """State that goes back with a snapshot."""
        return None

    def load(self, state: Any) -> None:
        """Restore what `state` gave."""


class Treated:
    """The run of a branch under a policy; `trace`: executed step and record of each step."""

    def __init__(
        self, control: Control, spec: LabSpec, untreated: Untreated, treatment: Treatment
    ) -> None:
        self.control, self.spec, self.untreated = control, spec, untreated
        self.treatment = treatment
        self.trace: list[tuple[int, Record]] = []
        treatment.total_steps = spec.total_steps
        self.branch = Branch(control, spec)
        self.actions: list[tuple[int, int, str, str]] = []
        self.kept: dict[int, tuple[State, Any]] = {}
        self.lineage: Lineage | None = control.lineage
        self.step = self.branch.executed = 0
        assert spec.onset_step is not None
        for record in control.lineage.records[: spec.onset_step - 1]:
            # What a policy decides before the onset is not done.
            treatment.before(Seen.of(record))
            if self._passed(record).action == "go_on":
                self._keep()
        self.lineage = None if treatment.every_step else untreated.lineage
        self.limit = self.step + MOST * (spec.total_steps - self.step)

    def run(self) -> Outcome:
        """To its end."""
        while self.step < self.spec.total_steps and self.branch.executed < self.limit:
            lineage = self.lineage
            if lineage is not None and self.step >= len(lineage.records):
                break  # the untreated branch has ended before its schedule
            decision = self._live_step() if lineage is None else self._shared_step(lineage)
            if decision.action in ("go_back", "hold"):
                self._note(decision)
                self._go_back(decision)
                if decision.action == "hold":
                    return self.branch.outcome(self.actions, held=True)
            elif self.lineage is None and not self.branch.is_finite:
                break
        self._leave_lineage()
        return self.branch.outcome(self.actions)

    def _shared_step(self, lineage: Lineage) -> Decision:
        """A step of a run that is trained already; it becomes our own if the policy acts."""
        record = lineage.records[self.step]
        decision = self.treatment.before(Seen.of(record))
        if decision.action != "go_on":
            self._leave_lineage()
            if decision.action == "leave_out":
                return self._leave_out(*self._gradient(), decision)
            self.branch.executed += 1
            return decision
        decision = self._passed(record)
        if decision.action == "go_on" and not self.treatment.changes_steps:
            self._keep()
        else:
            self._leave_lineage()
        return decision

    def _passed(self, record: Record) -> Decision:
        self.step += 1
        self.branch.executed += 1
        self.trace.append((self.branch.executed, record))
        return self.treatment.after(record)

    def _live_step(self) -> Decision:
        settings, average = self._gradient()
        norm = float(torch.linalg.vector_norm(average.gradient_N))
        decision = self.treatment.before(Seen(self.step + 1, average.loss, norm))
        if decision.action == "leave_out":
            return self._leave_out(settings, average, decision)
        if decision.action != "go_on":
            return decision
        average = self.treatment.clip(self.branch.training, average)
        return self._after(self.branch.take(settings, average))

    def _leave_out(self, settings: Settings, average: Average, decision: Decision) -> Decision:
        record = self.branch.take(settings, average, update=False)
        self._note(decision)
        return self._after(record)

    def _after(self, record: Record) -> Decision:
        self.step = record.step
        self.trace.append((self.branch.executed, record))
        decision = self.treatment.after(record)
        if decision.action not in ("go_back", "hold"):
            self._keep()
        return decision

    def _gradient(self) -> tuple[Settings, Average]:
        settings, losses_W, gradients_WN = self.branch.gradients(self.treatment.settings)
        return settings, self.treatment.combine(self.branch.training, losses_W, gradients_WN)

    def _leave_lineage(self) -> None:
        """Train from here on: bring the branch to the present step."""
        lineage, self.lineage = self.lineage, None
        if lineage is None:
            return
        executed = self.branch.executed
        if lineage is self.untreated.lineage:
            self.branch.load(lineage.states[self.step])
        else:
            self.branch.training.restore(_nearest(lineage, self.step).training)
            while self.branch.step < self.step:
                self.branch.advance()
        self.branch.executed = executed

    def _go_back(self, decision: Decision) -> None:
        """Restore weights, moments and data; time, and with it the fault, goes on."""
        self._leave_lineage()
        assert decision.to is not None
        branch = self.branch
        state, of_treatment = self.kept[decision.to]
        branch.training.restore(state.training)
        if decision.skip is not None:
            branch.leave_out_data(*decision.skip)
        # Live, an alarm is known with the next gradient, which is thrown away.
        branch.executed += 1
        self.treatment.load(of_treatment)
        self.kept = {s: kept for s, kept in self.kept.items() if s <= decision.to}
        self.step = decision.to
        of_control = self.step < (self.spec.onset_step or 1) and not branch.left_out
        if of_control and branch.fault_is_over and not self.treatment.changes_steps:
            self.lineage = self.control.lineage

    def _keep(self) -> None:
        if not self.treatment.snapshot_due(self.step):
            return
        state = self.branch.state() if self.lineage is None else self.lineage.states[self.step]
        self.kept[self.step] = state, self.treatment.state()
        for old in self.treatment.snapshot_taken(self.step):
            self.kept.pop(old, None)

    def _note(self, decision: Decision) -> None:
        what = self.branch.executed, self.step, decision.action, decision.reason
        self.actions.append(what)
