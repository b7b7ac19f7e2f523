"""What counts for and against a detector, by hand, by law, and in views of the runs."""

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric.detectors.calibrated import CalibratedDetector
from rmetric.detectors.calibrated.calibration import calibrate
from rmetric.evaluation.protocols import alerts_of
from rmetric.evaluation.scores import f1
from rmetric.evaluation.traces import trace
from rmetric.records import Run
from studies.detector_benchmark import views
from studies.detector_benchmark.benchmark import left_out
from studies.detector_benchmark.cases import (
    Cases,
    Costs,
    early,
    false_alarm_rate,
    neutral,
    oracle_trace,
    real_but_absorbed,
    seen_before_step,
    strict,
    visibly_broken,
    with_check,
)
from studies.detector_benchmark.data_sets import DataSet
from studies.detector_benchmark.measure import Judged, curve, operating
from tests.studies.detector_benchmark.runs import ONSET, STEPS, alarmed, campaign, made_run, rising


def cases_of(*runs: Run) -> Cases:
    return Cases.of(runs, [run.id for run in runs])


def seen(runs: list[Run], alerts: list[tuple[int, ...]]) -> Judged:
    traces = [alarmed(run, *steps) for run, steps in zip(runs, alerts, strict=True)]
    return Judged.of(cases_of(*runs), traces)


CONTROL = made_run("control")
ACUTE = made_run("acute", "acute", failure=80)
DEGRADED = made_run("degraded", "degraded", failure=80)
ABSORBED = made_run("absorbed", "absorbed")
BENIGN = made_run("benign", "benign")
FAILED_BENIGN = made_run("both", "benign degraded", failure=80)

#: run, alerts -> hit, false alarm (headline), false alarm (strict), counted apart
BY_HAND = {
    "control, silent": (CONTROL, (), (0, 0, 0, 0)),
    "control, alarmed": (CONTROL, (3,), (0, 1, 1, 0)),
    "failure, in time": (ACUTE, (60,), (1, 0, 0, 0)),
    "failure, at the onset": (ACUTE, (ONSET,), (1, 0, 0, 0)),
    "failure, at the failure": (ACUTE, (80,), (0, 0, 0, 0)),
    "failure, premature": (ACUTE, (49,), (0, 1, 1, 0)),
    "failure, premature and then in time: the first decides": (ACUTE, (9, 60), (0, 1, 1, 0)),
    "degraded, in time": (DEGRADED, (79,), (1, 0, 0, 0)),
    "absorbed, from the onset on": (ABSORBED, (ONSET,), (0, 0, 1, 1)),
    "absorbed, long after": (ABSORBED, (99,), (0, 0, 1, 1)),
    "absorbed, before the onset": (ABSORBED, (49,), (0, 1, 1, 0)),
    "absorbed, before and after": (ABSORBED, (49, 55), (0, 1, 1, 0)),
    "benign, from the onset on": (BENIGN, (ONSET,), (0, 1, 1, 0)),
    "benign, before the onset": (BENIGN, (20,), (0, 1, 1, 0)),
    "benign and failed by fact": (FAILED_BENIGN, (60,), (1, 0, 0, 0)),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_verdicts_by_hand(case):
    run, steps, expected = BY_HAND[case]
    cases = cases_of(run)
    alerts = alerts_of(cases.windows, [alarmed(run, *steps)])
    headline, harsh = neutral(cases, alerts), strict(cases, alerts)
    apart = real_but_absorbed(cases, alerts)
    found = headline.hit, headline.false_alarm, harsh.false_alarm, apart
    assert tuple(int(array[0]) for array in found) == expected
    assert harsh.hit[0] == headline.hit[0]


def test_the_loss_has_broken_where_the_median_of_three_is_half_a_nat_above_its_trend():
    # The trend is 3.0 and a little; two of three values above 3.6 make the median so.
    run = made_run("r", "acute", failure=90, training_loss={60: 3.9, 61: 3.0, 62: 3.9, 63: 3.9})
    assert visibly_broken(run) == 62
    assert visibly_broken(made_run("r", "acute", failure=90, training_loss={60: 9.0})) == inf
    assert visibly_broken(made_run("r", "acute", failure=90, training_loss={60: nan})) == 60
    before = dict.fromkeys(range(20, 30), 9.0)
    assert visibly_broken(made_run("r", "acute", failure=90, training_loss=before)) == inf


def test_early_is_five_steps_before_the_loss_has_broken():
    run = made_run("r", "acute", failure=90, training_loss=rising(60))  # broken at 63
    cases = cases_of(run)
    for step, expected in ((58, True), (59, False), (49, False)):
        alerts = alerts_of(cases.windows, [alarmed(run, step)])
        assert early(cases, neutral(cases, alerts), alerts).tolist() == [expected], step


def test_instant_failures_are_told_apart_and_what_sees_them_is_reported():
    instant = made_run("i", "acute", failure=ONSET, gradient_norm={ONSET: inf})
    entries = made_run("e", "acute", failure=ONSET, non_finite_gradients={ONSET: 1})
    weights = made_run("w", "acute", failure=ONSET, parameter_norm={ONSET: inf})
    cases = cases_of(instant, entries, weights, ACUTE)
    assert cases.warned.tolist() == [False, False, False, True]
    assert cases.seen_before_step.tolist() == [True, True, False, False]
    assert not seen_before_step(CONTROL)
    # The check before the step announces what it sees, and not where a false alarm came first.
    runs = [instant, entries, weights, ACUTE, CONTROL]
    for alarms, expected in (((), [True, True]), ((3,), [False, True])):
        found, cases = seen(runs, [alarms, (), (), (), ()]), cases_of(*runs)
        hit = with_check(cases, found.neutral, found.alerts).hit.tolist()
        assert hit == [*expected, False, False, False]


def test_a_kind_that_is_left_out_is_judged_by_thresholds_that_never_saw_it():
    """Noise in the gradients of one kind of benign change: seen, it raises the thresholds."""
    rough = [made_run(f"r{i}", "benign", training_loss=heavy(i)) for i in range(4)]
    smooth = [made_run(f"s{i}", "benign") for i in range(4)]
    for run in smooth:
        run.truth.fault = "OTHER"
    runs = [CONTROL, *rough, *smooth]
    found = left_out(runs, runs)
    name = rough[0].truth.fault
    assert found["calibrated_on"] == len(runs)
    alarms = {name: 4, "OTHER": 0}
    assert found["kinds"] == {of: {"runs": 4, "alarmed": n} for of, n in alarms.items()}
    assert found["share"].point == 0.5
    known = calibrate(runs, 0.0)
    detectors = [(CalibratedDetector(known), run) for run in rough]
    assert not any(judge.update(record).alarm for judge, run in detectors for record in run.records)


def heavy(seed: int) -> dict[int, float]:
    """A loss that stands 0.6 nat higher after the onset than before."""
    noise = np.random.default_rng(seed).normal(size=STEPS + 1)
    return {s: 2.0 + 0.01 * noise[s] + 0.6 * (s >= ONSET) for s in range(1, STEPS + 1)}


def test_episodes_are_counted_once_and_in_healthy_steps_only():
    runs = campaign(1)
    cases = cases_of(*runs)
    # The branches' past is the control's: healthy are 100 steps of it and 51 benign ones.
    assert (cases.healthy_to - cases.healthy_from).tolist() == [100, 0, 0, 51]
    further = ((), (), (60,), (70, 71))
    traces = [alarmed(run, 10, 11, 30, *more) for run, more in zip(runs, further, strict=True)]
    rate = false_alarm_rate(cases, traces)
    assert rate.episodes_per_1000 == pytest.approx(1000 * 3 / 151)
    assert rate.share_alarmed == pytest.approx(5 / 151)


RUNS = campaign(2)
alert_lists = st.lists(
    st.lists(st.integers(1, STEPS), max_size=3).map(tuple), min_size=len(RUNS), max_size=len(RUNS)
)


def utility(judged: Judged, costs: Costs) -> float:
    cases = cases_of(*RUNS)
    best = Judged.of(cases, [oracle_trace(run, cases.windows, i) for i, run in enumerate(RUNS)])
    return float(costs.utility(judged.neutral, best.neutral, np.ones(len(RUNS))))


@settings(max_examples=60, deadline=None)
@given(alert_lists, st.integers(0, len(RUNS) - 1), st.integers(1, ONSET - 1))
def test_neither_strictness_nor_a_further_false_alarm_raises_a_score_and_none_beats_the_oracle(
    alerts, which, step
):
    more = [(*steps, step) if i == which else steps for i, steps in enumerate(alerts)]
    before, after, once = seen(RUNS, alerts), seen(RUNS, more), np.ones(len(RUNS))
    assert f1(before.neutral, once) >= f1(before.strict, once)
    assert utility(before, Costs()) <= 1
    assert f1(after.neutral, once) <= f1(before.neutral, once)
    assert f1(after.strict, once) <= f1(before.strict, once)
    assert utility(after, Costs()) <= utility(before, Costs())


def test_the_utility_of_never_is_0_and_of_the_oracle_1_and_every_false_alarm_costs():
    costs = Costs(false_alarm=10, missed_failure=50, lead_step=1, lead_cap=20)
    silent = seen(RUNS, [()] * len(RUNS))
    assert utility(silent, costs) == 0
    cases = cases_of(*RUNS)
    best = [oracle_trace(run, cases.windows, i) for i, run in enumerate(RUNS)]
    assert utility(Judged.of(cases, best), costs) == 1
    # One of two failures announced ten steps ahead, one control alarmed: (50 + 10 - 10) of 2 x 70.
    alerts = [(5,), (70,), (), (), (), (), (), ()]
    assert utility(seen(RUNS, alerts), costs) == pytest.approx(50 / 140)


@pytest.mark.parametrize("wrong", [{"false_alarm": -1}, {"lead_cap": inf},
                                   {"missed_failure": 0, "lead_step": 0}])  # fmt: skip
def test_costs_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Costs(**wrong)


def test_a_threshold_between_two_scores_is_the_detector_itself():
    cases, traces = cases_of(*RUNS), [alarmed(run, 60) for run in RUNS]
    found = curve(cases, traces)
    own = operating(cases, alerts_of(cases.windows, traces))
    at = found["threshold"].index(0.0)  # scores are 0 and 1: above 0 is the alarm itself
    for name, value in own.items():
        assert found[name][at] == pytest.approx(float(value), abs=1e-4)
        assert found["own"][name] == pytest.approx(float(value), abs=1e-4)


# -- views: what is left out is gone, and the truth is the same

VIEWED = [
    made_run("control"),
    made_run("rises", "fault", failure=80, training_loss=rising(ONSET)),
    made_run("announced", "benign"),
]


@pytest.mark.parametrize("title", views.VIEWS)
def test_a_view_keeps_its_signals_and_steps(title):
    keep, every = views.VIEWS[title]
    for run in VIEWED:
        seen = views.seen_as(run, keep, every)
        steps = [record.step for record in run.records if record.step % every == 0]
        assert [record.step for record in seen.records] == steps
        factor = 0.03 if "0.03" in title else 1.0
        for ours, theirs in zip(seen.records, run.records[every - 1 :: every], strict=True):
            assert ours.training_loss == pytest.approx(theirs.training_loss * factor)
            shown = {"gradient_norm": "norm", "validation_loss": "validation"}
            for name, word in shown.items():
                kept = "all signals" in title or word in title
                assert getattr(ours, name) == (getattr(theirs, name) if kept else None)


def test_each_view_has_a_row_for_each_detector():
    cases = cases_of(*VIEWED)
    data = DataSet(name="lab", title="made", runs=VIEWED, cases=cases, group="runs", inputs={})
    results = views.results_of(data, views.measured(data), views.ALL)
    assert results["runs"] == {"all": 3, "failed": 1, "benign": 1, "control": 1}
    shown = views.table(results)
    assert len(shown.rows) == len(views.VIEWS) * len(views.DETECTORS)
    found = results["views"]["training loss"]["calibrated"]
    assert (found["hits"], found["control"]) == (1, 0)
    traces = [
        trace("calibrated", views.seen_as(run, *views.VIEWS["training loss"])) for run in VIEWED
    ]
    assert alerts_of(cases.windows, traces).first[1] < 80
