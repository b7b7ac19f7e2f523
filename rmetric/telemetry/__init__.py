"""GPU telemetry: readings with their units, events for λ, and verdicts.

`nvml` reads (through `library`, the one user of pynvml); `risk` scores and `rules` override;
`judge` puts both into a verdict on one GPU; `sources` has the sources of verdicts, `export`
writes them out. Every module is imported when it is asked for; all but `nvml` and `library`
are pure or use files only.
"""

from typing import TYPE_CHECKING

from rmetric._util.lazy import lazy

if TYPE_CHECKING:
    from rmetric.telemetry.gpu_watch import GpuWatch
    from rmetric.telemetry.judge import Judge
    from rmetric.telemetry.nvml import NvmlEvents
    from rmetric.telemetry.played import PlayedReadings
    from rmetric.telemetry.reading import Reading, Sign
    from rmetric.telemetry.risk import RiskScore
    from rmetric.telemetry.risk_config import RiskConfig
    from rmetric.telemetry.sources import VerdictSource
    from rmetric.telemetry.verdict import GpuVerdict
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "rmetric.telemetry.gpu_watch": "GpuWatch",
            "rmetric.telemetry.judge": "Judge",
            "rmetric.telemetry.nvml": "NvmlEvents",
            "rmetric.telemetry.played": "PlayedReadings",
            "rmetric.telemetry.reading": "Reading Sign",
            "rmetric.telemetry.risk": "RiskScore",
            "rmetric.telemetry.risk_config": "RiskConfig",
            "rmetric.telemetry.sources": "VerdictSource",
            "rmetric.telemetry.verdict": "GpuVerdict",
        },
    )

__all__ = [
    "GpuVerdict",
    "GpuWatch",
    "Judge",
    "NvmlEvents",
    "PlayedReadings",
    "Reading",
    "RiskConfig",
    "RiskScore",
    "Sign",
    "VerdictSource",
]
