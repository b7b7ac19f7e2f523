"""The verdict on a whole log: its classes, on courses made to break the rules."""

from __future__ import annotations

import csv
from math import inf, isfinite, nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric import Record, Run, Truth
from rmetric.evaluation import RunVerdict, Side, compare, judge_run
from rmetric.evaluation.verdict_words import SEVERITY, alarm_words
from rmetric.metric import HEALTHY_ALARMED

N = 1000


def course(count: int = N, start: float = 10.8, end: float = 2.9, noise: float = 0.05, seed=0):
    """A loss that falls as that of a language model."""
    steps = np.arange(count)
    rng = np.random.default_rng(seed)
    fall = (start - end) * np.exp(-6 * steps / count) + end
    return fall + noise * rng.standard_normal(count)


def records(losses, every: int = 1, name: str = "training_loss", first: int = 1) -> list[Record]:
    return [Record(step=first + i * every, **{name: float(x)}) for i, x in enumerate(losses)]


def evaluated(losses, evaluations, every: int) -> list[Record]:
    """A log with an evaluation at each record of so many, for as long as there are any."""
    log = records(losses)
    for record, value in zip(log[every - 1 :: every], evaluations, strict=False):
        record.validation_loss = float(value)
    return log


def verdict(losses, alarms=(), **how) -> RunVerdict:
    return judge_run(records(losses, **how), alarms)


def with_part(losses, at: int, part):
    changed = np.array(losses, dtype=float)
    part = np.broadcast_to(part, min(np.size(part) if np.ndim(part) else 1, len(changed) - at))
    changed[at : at + len(part)] = part
    return changed


def diverged(at: int = 712, count: int = N, high: float = 7.2, over: int = 20, seed: int = 0):
    losses = course(count, seed=seed)
    rise = np.minimum(1, np.arange(1, count - at + 1) / over)
    losses[at:] += rise * (high - losses[at:])
    return losses + 0.1 * np.random.default_rng(seed + 1).standard_normal(count) * (
        np.arange(count) >= at
    )


def normal(count: int, seed: int = 0):
    return np.random.default_rng(seed).standard_normal(count)


def noisy(level: float, count: int, noise: float):
    return level + noise * normal(count)


def scattered() -> np.ndarray:
    losses = course()
    losses[[*range(500, 1000, 3), 999]] = nan
    return losses


def shaken() -> np.ndarray:
    losses = course()
    losses[100:500] += 3 * (np.arange(400) % 40 < 30)
    return losses


def wild() -> np.ndarray:
    losses = course(noise=0.02)
    losses[200:700] += np.random.default_rng(1).lognormal(1, 1, 500) + 2
    return losses


NEAR_ZERO, BELOW_ZERO = np.abs(course(start=2.0, end=0.0, noise=0.002)), course(start=3.0, end=-2.0)
TWICE = with_part(with_part(course(), 701, [7.0] * 4), 300, [9.0] * 5)
BLOWN_UP = [5.0, 4.0, 3.0, 2.5, 900.0, 950.0, 940.0, nan, nan, nan]
EARLY = [12.0, 22.5, 12.5, 9.7, 8.4, 8.1, 8.1, 8.0, 7.9, 7.9, 7.8, 7.9, 7.7, 7.6, 7.5, 7.4]
FELL_FIRST = np.concatenate([[12.4, 12.4], np.linspace(48, 12, 28), np.linspace(11.9, 20.4, 32)])
BACK = "stop, go back to a checkpoint before step "
#: losses, alarms -> how the words begin, the numbers or "..." and a part, how the advice begins
VERDICTS = {
    "a divergence": (diverged(over=1), [713], "DIVERGED at step 713: never came back",
        "loss 3, end 7.23; trained on for 287 steps (29 %) after the live alarm", BACK + "713"),
    "one without an alarm": (diverged(), [], "DIVERGED at step 713: never came back",
        "loss 3, end 7.23", BACK + "713"),
    "one that comes back": (with_part(course(), 600, np.linspace(40.0, 10.0, 400)), [],
        "DIVERGED at step 601: not back by the end", "...", ""),
    "one after a fall": (FELL_FIRST, [], "DIVERGED at step 37: never came back",
        "...before it a spike to 48 at step 3, recovered", ""),
    "a slow one": (course(noise=0.02) + np.r_[np.zeros(450), np.linspace(0, 3, 550)], [],
        "DIVERGED", "...", ""),
    "one near zero": (with_part(NEAR_ZERO, 800, [1.4] * 200), [], "DIVERGED", "...", ""),
    "one from below zero": (with_part(BELOW_ZERO, 600, [4.0] * 400), [], "DIVERGED", "...", ""),
    "a spike": (with_part(course(), 701, [7.0, 8.0, 6.5]), [],
        "SPIKE at 702, recovered in 3 steps", "loss 3.01, peak 8", "watch whether it comes again"),
    "a high one": (with_part(course(), 701, [7.0, 147_312.0, 6.5]), [],
        "SPIKE at 702, recovered in 3 steps", "loss 3.01, peak 147,000", ""),
    "one without a record beside it": (with_part(course(), 600, [9.0] * 6), [],
        "SPIKE at 601", "loss 3.07, peak 9", ""),
    "two": (TWICE, [], "2 SPIKES, all recovered", "the highest begins at 301: loss 4.24, peak 9, "
        "recovered in 5 steps", "look at the data"),
    "nan for a while": (with_part(course(), 500, [nan, nan]), [],
        "SPIKE at 501, recovered in 2 steps", "loss 3.29, then nan or infinite", ""),
    "a spike beside a record": (
        with_part(with_part(course(), 300, [40.0]), 600, [9.0] * 6), [],
        "SPIKE at 601", "...; one record stands out, 40 at step 301", ""),
    "single records": (with_part(with_part(course(), 300, [40.0]), 600, [30.0]), [],
        "HEALTHY", "...; 2 single records stand out, the highest 40 at step 301", "nothing"),
    "health": (course(), [], "HEALTHY: no failure seen", "loss 10.8 -> 2.91", "nothing"),
    "a fall within one record": ([0.8, *noisy(9e-3, 20, 1e-4)], [], "HEALTHY", "...", "nothing"),
    "a flat loss": (course(start=2.9), [], "HEALTHY", "..., it does not fall", "see whether"),
    "an early rise": (EARLY, [], "HEALTHY",
        "loss 12 -> 7.4; an early rise to 22.5 at step 2, gone by step 4", "nothing"),
    "near zero": (with_part(NEAR_ZERO, 800, [0.05] * 20), [], "HEALTHY", "...", "nothing"),
    "below zero": (BELOW_ZERO, [], "HEALTHY", "...", "nothing"),
    "few records": ([3.0, 2.9, 2.8, 2.7], [], "CANNOT TELL: 4 records", "", ""),
    "no record": ([], [], "CANNOT TELL: no record", "", ""),
    "nan to the end": (with_part(course(), 900, [nan] * 100), [902],
        "NOT FINITE from step 901 to the end", "loss 2.94 -> nan, 100 of 1,000 losses; trained on "
        "for 98 steps (10 %) after the live alarm", BACK + "901"),
    "inf at last": (with_part(course(), 999, [inf]), [], "NOT FINITE", "...", BACK),
    "nan, however short": ([5.0, 6.0, nan, nan], [], "NOT FINITE", "...", BACK),
    "0 to the end": (with_part(course(), 900, [0.0] * 100), [], "NOT FINITE", "...exactly 0", BACK),
    "nan again and again": (scattered(), [], "NOT FINITE again and again since step 501", "...",
        BACK + "501"),
    "nan twice": (with_part(with_part(course(), 500, [nan]), 990, [nan] * 10), [],
        "NOT FINITE from step 991 to the end", "...", ""),
    "blown up before it was nan": (BLOWN_UP, [], "NOT FINITE from step 8 to the end",
        "loss 2.5 -> 940 at step 5, then nan, 3 of 10 losses", BACK + "5"),
    "blown up, back, nan": ([5.0, 4.0, 900.0, 3.0, 2.5, nan, nan], [], "NOT FINITE", "...",
        BACK + "6"),
    "a spike before a nan": (
        with_part(with_part(course(), 500, [8.0, 9.0, 8.0]), 900, [nan] * 100), [],
        "NOT FINITE", "...before it a spike to 9 at step 501, recovered", ""),
    "unstable": (wild(), [], "UNSTABLE from step 201 to 70", "...", "lower the learning rate"),
    "unstable, then calm": (shaken(), [], "UNSTABLE from step 101 to 491, calm since", "...", ""),
    "other data": (np.r_[course(500, 1.2, 1.0, 0.03), course(500, 2.4, 1.9, 0.03)], [],
        "LEVEL ROSE", "...", ""),
    "a rise at the end": (diverged(at=980, over=1), [],
        "CANNOT TELL: the log ends 19 steps after a rise at step 981", "...loss 2.93 -> 7.17", ""),
    "the same, earlier": (diverged(at=900, over=1), [], "DIVERGED", "...", ""),
    "a last record": ([*course(400), 9.5], [], "CANNOT TELL: the last record is 9.5", "...", ""),
    "two last records": ([*course(400), 9.5, 9.0], [], "CANNOT TELL", "...", ""),
    "of a policy": (1e-3 * normal(400), [], "CANNOT TELL", "...", ""),
    # The divergence term of GRPO grows in health.
    "of a policy, which drifts": (
        np.abs(0.05 * np.arange(400) / 400 + 1e-3 * normal(800)[400:]), [],
        "CANNOT TELL", "...", ""),
    # Flat from the start: no learning, where no trained model has the level.
    "a language model without context": (noisy(7.65, 220, 0.08), [],
        "LEARNS NOTHING: the loss does n", "...", ""),
    "a guess among ten classes": (noisy(2.3028, 40, 1e-4), [],
        "LEARNS NOTHING: the loss stays at ln(10)", "...", ""),
    "a guess after a wild start": ([0.68, 2.5, 5.3, 1.0, 10.7, 2.0, 1.6, *[0.6931] * 30], [],
        "LEARNS NOTHING: the loss stays at ln(2)", "...", ""),
    "a fine-tuning that has converged": (noisy(1.52, 200, 0.06), [], "HEALTHY", "...", ""),
    "the same, near ln(4)": (noisy(1.386, 200, 0.02), [], "HEALTHY", "...", ""),
    "an average over many steps": (noisy(1.1, 60, 0.001), [], "HEALTHY", "...", ""),
    "a short flat log": (noisy(7.65, 60, 0.08), [], "HEALTHY", "...", ""),
    "a loss that falls by a twentieth": (np.linspace(7.6, 7.2, 200), [], "HEALTHY", "...", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_a_course_has_its_class_numbers_and_advice(name):
    losses, alarms, text, detail, advice = VERDICTS[name]
    found = verdict(losses, alarms)
    assert found.text.startswith(text)
    assert found.detail == detail or (detail[:3] == "..." and detail[3:] in found.detail)
    assert found.advice.startswith(advice)


def test_a_peak_is_no_low_record_between_two_high_ones():
    first = with_part(FLAT * 3, 10, [2.8, 2.0, 2.8])
    assert "peak 3.5" in verdict(with_part(first, 30, [3.5, 2.0, 3.4]), every=10).detail


def test_a_verdict_has_its_steps():
    found = verdict(diverged(over=1), [713])
    assert (found.kind, found.severity, found.onset_step) == ("diverged", "bad", 713)
    assert (found.alarm_step, found.end_step, found.loss) == (713, None, "training_loss")
    spike = verdict(with_part(course(), 701, [7.0, 8.0, 6.5]))
    assert (spike.onset_step, spike.end_step, spike.severity) == (702, 705, "warning")
    assert verdict(TWICE).event_steps == (301, 702)
    assert verdict(course()).event_steps == ()
    assert verdict([*course(400), 9.5]).onset_step == 401


def test_a_side_is_judged_once_however_often_it_is_compared(monkeypatch):
    judged = []

    def judge(records, **how) -> RunVerdict:
        judged.append(records)
        return judge_run(records, **how)

    monkeypatch.setattr("rmetric.evaluation.comparison.judge_run", judge)
    reference = Side([Run(id="a", records=records(course(400)))])
    failed = Run(id="b", records=records(diverged(300, 400)))
    assert [compare(reference, [failed]).kind for _ in range(3)] == ["worse"] * 3
    assert judged == [failed.records, reference.runs[0].records, *[failed.records] * 2]


def test_a_step_that_the_optimiser_skipped_is_no_value():
    log = records(with_part(course(), 500, [inf, inf]))
    for record in log[500:502]:
        record.skipped = True
    assert judge_run(log).kind == "healthy"


def test_a_restart_of_the_schedule_is_no_failure():
    losses = course(3000, noise=0.02)
    for at in (1000, 2000):
        steps = np.arange(1000)
        bump = np.minimum(steps / 15, 1) * 0.9 * (1 + np.cos(np.pi * steps / 1000)) / 2
        losses[at : at + 1000] += bump
    assert verdict(losses).kind == "level_rose"
    assert verdict(losses[:2000]).kind == "level_rose"
    mild = course(3000, noise=0.02)
    mild[1000:2000] += 0.3 * np.linspace(1, 0, 1000)
    assert verdict(mild).kind == "healthy"


@pytest.mark.parametrize("to", [3.8, 4.5, 5.5])
def test_other_data_are_no_divergence(to):
    losses = course(noise=0.03)
    losses[500:] += (to - 2.9) * (0.7 + 0.3 * np.exp(-np.arange(500) / 150))
    found = verdict(losses)
    assert (found.kind, found.severity, found.onset_step) == ("level_rose", "warning", 501)


def test_an_announced_change_begins_a_past_anew():
    log = records(with_part(course(noise=0.02), 500, 6.0 + course(500, 1.0, 0.0, 0.02)))
    assert judge_run(log).kind != "healthy"
    log[500].planned_events = ("data_mixture",)
    assert judge_run(log).kind == "healthy"


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("count", [10, 14, 20, 40])
@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_a_noisy_short_log_is_no_failure(count, noise, seed):
    rng = np.random.default_rng(seed)
    losses = 2.0 * rng.lognormal(0, noise, count)
    assert verdict(losses, every=10).severity != "bad"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("every", [1, 10])
def test_heavy_tails_are_no_spikes(every, seed):
    rng = np.random.default_rng(seed)
    losses = course(2000, noise=0.0) + 0.05 * rng.standard_t(3, 2000)
    assert verdict(losses, every=every).kind == "healthy"
    drifting = course(2000, noise=0.0)
    walk = 0.0
    for i in range(2000):
        walk = 0.95 * walk + 0.02 * rng.standard_normal()
        drifting[i] += walk
    assert verdict(drifting, every=every).kind == "healthy"


def test_an_early_rise_without_any_calm_part_is_a_divergence():
    rng = np.random.default_rng(0)
    wild = 20 * rng.lognormal(0, 0.5, 34).clip(0.6, 3)
    wild[-6:] = 15.0
    assert verdict([6.9, 6.8, 7.2, 8.0, 8.4, 10.0, *wild]).severity == "bad"
    grows = np.clip(0.1 + 0.8 * np.arange(60) / 20, 0, 0.9)
    assert verdict(grows + 0.05 * rng.standard_normal(60)).severity != "bad"


def test_an_accuracy_is_not_called_a_divergence():
    rising = 0.1 + 0.8 * (1 - np.exp(-np.arange(N) / 300))
    noise = 0.01 * np.random.default_rng(0).standard_normal(N)
    assert verdict(rising + noise).kind == "cannot_tell"
    found = judge_run([Record(step=s, gradient_norm=1.0) for s in range(50)])
    assert found.text == "CANNOT TELL: no loss is logged"


def test_the_evaluation_loss_alone_is_judged_where_it_can_be():
    name = "validation_loss"
    assert verdict(course(30, noise=0.01), every=100, name=name).kind == "healthy"
    overfit = np.concatenate([np.linspace(1.3, 1.0, 10), np.linspace(1.0, 1.8, 30)])
    assert verdict(overfit, every=100, name=name).kind == "cannot_tell"
    failed = with_part(course(30, noise=0.01), 20, [7.0] * 10)
    assert verdict(failed, every=100, name=name).kind == "diverged"
    assert verdict(with_part(failed, 20, [nan] * 10), name=name).kind == "not_finite"


def test_one_evaluation_that_is_nan_is_no_failure_of_the_training():
    assert judge_run(evaluated(course(400), [3.0] * 9 + [nan], 40)).kind == "healthy"
    assert judge_run(evaluated(course(400), [3.0] * 8 + [nan] * 2, 40)).kind == "not_finite"


def test_a_run_that_failed_by_its_own_log_is_not_called_healthy():
    truth = Truth(outcome="failed", failure_kind="lost_worker", failure_step=812)
    found = judge_run(records(course()), truth=truth)
    assert (found.kind, found.severity, found.onset_step) == ("failed", "bad", 812)
    assert found.text == "FAILED at step 812, as its log states (lost worker)"
    assert found.detail == "its loss does not show it"
    spike = with_part(course(), 998, [7.0, 7.0])
    assert judge_run(records(spike), truth=truth).detail == "loss 2.91 -> 7 at step 999"
    assert judge_run(records(diverged()), truth=truth).kind == "diverged"


def test_overfitting_is_distinguished_from_health_and_from_divergence():
    evaluations = [*np.linspace(1.5, 1.0, 4), *np.linspace(1.1, 1.7, 6)]
    found = judge_run(evaluated(course(400, 1.6, 0.1, 0.01), evaluations, 40))
    assert (found.kind, found.text) == ("overfitting", "OVERFITTING since step 160")
    assert found.detail == "validation loss 1 -> 1.7 while the training loss falls"


def test_steps_that_fall_back_are_counted_as_records():
    log = records(diverged(over=1))
    for i, record in enumerate(log):
        record.step = i + 1 if i < 400 else i - 99
    found = judge_run(log, [613])
    assert (found.kind, found.detail) == ("diverged", "loss 3, end 7.23")


COURSES = {
    "healthy": course(2000),
    "diverged": diverged(1400, 2000, over=1),
    "slow": diverged(1200, 2000, over=300),
    "spike": with_part(course(2000, noise=0.02), 1000, [7.0] * 60),
    "nan": with_part(course(2000), 1500, [nan] * 500),
    "undecided": diverged(1940, 2000, over=1),
    "rose": course(2000, noise=0.02) + 1.2 * (np.arange(2000) >= 1000),
}


@pytest.mark.parametrize("name", COURSES)
@settings(deadline=None, max_examples=20)
@given(exponent=st.integers(-20, 20))
def test_the_class_does_not_depend_on_the_unit_of_the_loss(name, exponent):
    plain, scaled = verdict(COURSES[name]), verdict(COURSES[name] * 2.0**exponent)
    steps = (plain.kind, plain.onset_step, plain.end_step, plain.num_events)
    assert steps == (scaled.kind, scaled.onset_step, scaled.end_step, scaled.num_events)


@pytest.mark.parametrize("name", COURSES)
@pytest.mark.parametrize("offset", [0, 3, 9])
def test_every_tenth_record_has_the_same_verdict(name, offset):
    log = records(COURSES[name])
    plain, thinned = judge_run(log), judge_run(log[offset::10])
    assert thinned.kind == plain.kind
    if plain.onset_step is not None and name != "slow":
        assert abs(thinned.onset_step - plain.onset_step) <= 20


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.none(), st.floats(allow_nan=True, allow_infinity=True),
            st.sampled_from([0.0, 1.0, 2.0, nan, inf, -inf, 1e308, -1e308, 5e-324]),
        ),
        max_size=60,
    ),
    st.lists(st.integers(-5, 70), max_size=4),
)  # fmt: skip
def test_any_log_has_a_verdict_on_one_line(losses, alarms):
    log = [Record(step=s, training_loss=x) for s, x in enumerate(losses)]
    found = judge_run(log, sorted(alarms))
    assert found.kind in SEVERITY
    assert found.text
    assert found.text.isprintable()
    assert found == judge_run(log, sorted(alarms))
    for value in (found.before, found.after):
        assert value is None or isfinite(value)


def beside_validation(evaluations) -> RunVerdict:
    return judge_run(evaluated(diverged(over=1), evaluations, 100), [713])


def test_a_divergence_of_the_training_loss_alone_says_so():
    found = beside_validation([5, 4, 3.5, 3.2, 3.1, 3.0, 2.9, 2.9, 2.85, 2.8])
    assert found.text == "DIVERGED at step 713: never came back, in the training loss only"
    assert found.detail.endswith("; validation loss 2.9 -> 2.8")
    assert (found.kind, found.training_only) == ("diverged", True)


@pytest.mark.parametrize(
    "evaluations",
    [
        [5, 4, 3.5, 3.2, 3.1, 3.0, 2.9, 7.0, 7.1, 7.2],
        [5, 4, 3.5, 3.2, 3.1, 3.0, 2.9, 4.0, 2.9, 2.9],
        [5, 4, 3.5, 3.2, 3.1, 3.0, 2.9, nan, 2.9, 2.9],
        [5, 4, 3.5, 3.2, 3.1, 3.0, 4.9, 4.5, 4.2, 4.0],
        [5, 4, 3.5, 3.2, 3.1, 3.0, 2.9, 2.9],
        [],
    ],
    ids=["rises too", "rises for a while", "not finite", "before the onset", "one", "none"],
)
def test_it_does_not_say_so_where_the_validation_loss_does_not_show_it(evaluations):
    found = beside_validation(evaluations)
    assert (found.kind, found.training_only) == ("diverged", False)
    assert "training loss only" not in found.text


def fine_tuning(losses, evaluations, every: int = 10) -> RunVerdict:
    """The verdict on a short log with evaluations at even distances, the last at its end."""
    log = records(losses, every=every)
    for i, value in enumerate(evaluations, start=1):
        log[len(log) * i // len(evaluations) - 1].validation_loss = value
    return judge_run(log)


FLAT = [2.0, 2.02, 1.98, 2.01, 1.99] * 4
CALM = [2.05, 2.03, 1.99, 2.0, 1.99, 2.01, 1.94, 1.96]
FALLS = [3.0, 2.6, 2.4, 2.3, 2.2, 2.15, 2.1, 2.05, 2.03, 2.01, 2.0, 1.98, 1.97, 1.97]
#: training losses, evaluations -> the class, and how the words begin
SHORT = {
    "an early rise that never came back": (
        [2.05, 2.03, 3.4, 2.9, 2.75, 2.6, 2.5, 2.4, 2.4, 2.4, 2.35, 2.3, 2.3, 2.25, 2.25, 2.2, 2.2],
        [2.95, 2.7, 2.6, 2.55], "unstable", "UNSTABLE from step 21 to "),
    "a slow rise": (
        [*CALM, 1.95, 2.03, 2.0, 2.0, 2.1, 2.1, 2.2, 2.27, 2.33, 2.25, 2.28, 2.26],
        [2.29, 2.29, 2.5, 2.6], "level_rose", "WORSE THAN AT THE START"),
    "a fall and then a slow rise": (
        [*FALLS, *np.linspace(1.98, 2.2, 16)], [], "level_rose", "LEVEL ROSE since step "),
    "worse from the start on": (
        list(np.linspace(2.0, 2.3, 20) + 0.01 * (np.arange(20) % 3)), [],
        "level_rose", "WORSE THAN AT THE START"),
    "worse evaluations alone": (
        FLAT, [2.3, 2.34, 2.37, 2.4, 2.42, 2.44], "level_rose", "WORSE THAN AT THE START"),
    "evaluations that jump": (
        FLAT, [2.3, 2.2, 2.9, 3.0, 3.0], "level_rose", "LEVEL ROSE since step "),
    "the same while the training loss falls": (
        FALLS, [2.3, 2.2, 2.9, 3.0, 3.0], "overfitting", "OVERFITTING since step "),
    "a little of it, beyond the noise": (
        FALLS, [2.3, 2.35, 2.39, 2.44, 2.48, 2.53], "overfitting", "OVERFITTING since step "),
    "one last evaluation": (FALLS, [2.3, 2.2, 2.1, 9.0], "cannot_tell", "CANNOT TELL: the last "),
    "it explodes": (
        [*CALM, 2.7, 14.0, 2528.0, 1.3e5, 2.6e6, 5.4e6, 6.4e6, 6.7e6, 6.8e6, 6.8e6],
        [2.3, 4.5, 6.1e6, 6.7e6], "diverged", "DIVERGED at step 8"),
    "it climbs from the first steps on, and so do the evaluations": (
        list(np.linspace(2.0, 6.0, 20)), [2.3, 3.0, 4.0, 5.0], "diverged", "DIVERGED at step "),
    "it may be no loss": (list(np.linspace(2.0, 6.0, 20)), [], "cannot_tell", "CANNOT TELL: the v"),
    "healthy": (CALM + [x - 0.05 for x in CALM], [2.3, 2.28, 2.26, 2.26], "healthy", "HEALTHY"),
    "an early rise that was over": (
        [2.05, 2.8, 7.6, 5.8, 3.8, 2.4, 2.15, 2.07, *CALM, 1.93, 1.93],
        [2.86, 2.32, 2.3, 2.29], "healthy", "HEALTHY"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHORT)
def test_a_short_run_is_healthy_only_where_no_loss_ends_above_where_it_was(name):
    losses, evaluations, kind, text = SHORT[name]
    found = fine_tuning(losses, evaluations)
    assert found.kind == kind
    assert found.text.startswith(text)


@pytest.mark.parametrize("seed", range(40))
def test_noise_is_no_rise_of_the_level(seed):
    rng = np.random.default_rng(seed)
    found = fine_tuning(2.0 + 0.1 * rng.standard_normal(60), 2.3 + 0.01 * rng.standard_normal(6))
    assert found.kind == "healthy"


def test_a_training_loss_that_was_lost_first_sets_the_checkpoint():
    training = [*course()[:90], *(40.0 + x for x in range(10))]
    evaluations = records([9.0] * 5 + [nan] * 14, 200, "validation_loss", first=200)
    found = judge_run(records(training) + evaluations)
    assert (found.kind, found.advice) == ("not_finite", BACK + "91")
    assert "last logged at step 100" in found.detail


def test_overfitting_is_reported_beside_a_spike():
    losses = with_part(course(), 200, [9.0] * 6)
    found = judge_run(evaluated(losses, [3.0, 2.5, *(2.5 + 0.1 * k for k in range(17))], 50))
    assert found.kind == "spike"
    assert "; and overfitting since step 100: validation loss 2.5 -> 4.1" in found.detail


def words(losses, alarms) -> str:
    return alarm_words(verdict(losses, alarms), alarms[0] if alarms else None, len(alarms))


def test_a_live_alarm_is_reported_with_its_reason():
    nan_tail = with_part(course(), 900, [nan] * 100)
    assert words(nan_tail, [35, 300]) == (
        "at step 35 (first of 2), 866 steps before the onset, and none at the onset"
    )
    assert words(nan_tail, [901]) == "at step 901, at the onset"
    assert words(nan_tail, [902]) == "at step 902, 1 step after the onset"
    late = "at step 951, 50 steps after the onset: the rise was too small for it before"
    assert words(nan_tail, [951]) == late
    assert words(nan_tail, [300, 895]) == (
        "at step 300 (first of 2): an earlier, brief rise; at the event again, at step 895, "
        "6 steps before the onset"
    )
    early = with_part(course(), 5, [nan] * 995)
    assert words(early, [54]) == (
        "at step 54, 48 steps after the onset: it needs about 10 records before it can judge"
    )
    assert "needs about 10" in words(early, [])
    assert words(course(), [650]) == "at step 650: a brief rise, no failure by the verdict"
    assert words(TWICE, [703]) == "at step 703, in spike 2 of 2, 1 step after its onset"
    assert words(TWICE, [500]) == "at step 500: a brief rise, none of the verdict's spikes"


def test_silence_has_a_reason_for_every_verdict():
    for kind in SEVERITY:
        found = RunVerdict(kind=kind, text="")
        assert alarm_words(found, None).startswith("none; ")
        assert alarm_words(found, 5).startswith("at step 5")
    assert "not for overfitting" in alarm_words(RunVerdict(kind="overfitting", text=""), None)
    unjudged = alarm_words(RunVerdict(kind="healthy", text=""), None, judged=False)
    assert unjudged == "none; nothing is logged that it watches"


def test_the_share_of_healthy_public_runs_is_that_of_the_benchmark():
    results = Path(__file__).parents[2] / "studies/detector_benchmark/results/real.csv"
    with open(results, newline="", encoding="utf-8") as file:
        row = next(row for row in csv.DictReader(file) if row["Detector"] == "R-Metric")
    assert round(float(row["Healthy alarmed, all (%)"])) == HEALTHY_ALARMED


def test_a_rate_that_still_warms_up_and_evaluations_that_fall_are_no_lack_of_learning():
    log = records(noisy(0.6931, 60, 1e-4))
    assert judge_run(log).kind == "learns_nothing"
    for i, record in enumerate(log):
        record.learning_rate = 1e-6 * i
    assert judge_run(log).kind == "healthy"
    log = records(noisy(7.65, 220, 0.08))
    for at, value in ((50, 7.6), (100, 7.2), (219, 6.8)):
        log[at].validation_loss = value
    assert judge_run(log).kind == "healthy"
    assert judge_run(records(noisy(7.65, 220, 0.08), first=5000)).kind == "healthy", "it goes on"


def test_evaluations_at_chance_show_it_of_a_noisy_training_loss():
    log = records(noisy(1.389, 120, 0.008))
    assert judge_run(log).kind == "healthy"
    for record in log[::4]:
        record.validation_loss = float(np.log(4))
    assert judge_run(log).text == "LEARNS NOTHING: the loss stays at ln(4)"
    falls = records(np.linspace(1.389, 0.3, 120))
    for record in falls[::4]:
        record.validation_loss = float(np.log(4))
    assert judge_run(falls).kind == "healthy", "it learns its examples"


@pytest.mark.parametrize(
    ("losses", "kind"),
    [(noisy(10.4, 400, 0.03), "learns_nothing"), (noisy(2.9, 400, 0.03), "healthy")],
)  # fmt: skip
def test_a_run_may_be_stuck_after_a_restart(losses, kind):
    log = records(course(600, noise=0.02)) + records(losses, first=501)
    found = judge_run(log, [502])
    assert found.kind == kind
    if kind == "learns_nothing":
        assert found.text == "LEARNS NOTHING since the restart at step 501: the loss does not fall"
        assert (found.onset_step, found.alarm_step) == (501, 502)


def several(**losses) -> list[Record]:
    """Records of a log that states several losses and no whole."""
    length = len(next(iter(losses.values())))
    parts = {name.replace("validation_", "validation "): values for name, values in losses.items()}
    return [
        Record(step=i + 1, loss_parts={name: float(x[i]) for name, x in parts.items()})
        for i in range(length)
    ]


def test_of_several_losses_the_worst_is_reported_with_its_name():
    calm, lost = course(200, 3.0, 0.5, 0.01), diverged(120, 200, over=1)
    found = judge_run(several(box_loss=calm, cls_loss=lost))
    assert found.text == "DIVERGED at step 121: never came back, in cls_loss"
    assert (found.kind, found.part, found.loss) == ("diverged", "cls_loss", "training_loss")
    twice = judge_run(several(box_loss=with_part(calm, 80, [2.9] * 3), cls_loss=lost))
    assert twice.detail.endswith("; box_loss: SPIKE at 81, recovered in 3 steps")
    healthy = judge_run(several(box_loss=calm, dfl_loss=calm / 2))
    assert healthy.text == "HEALTHY: no failure seen"
    assert healthy.detail.startswith("box_loss 3")
    assert "; dfl_loss 1.5" in healthy.detail
    rises = np.linspace(1, 2, 200)
    overfits = judge_run(several(box_loss=calm, validation_box_loss=rises, cls_loss=calm))
    assert overfits.text == "OVERFITTING since step 1, in box_loss"


def test_the_losses_of_adversaries_are_judged_where_they_are_not_finite_alone():
    gen, disc = course(100, 0.7, 4.0, 0.3), course(100, 1.4, 0.2, 0.1)
    assert judge_run(several(gen_loss=gen, disc_loss=disc)).kind == "cannot_tell"
    lost = judge_run(several(gen_loss=with_part(gen, 90, [nan] * 10), disc_loss=disc))
    assert lost.text == "NOT FINITE from step 91 to the end, in gen_loss"


def test_the_whole_is_judged_where_it_is_logged():
    log = several(box_loss=diverged(120, 200, over=1), cls_loss=course(200))
    for record, loss in zip(log, course(200), strict=True):
        record.training_loss = float(loss)
    assert (judge_run(log).kind, judge_run(log).part) == ("healthy", "")


@pytest.mark.parametrize(
    ("number", "end", "kind"),
    [(600, 0.5, "learns_nothing"), (600, 0.75, "healthy"), (60, 0.5, "healthy")],
)
def test_preferences_that_are_told_apart_by_chance_are_not_learnt(number, end, kind):
    log, rng = records(noisy(0.72, number, 0.1)), np.random.default_rng(1)
    for record, share in zip(log, np.linspace(0.5, end, number), strict=True):
        record.policy = {"preference_accuracy": rng.binomial(4, share) / 4}
    found = judge_run(log)
    assert found.kind == kind, found.text
    assert ("by chance alone" in found.text) == (kind == "learns_nothing")
