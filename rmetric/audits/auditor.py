"""All audits, and what runs those of one training on one rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rmetric.audits.batches import Batches
from rmetric.audits.contract import Audit
from rmetric.audits.finding import Finding
from rmetric.audits.fingerprint import fingerprints, halves, joined, peaks
from rmetric.audits.groups import Groups
from rmetric.audits.modes import Modes
from rmetric.audits.replicas import Replicas
from rmetric.audits.resume import Resume
from rmetric.audits.schedule import Schedule
from rmetric.audits.training import Seen, Training
from rmetric.audits.updates import Updates

logger = logging.getLogger("rmetric")

#: All parameters are measured at each of the first steps, and at two of `EVERY` afterwards.
FIRST, EVERY = 20, 20

AUDITS: dict[str, type[Audit]] = {
    audit.name: audit for audit in (Groups, Updates, Replicas, Batches, Modes, Schedule, Resume)
}


def make_audits(names: object = True) -> list[Audit]:
    """The audits of these names; all for True, none for False, all but "resume" for "-resume".

    Raises:
        TypeError: not a bool or an iterable of names.
        ValueError: an unknown name, or names with and without a minus.

    >>> [audit.name for audit in make_audits(["schedule"])]
    ['schedule']
    >>> [audit.name for audit in make_audits(["-resume", "-batches"])]
    ['groups', 'updates', 'replicas', 'modes', 'schedule']
    """
    if isinstance(names, bool):
        return [audit() for audit in AUDITS.values()] if names else []
    if isinstance(names, str) or not hasattr(names, "__iter__"):
        raise TypeError(f"audits is {names!r}: True, False or names are accepted")
    wanted = list(names)
    off = [name[1:] for name in wanted if str(name).startswith("-")]
    if off and len(off) < len(wanted):
        raise ValueError(f"audits is {wanted!r}: all names have a minus, or none")
    if unknown := [name for name in off or wanted if name not in AUDITS]:
        raise ValueError(f"audits has {unknown[0]!r}: known are {', '.join(AUDITS)}")
    return [AUDITS[name]() for name in (AUDITS if off else wanted) if name not in off]


class Auditor:
    """Measures what the audits need, passes it to them and reports their findings.

    `measure` gives tensors that the monitor copies to the host with its own; `received` takes them
    back at the next check. So nothing waits for a device.
    """

    def __init__(
        self, training: Training, audits: Iterable[Audit], report: Callable[[Finding], None]
    ) -> None:
        self.training, self.findings = training, list[Finding]()
        self._audits, self._report = list(audits), report
        self._facts: dict[str, Any] | None = None
        self._measured = 0  # the last step that was measured in full
        self._resumed: Mapping[str, Any] | None = None
        self._begun = False

    def __bool__(self) -> bool:
        return bool(self._audits)

    def install(self) -> Iterator[Callable[[], Any]]:
        removers = list(self.training.install())
        self._each(lambda audit: removers.extend(audit.install(self.training)))
        yield from removers

    def on_batch(self, batch: Any) -> None:
        self._each(lambda audit: audit.on_batch(self.training, batch))

    def measure(self, step: int) -> dict[str, Tensor]:
        """Measure a step between backward and the optimiser's step; float64, on the device."""
        training = self.training
        training.step = step
        if not self._begun:
            self._begun = True
            self._each(lambda audit: audit.before_training(training))
        if self._resumed is not None:
            saved, self._resumed = self._resumed, None
            self._each(lambda audit: audit.on_resume(training, saved))
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return {}
        full = step <= FIRST or step % EVERY < 2
        values: dict[str, Tensor] = {}
        self._each(lambda audit: values.update(audit.measure(training)))
        self._facts = {"step": step, "full": full, "consecutive": self._measured == step - 1}
        if full:
            try:
                values |= self._measure_all()
            except Exception as error:  # a device without 64-bit numbers, tensors of another kind
                self._audits, self._facts = [], None
                logger.error("rmetric: parameters cannot be measured, no audits: %s", error)
                return {}
            self._measured = step
            self._facts |= training.host_facts()
        return values

    def _measure_all(self) -> dict[str, Tensor]:
        """Fingerprints of all parameters, and the largest magnitude of each gradient."""
        training = self.training
        gradients = [p.grad for p in training.parameters]
        kinds = {"weights": fingerprints(training.parameters)}
        if training.ranks > 1:
            kinds |= {"gradients": fingerprints(gradients)}
            kinds |= {"moments": fingerprints(training.moments())}
        rows = {name: halves(prints).double().flatten() for name, prints in kinds.items()}
        return rows | {"peaks": peaks(gradients)}

    def received(self, values: Mapping[str, list[float]], loss: float | None) -> None:
        """Take the values of `measure` for the last step back, on the host, and its loss."""
        facts, self._facts = self._facts, None
        if facts is None:
            return
        whole: dict[str, Any] = {
            n: joined(values[n]) for n in ("weights", "gradients", "moments") if n in values
        }
        rest = {n: np.asarray(v) for n, v in values.items() if n not in whole}
        if "peaks" in rest:
            whole["peaks"] = rest.pop("peaks")
        seen = Seen(**facts, **whole, loss=loss, values=rest)
        self._each(lambda audit: audit.on_step(self.training, seen))

    def on_evaluation(self) -> None:
        self._each(lambda audit: audit.on_evaluation(self.training))

    def on_save(self) -> dict[str, Any]:
        """Plain values that a checkpoint keeps, by the audit's name."""
        kept: dict[str, Any] = {}
        self._each(lambda audit: kept.update({audit.name: dict(audit.on_save(self.training))}))
        return {name: state for name, state in kept.items() if state}

    def loaded(self, saved: Mapping[str, Any], logged: Sequence[Mapping[str, Any]] = ()) -> None:
        """A checkpoint was loaded: the next check compares the state with what `on_save` saved.

        `logged` has the entries of the log on the batches after each save.
        """
        self._resumed, self._facts, self._measured = {**saved, "logged": logged}, None, 0
        for audit in self._audits:
            audit.restart()

    def _each(self, call: Callable[[Audit], Iterable[Finding] | None]) -> None:
        for audit in tuple(self._audits):
            try:
                for finding in call(audit) or ():
                    self.findings.append(finding)
                    self._report(finding)
            except Exception as error:
                self._audits.remove(audit)
                text = "rmetric: the audit %r failed and is switched off: %s"
                logger.error(text, audit.name, error)
