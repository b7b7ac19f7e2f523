"""Weights fitted on one architecture, tested on another.

Shape suffixes: G weight vectors of the grid, R runs, T records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rmetric._util.strict_json import field, whole_number
from rmetric.evaluation.intervals import Estimate, estimate
from rmetric.evaluation.protocols import Outcomes, Windows, first_alerts, judge_alerts
from rmetric.evaluation.scores import f1, ratio
from rmetric.metric import PAPER_WEIGHTS, Components, RMetric, RMetricConfig
from rmetric.metric_settings import settings_of
from rmetric.records import Run

#: Weights from 0 to 1 in steps of 1 / STEPS; the paper's three lie on this grid.
STEPS = 20


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Weights fitted on the runs of one architecture, judged on those of another.

    Cross-fitted: each half of the runs is judged by weights fitted on the other half, of the one
    architecture or of the other, and both halves are pooled. `seen_f1` is in sample, `own_f1` out
    of sample, `moved_f1` of the weights from elsewhere; `overfit_percent` is 100 (1 - own / seen),
    `loss_percent` 100 (1 - moved / own), paired.
    """

    fitted_on: str
    tested_on: str
    num_runs: int
    weights: tuple[Components, Components]
    seen_f1: Estimate
    own_f1: Estimate
    paper_f1: Estimate
    moved_f1: Estimate
    overfit_percent: Estimate
    loss_percent: Estimate


@dataclass(frozen=True, kw_only=True)
class WeightGrid:
    """Every weight vector of the grid on every run, under one protocol.

    Attributes:
        units: the weights in whole steps of the grid, shape (G, 3).
        outcomes: shape (G, R).
        halves: which half of its architecture each run is in, 0 or 1, shape (R,).
    """

    units: NDArray[np.int64]
    outcomes: Outcomes
    architectures: NDArray[np.str_]
    halves: NDArray[np.int64]

    def weights(self, index: int) -> Components:
        return Components(*(self.units[index] / STEPS).tolist())

    def index(self, weights: Components) -> int:
        """Index of `weights`, which must lie on the grid."""
        return int((self.units == np.rint(np.array(weights) * STEPS)).all(axis=1).argmax())

    def fit(self, chosen_R: NDArray) -> int:
        """Index of the weights of highest F1 on some runs; of equal ones nearest to the paper's."""
        outcomes = self.outcomes.select(chosen_R)
        scores = np.nan_to_num(f1(outcomes, np.ones(outcomes.failed.shape)), nan=-1.0)
        paper = self.units[self.index(PAPER_WEIGHTS)]
        distance = ((self.units - paper) ** 2).sum(axis=1)
        # The grid is in rising order, so the first among equals is the smaller.
        return int(np.lexsort((distance, -scores))[0])

    def fit_halves(self) -> dict[str, NDArray[np.int64]]:
        """The weights fitted on each half of each architecture that has both, shape (2,)."""
        return {
            name: np.array([self.fit(there & (self.halves == half)) for half in (0, 1)])
            for name in np.unique(self.architectures).tolist()
            for there in [self.architectures == name]
            if len(set(self.halves[there].tolist())) == 2
        }

    def verdicts(self, index: int | NDArray[np.int64], chosen_R: NDArray) -> Outcomes:
        """Outcomes of some runs, shape (R,), under one weight vector, or under one for each run."""
        whole = self.outcomes
        return Outcomes(
            failed=whole.failed[chosen_R],
            hit=whole.hit[index, chosen_R],
            false_alarm=whole.false_alarm[index, chosen_R],
            lead_steps=whole.lead_steps[index, chosen_R],
            lead_minutes=whole.lead_minutes[index, chosen_R],
        )


def weight_grids(runs: Sequence[Run], protocols: Sequence[str]) -> dict[str, WeightGrid]:
    """Judge every weight vector of the grid on every run, with the run's other settings."""
    # Without the first vector: all weights are 0, so there is no metric.
    units = np.indices((STEPS + 1,) * 3).reshape(3, -1).T[1:]
    of_rate, of_variance, of_drift = units.T / STEPS

    def alarms_TG(run: Run) -> NDArray[np.bool_]:
        config = settings_of(run).config
        rate, variance, drift = normalised_signals(run, config).T[:, :, None]
        # In the order of additions of RMetric, so that the paper's weights give its R exactly.
        return of_rate * rate + of_variance * variance + of_drift * drift > config.threshold

    windows = Windows.of(runs)
    steps = [np.array([record.step for record in run.records], dtype=np.int64) for run in runs]
    alerts = first_alerts(windows, steps, (alarms_TG(run) for run in runs))
    architectures = np.array([architecture(run) for run in runs])
    halves = halves_of(runs)
    return {
        protocol: WeightGrid(
            units=units,
            outcomes=judge_alerts(windows, alerts, protocol),
            architectures=architectures,
            halves=halves,
        )
        for protocol in protocols
    }


def transfers(grid: WeightGrid) -> list[Transfer]:
    """Each architecture's weights on each of the others."""
    fitted = grid.fit_halves()
    return [
        _transfer(grid, fitted, source, target)
        for source in fitted
        for target in fitted
        if source != target
    ]


def _transfer(
    grid: WeightGrid, fitted: dict[str, NDArray[np.int64]], source: str, target: str
) -> Transfer:
    chosen = grid.architectures == target
    seen = _judged(grid, fitted[target], target, out_of_sample=False)
    own, moved = (_judged(grid, fitted[name], target) for name in (target, source))
    of_paper = grid.verdicts(grid.index(PAPER_WEIGHTS), chosen)
    num_runs = int(chosen.sum())
    first, second = fitted[source].tolist()

    def f1_of(outcomes: Outcomes) -> Estimate:
        return estimate(partial(f1, outcomes), num_runs)

    def loss(better: Outcomes, worse: Outcomes) -> Estimate:
        """100 (1 - worse / better) of F1; nan where even the better scores 0."""
        return estimate(
            lambda counts: 100 * (1 - ratio(f1(worse, counts), f1(better, counts))), num_runs
        )

    return Transfer(
        fitted_on=source,
        tested_on=target,
        num_runs=num_runs,
        weights=(grid.weights(first), grid.weights(second)),
        seen_f1=f1_of(seen),
        own_f1=f1_of(own),
        paper_f1=f1_of(of_paper),
        moved_f1=f1_of(moved),
        overfit_percent=loss(seen, own),
        loss_percent=loss(own, moved),
    )


def _judged(
    grid: WeightGrid, fitted: NDArray[np.int64], target: str, *, out_of_sample: bool = True
) -> Outcomes:
    """The runs of `target`, each judged by the weights fitted on the other half, or on its own."""
    chosen = grid.architectures == target
    halves = grid.halves[chosen]
    return grid.verdicts(fitted[1 - halves if out_of_sample else halves], chosen)


def mean_loss(grid: WeightGrid) -> Estimate:
    """The loss on transfer of the mean F1 over the pairs of architectures; nan without a pair."""
    fitted = grid.fit_halves()
    pairs = [
        (target, _judged(grid, own, target), _judged(grid, moved, target))
        for target, own in fitted.items()
        for source, moved in fitted.items()
        if source != target
    ]
    return _loss_of_mean(grid, pairs)


def mean_overfit(grid: WeightGrid) -> Estimate:
    """The loss out of sample without any move, of the mean F1 over the architectures."""
    pairs = [
        (name, _judged(grid, own, name, out_of_sample=False), _judged(grid, own, name))
        for name, own in grid.fit_halves().items()
    ]
    return _loss_of_mean(grid, pairs)


def _loss_of_mean(grid: WeightGrid, pairs: list[tuple[str, Outcomes, Outcomes]]) -> Estimate:
    # A mean of losses would be undefined as soon as one architecture's own F1 is 0.
    def statistic(counts_BR: NDArray[np.float64]) -> NDArray[np.float64]:
        better, worse = np.zeros((2, len(counts_BR)))
        for name, before, after in pairs:
            counts = counts_BR[:, grid.architectures == name]
            better, worse = better + f1(before, counts), worse + f1(after, counts)
        return 100 * (1 - ratio(worse, better))

    return estimate(statistic, len(grid.architectures))


def normalised_signals(run: Run, config: RMetricConfig) -> NDArray[np.float64]:
    """n(λ), n(σ²) and n(ΔL) after each record, shape (T, 3)."""
    metric = RMetric(config)
    rows = [metric.update(record).normalised for record in run.records]
    return np.array(rows, dtype=float).reshape(-1, 3)


def architecture(run: Run) -> str:
    """The run's architecture as its configuration names it."""
    return str(run.config.get("model_type", "unknown"))


def halves_of(runs: Sequence[Run]) -> NDArray[np.int64]:
    """Parity of each run's repetition, or of its place in its architecture where it has none."""
    seen: Counter[str] = Counter()
    halves = []
    for run in runs:
        name = architecture(run)
        repetition = field(run.config, "repetition", whole_number)
        halves.append((seen[name] if repetition is None else repetition) % 2)
        seen[name] += 1
    return np.array(halves, dtype=np.int64)
