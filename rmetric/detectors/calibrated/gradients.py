"""Statistics of the gradient and of single workers' gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import copysign, inf, isfinite, log, sqrt

from rmetric.detectors.calibrated.source import (
    Deviation,
    EvidenceSource,
    LaggedPast,
    amount,
    clipped,
    times,
)
from rmetric.detectors.contract import roll_back
from rmetric.records import Record
from rmetric.signals.gradient_variance import population_variance

_SMOOTHING = 0.1
_TURNING = 0.2
_CLIPPED_AT = 6.0
_MOST_APART = 5.0
_COSINE_WARM_UP = 10
_DEAD = log(1e-9)  # a norm below is none
#: How fast the usual norm of a worker follows, where only its own past shows which of two is odd.
_FOLLOWING = 0.02
#: Of two workers neither is in the majority.
_PAIR = 2
#: One value is itself unusual: spreads, logarithm of times the others', minus a cosine.
_UNUSUAL_SPREADS, _UNUSUAL_TIMES, _UNUSUAL_COSINE = 1.0, log(1.5), 0.1


class Gradients(EvidenceSource):
    """Gradients that grow, and workers that do not agree.

        gradient_norm   EWMA (0.1) of the robust z of log(gradient norm), cut to ±6
        worker_norm     |EWMA (0.1) of log(worker's norm / median norm), each cut to ±5|, of the
                        worst worker; of an even number the median is the upper of the two. Of
                        two workers the worst is the one that is farther from its own past
        opposed_worker  minus the EWMA (0.2) of the cosine between a worker's gradient and the
                        mean of the others', of the worst worker: above 0 it climbs where they
                        descend; from the eleventh record on
        gradient_variance  EWMA (0.1) of the robust z of log(variance of the workers' norms),
                        cut to ±6: the σ² of the R-Metric, for `contributions` alone

    The cosine is computed from the workers' norms g_i, their cosines c_i to the mean over
    all, the norm G of that mean and the number n of workers:

        dot_i = (n g_i G c_i - g_i²) / (n - 1)
        others_i² = (n² G² - 2 n g_i G c_i + g_i²) / (n - 1)²
    """

    NAMES = ("gradient_norm", "worker_norm", "opposed_worker", "gradient_variance")
    LABEL = "gradients"

    def __init__(self) -> None:
        super().__init__()
        self._norm = Deviation(LaggedPast(window=80, least=12), absolute=0.02)
        self._variance = Deviation(LaggedPast(window=80, least=12), absolute=0.05)
        self._apart: list[float] = []
        self._own: list[float] = []  # usual logarithm of each worker's norm
        self._cosines: list[float] = []
        self._count = 0
        self._last = 0.0
        self._logs: list[float] = []  # of the workers' norms at the last record
        self._middle = 0.0

    def update(self, record: Record) -> None:
        norm = record.gradient_norm
        if norm is not None and 0 < norm < inf:
            self._judge_norm(norm, record.step)
        norms, cosines = record.worker_gradient_norms, record.worker_gradient_cosines
        if norms is None or len(norms) < 2 or not all(isfinite(g) for g in norms):
            return
        self._judge_workers(norms, record.step)
        if cosines is None or norm is None or len(cosines) != len(norms):
            return
        if 0 < norm < inf and all(isfinite(c) for c in cosines):
            self._judge_directions(norms, cosines, norm, record.step)

    def _judge_norm(self, norm: float, step: int) -> None:
        self._last = norm
        z = self._norm.update(log(norm))
        if z == z:
            self.smooth("gradient_norm", clipped(z, -_CLIPPED_AT, _CLIPPED_AT), _SMOOTHING)
            self.note("gradient_norm", step, z, _UNUSUAL_SPREADS)

    def _judge_workers(self, norms: Sequence[float], step: int) -> None:
        logs = [log(max(g, 1e-12)) for g in norms]
        middle = sorted(logs)[len(logs) // 2]
        self._logs, self._middle = logs, middle
        if len(self._apart) != len(logs):
            self._apart, self._own = [0.0] * len(logs), logs
            self.begun.pop("worker_norm", None)
        self._apart = [
            a + _SMOOTHING * (clipped(x - middle, -_MOST_APART, _MOST_APART) - a)
            for a, x in zip(self._apart, logs, strict=True)
        ]
        self._own = [u + _FOLLOWING * (x - u) for u, x in zip(self._own, logs, strict=True)]
        self.statistics["worker_norm"] = max(abs(a) for a in self._apart)
        worst = self._worst_norm
        newest = copysign(1.0, self._apart[worst]) * (logs[worst] - middle)
        if len(logs) == _PAIR:
            newest = abs(logs[0] - logs[1])
        self.note("worker_norm", step, newest, _UNUSUAL_TIMES)
        variance = population_variance(norms)
        if variance < inf:
            z = self._variance.update(log(max(variance, 1e-24)))
            if z == z:
                z = clipped(z, -_CLIPPED_AT, _CLIPPED_AT)
                self.smooth("gradient_variance", z, _SMOOTHING)

    def _judge_directions(
        self, norms: Sequence[float], cosines: Sequence[float], norm: float, step: int
    ) -> None:
        number = len(norms)
        if len(self._cosines) != number:
            self._cosines, self._count = [0.0] * number, 0
            self.statistics.pop("opposed_worker", None)
            self.begun.pop("opposed_worker", None)
        self._count += 1
        total = number * norm
        newest = []
        for i, (g, c) in enumerate(zip(norms, cosines, strict=True)):
            others = total * total - 2 * number * g * norm * c + g * g
            cosine = 0.0
            if g > 0 and 0 < others < inf:
                cosine = clipped((total * c - g) / sqrt(others), -1.0, 1.0)
            self._cosines[i] += _TURNING * (cosine - self._cosines[i])
            newest.append(cosine)
        self.note("opposed_worker", step, -newest[self._most_opposed], _UNUSUAL_COSINE)
        if self._count > _COSINE_WARM_UP:
            self.statistics["opposed_worker"] = -min(self._cosines)

    @property
    def _worst_norm(self) -> int:
        if len(self._apart) == _PAIR:
            return int(abs(self._logs[1] - self._own[1]) > abs(self._logs[0] - self._own[0]))
        return max(range(len(self._apart)), key=lambda i: abs(self._apart[i]))

    @property
    def _most_opposed(self) -> int:
        return min(range(len(self._cosines)), key=lambda i: self._cosines[i])

    def odd_worker(self, limits: Mapping[str, float]) -> int | None:
        """The worker that its cosine or norm sets apart most, in units of `limits`.

        None where most workers send zeros: the one that differs is then the healthy one. None
        where two workers oppose each other: nothing shows which of them is wrong.
        """
        if self._middle < _DEAD:
            return None
        strengths = {
            name: self.statistics.get(name, 0.0) / limits.get(name, inf)
            for name in ("worker_norm", "opposed_worker")
        }
        name = max(strengths, key=lambda key: strengths[key])
        if strengths[name] <= 0:
            return None
        if name == "worker_norm":
            return self._worst_norm
        return None if len(self._cosines) == _PAIR else self._most_opposed

    def restart(self) -> None:
        super().restart()
        self._norm.forget()
        self._variance.forget()
        self._apart = []
        self._cosines = []
        self._count = 0

    def words(self, name: str) -> str:
        if name == "gradient_norm":
            usual = amount(self._norm.usual)
            return f"gradient norm {self._last:.3g}, usual {usual} ({times(self._norm.rise)})"
        if name == "worker_norm":
            worker = self._worst_norm
            if len(self._logs) == _PAIR:
                ours, other = amount(self._logs[worker]), amount(self._logs[1 - worker])
                own = amount(self._own[worker])
                return f"worker {worker}'s gradient norm {ours}, usual {own}, the other's {other}"
            norm, middle = amount(self._logs[worker]), amount(self._middle)
            apart = f"{times(self._apart[worker])}, smoothed"
            return f"worker {worker}'s gradient norm {norm}, the workers' median {middle} ({apart})"
        if name == "gradient_variance":
            return f"variance between workers {times(self._variance.rise)} the usual"
        worker = self._most_opposed
        return (
            f"cosine of worker {worker}'s gradient to the mean of the others' "
            f"{self._cosines[worker]:.2f} (smoothed), usual above 0"
        )

    def advice(self, name: str, since: int) -> str:
        if name == "gradient_norm":
            return f"lower the learning rate or the clipping limit, or {roll_back(since)}"
        if name == "opposed_worker" and len(self._cosines) == _PAIR:
            return "check the data and the GPUs of both workers"
        worker = self._most_opposed if name == "opposed_worker" else self._worst_norm
        return f"check the data and the GPU of worker {worker}"
