"""The policies of the study: rescue, and the rules that other projects and papers use.

The rules have their published settings. A setting in steps that was made for runs of 10^5 steps is
scaled to the 400 of the laboratory; the docstring says which. Rules that need an alarm get that of
the calibrated detector, so that they differ from rescue in what they do and not in what they see.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rmetric.detectors.calibrated import CalibratedDetector
from rmetric.monitor.rules import StepRules
from rmetric.records import Record
from rmetric.rescue.judgement import LossLevel, evidence_of
from rmetric.rescue.policy import REMEDIES, Decision, Evidence, RescueConfig, RescuePolicy
from studies.fault_lab.rescue.runner import EVERY, GO_ON, Seen, Treatment
from studies.fault_lab.training import BETA1, BETA2, Average, Settings, Training

LEAVE_OUT = Decision(action="leave_out", reason="left out by the rule")


class LeaveOutNonFinite(Treatment):
    """Leave a step out whose loss or gradient norm is not finite."""

    def before(self, seen: Seen) -> Decision:
        return GO_ON if seen.finite else LEAVE_OUT


class LeaveOutOutliers(Treatment):
    """OLMo-core's SkipStep optimisers: loss or norm above the mean of 128 steps by 6 deviations."""

    WINDOW, SIGMAS = 128, 6.0

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=self.WINDOW)
        self._norms: deque[float] = deque(maxlen=self.WINDOW)

    def before(self, seen: Seen) -> Decision:
        if not seen.finite:
            return LEAVE_OUT
        out = self._is_outlier(self._losses, seen.loss) or self._is_outlier(self._norms, seen.norm)
        self._losses.append(seen.loss)
        self._norms.append(seen.norm)
        return LEAVE_OUT if out else GO_ON

    def _is_outlier(self, past: deque[float], x: float) -> bool:
        if len(past) < self.WINDOW // 2:
            return False
        return x - float(np.mean(past)) > self.SIGMAS * float(np.std(past, ddof=1))


class ZClip(Treatment):
    """ZClip (2025): a norm of z > 2.5 over its moving mean and deviation (0.97) is scaled down.

    The norm becomes mean + (2.5² / z) deviations; the first 25 norms are the moving values' start.
    """

    every_step = True
    ALPHA, LIMIT, WARM_UP = 0.97, 2.5, 25

    def __init__(self) -> None:
        self._first: list[float] = []
        self._mean = self._variance = 0.0

    def after(self, record: Record) -> Decision:
        if record.gradient_norm is not None and isfinite(record.gradient_norm):
            self._take(self._clipped(record.gradient_norm))
        return GO_ON

    def clip(self, training: Training, average: Average) -> Average:
        norm = float(torch.linalg.vector_norm(average.gradient_N))
        if not isfinite(norm) or not norm:
            return average
        return average._replace(gradient_N=average.gradient_N * (self._clipped(norm) / norm))

    def _clipped(self, norm: float) -> float:
        deviation = self._variance**0.5
        if len(self._first) < self.WARM_UP or not deviation:
            return norm
        z = (norm - self._mean) / deviation
        return norm if z <= self.LIMIT else self._mean + self.LIMIT**2 / z * deviation

    def _take(self, norm: float) -> None:
        if len(self._first) < self.WARM_UP:
            self._first.append(norm)
            self._mean = float(np.mean(self._first))
            self._variance = float(np.var(self._first))
            return
        self._variance = self.ALPHA * self._variance + (1 - self.ALPHA) * (norm - self._mean) ** 2
        self._mean = self.ALPHA * self._mean + (1 - self.ALPHA) * norm


class AdaGC(Treatment):
    """AdaGC (2025): each tensor's norm at most 1.05 times its moving mean (0.98).

    The paper begins after 100 steps; here with the first step under the rule.
    """

    every_step = True
    BETA, LIMIT = 0.98, 1.05

    def __init__(self) -> None:
        self._means: list[float] = []

    def clip(self, training: Training, average: Average) -> Average:
        gradient_N = average.gradient_N.clone()
        tensors = list(training.model.tensors(gradient_N))
        norms = [float(torch.linalg.vector_norm(tensor)) for tensor in tensors]
        if not self._means:
            self._means = [norm if isfinite(norm) else 0.0 for norm in norms]
        for place, (tensor, norm) in enumerate(zip(tensors, norms, strict=True)):
            limit = self.LIMIT * self._means[place]
            if isfinite(norm) and norm > limit > 0:
                tensor.mul_(limit / norm)
                norm = limit
            if isfinite(norm):
                self._means[place] = self.BETA * self._means[place] + (1 - self.BETA) * norm
        return average._replace(gradient_N=gradient_N)


class Spam(Treatment):
    """SPAM (2025): entries above sqrt(5000 v) are cut there; the moments are reset.

    The paper resets every 500 steps and warms the rate up over 150 of them; here 100 and 30.
    """

    every_step = True
    RESET, WARM_UP, LIMIT = 100, 30, 5000.0

    def __init__(self) -> None:
        self._since = self.RESET  # steps since the last reset

    def settings(self, settings: Settings) -> None:
        if self._since < self.WARM_UP:
            share = (self._since + 1) / self.WARM_UP
            settings.rate_factor *= 0.5 * (1.0 - float(np.cos(np.pi * share)))

    def clip(self, training: Training, average: Average) -> Average:
        if (training.step + 1) % self.RESET == 0:
            training.first_N.zero_()
            training.second_N.zero_()
            self._since = 0
        self._since += 1
        limit_N = (self.LIMIT * training.second_N).sqrt()
        cut_N = torch.where(
            limit_N > 0, average.gradient_N.clamp(-limit_N, limit_N), average.gradient_N
        )
        return average._replace(gradient_N=cut_N)


class _WithSnapshots(Treatment):
    """Keeps the snapshots of the last `keep` steps at multiples of `every`."""

    every, keep = EVERY, 8

    def __init__(self) -> None:
        self._steps: list[int] = []

    def snapshot_due(self, step: int) -> bool:
        return step % self.every == 0 and (not self._steps or step > self._steps[-1])

    def snapshot_taken(self, step: int) -> tuple[int, ...]:
        self._steps.append(step)
        dropped, self._steps = self._steps[: -self.keep], self._steps[-self.keep :]
        return tuple(dropped)

    def _back_to(self, before: int) -> int | None:
        good = [s for s in self._steps if s <= before]
        if not good:
            return None
        self._steps = good
        return good[-1]


class RestartAtNan(_WithSnapshots):
    """Restart from a checkpoint, of every 50 steps, once loss or weights are not finite."""

    every, keep = 50, 1

    def before(self, seen: Seen) -> Decision:
        return GO_ON if isfinite(seen.loss) else self._restart(seen.step)

    def after(self, record: Record) -> Decision:
        norm = record.parameter_norm
        return GO_ON if norm is None or isfinite(norm) else self._restart(record.step)

    def _restart(self, step: int) -> Decision:
        to = self._back_to(step - 1)
        if to is None:
            return GO_ON
        return Decision(action="go_back", to=to, reason="the loss is not finite")


class _OnAlarm(_WithSnapshots):
    def __init__(self) -> None:
        super().__init__()
        self.detector = CalibratedDetector()
        self._was = False

    def after(self, record: Record) -> Decision:
        if not record.skipped:
            self.detector.update(record)
        was, self._was = self._was, self.detector.alarm
        return GO_ON if was or not self._was else self.alarmed(record.step)

    def alarmed(self, step: int) -> Decision:
        raise NotImplementedError

    def state(self) -> Any:
        return copy.deepcopy(self.detector)

    def load(self, state: Any) -> None:
        self.detector, self._was = copy.deepcopy(state), False


class Palm(_OnAlarm):
    """PaLM (2022): go back about 100 steps and skip 200 to 500 batches; here 20 and 40."""

    BACK, SKIP = 20, 40

    def alarmed(self, step: int) -> Decision:
        to = self._back_to(step - self.BACK)
        if to is None:
            return GO_ON
        return Decision(action="go_back", to=to, skip=(to + 1, to + self.SKIP), reason="alarm")


class HalveRate(_OnAlarm):
    """Halve the learning rate at each alarm, for the rest of the run."""

    every, keep = 10**9, 1

    def __init__(self) -> None:
        super().__init__()
        self._factor = 1.0

    def alarmed(self, step: int) -> Decision:
        self._factor /= 2
        return GO_ON

    def settings(self, settings: Settings) -> None:
        settings.rate_factor *= self._factor

    @property
    def changes_steps(self) -> bool:
        return self._factor < 1


class GoBackAndHalve(HalveRate):
    """OPT (2022): go back to a checkpoint before the alarm and lower the rate, here by half."""

    BACK = 20
    every, keep = EVERY, 8

    def alarmed(self, step: int) -> Decision:
        to = self._back_to(step - self.BACK)
        if to is None:
            return GO_ON
        super().alarmed(step)
        return Decision(action="go_back", to=to, reason="alarm")


class Rescue(Treatment):
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
        recovered = self._level.has_recovered
        decision = self.policy.after_step(record.step, evidence, loss_recovered=recovered)
        if record.step == self.total_steps and decision.action == "go_on":
            decision = self.policy.at_end(record.step, loss_recovered=recovered)
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


class Policy(NamedTuple):
    """A policy of the study: its label in tables, and what makes one for a branch, if anything."""

    label: str
    make: Callable[[], Treatment] | None


def rescue(*remedies: str) -> Callable[[], Treatment]:
    config = RescueConfig(every=EVERY, remedies=frozenset(remedies))
    return lambda: Rescue(config)


NOTHING, RESCUE = "nothing", "rescue"
POLICIES: dict[str, Policy] = {
    NOTHING: Policy("Nothing", None),
    "leave_out_non_finite": Policy("Leave out steps that are not finite", LeaveOutNonFinite),
    "leave_out_outliers": Policy("Leave out 6-sigma outliers (OLMo-core)", LeaveOutOutliers),
    "zclip": Policy("ZClip", ZClip),
    "adagc": Policy("AdaGC", AdaGC),
    "spam": Policy("SPAM, reset every 100 steps", Spam),
    "restart_at_nan": Policy("Restart at NaN, checkpoint every 50 steps", RestartAtNan),
    "palm": Policy("PaLM: back 20 steps, skip 40 batches", Palm),
    "halve": Policy("Halve the rate", HalveRate),
    "back_and_halve": Policy("Back 20 steps, halve the rate (OPT)", GoBackAndHalve),
    RESCUE: Policy("Rescue", rescue(*REMEDIES)),
}
#: Parts of rescue, which are measured on the failing runs alone.
ABLATIONS: dict[str, Policy] = {
    "only_leave_out": Policy("Rescue: only leaves steps out", rescue("leave_out")),
    "only_retry": Policy("Rescue: only goes back and tries again", rescue("retry")),
    **{
        f"without_{remedy}": Policy(
            f"Rescue without {remedy.replace('_', ' ')}",
            rescue(*(other for other in REMEDIES if other != remedy)),
        )
        for remedy in REMEDIES
    },
}
#: The sealed rows are of the detector that was there when they were opened.
NEWER = "rescue_newer_detector"
KNOWN = POLICIES | ABLATIONS | {NEWER: Policy("Rescue with the newest detector", rescue(*REMEDIES))}
