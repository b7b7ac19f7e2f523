"""Metrics for Prometheus: as text, as a file of node_exporter's textfile collector, over HTTP.

They need the package prometheus_client, which is imported on use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rmetric._util.durable import write_atomically


def family(
    name: str,
    words: str,
    labels: Sequence[str],
    samples: Iterable[tuple[Sequence[str], float | None]],
    *,
    counter: bool = False,
) -> Any:
    """A metric with its samples, each the values of the `labels` and a number; None: no sample.

    The name is without the prefix ``rmetric_`` and without the ``_total`` of a counter, which only
    rises; else it is a gauge. `words` are its HELP text.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if counter else GaugeMetricFamily
    made = kind(f"rmetric_{name}", words, labels=labels)
    for values, number in samples:
        if number is not None:
            made.add_metric(values, number)
    return made


def exposition(collector: Any) -> bytes:
    """Metrics in the Prometheus text format; `collect` of the collector gives each `family`."""
    from prometheus_client import generate_latest

    return bytes(generate_latest(_registry(collector)))


def write_textfile(path: Path, collector: Any) -> None:
    """Write a text file for node_exporter's textfile collector, atomically. Raises OSError."""
    write_atomically(path, [exposition(collector)])


def serve(collector: Any, port: int, address: str = "127.0.0.1") -> Any:
    """Serve the metrics over HTTP in a thread; `stop` ends the server that it returns.

    Port 0 is any free one. Raises OSError that names the address if it is not available.
    """
    from prometheus_client import start_http_server

    try:
        server, _ = start_http_server(port, address, _registry(collector))
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"{address}, port {port}") from None
    return server


def stop(server: Any) -> None:
    """End a server of `serve`, if there is one."""
    if server is not None:
        server.shutdown()
        server.server_close()


def _registry(collector: Any) -> Any:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry
