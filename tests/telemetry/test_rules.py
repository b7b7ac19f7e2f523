"""Rules, the Xid catalogue, and the judge that puts them above the score."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.telemetry.judge import RULES, Judge, rule_of
from rmetric.telemetry.lines import ACTIONS, LEVELS, GpuVerdict
from rmetric.telemetry.reading import FLAGS, RECOVERY_ACTIONS, Reading
from rmetric.telemetry.risk import RiskConfig
from rmetric.telemetry.xid import catalogue, xid_kind, xid_of_kind

CATALOGUE = catalogue()
APPLICATION_XIDS = {n for n, xid in CATALOGUE.items() if xid.about == "application"}
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "telemetry.md"
BENCHMARK = ROOT / "results" / "benchmarks" / "telemetry.json"


class TestCatalogue:
    def test_a_fatal_xid_takes_the_gpu_out_of_use_and_no_other_does(self):
        for entry in CATALOGUE.values():
            assert entry.action in ("reset", "drain", "reboot") or entry.level != "fatal"
            assert entry.action in ("none", "watch") or entry.level != "healthy"

    def test_the_application_is_to_blame_for_these_alone(self):
        assert sorted(APPLICATION_XIDS) == [13, 31, 43, 45]

    @given(st.integers(0, 1000))
    def test_a_kind_gives_its_number_back_and_unknown_ones_are_watched(self, number):
        assert xid_of_kind(xid_kind(number)) == number
        if number not in CATALOGUE:
            assert rule_of(xid_kind(number)).action == "watch"

    def test_the_page_lists_the_catalogue_and_the_rules(self):
        page = PAGE.read_text()
        for row in CATALOGUE.values():
            action = row.action.replace("_", " ")
            assert f"| {row.number} | {row.words} | {row.about} | {row.level} | {action} |" in page
        for rule in RULES.values():
            action = rule.action.replace("_", " ")
            assert f"| `{rule.kind}` | {rule.words} | {rule.level} | {action} |" in page

    def test_the_page_states_what_was_measured(self):
        measured = json.loads(BENCHMARK.read_text())["measured"]
        for watch in measured["watches"]:
            number = f"{watch['gpus']} GPU{'s' * (watch['gpus'] > 1)}"
            assert f"{watch['percent_of_a_core']:.3f} % for {number}" in PAGE.read_text()
            assert watch["percent_of_a_core"] <= measured["goal_percent_of_a_core"]


class TestRules:
    def test_every_state_and_every_advice_of_the_driver_has_one(self):
        assert all(rule_of(flag) for flag in FLAGS)
        assert all(rule_of(f"recovery_{word}") for word in RECOVERY_ACTIONS if word != "none")
        assert rule_of("recovery_unknown_9").level == "risk"


kinds = st.sampled_from([*(xid_kind(n) for n in CATALOGUE), *RULES, "pcie_replay", "xid_999"])


def judged(events, config=None):
    judge = Judge(0, config=config)
    verdict = judge.take(Reading(gpu=0, time=0.0, temperature_celsius=60.0))
    for time, kind in enumerate(events, start=1):
        verdict = judge.happened(kind, float(time))
    return verdict


class TestJudge:
    @given(st.lists(kinds, max_size=8))
    def test_a_verdict_is_as_grave_as_its_gravest_rule(self, events):
        verdict = judged(events)
        rules = [rule_of(kind) for kind in verdict.rules]
        levels = [LEVELS.index(rule.level) for rule in rules]
        assert verdict.level == LEVELS[max(levels, default=0)]
        assert verdict.action == ACTIONS[max([ACTIONS.index(r.action) for r in rules], default=0)]
        assert levels == sorted(levels, reverse=True)
        assert len(verdict.reasons) == len(rules)

    @given(st.lists(st.sampled_from([xid_kind(n) for n in sorted(APPLICATION_XIDS)])))
    def test_applications_never_condemn(self, events):
        assert judged(events).level == "healthy"

    @pytest.mark.parametrize(
        ("xid", "gist"),
        [(94, ("risk", "restart_application")), (63, ("risk", "reset")), (119, ("fatal", "reset")),
         (145, ("fatal", "reset")), (149, ("fatal", "reset")), (48, ("fatal", "drain")),
         (64, ("fatal", "drain")), (95, ("fatal", "drain")), (79, ("fatal", "reboot")),
         *((xid, ("healthy", "none")) for xid in (13, 31, 43, 45))],
    )  # fmt: skip
    def test_an_xid_asks_for_its_action(self, xid, gist):
        verdict = judged([xid_kind(xid)])
        assert verdict.gist == (*gist, (xid_kind(xid),))
        assert verdict.reasons[0].startswith(f"Xid {xid}: ")

    @given(st.lists(kinds, max_size=8), kinds)
    def test_a_further_sign_never_makes_a_fatal_verdict_milder(self, events, another):
        before, after = judged(events), judged([*events, another])
        excused = another == "xid_94" and "ecc_uncorrected" in before.rules
        assert excused or LEVELS.index(after.level) >= LEVELS.index(before.level)

    def test_a_score_at_its_threshold_is_a_risk_until_it_has_come_down(self):
        judge = Judge(0, config=RiskConfig(threshold=0.2, release=0.5))

        def level(time, celsius):
            return judge.take(Reading(gpu=0, time=time, temperature_celsius=celsius)).level

        temperatures = [60.0, 87.0, 85.0, 79.0, 77.0, 85.0, 86.0]  # 0.25 x (T - 70) / 20
        levels = [level(1.0 * n, celsius) for n, celsius in enumerate(temperatures)]
        assert levels == ["healthy", "risk", "risk", "risk", "healthy", "healthy", "risk"]

    def test_a_missing_value_between_does_not_hide_a_rise(self):
        judge = Judge(0)
        counts = [3, None, 4]
        verdicts = [
            judge.take(Reading(gpu=0, time=float(n), ecc_uncorrected_errors=count))
            for n, count in enumerate(counts)
        ]
        assert [verdict.level for verdict in verdicts] == ["healthy", "healthy", "fatal"]

    def test_an_explanation_in_full(self):
        judge = Judge(0, config=RiskConfig(threshold=0.3))
        for n in range(30):
            judge.take(
                Reading(
                    gpu=0,
                    time=10.0 * n,
                    temperature_celsius=62.0 + n,
                    slowdown_temperature_celsius=90.0,
                    power_watts=600.0 - 10 * (n % 20),
                    utilisation_percent=98.0 - 2 * n,
                    memory_used_bytes=78,
                    memory_total_bytes=80,
                    ecc_corrected_errors=n,
                )
            )
        judge.happened("xid_63", 295.0)
        verdict = judge.silent(400.0, "NVML has not answered for 110 s")
        assert verdict.level == "risk"
        assert verdict.action == "reset"
        assert verdict.reasons == (
            "Xid 63: a row of memory is to be replaced at the next reset",
            "the GPU sends no readings: NVML has not answered for 110 s",
            "hotter than where it slows down: 91 °C, its limit is 90 °C",
            "risk 0.58, the limit is 0.30: temperature 0.25 of 0.25 (91 °C; from 70 to 90), "
            "temperature rise 0.10 of 0.10 (+6.0 °C a minute; full at 2), memory 0.07 of 0.15 "
            "(97.5% in use; from 95.0%), errors 0.07 of 0.25 (0.29 of a full rise in 600 s), "
            "utilisation drop 0.06 of 0.15 (down by 40%), power 0.02 of 0.10 (varies by 11%; "
            "full at 50%)",
        )


class TestVerdict:
    @given(st.lists(kinds, max_size=4))
    def test_json_gives_it_back(self, events):
        verdict = judged(events)
        assert GpuVerdict.from_json(verdict.as_json()) == verdict

    @pytest.mark.parametrize(
        "change", [{"level": "ill"}, {"action": "pray"}, {"gpu": None}, {"risk": "high"}], ids=str
    )
    def test_what_is_no_verdict_is_refused(self, change):
        with pytest.raises(ValueError, match=str(next(iter(change.values())) or "field `gpu`")):
            GpuVerdict.from_json(judged([]).as_json() | change)
