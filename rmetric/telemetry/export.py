"""Export of telemetry: JSONL, and Prometheus as a text file or over HTTP.

Prometheus needs the package prometheus_client, which is imported on use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from rmetric._util.durable import write_atomically
from rmetric.telemetry.lines import TelemetryEvent, event_line, verdict_line
from rmetric.telemetry.reading import Reading
from rmetric.telemetry.verdict import ACTIONS, LEVELS, GpuVerdict

MEGA = 1e6


class ExportedTelemetry(Protocol):
    """Exported source: a `GpuWatch` or `ReplayedReadings`."""

    def verdicts(self) -> dict[str, GpuVerdict]: ...

    def readings(self) -> dict[str, Reading]: ...


class JsonlFile:
    """Appends readings, signs and verdicts to a file in the format of `lines`.

    A truncated last record is terminated first, so that only it is lost.
    Raises OSError with the file name if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = open(path, "ab+", buffering=0)  # noqa: SIM115
        if self._file.seek(0, 2) > 0:
            self._file.seek(-1, 2)
            if self._file.read(1) != b"\n":
                self._write(b"\n")

    def write_event(self, node: str, event: TelemetryEvent) -> None:
        """Append a reading or a sign."""
        self._write(event_line(event, node))

    def verdict(self, verdict: GpuVerdict) -> None:
        """Append a verdict."""
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
    """One Prometheus metric and the fields of a reading that it exports.

    Attributes:
        name: without the prefix and without ``_total``.
        words: HELP text.
        fields: fields of `Reading` -> value of the label, if there is one.
        label: name of the label; empty for none.
        scale: factor from the field to the base unit.
        counter: it only rises until the driver is reloaded.
    """

    name: str
    words: str
    fields: dict[str, str]
    label: str = ""
    scale: float = 1.0
    counter: bool = False


METRICS = (
    _Metric("temperature_celsius", "Temperature of the GPU.", {"temperature_celsius": ""}),
    _Metric("slowdown_temperature_celsius", "Temperature above which the GPU slows down.",
            {"slowdown_temperature_celsius": ""}),
    _Metric("power_watts", "Power drawn.", {"power_watts": ""}),
    _Metric("power_limit_watts", "Power limit in force.", {"power_limit_watts": ""}),
    _Metric("utilisation_ratio", "Share of the last sample period with a kernel running.",
            {"utilisation_percent": ""}, scale=0.01),
    _Metric("memory_busy_ratio", "Share of it in which memory was read or written.",
            {"memory_busy_percent": ""}, scale=0.01),
    _Metric("memory_used_bytes", "Memory in use.", {"memory_used_bytes": ""}),
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
    _Metric("row_remap_pending", "1 if a row is replaced at the next reset.",
            {"row_remap_pending": ""}),
    _Metric("row_remap_failed", "1 if a row could not be replaced.", {"row_remap_failed": ""}),
    _Metric("retired_pages", "Pages of memory retired over the life of the GPU.",
            {"retired_pages": ""}, counter=True),
    _Metric("page_retirement_pending", "1 if a page is retired at the next reset.",
            {"page_retirement_pending": ""}),
    _Metric("pcie_replays", "PCIe packets sent again since the driver was loaded.",
            {"pcie_replays": ""}, counter=True),
    _Metric("nvlink_errors", "NVLink errors over all links since the driver was loaded.",
            {"nvlink_replays": "replay", "nvlink_recoveries": "recovery",
             "nvlink_crc_errors": "crc"}, "kind", counter=True),
)  # fmt: skip


class PrometheusCollector:
    """Prometheus collector of the latest readings and verdicts of a source.

    Every metric is named rmetric_gpu_..., in base units, with the labels node and gpu.
    Missing values have no sample.
    """

    def __init__(self, watched: ExportedTelemetry) -> None:
        self._watched = watched

    def collect(self) -> Iterator[Any]:
        readings, verdicts = self._watched.readings(), self._watched.verdicts()
        places = {key: [one.node, str(one.gpu)] for key, one in verdicts.items()}
        for metric in METRICS:
            family = _family(metric)
            for key in sorted(readings.keys() & places.keys()):
                for name, label in metric.fields.items():
                    value = getattr(readings[key], name)
                    if value is not None:
                        labels = places[key] + ([label] if metric.label else [])
                        family.add_metric(labels, float(value) * metric.scale)
            yield family
        yield from _words(readings, places)
        yield from _of_verdicts(verdicts, places)


def write_textfile(path: Path, watched: ExportedTelemetry) -> None:
    """Write a text file for node_exporter's textfile collector, atomically. Raises OSError."""
    write_atomically(path, [exposition(watched)])


def exposition(watched: ExportedTelemetry) -> bytes:
    """Metrics in the Prometheus text format."""
    from prometheus_client import generate_latest

    return bytes(generate_latest(_registry(watched)))


def serve(watched: ExportedTelemetry, port: int, address: str = "127.0.0.1") -> Any:
    """Serve the metrics over HTTP in a thread.

    Args:
        watched: exported source.
        port: TCP port; 0 for any free one.
        address: address to bind.

    Returns:
        The server; `shutdown` stops it.

    Raises:
        OSError: the address is not available; the message names it.
    """
    from prometheus_client import start_http_server

    try:
        server, _ = start_http_server(port, address, _registry(watched))
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"{address}, port {port}") from None
    return server


def _registry(watched: ExportedTelemetry) -> Any:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(PrometheusCollector(watched))
    return registry


def _family(metric: _Metric) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = ["node", "gpu"] + ([metric.label] if metric.label else [])
    kind = CounterMetricFamily if metric.counter else GaugeMetricFamily
    return kind(f"rmetric_gpu_{metric.name}", metric.words, labels=labels)


def _gauge(name: str, words: str, *labels: str) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(f"rmetric_gpu_{name}", words, labels=["node", "gpu", *labels])


def _words(readings: dict[str, Reading], places: dict[str, list[str]]) -> Iterator[Any]:
    """Metrics of textual values: a sample of 1 for each active value."""
    throttled = _gauge("throttled", "1 for each reason for which clocks are held down.", "reason")
    action = _gauge("recovery_action", "1 for what the driver says the GPU needs.", "action")
    for key in sorted(readings.keys() & places.keys()):
        for reason in sorted(readings[key].throttle_reasons or ()):
            throttled.add_metric([*places[key], reason], 1.0)
        if readings[key].recovery_action is not None:
            action.add_metric([*places[key], readings[key].recovery_action], 1.0)
    yield throttled
    yield action


def _of_verdicts(verdicts: dict[str, GpuVerdict], places: dict[str, list[str]]) -> Iterator[Any]:
    risk = _gauge("risk_ratio", "Risk score, from 0 to 1.")
    reachable = _gauge("risk_reachable_ratio", "The most that the known factors could give.")
    factor = _gauge("risk_factor_ratio", "Normalised factor of the risk score.", "factor")
    sign = _gauge("sign", "1 for each sign of trouble that holds, such as an Xid.", "kind")
    level = _gauge("level", "1 for what is thought of the GPU, 0 for what is not.", "level")
    action = _gauge("action", "1 for what the GPU asks for, 0 for what it does not.", "action")
    for key, verdict in sorted(verdicts.items()):
        place = places[key]
        if verdict.risk is not None:
            risk.add_metric(place, verdict.risk)
        if verdict.reachable is not None:
            reachable.add_metric(place, verdict.reachable)
        for name, value in verdict.factors.items():
            if value is not None:
                factor.add_metric([*place, name], value)
        for name in verdict.rules:
            sign.add_metric([*place, name], 1.0)
        for name in LEVELS:
            level.add_metric([*place, name], float(name == verdict.level))
        for name in ACTIONS:
            action.add_metric([*place, name], float(name == verdict.action))
    yield from (risk, reachable, factor, sign, level, action)
