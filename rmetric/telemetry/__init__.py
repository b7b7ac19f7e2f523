"""GPU telemetry: readings with units, hardware events, risk scores and verdicts.

`nvml` reads GPUs (through `nvml_library`). `risk` scores the readings; `judge` has the rules that
override the score, and combines both into a verdict on one GPU.
`sources` has the sources of verdicts, `export` writes verdicts and readings. All but `nvml` and
`nvml_library` are pure or use files.
"""

from rmetric.telemetry.judge import Judge
from rmetric.telemetry.lines import GpuVerdict
from rmetric.telemetry.nvml import NvmlEvents
from rmetric.telemetry.reading import GpuSign, Reading
from rmetric.telemetry.risk import RiskConfig, RiskScore
from rmetric.telemetry.sources import GpuWatch, ReplayedReadings, VerdictSource

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
