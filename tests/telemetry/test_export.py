"""What others see: Prometheus's text, its textfile and its endpoint."""

import subprocess
import sys
import urllib.error
import urllib.request

import pytest

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")

from prometheus_client.parser import text_string_to_metric_families

from rmetric._util.prometheus import exposition, serve, write_textfile
from rmetric.telemetry.export import METRICS, PrometheusCollector
from rmetric.telemetry.lines import ACTIONS, LEVELS
from rmetric.telemetry.reading import GpuSign, Reading
from rmetric.telemetry.sources import JudgedGpus


class FakeTelemetry(JudgedGpus):
    def __init__(self, *events):
        super().__init__()
        for node, event in events:
            self.process(node, event)


def metrics(*events):
    return PrometheusCollector(FakeTelemetry(*events))


WELL = Reading(
    gpu=0,
    time=0.0,
    temperature_celsius=61,
    slowdown_temperature_celsius=90,
    power_watts=312.5,
    utilisation_percent=97,
    memory_used_bytes=76_000_000_000,
    memory_total_bytes=80_000_000_000,
    sm_clock_mhz=1755,
    memory_clock_max_mhz=2619,
    throttle_reasons=frozenset({"software_power_cap"}),
    ecc_corrected_errors=0,
    ecc_uncorrected_errors_lifetime=3,
    row_remap_pending=False,
    nvlink_crc_errors=12,
    recovery_action="none",
)


def samples(text):
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(found, name, **labels):
    labels = {"gpu": "0", "node": "a"} | labels
    return found[(f"rmetric_gpu_{name}", *sorted(labels.items()))]


class TestText:
    def test_values_are_in_base_units(self):
        text = exposition(metrics(("a", WELL)))
        assert b"# TYPE rmetric_gpu_power_watts gauge\n" in text
        assert b"# TYPE rmetric_gpu_ecc_errors_total counter\n" in text
        found = samples(text)
        assert value(found, "temperature_celsius") == 61
        assert value(found, "utilisation_ratio") == 0.97
        assert value(found, "memory_used_bytes") == 7.6e10
        assert value(found, "clock_hertz", clock="sm") == 1.755e9
        assert value(found, "clock_max_hertz", clock="memory") == 2.619e9
        assert value(found, "ecc_errors_total", kind="corrected") == 0
        assert value(found, "ecc_lifetime_errors_total", kind="uncorrected") == 3
        assert value(found, "nvlink_errors_total", kind="crc") == 12
        assert value(found, "throttled", reason="software_power_cap") == 1
        assert value(found, "recovery_action", action="none") == 1
        assert (value(found, "risk_ratio"), value(found, "risk_reachable_ratio")) == (0, 0.65)
        assert value(found, "risk_factor_ratio", factor="errors") == 0
        assert [value(found, "level", level=name) for name in LEVELS] == [1, 0, 0]
        assert [value(found, "action", action=name) for name in ACTIONS] == [1, 0, 0, 0, 0, 0]

    def test_every_quantity_of_a_reading_is_exported(self):
        exported = {name for metric in METRICS for name in metric.fields or {metric.name}}
        others = {"gpu", "time", "throttle_reasons"}
        assert exported | others >= set(Reading.__dataclass_fields__)

    def test_what_is_missing_has_no_sample(self):
        found = samples(exposition(metrics(("a", Reading(gpu=3, time=0.0)))))
        assert {name for name, *_ in found} == {
            "rmetric_gpu_level", "rmetric_gpu_action", "rmetric_gpu_risk_reachable_ratio",
        }  # fmt: skip

    def test_a_lost_gpu_has_a_verdict_and_no_stale_reading(self):
        lost = GpuSign(gpu=0, time=5.0, kind="gpu_lost")
        found = samples(exposition(metrics(("a", WELL), ("b", WELL), ("a", lost))))
        assert found["rmetric_gpu_level", ("gpu", "0"), ("level", "fatal"), ("node", "a")] == 1.0
        assert found["rmetric_gpu_sign", ("gpu", "0"), ("kind", "gpu_lost"), ("node", "a")] == 1.0
        assert {dict(labels)["node"] for name, *labels in found if "temperature" in name} == {"b"}


def test_the_textfile_is_replaced_whole_and_readable_by_others(tmp_path):
    path = tmp_path / "rmetric.prom"
    path.write_text("old")
    write_textfile(path, metrics(("a", WELL)))
    assert path.read_bytes() == exposition(metrics(("a", WELL)))
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_the_endpoint_is_on_loopback_answers_with_what_is_known_now_and_has_its_port_alone():
    watched = FakeTelemetry(("a", WELL))
    server = serve(PrometheusCollector(watched), 0)
    try:
        assert server.server_address[0] == "127.0.0.1"
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.read() == exposition(metrics(("a", WELL)))
            assert answer.headers["Content-Type"].startswith("text/plain")
        with pytest.raises(OSError, match="in use"):
            serve(metrics(), server.server_port)
        watched.process("a", GpuSign(gpu=0, time=5.0, kind="xid_79"))
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert (
                'rmetric_gpu_action{action="reboot",gpu="0",node="a"} 1.0' in answer.read().decode()
            )
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)


def test_neither_telemetry_nor_its_command_loads_what_it_may_not_need():
    code = "import rmetric.cli.telemetry, rmetric.telemetry.sources, sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "rmetric.telemetry.export" in loaded
    assert loaded.isdisjoint({"torch", "pandas", "sklearn", "prometheus_client", "pynvml"})
