"""Scripted histories through the real bindings, to events and to verdicts."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.metric import RMetric
from rmetric.records import HardwareEvent, Record
from rmetric.telemetry.nvml import NvmlEvents
from rmetric.telemetry.nvml_library import NvmlLibrary
from rmetric.telemetry.reading import RISES, Changes, Reading
from rmetric.telemetry.risk import RiskConfig
from rmetric.telemetry.sources import ReplayedReadings
from rmetric.telemetry.xid import xid_entry, xid_kind
from tests.telemetry.fake_nvml import build, play, play_verdicts

LOST, RESET_REQUIRED = 15, 16
SOFTWARE_POWER_CAP, SLOWDOWN = 0x04, 0x08
DAY = 2880  # readings, 30 s apart


@pytest.fixture(scope="module")
def nvml(tmp_path_factory):
    return build(tmp_path_factory.mktemp("nvml"))


def kinds(seen):
    return [kind for kind, _ in seen["events"]]


class TestHistories:
    def test_a_healthy_day_has_no_event(self, nvml):
        history = [(t, 0, "temperature", 60 + t % 25) for t in range(1, 8640)]
        history += [(t, 0, "throttle", SOFTWARE_POWER_CAP * (t % 2)) for t in range(1, 8640, 7)]
        seen = play(nvml, history, ticks=8640, interval=1e-6, quiet=0.0)
        assert seen["events"] == []
        assert seen["states"][-1] == [True, None]

    @pytest.mark.parametrize(
        ("history", "events"),
        [
            ([(5, 0, "throttle", SLOWDOWN)], ["hardware_slowdown"]),
            ([(t, 0, "ecc_corrected", 100 * t) for t in range(5, 15)], ["ecc_corrected"] * 10),
            ([(5, 0, "replays", 4)], ["pcie_replay"]),
            ([(5, 0, "xid", 13)], ["application_xid_13"]),
            ([(5, 0, "link_replays", 3), (5, 0, "link_crc", 2)], ["nvlink_error"]),
            # An uncontained error goes from the counter to a remap and to Xids.
            ([(5, 0, "ecc_uncorrected", 1), (6, 0, "remapped", 1), (6, 0, "remap_pending", 1),
              (6, 0, "xid", 63), (9, 0, "remap_failed", 1), (9, 0, "xid", 94)],
             ["ecc_uncorrected", "row_remapped", "row_remap_pending", "xid_63",
              "row_remap_failed", "xid_94"]),
            # What was so at the first reading is not an event.
            ([(1, 0, "ecc_corrected", 9), (1, 0, "row_remap_failed", 1),
              (1, 0, "throttle", SLOWDOWN)], []),
        ],
    )  # fmt: skip
    def test_each_fault_has_its_event(self, nvml, history, events):
        assert kinds(play(nvml, history, ticks=20)) == events

    def test_an_older_gpu_retires_pages(self, nvml):
        history = [(1, 0, "retired", 2), (1, 0, "retirement_pending", 0), (1, 0, "remapped", -1)]
        history += [(5, 0, "retired", 3), (5, 0, "retirement_pending", 1)]
        seen = play(nvml, history, ticks=10)
        assert kinds(seen) == ["page_retired", "page_retirement_pending"]
        assert seen["readings"][0]["retired_pages"] == 3
        assert seen["readings"][0]["row_remap_failed"] is None

    def test_an_xid_reported_again_and_again_is_one_incident(self, nvml):
        history = [(t, 0, "xid", 94) for t in range(5, 25)]
        assert kinds(play(nvml, history, ticks=30)) == ["xid_94"]
        assert kinds(play(nvml, history, ticks=30, quiet=0.0)) == ["xid_94"] * 20

    def test_a_gpu_that_falls_off_the_bus_is_lost_once_and_the_others_go_on(self, nvml):
        history = [(5, 1, "xid", 79), (6, 1, "gone", LOST), (9, 0, "ecc_corrected", 1)]
        seen = play(nvml, history, ticks=20, gpus=2)
        assert seen["events"] == [["xid_79", 1], ["gpu_lost", 1], ["ecc_corrected", 0]]
        available, problem = seen["states"][-1]
        assert available
        assert "GPU 1" in problem
        assert [reading["gpu"] for reading in seen["readings"]] == [0]

    def test_a_reloaded_driver_is_found_again_and_its_zeroed_counters_are_no_event(self, nvml):
        history = [(4, 0, "ecc_corrected", 50), (6, 0, "driver", 0), (12, 0, "driver", 1)]
        history += [(16, 0, "ecc_corrected", 1), (18, 0, "xid", 48)]
        seen = play(nvml, history, ticks=25)
        assert kinds(seen) == ["ecc_corrected", "ecc_corrected", "xid_48"]
        assert [False, "the NVIDIA driver is not loaded"] in seen["states"]
        assert seen["states"][-1] == [True, None]

    def test_a_call_that_hangs_holds_up_nobody(self, nvml):
        seen = play(nvml, [(5, 0, "hang", 60_000)], ticks=5, linger=0.6, hung_after=0.2)
        available, problem = seen["states"][-1]
        assert not available
        assert "not answered" in problem
        assert seen["readings"] == []
        assert seen["slowest_poll_seconds"] < 20.0
        assert seen["close_seconds"] < 20.0

    def test_a_call_that_answers_late_is_forgiven(self, nvml):
        history = [(5, 0, "hang", 700), (8, 0, "xid", 79)]
        seen = play(nvml, history, ticks=12, hung_after=0.2)
        assert any("not answered" in (problem or "") for _, problem in seen["states"])
        assert seen["states"][-1] == [True, None]
        assert kinds(seen) == ["xid_79"]

    def test_what_a_gpu_does_not_report_is_missing_and_not_zero(self, nvml):
        names = ("temperature", "power", "ecc_corrected", "remapped", "replays", "throttle")
        names += ("sm_clock", "memory_clock_max", "ecc_uncorrected_lifetime", "links", "recovery")
        seen = play(nvml, [(1, 0, name, -1) for name in names], ticks=5)
        (reading,) = seen["readings"]
        missing = {name for name, value in reading.items() if value is None}
        assert missing >= {
            "temperature_celsius", "power_watts", "ecc_corrected_errors", "row_remap_pending",
            "throttle_reasons", "sm_clock_mhz", "memory_clock_max_mhz", "nvlink_replays",
            "ecc_uncorrected_errors_lifetime", "recovery_action",
        }  # fmt: skip
        assert reading["power_limit_watts"] == 700.0
        assert seen["states"][-1] == [True, None]

    def test_every_quantity_is_read_with_its_unit(self, nvml):
        history = [(1, 0, "ecc_corrected_lifetime", 40), (1, 0, "ecc_uncorrected_lifetime", 2)]
        history += [(1, 0, "ecc_corrected", 5), (1, 0, "remapped_correctable", 3)]
        history += [(1, 0, "remapped", 1), (1, 0, "recovery", 4), (1, 0, "retired", 0)]
        history += [(1, 0, "retirement_pending", 0), (1, 0, "link_crc", 6)]
        (reading,) = play(nvml, history, ticks=5)["readings"]
        assert reading.pop("time") > 0
        assert reading == {
            "gpu": 0,
            "temperature_celsius": 60,
            "slowdown_temperature_celsius": 90,
            "power_watts": 300.0,
            "power_limit_watts": 700.0,
            "utilisation_percent": 95,
            "memory_busy_percent": 40,
            "memory_used_bytes": 60_000_000_000,
            "memory_total_bytes": 80_000_000_000,
            "sm_clock_mhz": 1755,
            "sm_clock_max_mhz": 1980,
            "memory_clock_mhz": 2619,
            "memory_clock_max_mhz": 2619,
            "throttle_reasons": [],
            "ecc_corrected_errors": 5,
            "ecc_uncorrected_errors": 0,
            "ecc_corrected_errors_lifetime": 40,
            "ecc_uncorrected_errors_lifetime": 2,
            "remapped_rows_correctable": 3,
            "remapped_rows_uncorrectable": 1,
            "row_remap_pending": False,
            "row_remap_failed": False,
            "retired_pages": 0,
            "page_retirement_pending": False,
            "pcie_replays": 0,
            "nvlink_replays": 0,
            "nvlink_recoveries": 0,
            "nvlink_crc_errors": 24,  # 6 on each of 4 links
            "recovery_action": "drain_and_reset",
        }

    def test_nvlink_errors_are_read_as_sums_where_the_driver_has_them(self, nvml):
        history = [(1, 0, "nvlink_replays", 7), (1, 0, "nvlink_recoveries", 1)]
        history += [(1, 0, "nvlink_crc_flit", 30), (1, 0, "nvlink_crc_data", 4)]
        history += [(1, 0, "link_replays", 99), (5, 0, "nvlink_recoveries", 2)]
        seen = play(nvml, history, ticks=10)
        (reading,) = seen["readings"]
        assert reading["nvlink_replays"] == 7
        assert reading["nvlink_recoveries"] == 2
        assert reading["nvlink_crc_errors"] == 34
        assert kinds(seen) == ["nvlink_error"]

    def test_advice_that_is_newer_than_this_is_kept_by_its_number(self, nvml):
        (reading,) = play(nvml, [(1, 0, "recovery", 42)], ticks=5)["readings"]
        assert reading["recovery_action"] == "unknown_42"


def gists(seen, gpu=0):
    return [(entry["level"], entry["action"]) for entry in seen["verdicts"] if entry["gpu"] == gpu]


def a_healthy_day():
    """Warm under load, capped in power, a pause for a checkpoint each hour, two soft errors."""
    history = [(t, 0, "temperature", 62 + t % 13) for t in range(1, DAY)]
    history += [(t, 0, "power", 640_000 + 1000 * (t % 40)) for t in range(1, DAY)]
    history += [(t, 0, "throttle", SOFTWARE_POWER_CAP * (t % 2)) for t in range(1, DAY)]
    for pause in range(120, DAY, 120):
        history += [(pause, 0, "utilisation", 15), (pause + 4, 0, "utilisation", 97)]
    history += [(700, 0, "ecc_corrected", 1), (2000, 0, "ecc_corrected", 2)]
    return [*history, (1, 0, "used", 74_000_000_000)]


class TestVerdicts:
    def test_a_healthy_day_stays_healthy_at_095_and_does_not_at_010(self, nvml):
        recording = nvml / "day.jsonl"
        seen = play_verdicts(
            nvml, a_healthy_day(), ticks=DAY, seconds_a_tick=30.0, record=recording, interval=30.0
        )
        assert gists(seen) == [("healthy", "none")]
        assert seen["last"]["0"]["reachable"] == pytest.approx(1.0)
        again = ReplayedReadings(recording, RiskConfig(interval=30.0))
        assert [verdict.gist for verdict in again.poll()] == [("healthy", "none", ())]
        assert again.verdicts()["0"].as_json() == seen["last"]["0"]
        lower = ReplayedReadings(recording, RiskConfig(interval=30.0, threshold=0.10))
        assert {verdict.level for verdict in lower.poll()} == {"healthy", "risk"}

    def test_one_uncorrectable_error_overrides_the_score(self, nvml):
        seen = play_verdicts(nvml, [(20, 0, "ecc_uncorrected", 1)], ticks=30)
        assert gists(seen) == [("healthy", "none"), ("fatal", "drain")]
        assert seen["verdicts"][1]["reasons"] == [
            "new uncorrectable memory errors: 1 since the driver was loaded"
        ]
        assert seen["verdicts"][1]["risk"] <= 0.25

    @pytest.mark.parametrize(
        ("history", "verdicts"),
        [
            ([(1, 0, "ecc_uncorrected", 5)], [("healthy", "none")]),  # errors of before
            # A contained error that comes while GPUs are read is never fatal.
            ([(6, 0, "xid", 94), (6, 0, "ecc_uncorrected", 1)],
             [("healthy", "none"), ("risk", "restart_application")]),
            ([(1, 0, "remap_failed", 1)], [("fatal", "drain")]),  # even if it was so before
            ([(5, 0, "recovery", 1), (9, 0, "recovery", 2), (13, 0, "recovery", 0),
              (17, 0, "recovery", 4), (21, 0, "recovery", 99)],
             [("healthy", "none"), ("fatal", "reset"), ("fatal", "reboot"), ("healthy", "none"),
              ("risk", "reset"), ("risk", "watch")]),
            # It is well again when it is read again.
            ([(5, 0, "gone", RESET_REQUIRED), (15, 0, "gone", 0)],
             [("healthy", "none"), ("fatal", "reset"), ("healthy", "none")]),
        ],
        ids=["before", "contained", "remap", "advice", "reset"],
    )  # fmt: skip
    def test_the_verdicts_of_a_history(self, nvml, history, verdicts):
        assert gists(play_verdicts(nvml, history, ticks=30)) == verdicts

    def test_a_contained_error_excuses_the_counter_beside_it_for_good(self, nvml):
        history = [(5, 0, "xid", 94), (6, 0, "ecc_uncorrected", 1), (6, 0, "remap_pending", 1)]
        seen = play_verdicts(nvml, history, ticks=100)
        assert [entry["rules"] for entry in seen["verdicts"]] == [
            [],
            ["xid_94"],
            ["row_remap_pending", "xid_94"],
            ["row_remap_pending"],
        ]

    def test_a_reloaded_driver_clears_what_was_held_against_a_gpu(self, nvml):
        history = [(5, 0, "xid", 119), (8, 0, "driver", 0), (150, 0, "driver", 1)]
        seen = play_verdicts(nvml, history, ticks=160, pace=2e-3)
        assert "the NVIDIA driver is not loaded" in seen["problems"]
        assert gists(seen) == [("healthy", "none"), ("fatal", "reset"), ("healthy", "none")]

    def test_a_driver_that_stays_away_is_a_risk(self, nvml):
        history = [(200, 0, "driver", 0)]
        seen = play_verdicts(
            nvml, history, ticks=400, seconds_a_tick=None, interval=1e-3, silence=0.5, linger=0.8
        )
        assert gists(seen) == [("healthy", "none"), ("risk", "watch")]
        assert seen["last"]["0"]["reasons"] == [
            "the GPU sends no readings: the NVIDIA driver is not loaded"
        ]

    def test_a_call_that_hangs_is_a_risk_until_it_answers(self, nvml):
        seen = play_verdicts(
            nvml, [(20, 0, "hang", 2500)], ticks=40, seconds_a_tick=None, interval=1e-3,
            silence=1.0, hung_after=0.2,
        )  # fmt: skip
        assert gists(seen) == [("healthy", "none"), ("risk", "watch"), ("healthy", "none")]
        assert "NVML has not answered for" in seen["verdicts"][1]["reasons"][0]

    def test_no_gpu_is_a_problem_and_no_verdict(self, nvml):
        seen = play_verdicts(nvml, [], ticks=4, gpus=0)
        assert seen["verdicts"] == []
        assert "the NVIDIA driver lists no GPU" in seen["problems"]


class TestDevices:
    @pytest.mark.parametrize(
        ("devices", "cuda_visible", "watched"),
        [
            (None, None, [0, 1, 2]),
            ([2], None, [2]),
            (["GPU-0001"], None, [1]),
            (None, "2,0", [2, 0]),
            (None, "GPU-0001-fake", [1]),
            (None, "MIG-1234", [0, 1, 2]),
            ([1], "0", [1]),
        ],
    )
    def test_only_the_gpus_asked_for_are_read(self, nvml, devices, cuda_visible, watched):
        seen = play(nvml, [], ticks=4, gpus=3, devices=devices, cuda_visible=cuda_visible)
        assert [reading["gpu"] for reading in seen["readings"]] == watched

    @pytest.mark.parametrize(("devices", "cuda_visible"), [([7], None), (None, ""), (None, "-1")])
    def test_a_gpu_that_is_not_there_is_a_problem_in_words(self, nvml, devices, cuda_visible):
        seen = play(nvml, [], ticks=4, gpus=2, devices=devices, cuda_visible=cuda_visible)
        available, problem = seen["states"][-1]
        assert not available
        assert "the driver lists 2" in problem

    @pytest.mark.parametrize(
        "settings",
        [{"interval": 0}, {"interval": float("nan")}, {"quiet": -1}, {"devices": "0"}],
        ids=str,
    )
    def test_bad_arguments_are_refused_at_once(self, settings):
        (name,) = settings
        with pytest.raises(ValueError, match=name):
            NvmlEvents(**settings)


class TestWithoutNvml:
    @pytest.mark.parametrize(
        ("broken", "problem"),
        [
            ("library", "NVML is not on this machine"),
            ("package", "nvidia-ml-py"),
            ("code", "division"),
        ],
    )
    def test_whatever_is_missing_is_reported_and_stays_in_the_thread(
        self, monkeypatch, broken, problem
    ):
        pynvml = pytest.importorskip("pynvml")

        def missing(name):
            raise OSError(name)

        monkeypatch.setattr(pynvml, "nvmlLib", None)
        monkeypatch.setattr(pynvml, "CDLL", missing)
        if broken == "package":
            monkeypatch.setitem(sys.modules, "pynvml", None)
        if broken == "code":
            monkeypatch.setattr("rmetric.telemetry.nvml.NvmlLibrary", lambda nvml: 1 / 0)
        with NvmlEvents() as hardware:
            assert not hardware.ready()
            assert problem in hardware.problem
            assert hardware.poll() == ()
            assert hardware.readings() == ()


class TestChanges:
    @given(st.sampled_from(sorted(RISES)), st.lists(st.none() | st.integers(0, 3)))
    def test_a_counter_is_an_event_where_it_exceeds_its_last_known_value(self, counter, values):
        changes = Changes(quiet=60.0)
        known = None
        for time, value in enumerate(values):
            rose = value is not None and known is not None and value > known
            events = changes.update(Reading(gpu=0, time=float(time), **{counter: value}))
            assert events == [RISES[counter]] * rose
            known = known if value is None else value

    @given(st.lists(st.booleans(), min_size=1))
    def test_a_state_that_flickers_within_the_quiet_time_is_one_event(self, flags):
        changes = Changes(quiet=60.0)
        events = [
            changes.update(Reading(gpu=0, time=float(time), row_remap_pending=flag))
            for time, flag in enumerate(flags)
        ]
        assert sum(map(len, events)) == (not flags[0] and any(flags))


class TestFailureRate:
    def test_an_applications_fault_does_not_move_lambda(self):
        for xid in (13, 31, 43, 45, 48, 63, 79, 94, 119, 12345):
            event = HardwareEvent(1.0, xid_kind(xid))
            metric = RMetric().update(Record(step=1, time=3600.0, events=(event,)))
            assert event.is_hardware == (xid_entry(xid).about != "application")
            assert metric.raw.failure_rate == float(event.is_hardware)

    def test_event_times_count_from_the_start_that_is_set(self):
        hardware = NvmlEvents()
        hardware.close()
        hardware._events.append((hardware.start + 5.0, "xid_79", 0))
        hardware.start -= 100.0
        assert hardware.poll() == (HardwareEvent(pytest.approx(105.0), "xid_79", 0),)


def test_a_driver_that_cannot_wait_for_xids_is_still_read():
    class Old:
        class NVMLError(Exception):
            value = 3

        def __getattr__(self, name):
            def call(*_):
                if name == "nvmlEventSetCreate":
                    raise self.NVMLError
                return 1

            return call

    waited = []
    assert NvmlLibrary(Old()).next_xid(0.25, otherwise=waited.append) is None
    assert waited == [0.25]
