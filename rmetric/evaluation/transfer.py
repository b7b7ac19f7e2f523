"""Weights fitted on one architecture, tried on another.

Shape suffixes: G weight vectors of the grid, R runs, T records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmetric.evaluation.intervals import Estimate, estimate
from rmetric.evaluation.protocols import Outcomes, Windows, first_alerts, judge_alerts
from rmetric.evaluation.scores import f1, ratio
from rmetric.metric import PAPER_WEIGHTS, Components, RMetric, RMetricConfig
from rmetric.records import Run

#: Weights from 0 to 1 in steps of 1 / STEPS; the paper's three lie on this grid.
STEPS = 20


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Weights fitted on the runs of one architecture, judged on those of another.

    Attributes:
        fitted_on, tested_on: the architectures.
        num_runs: of the one tested on.
        weights: as fitted.
        own_f1: F1 there of the weights fitted there, on the runs they were fitted on.
        paper_f1: F1 there of the paper's weights.
        moved_f1: F1 there of the weights from elsewhere.
        loss_percent: 100 (1 - moved / own), paired, over the runs tested on.
    """

    fitted_on: str
    tested_on: str
    num_runs: int
    weights: Components
    own_f1: Estimate
    paper_f1: Estimate
    moved_f1: Estimate
    loss_percent: Estimate


@dataclass(frozen=True, kw_only=True)
class WeightGrid:
    """Every weight vector of the grid on every run, under one protocol.

    Attributes:
        units: the weights in whole steps of the grid, shape (G, 3).
        outcomes: shape (G, R).
        architectures: shape (R,).
    """

    units: NDArray[np.int64]
    outcomes: Outcomes
    architectures: NDArray[np.str_]

    def weights(self, index: int) -> Components:
        return Components(*(self.units[index] / STEPS).tolist())

    def index(self, weights: Components) -> int:
        """Where `weights`, which must lie on the grid, are in it."""
        return int((self.units == np.rint(np.array(weights) * STEPS)).all(axis=1).argmax())

    def fit(self, chosen_R: NDArray) -> int:
        """The weights of highest F1 on some runs, as an index of the grid.

        Ties go to the weights nearest to the paper's, then to the smaller λ, σ², ΔL.
        """
        outcomes = self.outcomes.select(chosen_R)
        scores = np.nan_to_num(f1(outcomes, np.ones(outcomes.failed.shape)), nan=-1.0)
        paper = self.units[self.index(PAPER_WEIGHTS)]
        distance = ((self.units - paper) ** 2).sum(axis=1)
        # The grid is in rising order, so the first among equals is the smaller.
        return int(np.lexsort((distance, -scores))[0])

    def verdicts(self, index: int, chosen_R: NDArray) -> Outcomes:
        """What one weight vector makes of some runs, shape (R,)."""
        whole = self.outcomes
        return Outcomes(
            failed=whole.failed[chosen_R],
            hit=whole.hit[index, chosen_R],
            false_alarm=whole.false_alarm[index, chosen_R],
            lead_steps=whole.lead_steps[index, chosen_R],
            lead_minutes=whole.lead_minutes[index, chosen_R],
        )


def weight_grids(runs: Sequence[Run], protocols: Sequence[str]) -> dict[str, WeightGrid]:
    """Judge every weight vector of the grid on every run, threshold and windows as published."""
    config = RMetricConfig.simulation()
    # Without the first vector, all 0, which is no metric.
    units = np.indices((STEPS + 1,) * 3).reshape(3, -1).T[1:]
    of_rate, of_variance, of_drift = units.T / STEPS

    def alarms_TG(run: Run) -> NDArray[np.bool_]:
        rate, variance, drift = normalised_signals(run, config).T[:, :, None]
        # In the order of additions of RMetric, so that the paper's weights give its R exactly.
        return of_rate * rate + of_variance * variance + of_drift * drift > config.threshold

    windows = Windows.of(runs)
    steps = [np.array([record.step for record in run.records], dtype=np.int64) for run in runs]
    alerts = first_alerts(windows, steps, (alarms_TG(run) for run in runs))
    architectures = np.array([architecture(run) for run in runs])
    return {
        protocol: WeightGrid(
            units=units,
            outcomes=judge_alerts(windows, alerts, protocol),
            architectures=architectures,
        )
        for protocol in protocols
    }


def transfers(grid: WeightGrid) -> list[Transfer]:
    """Each architecture's weights on each of the others."""
    names = sorted(set(grid.architectures.tolist()))
    fitted = {name: grid.fit(grid.architectures == name) for name in names}
    return [
        _transfer(grid, fitted, source, target)
        for source in names
        for target in names
        if source != target
    ]


def _transfer(grid: WeightGrid, fitted: dict[str, int], source: str, target: str) -> Transfer:
    chosen = grid.architectures == target
    own = grid.verdicts(fitted[target], chosen)
    moved = grid.verdicts(fitted[source], chosen)
    of_paper = grid.verdicts(grid.index(PAPER_WEIGHTS), chosen)
    num_runs = int(chosen.sum())
    return Transfer(
        fitted_on=source,
        tested_on=target,
        num_runs=num_runs,
        weights=grid.weights(fitted[source]),
        own_f1=estimate(lambda counts: f1(own, counts), num_runs),
        paper_f1=estimate(lambda counts: f1(of_paper, counts), num_runs),
        moved_f1=estimate(lambda counts: f1(moved, counts), num_runs),
        loss_percent=estimate(lambda counts: loss_percent(own, moved, counts), num_runs),
    )


def mean_loss(grid: WeightGrid) -> Estimate:
    """The loss on transfer, averaged over the pairs of architectures; nan without a pair."""
    masks = {name: grid.architectures == name for name in np.unique(grid.architectures).tolist()}
    fitted = {name: grid.fit(mask) for name, mask in masks.items()}
    verdicts = {
        (source, target): grid.verdicts(fitted[source], masks[target])
        for source in masks
        for target in masks
    }

    def statistic(counts_BR: NDArray[np.float64]) -> NDArray[np.float64]:
        losses = [
            loss_percent(verdicts[target, target], moved, counts_BR[:, masks[target]])
            for (source, target), moved in verdicts.items()
            if source != target
        ]
        return np.mean(losses, axis=0) if losses else np.full(len(counts_BR), np.nan)

    return estimate(statistic, len(grid.architectures))


def loss_percent(
    own: Outcomes, moved: Outcomes, counts: NDArray[np.float64]
) -> NDArray[np.float64]:
    """100 (1 - moved / own) of F1; nan where even the own weights score 0."""
    return 100 * (1 - ratio(f1(moved, counts), f1(own, counts)))


def normalised_signals(run: Run, config: RMetricConfig) -> NDArray[np.float64]:
    """n(λ), n(σ²) and n(ΔL) after each record, shape (T, 3)."""
    metric = RMetric(config)
    rows = [metric.update(record).normalised for record in run.records]
    return np.array(rows, dtype=float).reshape(-1, 3)


def architecture(run: Run) -> str:
    """The run's architecture as its configuration names it."""
    return str(run.config.get("model_type", "unknown"))
