"""A policy in the laboratory, and the loop that runs a branch under it."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from rmetric.records import Record
from rmetric.rescue.policy import Decision
from studies.fault_lab.rescue.runner import (
    Branch,
    Control,
    Lineage,
    Outcome,
    State,
    Untreated,
    nothing,
    outcome_of,
)
from studies.fault_lab.spec import LabSpec
from studies.fault_lab.training import Average, Settings, Training

GO_ON = Decision()
#: A run that has computed so many times the steps of its branch is stopped, and lost.
MOST = 2


@dataclass(frozen=True)
class Seen:
    """What a training knows of a step before its update.

    Attributes:
        step: of the schedule.
        loss, norm: of the mean of all workers.
        norms: of each worker's gradient.
    """

    step: int
    loss: float
    norm: float
    norms: tuple[float, ...] = ()

    @property
    def finite(self) -> bool:
        return isfinite(self.loss) and isfinite(self.norm)


class Treatment:
    """One policy in one branch. It sees what a training sees, and changes what one can change.

    Attributes:
        every_step: it may change any gradient, so no step is shared with the untreated branch.
    """

    every_step = False
    total_steps = 0  # of the run, set by `treat`

    def before(self, seen: Seen) -> Decision:
        """Decide on a step whose gradient is there."""
        return GO_ON

    def after(self, record: Record) -> Decision:
        """Decide after a step."""
        return GO_ON

    def settings(self, settings: Settings) -> None:
        """Change the settings of the next step."""

    def combine(self, training: Training, losses_W: Tensor, gradients_WN: Tensor) -> Average:
        """Average the workers' gradients."""
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


def treat(
    control: Control,
    spec: LabSpec,
    untreated: Untreated,
    treatment: Treatment,
    trace: list[tuple[int, Record]] | None = None,
) -> Outcome:
    """Run a branch under a policy to its end.

    Args:
        control: that the branch starts from.
        spec: of the branch.
        untreated: the branch without a policy.
        treatment: the policy.
        trace: filled with (executed step, record) of every step that was taken or left out, from
            the first step of the control on.
    """
    return _Run(control, spec, untreated, treatment, trace).run()


class _Run:
    """The loop of `treat`.

    The present lineage is that of the untreated branch, of the control, or None while the steps
    are trained.
    """

    def __init__(
        self,
        control: Control,
        spec: LabSpec,
        untreated: Untreated,
        treatment: Treatment,
        trace: list[tuple[int, Record]] | None,
    ) -> None:
        assert spec.onset_step is not None
        self.trace = [] if trace is None else trace
        self.control, self.spec, self.untreated = control, spec, untreated
        self.treatment = treatment
        treatment.total_steps = spec.total_steps
        self.branch = Branch(control, spec)
        self.actions: list[tuple[int, int, str, str]] = []
        self.kept: dict[int, tuple[State, Any]] = {}
        self.lineage: Lineage | None = control.lineage
        self.step = self.branch.executed = 0
        while self.step < spec.onset_step - 1:
            self._warm_up(control.lineage)
        self.lineage = None if treatment.every_step else untreated.lineage
        self.limit = self.step + MOST * (spec.total_steps - self.step)

    def run(self) -> Outcome:
        while self.step < self.spec.total_steps and self.branch.executed < self.limit:
            lineage = self.lineage
            if lineage is not None and self.step >= lineage.last:
                break  # the untreated branch has ended before its schedule
            decision = self._live_step() if lineage is None else self._shared_step(lineage)
            if decision.action in ("go_back", "hold"):
                self._note(decision)
                self._go_back(decision)
                if decision.action == "hold":
                    return outcome_of(self.branch, self.actions, held=True)
            elif self.lineage is None and not self.branch.is_finite:
                break
        self._leave_lineage()
        return outcome_of(self.branch, self.actions, held=False)

    # -- steps

    def _warm_up(self, lineage: Lineage) -> None:
        """A step before the onset: the policy sees it, and what it decides is not done."""
        record = lineage.record(self.step + 1)
        self.treatment.before(seen_of(record))
        self.step += 1
        self.branch.executed += 1
        self.trace.append((self.branch.executed, record))
        if self.treatment.after(record).action == "go_on":
            self._keep()

    def _shared_step(self, lineage: Lineage) -> Decision:
        """A step of a run that is trained already; it becomes our own if the policy acts."""
        record = lineage.record(self.step + 1)
        decision = self.treatment.before(seen_of(record))
        if decision.action == "leave_out":
            self._leave_lineage()
            settings, average = self._gradient()
            return self._leave_out(settings, average, decision)
        if decision.action in ("go_back", "hold"):
            self._leave_lineage()
            self.branch.executed += 1
            return decision
        self.step += 1
        self.branch.executed += 1
        self.trace.append((self.branch.executed, record))
        decision = self.treatment.after(record)
        if decision.action == "go_on" and not self.treatment.changes_steps:
            self._keep()
        else:
            self._leave_lineage()
        return decision

    def _live_step(self) -> Decision:
        settings, average = self._gradient()
        norm = float(torch.linalg.vector_norm(average.gradient_N))
        seen = Seen(self.step + 1, average.loss, norm, average.norms)
        decision = self.treatment.before(seen)
        if decision.action == "leave_out":
            return self._leave_out(settings, average, decision)
        if decision.action != "go_on":
            return decision
        record = self.branch.take(settings, self.treatment.clip(self.branch.training, average))
        return self._after(record)

    def _leave_out(self, settings: Settings, average: Average, decision: Decision) -> Decision:
        record = self.branch.leave_out(settings, average)
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

    # -- lineages

    def _leave_lineage(self) -> None:
        """Train from here on: bring the branch to the present step."""
        lineage, self.lineage = self.lineage, None
        if lineage is None:
            return
        executed = self.branch.executed
        if lineage is self.untreated.lineage:
            self.branch.load(lineage.states[self.step])
        else:
            nearest = max(s for s in lineage.states if s <= self.step)
            self.branch.go_back(lineage.states[nearest])
            while self.branch.step < self.step:
                settings, losses_W, gradients_WN = self.branch.gradients(nothing)
                average = self.branch.training.average(losses_W, gradients_WN)
                self.branch.take(settings, average)
        self.branch.executed = executed

    def _go_back(self, decision: Decision) -> None:
        self._leave_lineage()
        assert decision.to is not None
        branch = self.branch
        state, of_treatment = self.kept[decision.to]
        branch.go_back(state)
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


def seen_of(record: Record) -> Seen:
    assert record.training_loss is not None
    assert record.gradient_norm is not None
    norms = record.worker_gradient_norms or ()
    return Seen(record.step, record.training_loss, record.gradient_norm, norms)
