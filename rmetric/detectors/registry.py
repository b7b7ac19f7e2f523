"""Every detector by its name. To add one: a file beside this one, and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rmetric.detectors.anchors import Always, Never, Random
from rmetric.detectors.contract import Detector
from rmetric.detectors.first_loss_r_metric import FirstLossRMetric
from rmetric.detectors.gradient_norm import GradientNorm
from rmetric.detectors.isolation_forest import PeekingIsolationForest
from rmetric.detectors.loss_rise import LossRise
from rmetric.detectors.loss_slope import LossSlope
from rmetric.detectors.loss_z_score import LossZScore
from rmetric.metric import RMetric, RMetricConfig


@dataclass(frozen=True, kw_only=True)
class Entry:
    """How a detector is made and shown.

    Attributes:
        title: as tables and figures print it.
        kind: ``metric``, ``ablation``, ``variant``, ``baseline`` or ``anchor``.
        make: a fresh detector; the Generator is for those that draw.
        mode: the study's logs_<mode>/ that holds its runs.
        sees_future: needs `fit(run)` first; see `PeekingDetector`.
    """

    title: str
    kind: str
    make: Callable[[np.random.Generator], Detector]
    mode: str = "FULL_METRIC"
    sees_future: bool = False


def _r_metric(mode: str) -> Callable[[np.random.Generator], Detector]:
    return lambda generator: RMetric(RMetricConfig.simulation().with_mode(mode))


def _ablation(signal: str, mode: str) -> Entry:
    return Entry(title=f"R-Metric, {signal} only", kind="ablation", make=_r_metric(mode), mode=mode)


DETECTORS: dict[str, Entry] = {
    "r_metric": Entry(title="R-Metric", kind="metric", make=_r_metric("FULL_METRIC")),
    "r_metric_lambda": _ablation("λ", "LAMBDA_ONLY"),
    "r_metric_sigma": _ablation("σ²", "SIGMA_ONLY"),
    "r_metric_delta_l": _ablation("ΔL", "DELTA_L_ONLY"),
    "r_metric_first_loss": Entry(
        title="R-Metric, ΔL from first loss",
        kind="variant",
        make=lambda generator: FirstLossRMetric(),
    ),
    "isolation_forest": Entry(
        title="Isolation Forest (peeks)",
        kind="baseline",
        make=lambda generator: PeekingIsolationForest(),
        sees_future=True,
    ),
    "loss_rise": Entry(
        title="Validation loss rises twice", kind="baseline", make=lambda generator: LossRise()
    ),
    "loss_slope": Entry(
        title="Validation loss slope", kind="baseline", make=lambda generator: LossSlope()
    ),
    "loss_z_score": Entry(
        title="Loss z-score", kind="baseline", make=lambda generator: LossZScore()
    ),
    "gradient_norm": Entry(
        title="Gradient norm", kind="baseline", make=lambda generator: GradientNorm()
    ),
    "always": Entry(title="Always alarm", kind="anchor", make=lambda generator: Always()),
    "never": Entry(title="Never alarm", kind="anchor", make=lambda generator: Never()),
    "random": Entry(title="Random", kind="anchor", make=Random),
}
