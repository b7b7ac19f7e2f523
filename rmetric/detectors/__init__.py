"""Detectors, one a file, one contract: `update(record)`, then `.score`, `.alarm`, `.reason`."""

from rmetric.detectors.anchors import Always, Never, Random
from rmetric.detectors.bayesian_change_point import BayesianChangePoint
from rmetric.detectors.calibrated import CalibratedDetector, CalibratedRMetric, Thresholds
from rmetric.detectors.contract import Detector, PeekingDetector
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
from rmetric.detectors.registry import DETECTORS, IN_PAPER, Entry, make_detector
from rmetric.detectors.robust_gradient_norm import RobustGradientNorm
from rmetric.detectors.worker_dispersion import WorkerDispersion

__all__ = [
    "DETECTORS",
    "IN_PAPER",
    "Always",
    "BayesianChangePoint",
    "CalibratedDetector",
    "CalibratedRMetric",
    "Detector",
    "Entry",
    "GradientNorm",
    "LightningSpike",
    "LlmFoundrySpike",
    "LossCusum",
    "LossEwma",
    "LossRise",
    "LossSlope",
    "LossZScore",
    "Never",
    "OnlineIsolationForest",
    "PageHinkley",
    "PeekingDetector",
    "PeekingIsolationForest",
    "Random",
    "RobustGradientNorm",
    "Thresholds",
    "WorkerDispersion",
    "make_detector",
]
