"""The sources of evidence of the calibrated detector; to add one: a file, and a line here."""

from __future__ import annotations

from rmetric.detectors.calibrated.gradients import Gradients
from rmetric.detectors.calibrated.hardware import HardwareEvents
from rmetric.detectors.calibrated.held_out_loss import ProbeLoss, ValidationLoss
from rmetric.detectors.calibrated.not_finite import NotFinite
from rmetric.detectors.calibrated.rate_change import RateBeyondPeak
from rmetric.detectors.calibrated.source import EvidenceSource
from rmetric.detectors.calibrated.training_loss import TrainingLoss
from rmetric.detectors.calibrated.updates import Updates


def sources() -> tuple[EvidenceSource, ...]:
    """A fresh one of each."""
    return (
        NotFinite(),
        TrainingLoss(),
        ProbeLoss(),
        ValidationLoss(),
        Updates(),
        Gradients(),
        HardwareEvents(),
        RateBeyondPeak(),
    )
