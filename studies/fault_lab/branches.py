"""Train a control, and its branches from the control's states at their onsets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Any

import numpy as np
from torch import Tensor

from rmetric._util.errors import require
from rmetric.records import Record, Run, Truth
from rmetric.simulation.outcome import DEGRADED_NATS, DIVERGED_RATIO, soft_failure
from studies.fault_lab.corpus import corpus
from studies.fault_lab.faults import Turn, fault
from studies.fault_lab.spec import LabSpec, config_of
from studies.fault_lab.training import Settings, Training

RECORDS_AFTER_THE_END = 3  # of a run that is no longer finite
DIGITS = 6  # of what is measured; all that is derived sees no more


def train_seed(specs: Sequence[LabSpec], definitions: Definitions | None = None) -> Iterator[Run]:
    """The control (the first of `specs`) and its branches, each a whole run from step 1."""
    control_spec, *branch_specs = specs
    training = Training(control_spec)
    onsets = {spec.onset_step for spec in branch_specs}
    records, snapshots = [], {}
    for step in range(1, control_spec.total_steps + 1):
        if step in onsets:
            snapshots[step] = training.snapshot()
        records.append(take_step(training))
    truth = judge(Truth(), records, definitions=definitions)
    yield Run(id=control_spec.run_id, records=records, config=_config(control_spec), truth=truth)
    for spec in branch_specs:
        assert spec.onset_step is not None
        training.restore(snapshots[spec.onset_step])
        whole = records[: spec.onset_step - 1] + train_branch(training, spec)
        truth = judge(injected(spec), whole, records, definitions)
        yield Run(id=spec.run_id, records=whole, config=_config(spec), truth=truth)


def _config(spec: LabSpec) -> dict[str, Any]:
    return config_of(spec, corpus(spec.text).digest)


def injected(spec: LabSpec) -> Truth:
    """Truth of a branch before its outcome is known."""
    kind = fault(spec.fault or "")
    return Truth(
        fault=kind.name,
        severity=spec.severity,
        benign=kind.benign,
        onset_step=spec.onset_step,
        duration_steps=spec.duration_steps,
    )


def train_branch(training: Training, spec: LabSpec) -> list[Record]:
    """The records from the state of `training` to the end, or to shortly after the failure."""
    disturbance: Disturbance | None = Disturbance(spec)
    records: list[Record] = []
    remaining = spec.total_steps - training.step
    while remaining > 0:
        records.append(take_step(training, disturbance))
        remaining -= 1
        if not is_finite(records[-1]):
            remaining, disturbance = min(remaining, RECORDS_AFTER_THE_END), None
    return records


class Disturbance:
    """The fault of one branch, called at each place of each step.

    `state` is its generator and memory; with `forever` it acts from the onset on without an end,
    for runs that repeat steps.
    """

    def __init__(self, spec: LabSpec) -> None:
        assert spec.onset_step is not None
        assert spec.duration_steps is not None
        self._kind, self._severity = fault(spec.fault or ""), spec.severity or 0.0
        self._begin, self._duration = spec.onset_step, spec.duration_steps
        self._rng = np.random.default_rng([spec.seed, *spec.run_id.encode()])
        self._memory: dict[str, Any] = {}
        self.forever = False

    def turn(self, training: Training, settings: Settings, clock: int) -> Turn | None:
        """A step under the fault; None before and after it. `clock` counts executed steps."""
        age = clock - self._begin
        if age < 0 or (age >= self._duration and not self.forever):
            return None
        if self._kind.planned and age == 0:
            settings.planned = (self._kind.planned,)
        return Turn(
            training=training,
            settings=settings,
            age=age,
            severity=self._severity,
            duration=self._duration,
            rng=self._rng,
            memory=self._memory,
        )

    @property
    def state(self) -> tuple[Any, dict[str, Any]]:
        return self._rng.bit_generator.state, self._memory

    @state.setter
    def state(self, state: tuple[Any, dict[str, Any]]) -> None:
        self._rng.bit_generator.state, self._memory = state

    def act(self, place: str, turn: Turn) -> None:
        if self._kind.place == place:
            self._kind.act(turn)


def gradients(
    training: Training,
    disturbance: Disturbance | None = None,
    *,
    clock: int | None = None,
    batch: int | None = None,
    adjust: Callable[[Settings], None] = lambda settings: None,
) -> tuple[Settings, Tensor, Tensor]:
    """Settings, losses (workers,) and gradients (workers, parameters) of the next step.

    Where steps are repeated, `clock` counts the executed ones and `batch` is the number of the
    batch. `adjust` is called with the settings after the fault has changed them.
    """
    step = training.step + 1
    settings = training.settings(step)
    turn = disturbance and disturbance.turn(training, settings, clock or step)
    if not (disturbance and turn):
        adjust(settings)
        gradients_WN, losses_W = training.gradients(
            training.batch(batch or step, settings), settings
        )
        return settings, losses_W, gradients_WN
    disturbance.act("settings", turn)
    disturbance.act("weights", turn)
    adjust(settings)
    turn.batch = training.batch(batch or step, settings)
    disturbance.act("batch", turn)
    turn.gradients_WN, losses_W = training.gradients(turn.batch, settings)
    disturbance.act("gradients", turn)
    return settings, losses_W, turn.gradients_WN


def take_step(training: Training, disturbance: Disturbance | None = None) -> Record:
    """One step, with the disturbance applied at each place of it; its rounded record."""
    settings, losses_W, gradients_WN = gradients(training, disturbance)
    return rounded(training.finish_step(settings, training.average(losses_W, gradients_WN)))


def rounded(record: Record) -> Record:
    """The same record with `DIGITS` digits, in place."""
    for entry in fields(record):
        setattr(record, entry.name, _round(getattr(record, entry.name)))
    return record


def _round(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, tuple):
        return tuple(map(_round, value))
    if isinstance(value, dict):
        return {name: _round(entry) for name, entry in value.items()}
    return value


# -- outcomes

#: Changes of the evaluation alone: what is evaluated under them says nothing of the weights.
OF_THE_EVALUATION = ("NOISY_EVALUATION",)


@dataclass(frozen=True, kw_only=True)
class Definitions:
    """Failed: to the end, the median of three evaluations stays too far above another loss.

    That is `diverged_ratio` (above 1) times the best so far, or `degraded_nats` (above 0) above the
    twin's.
    """

    diverged_ratio: float = DIVERGED_RATIO
    degraded_nats: float = DEGRADED_NATS

    def __post_init__(self) -> None:
        require("diverged_ratio", self.diverged_ratio, self.diverged_ratio > 1, "above 1")
        require("degraded_nats", self.degraded_nats, self.degraded_nats > 0, "above 0")


def judge(
    injected: Truth,
    records: Sequence[Record],
    twin: Sequence[Record] | None = None,
    definitions: Definitions | None = None,
) -> Truth:
    """The truth of a whole run under the injected fault; `twin`: records of its control."""
    failure = _failure(injected, records, twin, definitions or Definitions())
    if failure is not None:
        kind, step = failure
        return replace(injected, outcome="failed", failure_kind=kind, failure_step=step)
    outcome = "healthy" if injected.fault == "NONE" else "absorbed"
    return replace(injected, outcome=outcome, failure_kind=None, failure_step=None)


def is_finite(record: Record) -> bool:
    """Whether loss, gradient and weights of a step are numbers."""
    measured = (
        record.training_loss,
        record.gradient_norm,
        record.parameter_norm,
        record.validation_loss,
    )
    return all(value is None or isfinite(value) for value in measured)


def _failure(
    injected: Truth,
    records: Sequence[Record],
    twin: Sequence[Record] | None,
    definitions: Definitions,
) -> tuple[str, int] | None:
    """Kind and step: not finite, else diverged or degraded."""
    for record in records:
        if not is_finite(record):
            return "non_finite", record.step
    losses = evaluations(injected, records)
    steps, loss_T = list(losses), np.array(list(losses.values()))
    twin_T = None
    if twin is not None:
        of_twin = evaluations(Truth(), twin)
        twin_T = np.array([of_twin[step] for step in steps])
    failure = soft_failure(
        loss_T, twin_T, ratio=definitions.diverged_ratio, nats=definitions.degraded_nats
    )
    return failure and (failure[0], steps[failure[1]])


def evaluations(injected: Truth, records: Sequence[Record]) -> dict[int, float]:
    """Step -> validation loss, without evaluations under added noise."""
    left_out = range(0)
    if injected.fault in OF_THE_EVALUATION:
        begin, duration = injected.onset_step or 0, injected.duration_steps or 0
        left_out = range(begin, begin + duration)
    return {
        record.step: record.validation_loss
        for record in records
        if record.validation_loss is not None and record.step not in left_out
    }
