"""What others see: Prometheus's text, its textfile and its endpoint."""

import re
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")

from prometheus_client.parser import text_string_to_metric_families

from rmetric._util.prometheus import exposition, serve, write_textfile
from rmetric.telemetry.export import METRICS, PrometheusCollector
from rmetric.telemetry.reading import GpuSign, Reading
from rmetric.telemetry.sources import JudgedGpus


class FakeTelemetry(JudgedGpus):
    def __init__(self, *heard):
        super().__init__()
        for node, one in heard:
            self.process(node, one)


def metrics(*heard):
    return PrometheusCollector(FakeTelemetry(*heard))


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
GOLDEN = """\
# HELP rmetric_gpu_temperature_celsius Temperature of the GPU.
# TYPE rmetric_gpu_temperature_celsius gauge
rmetric_gpu_temperature_celsius{gpu="0",node="a"} 61.0
# HELP rmetric_gpu_slowdown_temperature_celsius Temperature above which the GPU slows down.
# TYPE rmetric_gpu_slowdown_temperature_celsius gauge
rmetric_gpu_slowdown_temperature_celsius{gpu="0",node="a"} 90.0
# HELP rmetric_gpu_power_watts Power drawn.
# TYPE rmetric_gpu_power_watts gauge
rmetric_gpu_power_watts{gpu="0",node="a"} 312.5
# HELP rmetric_gpu_utilisation_ratio Share of the last sample period with a kernel running.
# TYPE rmetric_gpu_utilisation_ratio gauge
rmetric_gpu_utilisation_ratio{gpu="0",node="a"} 0.97
# HELP rmetric_gpu_memory_used_bytes Memory in use.
# TYPE rmetric_gpu_memory_used_bytes gauge
rmetric_gpu_memory_used_bytes{gpu="0",node="a"} 7.6e+10
# HELP rmetric_gpu_memory_size_bytes Memory of the GPU.
# TYPE rmetric_gpu_memory_size_bytes gauge
rmetric_gpu_memory_size_bytes{gpu="0",node="a"} 8e+10
# HELP rmetric_gpu_clock_hertz Clock at present.
# TYPE rmetric_gpu_clock_hertz gauge
rmetric_gpu_clock_hertz{clock="sm",gpu="0",node="a"} 1.755e+09
# HELP rmetric_gpu_clock_max_hertz Fastest clock of the GPU.
# TYPE rmetric_gpu_clock_max_hertz gauge
rmetric_gpu_clock_max_hertz{clock="memory",gpu="0",node="a"} 2.619e+09
# HELP rmetric_gpu_ecc_errors_total Memory errors since the driver was loaded.
# TYPE rmetric_gpu_ecc_errors_total counter
rmetric_gpu_ecc_errors_total{gpu="0",kind="corrected",node="a"} 0.0
# HELP rmetric_gpu_ecc_lifetime_errors_total Memory errors over the life of the GPU.
# TYPE rmetric_gpu_ecc_lifetime_errors_total counter
rmetric_gpu_ecc_lifetime_errors_total{gpu="0",kind="uncorrected",node="a"} 3.0
# HELP rmetric_gpu_row_remap_pending 1 if a row is replaced at the next reset.
# TYPE rmetric_gpu_row_remap_pending gauge
rmetric_gpu_row_remap_pending{gpu="0",node="a"} 0.0
# HELP rmetric_gpu_nvlink_errors_total NVLink errors over all links since the driver was loaded.
# TYPE rmetric_gpu_nvlink_errors_total counter
rmetric_gpu_nvlink_errors_total{gpu="0",kind="crc",node="a"} 12.0
# HELP rmetric_gpu_throttled 1 for each reason for which clocks are held down.
# TYPE rmetric_gpu_throttled gauge
rmetric_gpu_throttled{gpu="0",node="a",reason="software_power_cap"} 1.0
# HELP rmetric_gpu_recovery_action 1 for what the driver says the GPU needs.
# TYPE rmetric_gpu_recovery_action gauge
rmetric_gpu_recovery_action{action="none",gpu="0",node="a"} 1.0
# HELP rmetric_gpu_risk_ratio Risk score, from 0 to 1.
# TYPE rmetric_gpu_risk_ratio gauge
rmetric_gpu_risk_ratio{gpu="0",node="a"} 0.0
# HELP rmetric_gpu_risk_reachable_ratio The most that the known factors could give.
# TYPE rmetric_gpu_risk_reachable_ratio gauge
rmetric_gpu_risk_reachable_ratio{gpu="0",node="a"} 0.65
# HELP rmetric_gpu_risk_factor_ratio Normalised factor of the risk score.
# TYPE rmetric_gpu_risk_factor_ratio gauge
rmetric_gpu_risk_factor_ratio{factor="temperature",gpu="0",node="a"} 0.0
rmetric_gpu_risk_factor_ratio{factor="memory",gpu="0",node="a"} 0.0
rmetric_gpu_risk_factor_ratio{factor="errors",gpu="0",node="a"} 0.0
# HELP rmetric_gpu_level 1 for what is thought of the GPU, 0 for what is not.
# TYPE rmetric_gpu_level gauge
rmetric_gpu_level{gpu="0",level="healthy",node="a"} 1.0
rmetric_gpu_level{gpu="0",level="risk",node="a"} 0.0
rmetric_gpu_level{gpu="0",level="fatal",node="a"} 0.0
# HELP rmetric_gpu_action 1 for what the GPU asks for, 0 for what it does not.
# TYPE rmetric_gpu_action gauge
rmetric_gpu_action{action="none",gpu="0",node="a"} 1.0
rmetric_gpu_action{action="watch",gpu="0",node="a"} 0.0
rmetric_gpu_action{action="restart_application",gpu="0",node="a"} 0.0
rmetric_gpu_action{action="reset",gpu="0",node="a"} 0.0
rmetric_gpu_action{action="drain",gpu="0",node="a"} 0.0
rmetric_gpu_action{action="reboot",gpu="0",node="a"} 0.0
"""


def samples(text):
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def with_samples(text):
    """The families of a text that have a sample, in its own words."""
    families = re.split(r"(?m)^(?=# HELP)", text)
    return "".join(one for one in families if re.search(r"(?m)^[^#\n]", one))


class TestText:
    def test_it_is_as_told(self):
        assert with_samples(exposition(metrics(("a", WELL))).decode()) == GOLDEN

    def test_names_end_in_base_units_and_every_one_has_help(self):
        text = exposition(metrics(("a", WELL))).decode()
        names = re.findall(r"# TYPE (\S+) ", text)
        assert len(names) == len(set(names)) == text.count("# HELP")
        units = ("celsius", "watts", "ratio", "bytes", "hertz", "total", "pending", "failed",
                 "throttled", "action", "level", "sign")  # fmt: skip
        assert all(name.startswith("rmetric_gpu_") and name.endswith(units) for name in names)

    def test_every_quantity_of_a_reading_is_told(self):
        told = {name for metric in METRICS for name in metric.fields}
        others = {"gpu", "time", "throttle_reasons", "recovery_action"}
        assert told | others == set(Reading.__dataclass_fields__)

    def test_what_is_missing_has_no_sample(self):
        found = samples(exposition(metrics(("a", Reading(gpu=3, time=0.0)))))
        assert {name for name, *_ in found} == {
            "rmetric_gpu_level", "rmetric_gpu_action", "rmetric_gpu_risk_reachable_ratio",
        }  # fmt: skip

    def test_a_lost_gpu_has_a_verdict_and_no_stale_reading(self):
        lost = GpuSign(gpu=0, time=5.0, kind="gpu_lost")
        found = samples(exposition(metrics(("a", WELL), ("a", lost))))
        assert found["rmetric_gpu_level", ("gpu", "0"), ("level", "fatal"), ("node", "a")] == 1.0
        assert found["rmetric_gpu_sign", ("gpu", "0"), ("kind", "gpu_lost"), ("node", "a")] == 1.0
        assert not any(name == "rmetric_gpu_temperature_celsius" for name, *_ in found)

    def test_gpus_of_several_nodes_stand_beside_each_other(self):
        found = samples(exposition(metrics(("a", WELL), ("b", WELL))))
        nodes = {dict(labels)["node"] for name, *labels in found if "celsius" in name}
        assert nodes == {"a", "b"}


def test_the_textfile_is_replaced_whole_and_readable_by_others(tmp_path):
    path = tmp_path / "rmetric.prom"
    path.write_text("old")
    write_textfile(path, metrics(("a", WELL)))
    assert with_samples(path.read_text()) == GOLDEN
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_a_textfile_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        write_textfile(tmp_path / "nowhere" / "rmetric.prom", metrics())


def test_the_endpoint_is_on_loopback_and_answers_with_what_is_known_now():
    watched = FakeTelemetry(("a", WELL))
    server = serve(PrometheusCollector(watched), 0)
    try:
        assert server.server_address[0] == "127.0.0.1"
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert with_samples(answer.read().decode()) == GOLDEN
            assert answer.headers["Content-Type"].startswith("text/plain")
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


def test_a_port_that_is_taken_is_an_error():
    server = serve(metrics(), 0)
    try:
        with pytest.raises(OSError, match="in use"):
            serve(metrics(), server.server_port)
    finally:
        server.shutdown()
        server.server_close()


def test_neither_telemetry_nor_its_command_loads_what_it_may_not_need():
    code = "import rmetric.cli.telemetry, rmetric.telemetry.sources, sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "rmetric.telemetry.export" in loaded
    assert loaded.isdisjoint({"torch", "pandas", "sklearn", "prometheus_client", "pynvml"})
