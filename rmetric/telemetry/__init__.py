"""GPU telemetry: readings with units, hardware events, risk scores and verdicts.

Each module is imported when it is asked for; all but `nvml` and `nvml_library` are pure or use
files.
"""

from typing import TYPE_CHECKING

from rmetric._util.lazy import lazy

if TYPE_CHECKING:
    from rmetric.telemetry.judge import Judge
    from rmetric.telemetry.lines import GpuVerdict
    from rmetric.telemetry.nvml import NvmlEvents
    from rmetric.telemetry.reading import GpuSign, Reading
    from rmetric.telemetry.risk import RiskConfig, RiskScore
    from rmetric.telemetry.sources import GpuWatch, ReplayedReadings, VerdictSource
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "rmetric.telemetry.judge": "Judge",
            "rmetric.telemetry.lines": "GpuVerdict",
            "rmetric.telemetry.nvml": "NvmlEvents",
            "rmetric.telemetry.reading": "GpuSign Reading",
            "rmetric.telemetry.risk": "RiskConfig RiskScore",
            "rmetric.telemetry.sources": "GpuWatch ReplayedReadings VerdictSource",
        },
    )

__all__ = [
    "GpuSign",
    "GpuVerdict",
    "GpuWatch",
    "Judge",
    "NvmlEvents",
    "Reading",
    "ReplayedReadings",
    "RiskConfig",
    "RiskScore",
    "VerdictSource",
]
