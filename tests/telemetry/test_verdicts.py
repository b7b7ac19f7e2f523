"""Scripted histories, through the real bindings, to verdicts."""

import pytest

from rmetric.telemetry.risk import RiskConfig
from rmetric.telemetry.sources import ReplayedReadings
from tests.telemetry.fake_nvml import build, play_verdicts

LOST, RESET_REQUIRED = 15, 16
SOFTWARE_POWER_CAP, SLOWDOWN, THERMAL = 0x04, 0x08, 0x40
DAY = 2880  # readings, 30 s apart


@pytest.fixture(scope="module")
def nvml(tmp_path_factory):
    return build(tmp_path_factory.mktemp("nvml"))


def gists(seen, gpu=0):
    return [(one["level"], one["action"]) for one in seen["verdicts"] if one["gpu"] == gpu]


def a_healthy_day():
    """Warm under load, capped in power, a pause for a checkpoint each hour, two soft errors."""
    history = [(t, 0, "temperature", 62 + t % 13) for t in range(1, DAY)]
    history += [(t, 0, "power", 640_000 + 1000 * (t % 40)) for t in range(1, DAY)]
    history += [(t, 0, "throttle", SOFTWARE_POWER_CAP * (t % 2)) for t in range(1, DAY)]
    for pause in range(120, DAY, 120):
        history += [(pause, 0, "utilisation", 15), (pause + 4, 0, "utilisation", 97)]
    history += [(700, 0, "ecc_corrected", 1), (2000, 0, "ecc_corrected", 2)]
    return [*history, (1, 0, "used", 74_000_000_000)]


class TestHistories:
    @pytest.mark.long
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
        ("history", "told"),
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
    def test_the_verdicts_of_a_history(self, nvml, history, told):
        assert gists(play_verdicts(nvml, history, ticks=30)) == told

    def test_a_contained_error_excuses_the_counter_beside_it_for_good(self, nvml):
        history = [(5, 0, "xid", 94), (6, 0, "ecc_uncorrected", 1), (6, 0, "remap_pending", 1)]
        seen = play_verdicts(nvml, history, ticks=100)
        assert [one["rules"] for one in seen["verdicts"]] == [
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
            "nothing is heard of the GPU: the NVIDIA driver is not loaded"
        ]

    @pytest.mark.long
    def test_a_call_that_hangs_is_a_risk_until_it_answers(self, nvml):
        seen = play_verdicts(
            nvml, [(20, 0, "hang", 2500)], ticks=40, seconds_a_tick=None, interval=1e-3,
            silence=1.0, hung_after=0.2,
        )  # fmt: skip
        assert gists(seen) == [("healthy", "none"), ("risk", "watch"), ("healthy", "none")]
        assert "NVML has not answered for" in seen["verdicts"][1]["reasons"][0]


def test_no_gpu_is_a_problem_and_no_verdict(nvml):
    seen = play_verdicts(nvml, [], ticks=4, gpus=0)
    assert seen["verdicts"] == []
    assert "the NVIDIA driver lists no GPU" in seen["problems"]
