"""Export of telemetry: JSONL, and the metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from rmetric._util.durable import no_follow
from rmetric._util.prometheus import family
from rmetric.telemetry.lines import (
    ACTIONS,
    LEVELS,
    GpuVerdict,
    TelemetryEvent,
    event_line,
    verdict_line,
)
from rmetric.telemetry.reading import Reading
from rmetric.telemetry.sources import JudgedGpus

MEGA = 1e6
_Samples = dict[str, Mapping[str, float | None]]


class JsonlFile:
    """Appends readings, signs and verdicts to a file in the format of `lines`.

    A truncated last record is terminated first, so that only it is lost.
    Raises OSError with the file name if the file cannot be written.
    """

    def __init__(self, path: Path, *, follow_links: bool = True) -> None:
        self._path = path
        opener = None if follow_links else no_follow
        self._file: BinaryIO = open(path, "ab+", buffering=0, opener=opener)  # noqa: SIM115
        if self._file.seek(0, 2) > 0:
            self._file.seek(-1, 2)
            if self._file.read(1) != b"\n":
                self._write(b"\n")

    def write_event(self, node: str, event: TelemetryEvent) -> None:
        self._write(event_line(event, node))

    def verdict(self, verdict: GpuVerdict) -> None:
        self._write(verdict_line(verdict))

    def close(self) -> None:
        self._file.close()

    def _write(self, line: bytes) -> None:
        try:
            self._file.write(line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None


@dataclass(frozen=True)
class _Metric:
    """One Prometheus metric, of fields of a reading or of the other `_samples`.

    `name` is without the prefix and ``_total``, `words` the HELP text. `fields` maps fields of
    `Reading` to the value of the label; empty for the field of that name. `scale` is the factor to
    the base unit. A `counter` only rises until the driver is reloaded.
    """

    name: str
    words: str
    fields: dict[str, str] = field(default_factory=dict)
    label: str = ""
    scale: float = 1.0
    counter: bool = False


METRICS = (
    _Metric("temperature_celsius", "Temperature of the GPU."),
    _Metric("slowdown_temperature_celsius", "Temperature above which the GPU slows down."),
    _Metric("power_watts", "Power drawn."),
    _Metric("power_limit_watts", "Power limit in force."),
    _Metric("utilisation_ratio", "Share of the last sample period with a kernel running.",
            {"utilisation_percent": ""}, scale=0.01),
    _Metric("memory_busy_ratio", "Share of it in which memory was read or written.",
            {"memory_busy_percent": ""}, scale=0.01),
    _Metric("memory_used_bytes", "Memory in use."),
    _Metric("memory_size_bytes", "Memory of the GPU.", {"memory_total_bytes": ""}),
    _Metric("clock_hertz", "Clock at present.",
            {"sm_clock_mhz": "sm", "memory_clock_mhz": "memory"}, "clock", MEGA),
    _Metric("clock_max_hertz", "Fastest clock of the GPU.",
            {"sm_clock_max_mhz": "sm", "memory_clock_max_mhz": "memory"}, "clock", MEGA),
    _Metric("ecc_errors", "Memory errors since the driver was loaded.",
            {"ecc_corrected_errors": "corrected", "ecc_uncorrected_errors": "uncorrected"},
            "kind", counter=True),
    _Metric("ecc_lifetime_errors", "Memory errors over the life of the GPU.",
            {"ecc_corrected_errors_lifetime": "corrected",
             "ecc_uncorrected_errors_lifetime": "uncorrected"}, "kind", counter=True),
    _Metric("remapped_rows", "Rows of memory replaced over the life of the GPU, by their errors.",
            {"remapped_rows_correctable": "corrected",
             "remapped_rows_uncorrectable": "uncorrected"}, "kind", counter=True),
    _Metric("row_remap_pending", "1 if a row is replaced at the next reset."),
    _Metric("row_remap_failed", "1 if a row could not be replaced."),
    _Metric("retired_pages", "Pages of memory retired over the life of the GPU.", counter=True),
    _Metric("page_retirement_pending", "1 if a page is retired at the next reset."),
    _Metric("pcie_replays", "PCIe packets sent again since the driver was loaded.", counter=True),
    _Metric("nvlink_errors", "NVLink errors over all links since the driver was loaded.",
            {"nvlink_replays": "replay", "nvlink_recoveries": "recovery",
             "nvlink_crc_errors": "crc"}, "kind", counter=True),
    _Metric("throttled", "1 for each reason for which clocks are held down.", label="reason"),
    _Metric("recovery_action", "1 for what the driver says the GPU needs.", label="action"),
    _Metric("risk_ratio", "Risk score, from 0 to 1."),
    _Metric("risk_reachable_ratio", "The most that the known factors could give."),
    _Metric("risk_factor_ratio", "Normalised factor of the risk score.", label="factor"),
    _Metric("sign", "1 for each sign of trouble that holds, such as an Xid.", label="kind"),
    _Metric("level", "1 for what is thought of the GPU, 0 for what is not.", label="level"),
    _Metric("action", "1 for what the GPU asks for, 0 for what it does not.", label="action"),
)  # fmt: skip


class PrometheusCollector:
    """Prometheus collector of the latest readings and verdicts of a source.

    Every metric is named rmetric_gpu_..., in base units, with the labels node and gpu.
    Missing values have no sample.
    """

    def __init__(self, watched: JudgedGpus) -> None:
        self._watched = watched

    def collect(self) -> Iterator[Any]:
        readings = self._watched.readings()
        gpus = [
            ([verdict.node, str(verdict.gpu)], _samples(readings.get(key), verdict))
            for key, verdict in sorted(self._watched.verdicts().items())
        ]
        for metric in METRICS:
            samples = [
                (place + ([label] if metric.label else []), value)
                for place, own in gpus
                for label, value in own[metric.name].items()
            ]
            labels = ["node", "gpu"] + ([metric.label] if metric.label else [])
            name = f"gpu_{metric.name}"
            yield family(name, metric.words, labels, samples, counter=metric.counter)


def _samples(reading: Reading | None, verdict: GpuVerdict) -> _Samples:
    """Metric -> label -> value, of one GPU."""
    reasons = reading.throttle_reasons if reading else None
    recovery = reading.recovery_action if reading else None
    others: _Samples = {
        "throttled": dict.fromkeys(sorted(reasons or ()), 1.0),
        "recovery_action": {} if recovery is None else {recovery: 1.0},
        "risk_ratio": {"": verdict.risk},
        "risk_reachable_ratio": {"": verdict.reachable},
        "risk_factor_ratio": verdict.factors,
        "sign": dict.fromkeys(verdict.rules, 1.0),
        "level": {name: float(name == verdict.level) for name in LEVELS},
        "action": {name: float(name == verdict.action) for name in ACTIONS},
    }
    return others | {
        metric.name: {
            label: float(value) * metric.scale
            for name, label in (metric.fields or {metric.name: ""}).items()
            if (value := getattr(reading, name, None)) is not None
        }
        for metric in METRICS
        if metric.name not in others
    }
