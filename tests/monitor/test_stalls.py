"""The detectors of stalls, slow ranks and slow drift on scripted and generated times."""

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric._util.state import restore_state, state_of
from rmetric.monitor.stalls import BLOCK, LEAST, PARTS, RANK_WINDOW, StepTimeRules, StepTimes


def timed(data=0.01, passes=0.4, **more):
    return StepTimes(data_wait=data, forward_backward=passes, optimizer=0.02, check=0.01, **more)


def raised(series, rules=None, **settings):
    """(step, alarm) of each alarm over a series of steps, each a list of ranks' times."""
    rules = rules or StepTimeRules(**settings)
    return [
        (step, alarm)
        for step, rows in enumerate(series, start=1)
        for alarm in rules.update(step, rows, ranks=range(len(rows)))
    ]


def alarms_of(series, rules=None, **settings):
    """(step, source, rank) of each alarm."""
    return [(step, a.source, a.rank) for step, a in raised(series, rules, **settings)]


def steady(steps, **times):
    return [[timed(**times)] for _ in range(steps)]


def noisy(steps, ranks=1, seed=0, spread=0.2, outliers=0.01, longest=4.0):
    """Log-normal jitter, and now and then a step that takes some seconds more."""
    draw = random.Random(seed)

    def factor():
        return draw.lognormvariate(0.0, spread)

    return [
        [
            StepTimes(
                data_wait=0.01 * factor(),
                forward_backward=0.4 * factor()
                + (draw.uniform(0, longest) if draw.random() < outliers else 0.0),
                exchange=0.05 * factor() if ranks > 1 else None,
                optimizer=0.02 * factor(),
                check=0.01 * factor(),
            )
            for _ in range(ranks)
        ]
        for _ in range(steps)
    ]


@pytest.mark.parametrize("part", PARTS)
def test_a_stall_of_twenty_seconds_names_its_part_once(part):
    series = steady(100)
    setattr(series[56][0], part, 20.9)
    [(step, alarm)] = raised(series)
    assert (step, alarm.source, alarm.rank) == (57, "stall", 0)
    assert "20.9 s" in alarm.reason


def test_the_reason_says_how_long_how_usual_which_part_and_what_to_look_at():
    usual, waiting = timed(passes=0.36, exchange=0.0), timed(passes=0.36, exchange=20.9)
    late = timed(data=20.9, passes=0.36, exchange=0.0)
    [(step, alarm)] = raised([[usual] * 4] * 56 + [[waiting, waiting, waiting, late]])
    assert (step, alarm.rank) == (57, 3)
    assert alarm.reason.startswith(
        "the step took 21.3 s (usual 0.4 s): 20.9 s waiting for data on rank 3; look at its "
        "data loader or storage"
    )


def test_a_first_step_after_a_restart_is_not_judged():
    rules = StepTimeRules()
    assert alarms_of(steady(60), rules) == []
    rules.settle()
    assert rules.update(61, [timed(passes=60.0)]) == []
    for step in range(62, 70):
        rules.update(step, [timed()])
    assert [a.source for a in rules.update(70, [timed(passes=60.0)])] == ["stall"]


@given(st.integers(0, 2**32), st.floats(0.0, 0.5), st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_jitter_raises_no_alarm_but_a_stall_beside_it_does(seed, spread, ranks):
    series = noisy(150, ranks, seed, spread)
    assert [a for a in alarms_of(series) if a[1] != "slow_drift"] == []
    place = seed % ranks
    series[120][place].data_wait = 60.0
    found = [a for a in alarms_of(series) if a[1] == "stall"]
    assert [step for step, _, _ in found] == [121]
    assert found[0][2] == place


@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=80), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_any_times_are_taken_and_nothing_is_reported_before_a_baseline(seconds, ranks):
    series = [[timed(data=value)] * ranks for value in seconds]
    assert all(step > LEAST for step, _, _ in alarms_of(series))


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 149))
@settings(deadline=None, max_examples=25)
def test_a_detector_goes_on_from_its_state_as_if_it_had_not_stopped(seed, ranks, cut):
    series = noisy(150, ranks, seed, 0.5, outliers=0.05, longest=60.0)
    whole = StepTimeRules()
    expected = [whole.update(s, rows, ranks=range(ranks)) for s, rows in enumerate(series, 1)]
    first, second = StepTimeRules(), StepTimeRules()
    found = [first.update(s, r, ranks=range(ranks)) for s, r in enumerate(series[:cut], 1)]
    restore_state(second, json.loads(json.dumps(state_of(first))))
    found += [second.update(s, r, ranks=range(ranks)) for s, r in enumerate(series[cut:], cut + 1)]
    assert found == expected
    assert len(json.dumps(state_of(second))) < 40_000


def ranked(steps, slow=None, factor=2.0, ranks=4, **times):
    rows = []
    for _ in range(steps):
        own = [0.2 * (factor if rank == slow else 1.0) for rank in range(ranks)]
        rows.append([timed(passes=s, exchange=max(own) - s, **times) for s in own])
    return rows


def test_a_rank_that_is_twice_as_slow_is_named_once():
    [(step, alarm)] = raised(ranked(60) + ranked(200, slow=2))
    assert (alarm.source, alarm.rank) == ("slow_rank", 2)
    assert 60 + RANK_WINDOW // 2 < step <= 60 + 2 * RANK_WINDOW
    assert re.search("rank 2 takes 0.[34]. s a step for its own work and data", alarm.reason)
    assert "the other ranks 0.21 s" in alarm.reason
    assert "in forward and backward" in alarm.reason


def test_a_rank_that_recovers_and_slows_again_is_named_again():
    series = ranked(100, slow=2) + ranked(100) + ranked(100, slow=2)
    found = [(source, rank) for _, source, rank in alarms_of(series) if source != "slow_drift"]
    assert found == [("slow_rank", 2)] * 2


def test_single_stalls_make_no_slow_rank():
    series = ranked(200)
    for step in (60, 90, 121):
        series[step][1].data_wait = 4.0
    assert [a for a in alarms_of(series) if a[1] == "slow_rank"] == []


def test_a_rank_that_waits_for_data_every_eighth_step_is_slow():
    series = ranked(200)
    for rows in series[::8]:
        rows[3].data_wait = 3.0
    assert ("slow_rank", 3) in [a[1:] for a in alarms_of(series)]


def test_another_number_of_ranks_begins_anew():
    rules = StepTimeRules()
    assert alarms_of(ranked(60), rules) == []
    assert [a[1:] for a in alarms_of(ranked(100, slow=1, ranks=3), rules)] == [("slow_rank", 1)]


def drifting(steps, grown=1.3, begin=300, end=600, **more):
    def passes(step):
        share = min(1.0, max(0.0, (step - begin) / (end - begin)))
        return 0.4 * (1.0 + (grown - 1.0) * share)

    return [[timed(passes=passes(step), **more)] for step in range(steps)]


def test_a_drift_of_thirty_percent_is_one_alarm():
    [(step, source, _)] = alarms_of(drifting(1200, grown=1.4))
    assert source == "slow_drift"
    assert 300 < step < 600 + 3 * BLOCK


def test_the_drift_names_what_grew():
    [alarm] = [a for _, a in raised(steady(300) + steady(300, data=0.3)) if a.source != "stall"]
    assert "a step takes 0.73 s (median of 50), it took 0.44 s" in alarm.reason
    assert "waiting for data" in alarm.reason


def test_an_announced_change_is_no_drift():
    rules = StepTimeRules()
    found = raised(steady(300), rules) + rules.update(301, [timed(passes=0.7)], planned=True)
    assert not found + raised(steady(300, passes=0.7), rules)


def but(series, rows):
    """The series with other rows at these steps."""
    return [rows.get(step, usual) for step, usual in enumerate(series, start=1)]


CASES = {
    "of ranks that wait for a slow one that one": (
        but([[timed(exchange=0.0)] * 3] * 60,
            {50: [timed(exchange=15.0), timed(passes=15.4, exchange=0.0), timed(exchange=15.0)]}),
        [(50, "stall", 1)],
    ),
    "no rank where the wait is not measured": (
        but([[timed()] * 3] * 60, {50: [timed(passes=15.4)] * 3}), [(50, "stall", None)]
    ),
    "an episode of several steps once, and a later one": (
        but(steady(120), {key: [timed(data=20.0)] for key in (50, 51, 52, 101)}),
        [(50, "stall", 0), (101, "stall", 0)],
    ),
    "no compilation at the start or later": (
        but(steady(100), {1: [timed(passes=90.0)], 2: [timed(passes=30.0)], 3: [timed(passes=12.0)],
                          60: [timed(passes=40.0, compiled=True)]}),
        [],
    ),
    "no step of seven seconds more that is not twice as long": (
        but(steady(60, passes=10.0), {50: [timed(passes=17.0)]}), []
    ),
    "a step that is twice as long": (
        but(steady(60, passes=10.0), {50: [timed(passes=21.5)]}), [(50, "stall", 0)]
    ),
    "no longer batch that takes longer": (
        but(steady(60, passes=1.0, size=1e3), {50: [timed(passes=9.0, size=9e3)]}), []
    ),
    "a usual batch that takes longer": (
        but(steady(60, passes=1.0, size=1e3), {50: [timed(passes=9.0, size=1e3)]}),
        [(50, "stall", 0)],
    ),
    "a habitual pause twice": (
        but(steady(500), {key: [timed(data=12.0)] for key in range(100, 501, 100)}),
        [(100, "stall", 0), (200, "stall", 0)],
    ),
    "no rank as fast as the others": (ranked(200, slow=1, factor=1.0), []),
    "no rank a little slower": (ranked(200, slow=1, factor=1.3), []),
    "of two ranks the slower one": (ranked(100, slow=1, ranks=2), [(40, "slow_rank", 1)]),
    "no rank of equal ones without the wait": ([[timed(passes=0.5)] * 4] * 100, []),
    "of the data alone without the wait the slow one": (
        [[timed(passes=0.5), timed(data=0.3, passes=0.2), *[timed(passes=0.5)] * 2]] * 100,
        [(40, "slow_rank", 1)],
    ),
    "no milliseconds of a rank": (
        [[timed(passes=s, exchange=0.0) for s in (0.002, 0.006)]] * 100, []
    ),
    "no drift of a few percent": (drifting(1200, grown=1.15), []),
    "no longer sequences": (steady(300, size=1e3) + steady(300, passes=0.7, size=1.7e3), []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_alarms_of_a_case(case):
    series, expected = CASES[case]
    assert alarms_of(series) == expected


def test_the_seconds_of_a_stall_are_a_setting():
    short = but(steady(60, passes=0.01), {50: [timed(passes=4.5)]})  # a hundred times as long
    assert alarms_of(short) == []
    assert alarms_of(short, stall_seconds=4.0) == [(50, "stall", 0)]
