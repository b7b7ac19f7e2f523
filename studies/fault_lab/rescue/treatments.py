"""The policies that are measured: rescue, and the rules that are in use elsewhere."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import Tensor

from rmetric.detectors.calibrated import CalibratedDetector
from rmetric.monitor.rules import StepRules
from rmetric.records import Record
from rmetric.rescue.evidence import LossLevel, evidence_of
from rmetric.rescue.policy import Decision, Evidence, RescueConfig, RescuePolicy
from studies.fault_lab.rescue.runner import EVERY
from studies.fault_lab.rescue.treatment import Seen, Treatment
from studies.fault_lab.training import BETA1, BETA2, Average, Settings, Training


class Rescue(Treatment):
    """The package's own policy."""

    def __init__(self, config: RescueConfig | None = None) -> None:
        self.policy = RescuePolicy(config or RescueConfig(every=EVERY))
        self.rules, self.detector = StepRules(), CalibratedDetector()
        self._level = LossLevel()
        self._kept: list[int] = []

    def before(self, seen: Seen) -> Decision:
        broken = self.rules.update(seen.loss, seen.norm)
        evidence = None
        if broken:
            kind = "not_finite" if broken[0][0] == "non_finite" else "explosion"
            evidence = Evidence(step=seen.step, since=seen.step, kind=kind, words=broken[0][1])
        return self.policy.before_update(seen.step, evidence)

    def after(self, record: Record) -> Decision:
        evidence = None
        if not record.skipped:
            self.detector.update(record)
            self._level.update(record.step, record.training_loss)
            evidence = evidence_of(self.detector, record.step)
            if evidence is not None and evidence.worker is not None and self._kept:
                evidence = replace(evidence, worker=self._kept[evidence.worker])
        decision = self.policy.after_step(record.step, evidence, back=self._level.is_back)
        if record.step == self.total_steps and decision.action == "go_on":
            decision = self.policy.at_end(record.step, back=self._level.is_back)
        incident = self.policy.state.incident
        if incident is None:
            self._level.forget()
        else:
            self._level.mark(incident.onset)
        return decision

    def settings(self, settings: Settings) -> None:
        if self.policy.state.settings:
            settings.rate_factor, settings.beta1, settings.beta2 = 1.0, BETA1, BETA2

    def combine(self, training: Training, losses_W: Tensor, gradients_WN: Tensor) -> Average:
        out = self.policy.workers_out
        self._kept = [worker for worker in range(len(losses_W)) if worker not in out]
        return training.average(losses_W[self._kept], gradients_WN[self._kept])

    @property
    def changes_steps(self) -> bool:
        return self.policy.state.settings or bool(self.policy.workers_out)

    def snapshot_due(self, step: int) -> bool:
        return self.policy.snapshot_due(step)

    def snapshot_taken(self, step: int) -> tuple[int, ...]:
        return self.policy.snapshot_taken(step)

    def state(self) -> Any:
        return copy.deepcopy((self.rules, self.detector)), self._level.state()

    def load(self, state: Any) -> None:
        before, losses = state
        self.rules, self.detector = copy.deepcopy(before)
        self._level.go_back(losses)
