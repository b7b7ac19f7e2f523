"""The three signals of the R-Metric, one a file, each online and in O(1)."""

from rmetric.signals.failure_rate import FailureRate
from rmetric.signals.gradient_variance import GradientVariance, TrailingGradientVariance
from rmetric.signals.loss_drift import LossDrift

__all__ = ["FailureRate", "GradientVariance", "LossDrift", "TrailingGradientVariance"]
