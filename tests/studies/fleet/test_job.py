"""The simulated job: by hand, against the closed forms, and the laws that it must keep."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric.guard.interval import daly, expected_ettr, young
from studies.fleet import closed_form, guarded_job
from studies.fleet.event_sampling import FalseAlarm, NodeFailure, failures
from studies.fleet.guarded_job import SHARES, JobOutcome, replicate, simulate
from studies.fleet.job_settings import DAY, FailurePredictor, Fleet, FleetJob, Saves

pytest.importorskip("simpy")

NO_SAVES = Saves(interval_seconds=None, blocking_seconds=0.0, durable_seconds=0.0)


def fleet(**settings: object) -> Fleet:
    return Fleet(**{"num_gpus": 32, "restart_seconds": 100.0} | settings)  # type: ignore[arg-type]


def saves(interval: float = 1000.0, blocking: float = 50.0, durable: float | None = None) -> Saves:
    return Saves(
        interval_seconds=interval,
        blocking_seconds=blocking,
        durable_seconds=blocking if durable is None else durable,
    )


def job(**settings: object) -> FleetJob:
    return FleetJob(**{"fleet": fleet(), "saves": saves(), "work_seconds": 3000.0} | settings)  # type: ignore[arg-type]


def spent(outcome: JobOutcome) -> dict[str, float]:
    return {name: getattr(outcome, name) for name in SHARES}


# By hand


def test_without_trouble_only_saves_cost() -> None:
    outcome = simulate(job(), [])
    assert outcome.wall == 3000 + 2 * 50
    assert spent(outcome) == dict.fromkeys(SHARES, 0.0) | {"productive": 3000, "saving": 100}
    assert outcome.counts == {"saves_regular": 2}


def test_zero_failures_and_no_cost_is_one() -> None:
    assert simulate(job(saves=saves(blocking=0.0)), []).ettr == 1.0
    assert simulate(job(saves=NO_SAVES), []).ettr == 1.0


def test_a_failure_costs_what_was_not_saved_and_a_restart() -> None:
    outcome = simulate(job(), [NodeFailure(1555.0, 0)])
    assert outcome.counts == {"failures": 1, "saves_regular": 2, "warned": 0}
    assert outcome.lost == 1555 - 1050  # the save at 1000 was durable at 1050
    assert outcome.restarting == 100
    assert outcome.wall == 3000 + 505 + 100 + 2 * 50


def test_a_failure_in_the_middle_of_a_save_loses_the_save() -> None:
    outcome = simulate(job(), [NodeFailure(1049.0, 0)])
    assert outcome.lost == 1000
    assert outcome.saving == 49 + 2 * 50


def test_an_asynchronous_save_counts_from_when_it_is_durable() -> None:
    asynchronous = job(saves=saves(durable=300.0))
    assert simulate(asynchronous, [NodeFailure(1299.0, 0)]).lost == 1249
    assert simulate(asynchronous, [NodeFailure(1301.0, 0)]).lost == 1301 - 1050


def test_a_failure_while_restarting_begins_the_restart_again() -> None:
    outcome = simulate(job(), [NodeFailure(500.0, 0), NodeFailure(560.0, 0)])
    assert outcome.counts["failures"] == 2
    assert (outcome.lost, outcome.restarting) == (500, 160)


def test_a_warning_in_time_saves_what_was_computed() -> None:
    warned = simulate(job(), [NodeFailure(1900.0, 0, lead=95.0)])
    assert warned.counts["warned"] == warned.counts["saves_emergency"] == 1
    # Steps end at 1060, 1070, ...; the first boundary after 1805 is 1810, durable at 1860.
    assert warned.lost == 1900 - 1860
    assert simulate(job(), [NodeFailure(1900.0, 0)]).lost == 850


def test_a_warning_too_short_for_a_save_saves_nothing() -> None:
    late = simulate(job(), [NodeFailure(1900.0, 0, lead=45.0)])
    assert late.counts["saves_emergency"] == 1
    assert late.lost == 1860 - 1050  # stopped computing at 1860 and saved in vain
    assert late.saving == 50 + 40 + 50


def test_the_real_policy_filters_what_comes_right_after_a_save() -> None:
    # The state of step 100 is durable at 1050. With the filter the next is saved at step 125,
    # without it at step 102, so that a regular one at 202 fits in before the end at 220.
    alarm = [FalseAlarm(1065.0, 0, 30.0)]
    counts = [
        simulate(job(saves=replace(saves(), least_gap=gap), work_seconds=2200.0), [], alarm).counts
        for gap in (0.25, 0.0)
    ]
    assert [one["saves_emergency"] for one in counts] == [1, 1]
    assert [one["saves_regular"] for one in counts] == [1, 2]


def test_a_warning_repeats_only_where_asked() -> None:
    strike = [NodeFailure(1995.0, 0, lead=900.0)]
    once = simulate(job(), strike)
    again = simulate(job(predictor=FailurePredictor(repeats=True)), strike)
    assert once.counts["saves_emergency"] == 1
    assert again.counts["saves_emergency"] == 3
    assert again.lost < once.lost


def test_a_dropped_node_fails_nobody() -> None:
    outcome = simulate(
        job(predictor=FailurePredictor(drops=True)), [NodeFailure(1900.0, 0, lead=500.0)]
    )
    assert outcome.counts == {"averted": 1, "saves_emergency": 1, "saves_regular": 2}
    assert (outcome.lost, outcome.restarting) == (0, 100)


def test_a_needless_drop_costs_a_save_a_restart_and_a_node() -> None:
    one_short = job(
        fleet=fleet(num_spares=0, repair_seconds=700.0), predictor=FailurePredictor(drops=True)
    )
    outcome = simulate(one_short, [], [FalseAlarm(500.0, 0, 30.0)])
    assert outcome.counts["saves_emergency"] == 1
    assert (outcome.waiting, outcome.restarting, outcome.lost) == (700, 100, 0)


def test_without_a_spare_it_waits_for_the_repair() -> None:
    strike = [NodeFailure(1555.0, 0)]
    short = fleet(num_spares=0, repair_seconds=5000.0)
    assert simulate(job(fleet=short), strike).waiting == 5000
    assert simulate(job(fleet=replace(short, num_spares=1)), strike).waiting == 0
    assert simulate(job(fleet=fleet()), strike).waiting == 0


def test_shrunken_it_goes_on_more_slowly_and_grows_after_a_save() -> None:
    short = fleet(num_spares=0, repair_seconds=1000.0, shrinks=True)
    outcome = simulate(job(fleet=short), [NodeFailure(500.0, 0)])
    # From 600 at 3/4 of the speed; the save at 1000 steps is begun at 600 + 1000 * 4 / 3.
    assert outcome.waiting == 0
    assert outcome.slow == pytest.approx(1000 / 3)
    assert outcome.restarting == 200  # the failure, and growing
    never = simulate(job(fleet=replace(short, grows=False)), [NodeFailure(500.0, 0)])
    assert never.restarting == 100
    assert never.slow == pytest.approx(3000 / 3)


def test_a_shrunken_job_has_whole_replicas() -> None:
    pairs = fleet(num_spares=0, shrinks=True, replica_nodes=2)
    assert [pairs.nodes_for(n) for n in (5, 4, 3, 2, 1, 0)] == [4, 4, 2, 2, 0, 0]
    # The node in slot 3 idles after the first failure, so the second strikes nobody.
    outcome = simulate(job(fleet=pairs), [NodeFailure(500.0, 0), NodeFailure(900.0, 3)])
    assert outcome.counts["failures"] == 1


def test_a_repaired_node_fails_again_and_as_many_fail_in_all() -> None:
    apart = job(fleet=fleet(num_spares=1, repairs=(50.0,)), work_seconds=3e6, longest_seconds=3e6)
    relapses = {"relapse_share": 0.9, "relapse_gaps": (300.0,)}
    again = replace(apart, fleet=replace(apart.fleet, **relapses))
    one = [NodeFailure(1500.0, 0)]
    with pytest.raises(ValueError, match="rng is None"):
        simulate(again, one)
    counts = simulate(again, one, rng=np.random.default_rng(3)).counts
    assert counts["failures"] == counts["relapses"] + 1 > 1
    often = {"failures_per_node_day": 4.0, "num_spares": 0}
    few, many = (
        [replicate(replace(a, fleet=replace(a.fleet, **often)), seed).counts["failures"]
         for seed in range(4)]
        for a in (apart, again)
    )  # fmt: skip
    assert np.mean(many) == pytest.approx(np.mean(few), rel=0.2)


def test_who_never_gets_on_is_given_up() -> None:
    hopeless = job(longest_seconds=50_000.0)
    outcome = simulate(hopeless, [NodeFailure(900.0 * k, 0) for k in range(1, 100)])
    assert not outcome.finished
    assert (outcome.wall, outcome.productive, outcome.ettr) == (50_000, 0, 0)


# Laws

STRIKES = st.lists(st.floats(1.0, 20_000.0), max_size=12, unique=True).map(sorted)


@st.composite
def jobs(draw: st.DrawFn) -> FleetJob:
    blocking = draw(st.sampled_from([0.0, 5.0, 60.0]))
    return job(
        fleet=fleet(
            failures_per_node_day=draw(st.sampled_from([0.0, 0.5, 5.0])),
            weibull_shape=draw(st.sampled_from([0.7, 1.0])),
            num_spares=draw(st.sampled_from([None, 0, 1])),
            repair_seconds=draw(st.sampled_from([0.0, 3000.0])),
            shrinks=draw(st.booleans()),
            replica_nodes=draw(st.sampled_from([1, 2])),
            grows=draw(st.booleans()),
        ),
        saves=saves(draw(st.sampled_from([10.0, 300.0, 1000.0])), blocking, blocking + 40.0),
        predictor=FailurePredictor(
            recall=draw(st.sampled_from([0.0, 0.5, 1.0])),
            mean_lead_seconds=draw(st.sampled_from([0.0, 200.0])),
            false_alarms_per_gpu_day=draw(st.sampled_from([0.0, 3.0])),
            repeats=draw(st.booleans()),
            drops=draw(st.booleans()),
        ),
        work_seconds=20_000.0,
        longest_seconds=200_000.0,
    )


@given(jobs(), st.integers(0, 5))
def test_every_second_is_accounted_for(settings_: FleetJob, seed: int) -> None:
    outcome = replicate(settings_, seed)
    assert 0 <= outcome.ettr <= 1
    assert min(spent(outcome).values()) >= 0
    assert sum(spent(outcome).values()) == pytest.approx(outcome.wall)


@pytest.mark.parametrize("available", [-3, -1, 0, 1, 9])
def test_a_job_never_takes_fewer_than_no_nodes(available: int) -> None:
    shrinking = fleet(num_spares=0, shrinks=True)
    assert 0 <= shrinking.nodes_for(available) <= max(available, 0)


@given(jobs(), st.integers(0, 5))
def test_same_seed_same_outcome(settings_: FleetJob, seed: int) -> None:
    assert replicate(settings_, seed) == replicate(settings_, seed)


@given(STRIKES, STRIKES, st.sampled_from([0.0, 60.0]), st.sampled_from([0.0, 200.0]))
def test_more_failures_are_never_better(
    some: list[float], more: list[float], blocking: float, wait: float
) -> None:
    usual = job(saves=saves(500.0, blocking, blocking + wait), work_seconds=10_000.0)
    few = simulate(usual, [NodeFailure(time, 0) for time in some])
    many = simulate(usual, [NodeFailure(time, 0) for time in sorted({*some, *more})])
    assert many.wall >= few.wall


@pytest.mark.parametrize("drops", [False, True])
def test_recall_never_hurts_where_saves_are_free(drops: bool) -> None:
    ettr = []
    for recall in (0.0, 0.3, 0.6, 1.0):
        free = job(
            fleet=fleet(failures_per_node_day=3.0),
            saves=saves(2000.0, 0.0),
            predictor=FailurePredictor(recall=recall, mean_lead_seconds=100.0, drops=drops),
            work_seconds=200_000.0,
        )
        outcomes = [replicate(free, seed) for seed in range(8)]
        assert bool(recall) == any(one.counts.get("saves_emergency") for one in outcomes)
        ettr.append(np.mean([one.ettr for one in outcomes]))
    assert ettr == sorted(ettr)
    assert ettr[-1] > ettr[0] + 0.02


def test_shrinking_never_hurts_where_it_is_free_and_repairs_are_long() -> None:
    for seed in range(10):
        short = fleet(
            failures_per_node_day=2.0,
            num_spares=0,
            repair_seconds=10_000.0,
            restart_seconds=0.0,
        )
        waiting = job(fleet=short, saves=saves(500.0, 10.0), work_seconds=100_000.0)
        shrinking = replace(waiting, fleet=replace(short, shrinks=True))
        waited, shrunken = replicate(waiting, seed), replicate(shrinking, seed)
        assert waited.waiting > 0
        assert shrunken.slow > 0
        assert shrunken.ettr >= waited.ettr


@given(jobs(), st.integers(0, 3))
@settings(max_examples=25)
def test_asking_the_policy_at_every_step_changes_nothing(settings_: FleetJob, seed: int) -> None:
    """Steps at which the policy could want nothing are passed over; here none are."""
    # Times on the clock are sums of steps; with powers of two they are exact either way.
    exact = replace(settings_, step_seconds=8.0, fleet=replace(settings_.fleet, replica_nodes=2))
    skipping = replicate(exact, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guarded_job._Run, "_steps_to_next_question", lambda self: 1)
        every_step = replicate(exact, seed)
    assert skipping.counts == every_step.counts
    assert spent(skipping) == pytest.approx(spent(every_step))


def test_the_same_seed_warns_of_more_with_more_recall() -> None:
    def first(recall: float) -> list[NodeFailure]:
        stream = failures(job(predictor=FailurePredictor(recall=recall)), seed=3)
        return [next(stream) for _ in range(400)]

    few, many = first(0.2), first(0.6)
    assert [one[:2] for one in few] == [one[:2] for one in many]
    warned = [{i for i, one in enumerate(half) if one.lead is not None} for half in (few, many)]
    assert warned[0] < warned[1]
    assert len(warned[0]) / 400 == pytest.approx(0.2, abs=0.06)


@pytest.mark.parametrize("shape", [0.7, 1.0, 2.0])
def test_failures_come_at_the_rate_asked_for(shape: float) -> None:
    # 2.34 per 1000 node-days on 4 nodes
    stream = failures(job(fleet=fleet(failures_per_node_day=2.34e-3, weibull_shape=shape)), 0)
    times = [next(stream).time for _ in range(20_000)]
    assert times[-1] / len(times) == pytest.approx(DAY / (4 * 2.34e-3), rel=0.03)


# Against the closed forms


def simulated(num_failures: int, interval: float, blocking: float, durable: float) -> float:
    """Of a job with a failure an hour and restarts of 300 s."""
    hourly = fleet(failures_per_node_day=6.0, restart_seconds=300.0)
    assert hourly.seconds_between_failures == 3600
    long = job(
        fleet=hourly, saves=saves(interval, blocking, durable), work_seconds=num_failures * 3600.0
    )
    return replicate(long, seed=1).ettr


@pytest.mark.parametrize(("blocking", "durable"), [(60.0, 60.0), (10.0, 60.0), (10.0, 500.0)])
@pytest.mark.parametrize("interval", [500.0, 1500.0])
def test_agrees_with_renewal_theory(interval: float, blocking: float, durable: float) -> None:
    exact = closed_form.exact_ettr(
        mtbf=3600.0, interval=interval, blocking=blocking, durable=durable, restart=300.0
    )
    assert simulated(10_000, interval, blocking, durable) == pytest.approx(exact, rel=0.01)


def published(mtbf: float) -> float:
    return expected_ettr(
        3600.0, save_seconds=60.0, restart_seconds=300.0, failures_per_hour=3600.0 / mtbf
    )


def test_agrees_with_the_published_form_where_failures_are_rare() -> None:
    rare = fleet(num_gpus=1024, restart_seconds=300.0)  # a failure in 29 hours
    mtbf = rare.seconds_between_failures
    long = job(fleet=rare, saves=saves(3600.0, 60.0), work_seconds=1500 * mtbf)
    assert replicate(long, seed=0).ettr == pytest.approx(published(mtbf), rel=0.01)


def test_the_published_form_is_the_exact_one_to_first_order() -> None:
    for mtbf, within in ((1e7, 1e-5), (1e6, 1e-4), (1e5, 2e-3)):
        exact = closed_form.exact_ettr(
            mtbf=mtbf, interval=3600.0, blocking=60.0, durable=60.0, restart=300.0
        )
        assert published(mtbf) == pytest.approx(exact, abs=within)


def test_the_simulated_curve_is_highest_at_the_young_daly_interval() -> None:
    best = young(20.0, 3600.0)
    top = simulated(1500, best, 20.0, 20.0)
    others = [
        simulated(1500, best * factor, 20.0, 20.0) for factor in (0.25, 0.5, 0.71, 1.41, 2.0, 4.0)
    ]
    assert max(others) < top * 1.005  # the curve is flat: any near it is as good
    assert others[0] < 0.97 * top
    assert others[-1] < 0.97 * top


@given(st.floats(600.0, 1e7), st.floats(0.001, 0.05))
def test_best_interval_is_best_and_near_young_daly(mtbf: float, share: float) -> None:
    blocking = share * mtbf

    def ettr(interval: float) -> float:
        return closed_form.exact_ettr(
            mtbf=mtbf, interval=interval, blocking=blocking, durable=blocking, restart=60.0
        )

    best = closed_form.best_interval(mtbf=mtbf, blocking=blocking)
    top = ettr(best)
    assert all(ettr(best * factor) < top for factor in (0.5, 0.9, 1.1, 2.0))
    for interval in (young(blocking, mtbf), daly(blocking, mtbf)):
        assert ettr(interval) > 0.99 * top


def test_a_false_alarm_costs_less_than_its_save_and_a_hit_what_is_said() -> None:
    """At a failure in ten hours, saves of 60 s, warnings 61 to 70 s ahead."""
    mtbf, blocking = 36_000.0, 60.0
    interval = round(young(blocking, mtbf), -1)
    ten_hourly = fleet(failures_per_node_day=0.6, restart_seconds=0.0)
    usual = job(fleet=ten_hourly, saves=saves(interval, blocking), work_seconds=1500 * mtbf)
    # Two false alarms to a failure.
    crying = replace(usual, predictor=FailurePredictor(false_alarms_per_gpu_day=2 * 0.6 / 8))
    told = [NodeFailure(one.time, one.slot, 70.0) for one in islice(failures(usual, 0), 2500)]

    base = replicate(usual, 0)
    a_failure = base.counts["failures"] / base.wall
    costs = (base.ettr - replicate(crying, 0).ettr) / (2 * a_failure)
    wins = (simulate(usual, told).ettr - base.ettr) / a_failure
    rare = closed_form.false_alarm_costs(blocking=blocking, least_gap=0.25)
    in_time = closed_form.hit_saves(interval=interval, blocking=blocking, least_gap=0.25)
    assert rare == pytest.approx(0.281 * blocking, rel=1e-2)
    assert costs == pytest.approx(rare, abs=0.15 * blocking)
    assert wins == pytest.approx(in_time, rel=0.1)


def test_without_saves_a_job_starts_from_zero() -> None:
    unsaved = job(
        fleet=fleet(failures_per_node_day=6.0, restart_seconds=300.0),
        saves=NO_SAVES,
        work_seconds=7200.0,
    )
    walls = [replicate(unsaved, seed).wall for seed in range(2000)]
    expected = closed_form.unsaved_ettr(mtbf=3600.0, work=7200.0, restart=300.0)
    assert 7200.0 / np.mean(walls) == pytest.approx(expected, rel=0.05)
    assert closed_form.unsaved_ettr(mtbf=1.0, work=1e6, restart=0.0) == 0.0


# Bad input


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fleet(num_gpus=0), "num_gpus is 0: it must be an int of at least 1"),
        (lambda: fleet(num_gpus=12), "num_gpus is 12: it must be a multiple of 8"),
        (lambda: fleet(failures_per_node_day=-1.0), "failures_per_node_day is -1.0"),
        (lambda: fleet(weibull_shape=0.0), "weibull_shape is 0.0: it must be finite and above 0"),
        (lambda: fleet(restart_seconds=inf), "restart_seconds is inf"),
        (lambda: fleet(num_spares=-1), "num_spares is -1"),
        (
            lambda: fleet(relapse_share=0.5),
            "relapse_share is 0.5: it must be from 0 to below 1, and",
        ),
        (lambda: fleet(replica_nodes=3), "replica_nodes is 3: it must divide the 4 nodes"),
        (lambda: saves(interval=0.0), "interval_seconds is 0.0"),
        (lambda: saves(blocking=-1.0), "blocking_seconds is -1.0"),
        (lambda: saves(blocking=9.0, durable=8.0), "durable_seconds is 8.0"),
        (lambda: job(saves=replace(saves(), least_gap=2.0)), "least_gap is 2.0"),
        (lambda: FailurePredictor(recall=1.5), "recall is 1.5: it must be from 0 to 1"),
        (
            lambda: FailurePredictor(false_alarms_per_gpu_day=-1.0),
            "false_alarms_per_gpu_day is -1.0",
        ),
        (lambda: job(work_seconds=0.0), "work_seconds is 0.0"),
        (
            lambda: job(saves=NO_SAVES, predictor=FailurePredictor(recall=0.1)),
            "needs saves to ask for",
        ),
        (lambda: job(longest_seconds=0.0), "longest_seconds is 0.0"),
    ],
)
def test_bad_settings_are_refused(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]


def test_the_exact_form_refuses_saves_that_overlap() -> None:
    with pytest.raises(ValueError, match="durable is 500"):
        closed_form.exact_ettr(mtbf=1e4, interval=400.0, blocking=20.0, durable=500.0, restart=1.0)
