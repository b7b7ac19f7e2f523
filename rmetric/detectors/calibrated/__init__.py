"""The calibrated detector, in parts: sources of evidence, thresholds, and what joins them."""

from rmetric.detectors.calibrated.detector import CalibratedDetector
from rmetric.detectors.calibrated.r_metric import CalibratedRMetric
from rmetric.detectors.calibrated.thresholds import (
    Thresholds,
    default_thresholds,
    read_thresholds,
    thresholds_to_json,
)

__all__ = [
    "CalibratedDetector",
    "CalibratedRMetric",
    "Thresholds",
    "default_thresholds",
    "read_thresholds",
    "thresholds_to_json",
]
