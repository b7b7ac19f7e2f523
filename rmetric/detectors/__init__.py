"""Detectors, one a file, one contract: `update(record)`, then `.score` and `.alarm`."""

from rmetric.detectors.anchors import Always, Never, Random
from rmetric.detectors.contract import Detector, PeekingDetector
from rmetric.detectors.first_loss_r_metric import FirstLossRMetric
from rmetric.detectors.gradient_norm import GradientNorm
from rmetric.detectors.isolation_forest import PeekingIsolationForest
from rmetric.detectors.loss_rise import LossRise
from rmetric.detectors.loss_slope import LossSlope
from rmetric.detectors.loss_z_score import LossZScore
from rmetric.detectors.registry import DETECTORS, IN_PAPER, Entry

__all__ = [
    "DETECTORS",
    "IN_PAPER",
    "Always",
    "Detector",
    "Entry",
    "FirstLossRMetric",
    "GradientNorm",
    "LossRise",
    "LossSlope",
    "LossZScore",
    "Never",
    "PeekingDetector",
    "PeekingIsolationForest",
    "Random",
]
