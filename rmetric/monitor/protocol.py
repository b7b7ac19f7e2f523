"""How the monitor is called: arguments that can never be right, and slips of the loop around it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from rmetric._util.strict_json import encode_line
from rmetric.monitor.actions.action import RESCUE, Action
from rmetric.monitor.config import MonitorConfig
from rmetric.monitor.optimizer_steps import OptimizerSteps
from rmetric.monitor.pending import Pending
from rmetric.records import Record

logger = logging.getLogger("rmetric")

#: Checks of a process that show how its loop is written; a later exception may be on purpose.
_FIRST_CHECKS = 8
#: Later checks in a row without a step of the optimiser, until that is reported.
_IN_A_ROW = 3
#: Gradient norms look clipped where most of so many are equal, within a share, to their largest.
_NORMS, _EQUAL = 50, 1e-3

#: Each is one warning, at its first time: what was found, and what to do.
SLIPS = {
    "argument": "{error}; it counts as missing",
    "no_loss": "step {step} was checked without a loss: in a loop of your own call "
    "check_before_step(loss), or micro_batch(loss) after each backward",
    "no_gradients": "step {step} was checked and no parameter had a gradient other than 0: in a "
    "loop of your own call check_before_step after backward and before zero_grad",
    "twice": "steps {first} and {second} were checked and the monitor's optimizer made no step in "
    "between: check once a step, after the last micro-batch; a loop that steps another optimizer "
    "needs a monitor of that one",
    "other_model": "none of the optimizer's parameters is one of the model's: call "
    "Monitor(model, optimizer) with the model as it is trained and its own optimizer",
    "closed": "{call} was called after close and records nothing: make a new Monitor",
    "same_log": "{path} is the log of another monitor, which is open: close that one first, or "
    "give each a log of its own",
    "shared_action": "this {action} is an action of another monitor too, which is open: make one "
    "for each monitor",
    "never_called": "{action} reacts to {sources}, of which this monitor raises no alert: name "
    "them in MonitorConfig(alert_on=...)",
    "clipped": "the gradient norm was {largest:.4g} in {equal} of the last {of} steps and never "
    "larger: the gradients seem to be clipped before the check, so gradient_explosion sees "
    "nothing. Call check_before_step before clipping, or pass it gradient_norm=norm, which "
    "clip_grad_norm_ returns",
    "unknown_norm": "the model is sharded, so no rank knows the gradient norm before the step and "
    "every verdict is true: pass check_before_step(loss, gradient_norm=norm) what clip_grad_norm_ "
    "returned, or leave skipping to the action SkipStep",
    "validation_loss": "no evaluation so far had the metric {name!r}, so no validation loss is "
    "recorded; it had {found}: pass yours to the callback as validation_loss=NAME",
}


class ArgumentError(TypeError):
    """An argument that can never be right: raised at the call, also by what never raises else."""


class Protocol:
    """The order in which a loop calls its monitor. Each slip is warned about once.

    Everything is found on the host, in what the monitor has read anyway. `quiet`: another rank
    warns. Its weakness: a loop is known by its first checks; of what begins later, only an
    optimiser that makes no step any more, and clipping, are found. A gradient that hardly
    changes is taken for a clipped one.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, steps: OptimizerSteps, *, quiet: bool = False
    ) -> None:
        self._steps, self._quiet = steps, quiet
        self.slips: set[str] = set()
        self._checks = self._made = self._alone = 0
        self._norms: deque[float] = deque(maxlen=_NORMS)
        self._log: Path | None = None
        self._actions: Sequence[Action] = ()
        groups = getattr(optimizer, "param_groups", ())
        moved = {id(p) for group in groups for p in group.get("params", ())}
        self._foreign = bool(moved) and moved.isdisjoint(map(id, model.parameters()))

    def begins(
        self, log: Path | None, actions: Sequence[Action], others: Iterable[Protocol],
        alert_on: Iterable[str],
    ) -> None:  # fmt: skip
        """Look for a log or an action that another open monitor has, and one that gets no alert."""
        self._log, self._actions = log and log.resolve(), actions
        for action in actions:
            if missing := sorted((action.on or frozenset()) - {*alert_on, RESCUE}):
                sources = ", ".join(missing)
                self.warn("never_called", action=type(action).__name__, sources=sources)
        for other in others:
            if self._log is not None and self._log == other._log:
                self.warn("same_log", path=log)
            for action in actions:
                if any(action is known for known in other._actions):
                    self.warn("shared_action", action=type(action).__name__)

    def warn(self, slip: str, **found: Any) -> None:
        if slip not in self.slips:
            self.slips.add(slip)
            if not self._quiet:
                logger.warning("rmetric: %s", SLIPS[slip].format(**found))

    def number(self, name: str, value: Any) -> Tensor | float | None:
        """A number; a wrong one raises before the first check, later it is a slip, and None."""
        try:
            return number(name, value)
        except ArgumentError as error:
            if not self._checks:
                raise
            self.warn("argument", error=error)
            return None

    def check_begins(self, before: Pending | None) -> None:
        """Look for a step of the optimiser since the check before, which is None after a return."""
        made, self._made = self._made, self._steps.made
        self._checks += 1
        left_out = (
            before is None
            or before.sent is None  # restored: of another process, or of before a return
            or before.record.skipped
            or bool(before.broken_rules)
            or not isinstance(before.norm, float)  # not known, and so not whether it was taken
            or not isfinite(before.norm)
        )
        followed = self._steps.hooked and not self._steps.inside and not self._foreign
        unseen = followed and not left_out and made == self._made
        self._alone = self._alone + 1 if unseen else 0
        if self._alone >= (1 if self._checks <= _FIRST_CHECKS else _IN_A_ROW):
            assert before is not None
            step = before.record.step
            self.warn("twice", first=step, second=step + 1)

    def finished(self, record: Record, *, sharded: bool, own_norm: bool) -> None:
        """Look at a complete record; `own_norm`: the loop has not passed the norm in.

        The norm of a sharded model may be missing.
        """
        norm = record.gradient_norm
        if own_norm and norm is not None and isfinite(norm) and "clipped" not in self.slips:
            self._norms.append(norm)
            largest = max(self._norms)
            equal = sum(norm >= largest * (1.0 - _EQUAL) for norm in self._norms)
            if largest > 0.0 and len(self._norms) == _NORMS < 2 * equal:
                self.warn("clipped", largest=largest, equal=equal, of=_NORMS)
        if self._checks > _FIRST_CHECKS:
            return
        if record.training_loss is None:
            self.warn("no_loss", step=record.step)
        if norm == 0.0 or (norm is None and not sharded):
            self.warn("no_gradients", step=record.step)
        elif norm and self._foreign:
            self.warn("other_model")


def number(name: str, value: Any) -> Tensor | float | None:
    """A number, a tensor with one element, or None, as it is. Raises ArgumentError for all else."""
    accepted = "a number or a tensor with one element is accepted"
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ArgumentError(f"{name} is {found(value)}: {accepted}, such as its mean")
    if value is None or isinstance(value, Tensor):
        return value
    with suppress(TypeError, ValueError):
        if not isinstance(value, str):
            return float(value)
    raise ArgumentError(f"{name} is {found(value)}: {accepted}")


def check_arguments(model: object, optimizer: object, scaler: object, hardware: object) -> None:
    """Raise ArgumentError unless a training can be made of them; None for those that are not."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"model is {found(model)}: a torch module is accepted, as in Monitor(model, optimizer)"
        )
    parts = ("param_groups", "step", "optimizer")  # of an optimiser, or of a wrapper around one
    known = optimizer is None or any(hasattr(optimizer, part) for part in parts)
    if isinstance(optimizer, nn.Module) or not known:
        raise ArgumentError(f"optimizer is {found(optimizer)}: an optimizer or None is accepted")
    if lazy := [n for n, p in model.named_parameters() if isinstance(p, UninitializedParameter)]:
        raise ArgumentError(f"{lazy[0]} has no shape yet: run the model once before")
    for name, value, method in (
        ("optimizer", optimizer, ""), ("scaler", scaler, "scale"), ("hardware", hardware, "poll"),
    ):  # fmt: skip
        if isinstance(value, type):
            raise ArgumentError(f"{name} is {found(value)}: an object of it is accepted")
        if value is not None and method and not hasattr(value, method):
            raise ArgumentError(f"{name} is {found(value)}: it has no {method}")


def check_settings(log: object, run_id: object, about: Any, probe: object) -> None:
    """Raise ArgumentError for what no monitor can log or call."""
    try:
        is_json = bool(encode_line(dict(about or {})))
    except (TypeError, ValueError):
        is_json = False
    is_path = log is None or (isinstance(log, (str, PathLike)) and bool(str(log)))
    for name, value, fits, accepted in (
        ("log", log, is_path, "a path"),
        ("run_id", run_id, isinstance(run_id, str), "a text"),
        ("about", about, is_json, "a mapping of JSON values"),
        ("probe", probe, probe is None or callable(probe), "a function that returns a loss"),
    ):
        if not fits:
            raise ArgumentError(f"{name} is {found(value)}: {accepted} is accepted")


def checked_config(config: MonitorConfig | None) -> MonitorConfig:
    """The settings, by default those of `MonitorConfig`. Raises ArgumentError for all else."""
    if config is None:
        return MonitorConfig()
    if not isinstance(config, MonitorConfig):
        raise ArgumentError(f"config is {found(config)}: a MonitorConfig is accepted")
    return config


def found(value: object) -> str:
    """Short description of an argument, for an error message.

    >>> found(dict), found({})
    ('the class dict', '{}')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"of {type(value).__name__}"
