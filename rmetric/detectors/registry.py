"""Every detector by its name. To add one: a file beside this one, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rmetric.detectors.anchors import Always, Never, Random
from rmetric.detectors.bayesian_change_point import BayesianChangePoint
from rmetric.detectors.calibrated import CalibratedDetector, CalibratedRMetric, Thresholds
from rmetric.detectors.contract import Detector
from rmetric.detectors.gradient_norm import GradientNorm
from rmetric.detectors.isolation_forest import PeekingIsolationForest
from rmetric.detectors.lightning_spike import LightningSpike
from rmetric.detectors.llm_foundry_spike import LlmFoundrySpike
from rmetric.detectors.loss_cusum import LossCusum
from rmetric.detectors.loss_ewma import LossEwma
from rmetric.detectors.loss_rise import LossRise
from rmetric.detectors.loss_slope import LossSlope
from rmetric.detectors.loss_z_score import LossZScore
from rmetric.detectors.online_isolation_forest import OnlineIsolationForest
from rmetric.detectors.page_hinkley import PageHinkley
from rmetric.detectors.robust_gradient_norm import RobustGradientNorm
from rmetric.detectors.worker_dispersion import WorkerDispersion
from rmetric.metric import RMetric, RMetricConfig


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Constructor of a detector and its place in tables.

    Attributes:
        kind: ``metric``, ``ablation``, ``variant``, ``ours``, ``baseline``, ``peer`` (another
            package's, run by its own code) or ``anchor``.
        make: a fresh detector; the Generator is for those that draw.
        mode: the study's logs_<mode>/ that holds its runs.
        sees_future: needs `fit(run)` first; see `PeekingDetector`.
        in_paper: stands in the paper's tables and in those that are modelled on
            them; the others stand in the benchmark alone.
    """

    title: str
    kind: str
    make: Callable[[np.random.Generator], Detector]
    mode: str = "FULL_METRIC"
    sees_future: bool = False
    in_paper: bool = False


def _r_metric(mode: str = "FULL_METRIC", **changes: Any) -> Callable[[Any], Detector]:
    return lambda generator: RMetric(RMetricConfig.simulation(**changes).with_mode(mode))


def _ablation(signal: str, mode: str) -> Entry:
    title = f"R-Metric, {signal} only"
    return Entry(title=title, kind="ablation", make=_r_metric(mode), mode=mode, in_paper=True)


def _plain(title: str, make: Callable[[], Detector], kind: str = "baseline", **more: Any) -> Entry:
    return Entry(title=title, kind=kind, make=lambda generator: make(), **more)


DETECTORS: dict[str, Entry] = {
    "r_metric": Entry(title="R-Metric", kind="metric", make=_r_metric(), in_paper=True),
    "r_metric_lambda": _ablation("λ", "LAMBDA_ONLY"),
    "r_metric_sigma": _ablation("σ²", "SIGMA_ONLY"),
    "r_metric_delta_l": _ablation("ΔL", "DELTA_L_ONLY"),
    "r_metric_first_loss": Entry(
        title="R-Metric, ΔL from first loss", kind="variant", in_paper=True,
        make=_r_metric(variant="authors_simulator"),
    ),
    "r_metric_per_step": Entry(
        title="R-Metric, per step", kind="variant", make=_r_metric(loss="training_loss")
    ),
    "r_metric_calibrated": _plain("R-Metric, calibrated", CalibratedRMetric, "variant"),
    "calibrated": _plain("Calibrated detector", CalibratedDetector, "ours"),
    "isolation_forest": _plain(
        "Isolation Forest (peeks)", PeekingIsolationForest, sees_future=True, in_paper=True
    ),
    "isolation_forest_online": _plain("Isolation Forest (past only)", OnlineIsolationForest),
    "loss_rise": _plain("Validation loss rises twice", LossRise, in_paper=True),
    "loss_slope": _plain("Validation loss slope", LossSlope, in_paper=True),
    "loss_z_score": _plain("Loss z-score", LossZScore, in_paper=True),
    "gradient_norm": _plain("Gradient norm", GradientNorm, in_paper=True),
    "robust_gradient_norm": _plain("Gradient norm, robust z", RobustGradientNorm),
    "worker_dispersion": _plain("Worker dispersion, robust z", WorkerDispersion),
    "loss_ewma": _plain("EWMA of log loss", LossEwma),
    "loss_cusum": _plain("CUSUM of log loss", LossCusum),
    "page_hinkley": _plain("Page-Hinkley", PageHinkley),
    "bayesian_change_point": _plain("Bayesian change point", BayesianChangePoint),
    "lightning_spike": _plain("Lightning SpikeDetection (its rule)", LightningSpike),
    "llm_foundry_spike": _plain("LLM Foundry KillLossSpike (its rule)", LlmFoundrySpike),
    "always": _plain("Always alarm", Always, "anchor", in_paper=True),
    "never": _plain("Never alarm", Never, "anchor", in_paper=True),
    "random": Entry(title="Random", kind="anchor", make=Random, in_paper=True),
}  # fmt: skip

#: Those that a threshold file is for.
CALIBRATED: dict[str, Callable[[Thresholds | None], Detector]] = {
    "r_metric_calibrated": CalibratedRMetric,
    "calibrated": CalibratedDetector,
}

#: Those of the paper's tables, whose rows and bytes a new detector must not move.
IN_PAPER = {name: entry for name, entry in DETECTORS.items() if entry.in_paper}


def register(entries: Mapping[str, Entry]) -> None:
    """Add detectors of others, before the anchors, which end every table.

    Raises ValueError for a name that is taken, or an entry of the paper's tables.
    """
    for name, entry in entries.items():
        if name in DETECTORS:
            raise ValueError(f"the detector {name!r} is registered already")
        if entry.in_paper:
            raise ValueError(f"the detector {name!r} cannot be in_paper: those rows are closed")
    anchors = {n: DETECTORS.pop(n) for n, e in list(DETECTORS.items()) if e.kind == "anchor"}
    DETECTORS.update(entries)
    DETECTORS.update(anchors)


def make_detector(
    name: str, generator: np.random.Generator | None = None, thresholds: Thresholds | None = None
) -> Detector:
    """Make a fresh detector by its name.

    Args:
        name: a key of `DETECTORS`, such as ``calibrated`` or ``r_metric``.
        generator: for detectors that draw random numbers; by default one with a fixed seed.
        thresholds: for the calibrated detectors, in place of the shipped ones; ignored by others.

    Returns:
        A detector that has seen no record.

    Raises:
        KeyError: the name is unknown.
    """
    own = CALIBRATED.get(name)
    if own is not None and thresholds is not None:
        return own(thresholds)
    return DETECTORS[name].make(generator or np.random.default_rng(0))
