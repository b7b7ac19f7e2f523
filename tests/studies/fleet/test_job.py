"""The simulated job: by hand, against the closed forms, and the laws that it must keep."""

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric.guard.policy import young
from studies.fleet import closed_form, guarded_job
from studies.fleet.guarded_job import replicate, simulate
from studies.fleet.job_settings import (
    DAY,
    FailurePredictor,
    FalseAlarm,
    Fleet,
    FleetJob,
    NodeFailure,
    Saves,
    failures,
)

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


def struck(*times: float, slot: int = 0, lead: float | None = None) -> list[NodeFailure]:
    return [NodeFailure(time, slot, lead) for time in times]


def short(**settings: object) -> Fleet:
    return fleet(**{"num_spares": 0, "repair_seconds": 1000.0} | settings)


ALARM = [FalseAlarm(1065.0, 0, 30.0)]
REPEATS, DROPS = FailurePredictor(repeats=True), FailurePredictor(drops=True)
#: Words -> settings of the job, failures, false alarms, and what comes of it.
CASES: dict[str, tuple[Any, ...]] = {
    "without trouble only saves cost": (
        {}, [], [], dict(wall=3100, productive=3000, saving=100, lost=0)),
    "no saves are one": ({"saves": NO_SAVES}, [], [], dict(ettr=1)),
    # The save at 1000 was durable at 1050.
    "a failure costs what was not saved and a restart": (
        {}, struck(1555), [], dict(lost=505, restarting=100, wall=3705, failures=1, warned=0)),
    "in the middle of a save it loses the save": (
        {}, struck(1049), [], dict(lost=1000, saving=149)),
    "an asynchronous save that is not durable": (
        {"saves": saves(durable=300.0)}, struck(1299), [], dict(lost=1249)),
    "a failure while restarting begins it again": (
        {}, struck(500, 560), [], dict(failures=2, lost=500, restarting=160)),
    "no warning": ({}, struck(1900), [], dict(lost=850)),
    # Steps end at 1060, 1070, ...; the first boundary after 1805 is 1810, durable at 1860.
    "a warning in time": (
        {}, struck(1900, lead=95), [], dict(warned=1, saves_emergency=1, lost=40)),
    # It stopped computing at 1860 and saved in vain.
    "a warning too short for a save": (
        {}, struck(1900, lead=45), [], dict(saves_emergency=1, lost=810, saving=140)),
    # The state of step 100 is durable at 1050. With the filter the next is saved at step 125,
    # without it at step 102, so that a regular one at 202 fits in before the end at 220.
    "the policy filters what comes right after a save": (
        {"work_seconds": 2200.0}, [], ALARM, dict(saves_emergency=1, saves_regular=1)),
    "without its filter": (
        {"work_seconds": 2200.0, "saves": replace(saves(), least_gap=0.0)}, [], ALARM,
        dict(saves_emergency=1, saves_regular=2)),
    # A quarter of an interval after the last save: from 1300, and again from 1600 and 1900.
    "a warning asks once": ({}, struck(1995, lead=900), [], dict(saves_emergency=1, lost=645)),
    "or again": (
        {"predictor": REPEATS}, struck(1995, lead=900), [], dict(saves_emergency=3, lost=45)),
    "a dropped node fails nobody": (
        {"predictor": DROPS}, struck(1900, lead=500), [],
        dict(averted=1, failures=0, saves_emergency=1, lost=0, restarting=100)),
    "a needless drop costs a save, a restart and a node": (
        {"predictor": DROPS, "fleet": short()}, [], [FalseAlarm(500.0, 0, 30.0)],
        dict(saves_emergency=1, waiting=1000, restarting=100, lost=0)),
    "without a spare it waits": ({"fleet": short()}, struck(1555), [], dict(waiting=1000)),
    # From 600 at 3/4 of the speed; the save at 1000 steps is begun at 600 + 1000 * 4 / 3. It
    # restarts for the failure, and to grow.
    "shrunken it is slower and grows after a save": (
        {"fleet": short(shrinks=True)}, struck(500), [],
        dict(waiting=0, slow=1000 / 3, restarting=200)),
    "or does not grow": (
        {"fleet": short(shrinks=True, grows=False)}, struck(500), [],
        dict(slow=1000, restarting=100)),
    # The node in slot 3 idles after the first failure, so the second strikes nobody.
    "whole replicas": (
        {"fleet": short(repair_seconds=DAY, shrinks=True, replica_nodes=2)},
        [*struck(500), *struck(900, slot=3)], [], dict(failures=1)),
    "who never gets on is given up": (
        {"longest_seconds": 50_000.0}, struck(*range(900, 90_000, 900)), [],
        dict(finished=False, wall=50_000, productive=0, ettr=0)),
}  # fmt: skip


@pytest.mark.parametrize("words", CASES)
def test_what_a_failure_or_a_warning_costs(words: str) -> None:
    settings_, strikes, alarms, expected = CASES[words]
    outcome = simulate(job(**settings_), strikes, alarms)
    known = vars(outcome) | {"ettr": outcome.ettr} | outcome.spent | outcome.counts
    found = {name: known.get(name, 0) for name in expected}
    assert found == pytest.approx(expected)


def test_a_shrunken_job_has_whole_replicas() -> None:
    pairs = fleet(num_spares=0, shrinks=True, replica_nodes=2)
    assert [pairs.nodes_for(n) for n in (9, 5, 4, 3, 2, 1, 0, -1)] == [4, 4, 4, 2, 2, 0, 0, 0]


def test_a_repaired_node_fails_again_and_as_many_fail_in_all() -> None:
    apart = job(fleet=fleet(num_spares=1, repairs=(50.0,)), work_seconds=3e6, longest_seconds=3e6)
    relapses = {"relapse_share": 0.9, "relapse_gaps": (300.0,)}
    again = replace(apart, fleet=replace(apart.fleet, **relapses))
    single = [NodeFailure(1500.0, 0)]
    with pytest.raises(ValueError, match="rng is None"):
        simulate(again, single)
    counts = simulate(again, single, rng=np.random.default_rng(3)).counts
    assert counts["failures"] == counts["relapses"] + 1 > 1
    often = {"failures_per_node_day": 4.0, "num_spares": 0}
    few, many = (
        [replicate(replace(a, fleet=replace(a.fleet, **often)), seed).counts["failures"]
         for seed in range(4)]
        for a in (apart, again)
    )  # fmt: skip
    assert np.mean(many) == pytest.approx(np.mean(few), rel=0.2)


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
    assert min(outcome.spent.values()) >= 0
    assert sum(outcome.spent.values()) == pytest.approx(outcome.wall)


@given(STRIKES, STRIKES, st.sampled_from([0.0, 60.0]), st.sampled_from([0.0, 200.0]))
def test_more_failures_are_never_better(some, more, blocking, wait):
    usual = job(saves=saves(500.0, blocking, blocking + wait), work_seconds=10_000.0)
    few = simulate(usual, [NodeFailure(time, 0) for time in some])
    many = simulate(usual, [NodeFailure(time, 0) for time in sorted({*some, *more})])
    assert many.wall >= few.wall


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
    assert skipping.spent == pytest.approx(every_step.spent)


@pytest.mark.parametrize("shape", [0.7, 1.0, 2.0])
def test_failures_come_at_the_rate_asked_for(shape: float) -> None:
    # 2.34 per 1000 node-days on 4 nodes
    stream = failures(job(fleet=fleet(failures_per_node_day=2.34e-3, weibull_shape=shape)), 0)
    times = [next(stream).time for _ in range(20_000)]
    assert times[-1] / len(times) == pytest.approx(DAY / (4 * 2.34e-3), rel=0.03)


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


def test_without_saves_a_job_starts_from_zero_and_saves_that_overlap_have_no_form() -> None:
    hourly = fleet(failures_per_node_day=6.0, restart_seconds=300.0)
    unsaved = job(fleet=hourly, saves=NO_SAVES, work_seconds=7200.0)
    walls = [replicate(unsaved, seed).wall for seed in range(2000)]
    expected = closed_form.unsaved_ettr(mtbf=3600.0, work=7200.0, restart=300.0)
    assert 7200.0 / np.mean(walls) == pytest.approx(expected, rel=0.05)
    assert closed_form.unsaved_ettr(mtbf=1.0, work=1e6, restart=0.0) == 0.0
    with pytest.raises(ValueError, match="durable is 500"):
        closed_form.exact_ettr(mtbf=1e4, interval=400.0, blocking=20.0, durable=500.0, restart=1.0)


def test_a_false_alarm_costs_less_than_its_save_and_a_hit_what_is_stated() -> None:
    """At a failure in ten hours, saves of 60 s, warnings 61 to 70 s ahead."""
    mtbf, blocking = 36_000.0, 60.0
    interval = round(young(blocking, mtbf), -1)
    ten_hourly = fleet(failures_per_node_day=0.6, restart_seconds=0.0)
    usual = job(fleet=ten_hourly, saves=saves(interval, blocking), work_seconds=1500 * mtbf)
    # Two false alarms to a failure.
    crying = replace(usual, predictor=FailurePredictor(false_alarms_per_gpu_day=2 * 0.6 / 8))
    early = [NodeFailure(node.time, node.slot, 70.0) for node in islice(failures(usual, 0), 2500)]

    base = replicate(usual, 0)
    a_failure = base.counts["failures"] / base.wall
    costs = (base.ettr - replicate(crying, 0).ettr) / (2 * a_failure)
    wins = (simulate(usual, early).ettr - base.ettr) / a_failure
    rare = closed_form.false_alarm_costs(blocking=blocking, least_gap=0.25)
    in_time = closed_form.hit_saves(interval=interval, blocking=blocking, least_gap=0.25)
    assert rare == pytest.approx(0.281 * blocking, rel=1e-2)
    assert costs == pytest.approx(rare, abs=0.15 * blocking)
    assert wins == pytest.approx(in_time, rel=0.1)
