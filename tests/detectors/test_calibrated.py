"""Laws of the calibrated detector, streams that it must and must not alarm on, and its words."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric.detectors.calibrated import CalibratedDetector, CalibratedRMetric, Thresholds
from rmetric.detectors.calibrated.alarm_lifecycle import LOST_RATIO, TOO_EARLY, UNDER_WAY
from rmetric.detectors.calibrated.calibration import FLOORS
from rmetric.detectors.calibrated.detector import KEPT_OPEN
from rmetric.detectors.calibrated.thresholds import sources
from rmetric.readers.archive import read_runs
from rmetric.records import HardwareEvent, Record
from tests.detectors.calibrated_streams import first_alarm, healthy, records, rise, scores
from tests.detectors.streams import full_records
from tests.detectors.test_calibrated_sources import gradient_records

CALIBRATION = Path(__file__).parents[2] / "studies/fault_lab/data" / "calibration.tar.xz"
FLOORS_WITHOUT_CLIMB = replace(FLOORS, alone={"loss_jump": 4.0, "not_finite": 1.0}, together={})
GOLDEN = Path(__file__).with_name("calibrated_reasons.json")
HUGE = st.sampled_from([0.0, -0.0, 5e-324, 1e-30, 1e30, 1e200, 1.7e308, -1.7e308, -3.0])
FEW = settings(max_examples=30)


def full(length: int = 400, seed: int = 0) -> list[Record]:
    """A training that logs all that is looked at, with a jump of 2 nats at step 300."""
    rng = np.random.default_rng(seed)
    result = []
    for record in gradient_records(rng, 4, length)[0]:
        loss = 2.5 + 2 * float(np.exp(-record.step / 60)) + 2 * (record.step >= 300)
        events = (HardwareEvent(float(record.step), "ecc"),) if rng.random() < 0.02 else ()
        result.append(
            replace(
                record, training_loss=loss + 0.05 * float(rng.normal()), probe_loss=loss,
                validation_loss=loss if record.step % 10 == 0 else None, learning_rate=1e-3,
                update_norm=float(np.exp(0.1 * rng.normal())), parameter_norm=20.0,
                non_finite_gradients=0, events=events,
            )
        )  # fmt: skip
    return result


# Laws


@FEW
@given(full_records(values=st.floats(allow_nan=True) | HUGE), st.integers(0, 60))
def test_a_score_is_never_nan_once_it_is_known_and_nothing_raises(stream, announced):
    detector, metric, known = CalibratedDetector(), CalibratedRMetric(), False
    for n, record in enumerate(stream):
        if n == announced:
            record = replace(record, planned_events=("learning_rate",))
        detector.update(record)
        assert not (known and detector.score != detector.score)
        known = known or detector.score == detector.score
        assert all(x == x for x in detector.statistics.values())
        assert all(-inf < x <= 100 for x in detector.evidence.values())
        assert bool(detector.reason) == detector.alarm == (detector.score > 1)
        assert (detector.verdict == "healthy") == (not detector.alarm)
        assert all(0 <= x <= 1 for x in detector.contributions)
        assert 0 <= metric.update(record).score <= 1.25


@pytest.mark.parametrize("before", [0.0, 1.0, 1e-300, 1e30, 1e300])
@pytest.mark.parametrize("after", [0.0, 1e-300, 1e30, 1.7e308, -1.7e308])
def test_values_of_any_size_are_judged_and_put_into_words(before, after):
    detector = CalibratedDetector()
    for step in range(140):
        x = before if step < 70 else after
        detector.update(
            Record(step=step, training_loss=x, validation_loss=x, probe_loss=x, gradient_norm=x,
                   worker_gradient_norms=(x, 1.0, abs(x)), worker_gradient_cosines=(1.0, 0.1, -1.0),
                   update_norm=x, learning_rate=abs(x))
        )  # fmt: skip
        assert detector.score == detector.score
        assert all(x == x for x in detector.statistics.values())
        assert len(detector.reason) < 600
        for source in sources():
            assert set(source.statistics) <= set(source.NAMES)
    for source in detector._sources:
        for name in source.statistics:
            assert "nan" not in source.words(name)


@FEW
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=120))
def test_a_loss_that_only_falls_never_alarms(losses):
    assert first_alarm(records(sorted(losses, reverse=True))) is None


@pytest.mark.parametrize("kind", ["quiet", "bumpy", "noisy"])
@pytest.mark.parametrize("shape", ["jump", "ramp", "exponential"])
def test_the_unit_of_the_loss_changes_no_alarm(kind, shape):
    """Nats, bits, and a sum over a batch of 4096 tokens."""
    losses, _ = healthy(kind, np.random.default_rng(11), 800)
    losses = losses + rise(shape, 500, 800)
    alarms = [alarmed(*records(losses * factor)) for factor in (1.0, 1 / np.log(2), 4096.0, 1e-3)]
    assert any(alarms[0])
    assert all(other == alarms[0] for other in alarms)


def test_an_announcement_forgets_all_that_was_usual_and_no_nan():
    detector, fresh = CalibratedDetector(), CalibratedDetector()
    scores(full(), detector)
    for n, record in enumerate(full(seed=5)[:200]):
        events = ("batch_size",) if n == 0 else None
        record = replace(record, step=n + 1000, planned_events=events, events=None)
        ours, theirs = detector.update(record).statistics, fresh.update(record).statistics
        ours.pop("hardware_events", None)  # the hardware does not know of it
        assert ours == theirs
        ours, theirs = ([source.begun for source in each._sources] for each in (detector, fresh))
        assert ours == theirs
    detector.update(Record(step=1200, training_loss=nan))
    detector.update(Record(step=1201, planned_events=("batch_size",)))
    assert detector.reason == (
        "failure under way: training loss is nan, since step 1200: leave the step out, or roll "
        "back to a checkpoint before step 1200"
    )


def test_steps_that_repeat_or_go_back_are_judged_all_the_same():
    losses = (2 + 0.05 * np.random.default_rng(3).normal(size=200)).tolist()
    for steps in ([7] * 200, range(200, 0, -1)):
        stream = [Record(step=s, training_loss=x) for s, x in zip(steps, losses, strict=True)]
        assert first_alarm(stream) is None
        detector = CalibratedDetector()
        scores([*stream, *(Record(step=0, training_loss=5.0) for _ in range(3))], detector)
        assert detector.alarm


@pytest.mark.parametrize("with_norms", [True, False])
@pytest.mark.parametrize("kind", ["quiet", "bumpy", "noisy"])
def test_healthy_streams_do_not_alarm(kind, with_norms):
    for seed in range(4):
        losses, norms = healthy(kind, np.random.default_rng([seed, len(kind)]))
        assert first_alarm(records(losses, norms if with_norms else None)) is None


@pytest.mark.parametrize("kind", ["quiet", "bumpy", "noisy"])
def test_failures_alarm_and_most_of_them_early(kind):
    early, onset = [], 1500
    for seed in range(4):
        losses, norms = healthy(kind, np.random.default_rng([seed, len(kind)]))
        for shape in ("jump", "ramp", "exponential"):
            up = rise(shape, onset)
            grown = norms * np.minimum(1 + 4 * up, 50)
            alarm = first_alarm(records(losses + up, grown))
            assert alarm is not None, (seed, shape)
            assert alarm > onset, (seed, shape)
            if shape == "jump":
                assert alarm - onset == 3  # the third record of it
            else:
                early.append(up[alarm - 1] < (0.5 if kind != "noisy" else 1.0))
            assert first_alarm(records(losses + up)) is not None  # of the loss alone
    assert np.mean(early) > (0.5 if kind != "noisy" else 0.3)


@pytest.mark.parametrize("height", [1.0, 3.0, 1e6])
def test_one_bad_batch_of_a_run_that_logs_every_step_is_no_alarm(height):
    losses, _ = healthy("quiet", np.random.default_rng(1), 500)
    for bad in ([300], [300, 301], [300, 303, 306]):
        spoilt = losses.copy()
        spoilt[bad] += height
        assert first_alarm(records(spoilt)) is None
    spoilt[[301, 302]] += height
    assert first_alarm(records(spoilt)) == 303  # the third in a row


def alarmed(*stream: Record) -> list[bool]:
    return [fresh.update(record).alarm for fresh in [CalibratedDetector()] for record in stream]


def since_of(reason: str) -> int:
    """The step since which the first piece of evidence has been unusual."""
    return int(re.search(r"since step (\d+)", reason)[1])


def last_words(*stream: Record) -> str:
    scores(stream, detector := CalibratedDetector())
    return detector.reason


@pytest.mark.parametrize("name", ["training_loss", "validation_loss", "probe_loss",
                                  "parameter_norm"])  # fmt: skip
@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_a_loss_or_weights_that_are_no_number_alarm_at_once(name, bad):
    fine, ill = ({"step": step, name: x} for step, x in ((1, 2.0), (2, bad)))
    assert alarmed(Record(**fine), Record(**ill)) == [False, True]
    what = name.replace("_", " ")
    reason = last_words(Record(**fine), Record(**ill), Record(step=3))
    assert reason.startswith(f"{UNDER_WAY}: {what} is {bad}, since step 2: ")
    assert reason.endswith("roll back to a checkpoint before step 2")
    assert ("leave the step out" in reason) == (name == "training_loss")
    assert alarmed(Record(**ill), Record(**fine)) == [True, False]


def test_one_gradient_norm_that_is_no_number_is_no_alarm_and_two_are():
    def row(step, norm):
        return Record(step=step, training_loss=2.0, gradient_norm=norm)

    assert alarmed(row(1, 1.0), row(2, nan)) == [False, False]
    assert alarmed(row(1, 1.0), row(2, nan), row(3, 1.0), row(4, inf)) == [False] * 4
    assert alarmed(row(1, nan), row(2, inf), row(3, 1.0)) == [False, True, False]
    # A row without one, such as an evaluation, neither counts nor mends.
    assert alarmed(row(1, nan), row(2, None), row(2, inf), row(3, None)) == [False] * 2 + [True] * 2
    reason = last_words(row(1, nan), row(2, inf), row(3, None))
    assert "gradient norm is inf, 2 records in a row, since step 1" in reason


def test_counted_entries_of_the_gradient_alarm_at_once():
    stream = [Record(step=1, non_finite_gradients=0), Record(step=2, non_finite_gradients=3)]
    assert alarmed(*stream) == [False, True]
    assert "at least 3 gradient entries are not finite, since step 2" in last_words(*stream)


def skip(step: int, **fields) -> Record:
    return Record(step=step, gradient_norm=inf, non_finite_gradients=7, skipped=True, **fields)


def test_a_loss_scaler_may_leave_out_seven_steps_and_not_eight():
    stream = [skip(step, training_loss=2.0) for step in range(1, 11)]
    assert alarmed(*stream) == [False] * 7 + [True] * 3
    assert "10 steps in a row were left out, since step 1" in last_words(*stream)
    taken = Record(step=8, training_loss=2.0, gradient_norm=1.0, skipped=False)
    assert not any(alarmed(*stream[:7], taken, *stream[:7]))
    # An evaluation in between is not a step.
    assert alarmed(*stream[:7], Record(step=7, validation_loss=2.0), stream[7])[-1]
    assert alarmed(*stream[:8], Record(step=8, validation_loss=2.0))[-1]
    # Nor does it make an alarm of gradients that the scaler left out.
    assert alarmed(*stream[:3], Record(step=3, validation_loss=2.0)) == [False] * 4
    assert alarmed(stream[0], skip(2, training_loss=nan)) == [False, True]


def test_nothing_logged_is_nothing_known():
    detector = CalibratedDetector()
    assert detector.update(Record(step=1)).score != detector.score  # nan
    assert detector.update(Record(step=2, training_loss=2.0)).score == 0.0


# What it reports


def test_a_jump_that_stays_is_under_way_and_one_that_falls_back_is_recovering():
    rng = np.random.default_rng(4)
    t = np.arange(260)
    flat = 2 + 0.02 * rng.normal(size=260)
    shapes = {"stays": np.where(t >= 200, 3.0, 0.0)}
    shapes["falls back"] = np.where(t >= 200, 3 * np.exp(-np.maximum(0, t - 206) / 10), 0.0)
    for shape, up in shapes.items():
        detector, verdicts = CalibratedDetector(), {}
        for record in records(flat + up):
            detector.update(record)
            verdicts.setdefault(detector.verdict, (record.step, detector.reason))
        assert verdicts["spike or failure, too early to tell"][0] == 203
        if shape == "stays":
            assert verdicts.keys() == {"healthy", TOO_EARLY, UNDER_WAY}
            assert verdicts[UNDER_WAY][0] == 213  # the eleventh record of the alarm
            # Forty records later, by the climb.
            assert "the median of the last 5 is 5" in detector.reason
        else:
            step, reason = verdicts["recovering spike"]
            assert 0.7 < up[step - 1] < 1.5
            assert reason.startswith("recovering spike: training loss 3.")
            to_do = "keep the checkpoints from before step 201 until the loss is back"
            assert reason.endswith(to_do)
            assert detector.verdict == "healthy"


@pytest.mark.parametrize("ratio", [3.8, 4.6])
def test_a_loss_far_above_the_spikes_that_come_back_is_lost_at_once(ratio):
    losses = [2.0 + 0.02 * (t % 3) for t in range(60)] + [2.0 * ratio + 0.01 * t for t in range(9)]
    words = last_words(*records(np.array(losses[:63])))
    if ratio < LOST_RATIO:
        assert words.startswith(f"{TOO_EARLY}: training loss 7.6")
        assert words.endswith("and wait for ten records")
    else:
        assert words.startswith(
            f"{UNDER_WAY}: the loss is lost, 4.56 times its usual level; training loss 9.22, "
            "usual 2.02 (the last 3 records at least 7.18 above it"
        )
        assert words.endswith(
            "roll back to a checkpoint before step 61 and leave out the data after it"
        )
    detector = CalibratedDetector()
    back = [detector.update(record).verdict for record in records([*losses, 2.0, 2.0, 2.0])]
    assert "recovering spike" in back, "also of what was lost"


def test_evidence_that_is_not_of_the_losses_is_a_failure_at_once_and_stays_one():
    # The updates show it first, and a jump of the loss leads later.
    stream = [
        Record(step=step, training_loss=2.0 + 3 * (step >= 105), learning_rate=1e-3,
               update_norm=1.0 + 9999 * (step >= 100))
        for step in range(110)
    ]  # fmt: skip
    detector = CalibratedDetector()
    verdicts = [detector.update(record).verdict for record in stream]
    assert set(verdicts) == {"healthy", UNDER_WAY}
    assert verdicts.index(UNDER_WAY) == 104  # the fifth record of it


def test_the_level_rises_from_quiet_over_watch_to_alarm_and_falls_again():
    detector = CalibratedDetector()
    levels = [
        detector.update(Record(step=step, training_loss=loss)).level
        for step, loss in enumerate([2.0 + 0.01 * (i % 3) for i in range(60)] + [4.0] * 3)
    ]
    assert set(levels[:60]) == {"quiet"}
    assert levels[-1] == "alarm"
    weak = replace(FLOORS, alone={"not_finite": 1.0})  # the jump now never alarms by itself
    watching = CalibratedDetector(weak)
    for step in range(63):
        watching.update(Record(step=step, training_loss=2.0 + 0.01 * (step % 3) + 2 * (step > 59)))
    assert (watching.level, watching.alarm) == ("watch", False)


@pytest.mark.parametrize(("to", "restarts"), [(1e-3, True), (1e-2, False)])
def test_a_return_to_a_known_rate_is_a_restart_of_the_schedule(to, restarts):
    detector = CalibratedDetector()
    for step in range(120):
        rate = 1e-3 * (1 + np.cos(np.pi * min(step, 99) / 99)) / 2 + 1e-4
        high = step >= 100
        detector.update(
            Record(step=step, training_loss=2.0, learning_rate=to if high else rate,
                   gradient_norm=(4.0 if high else 1.0) * (1 + 0.01 * (step % 2)))
        )  # fmt: skip
    assert ("gradient_norm" not in detector.unusual) == restarts


def test_a_probe_loss_that_rises_while_the_training_loss_does_not_is_no_alarm():
    detector = CalibratedDetector()
    for step in range(200):
        probe = 2.0 - 0.01 * min(step, 60) + 0.01 * max(step - 60, 0)
        record = Record(step=step, training_loss=2.0 - 0.005 * step, probe_loss=probe)
        assert not detector.update(record).alarm
    assert detector.level == "watch"


def test_why_an_alarm_ended_is_stated_from_the_record_on_at_which_it_did():
    stays = [2.0] * 60 + [614.0] * 60
    stays_up = "the new level has become usual, the loss is still 614 where 2 was usual before"
    back = [2.0] * 60 + [6.0] * 5 + [2.0] * 10
    for losses, why in ((back, "the loss came back to 2"), (stays, stays_up)):
        detector, was = CalibratedDetector(FLOORS_WITHOUT_CLIMB), False
        for record in records(losses):
            before = detector.ended
            detector.update(record)
            if was and not detector.alarm:
                assert (before, detector.ended) == ("", why)
            assert not (detector.alarm and detector.ended)
            was = detector.alarm
        assert detector.ended == why
    # A fall from thousands to hundreds is not a return to 2.
    detector = CalibratedDetector(FLOORS_WITHOUT_CLIMB)
    scores(records([2.0] * 60 + [9000.0] * 6 + [614.0] * 40), detector)
    assert detector.ended.endswith("the loss is still 614 where 2 was usual before")
    scores(records(stays[:70]), detector := CalibratedDetector())
    detector.update(Record(step=71, training_loss=614.0, planned_events=("data_mixture",)))
    assert detector.ended == "a change was announced"
    for value, why in ((nan, ""), (2.0, "all values are numbers again"), (nan, "")):
        assert detector.update(Record(step=80, training_loss=value)).ended == why


def test_an_alarm_stays_open_until_the_loss_is_back_or_its_level_is_usual():
    losses = [2.0] * 60 + [4.0] * 3 + [3.3] * 2
    thresholds = replace(FLOORS_WITHOUT_CLIMB, alone={"loss_jump": 30.0}, together={})
    scores(records(losses), detector := CalibratedDetector(thresholds))
    assert (detector.score, detector.ended) == (KEPT_OPEN, "")
    scores(records([3.3] * 60), detector)
    assert not detector.alarm
    assert detector.ended == (
        "the new level has become usual, the loss is still 3.3 where 2 was usual before"
    )


@pytest.mark.parametrize(
    ("rates", "planned", "change"),
    [
        ([1e-3] * 60 + [1e-2] * 3, (), "went from 0.001 to 0.01 at step 61"),
        ([1e-3] * 60 + [1e-2, 1e-2, 1e-3], (), "went from 0.001 to 0.01 at step 61"),
        ([1e-3] * 60 + [1e-2] * 3, (61,), None),
        ([1e-3] * 60 + [1.4e-3] * 3, (), None),
        ([1e-3] * 40 + [1e-2] * 23, (), None),  # long ago
        ([1e-4 * 1.6**n for n in range(63)], (), None),  # a warm-up, from record to record
        ([0.0] * 60 + [1e-3] * 3, (), None),
    ],
)
def test_a_jump_of_the_rate_that_nobody_announced_is_reported(rates, planned, change):
    """It changes words and nothing else."""
    losses = [2.0] * 60 + [6.0] * 3
    stream = [
        replace(record, learning_rate=rate, planned_events=("lr",) * (record.step in planned))
        for record, rate in zip(records(losses), rates, strict=True)
    ]
    detector = CalibratedDetector()
    with_rate = scores(stream, detector)
    if planned:
        assert not detector.alarm
        return
    assert with_rate == scores(records(losses))
    assert (f"; the learning rate {change}: " in detector.reason) == bool(change)
    assert ("learning rate" in detector.reason) == bool(change)
    back = "set the learning rate back to 0.001 and roll back to a checkpoint before step 61"
    assert detector.reason.endswith(back) == bool(change)


@pytest.mark.parametrize(("heights", "since"), [([0.5, 0.5], 610), ([2.0], 610), ([0.0, 2.0], 620)])
def test_since_of_a_log_that_skips_steps_is_the_first_of_one_or_two_records(heights, since):
    losses = [*(2 + 0.02 * np.random.default_rng(1).normal(size=60)), *(2 + np.array(heights))]
    stream = [Record(step=10 * r.step, training_loss=r.training_loss) for r in records(losses)]
    assert since_of(last_words(*stream)) == since
    assert ("the last 2 records at least" in last_words(*stream)) == (heights == [0.5, 0.5])


def test_since_of_an_evaluation_is_the_first_that_rose():
    detector = CalibratedDetector(replace(FLOORS, alone={"validation_rise": 4.5}))
    for step in range(0, 220, 10):
        loss = 2.0 + 0.01 * (step // 10 % 2) + (step >= 200)
        detector.update(Record(step=step, training_loss=2.0, validation_loss=loss))
    assert since_of(detector.reason) == detector.since == 200


@pytest.mark.parametrize(
    ("runaway", "evaluation", "step"), [(1.3, 3.04, 48), (1.0, 3.04, None), (1.3, 1.90, None)]
)
def test_one_evaluation_alarms_at_once_beside_a_growing_rate_and_neither_alone(
    runaway, evaluation, step
):
    """As on an H100: the training loss is far below what is usual, so it shows nothing yet."""
    evaluations = {8: 6.7, 16: 4.32, 24: 2.79, 32: 2.19, 40: 1.94, 48: evaluation}
    stream = [
        Record(step=n, training_loss=1.9 + 10 * 0.9**n, validation_loss=evaluations.get(n),
               learning_rate=1e-5 * min(1.0, n / 20) * runaway ** max(0, n - 39))
        for n in range(1, 56)
    ]  # fmt: skip
    assert first_alarm(stream) == step
    reason = "validation loss 3.04, lowest 1.94, since step 48; and learning rate 0.000106, its "
    assert (reason in last_words(*stream[:step])) == (step is not None)


def test_since_of_what_is_smoothed_is_the_first_value_of_the_stretch_that_is_unusual():
    """The gradient norm was twice the usual once, and usual again, before it stayed so."""
    norms = [1.0 + 0.02 * (step % 3) for step in range(120)]
    norms[95] = 2.0
    norms[100:] = [2.0] * 20
    detector = CalibratedDetector(replace(FLOORS, alone={"gradient_norm": 3.0}))
    scores(records([2.0] * 112, norms[:112]), detector)
    assert since_of(detector.reason) == detector.since == 101


def test_since_begins_anew_with_other_workers():
    detector, since = CalibratedDetector(), []
    for begin, workers, odd in ((0, 4, -0.9), (100, 3, -0.9), (160, 3, 0.9)):
        for step in range(begin, begin + 60):
            cosines = (odd,) + (0.9,) * (workers - 1)
            norms = (1.0,) * workers
            detector.update(
                Record(step=step, gradient_norm=0.6, worker_gradient_norms=norms,
                       worker_gradient_cosines=cosines)
            )  # fmt: skip
        assert detector.alarm == (odd < 0)
        since += [since_of(detector.reason)] if detector.alarm else []
    assert (since, detector.ended) == ([0, 100], "no longer unusual: gradients")


def test_one_batch_that_is_better_by_chance_is_no_recovery():
    losses = np.where(np.arange(75) < 60, 2.0, 5.0)
    losses[[66, 70]] = 2.1
    detector = CalibratedDetector()
    verdicts = {detector.update(record).verdict for record in records(losses)}
    assert verdicts == {"healthy", TOO_EARLY, UNDER_WAY}


def test_gradients_alone_are_no_recovering_spike():
    """Only where somebody's own thresholds let them alarm alone."""
    detector = CalibratedDetector(replace(FLOORS, alone={"gradient_norm": 1.0}))
    losses = np.where(np.arange(130) < 100, 2.0, 2.03)
    losses[103:] = 2.0
    norms = np.where(np.arange(130) < 100, 1.0, 50.0)
    verdicts = {detector.update(record).verdict for record in records(losses, norms)}
    assert verdicts == {"healthy", UNDER_WAY}


def test_hardware_alone_never_alarms_and_is_reported_beside_a_loss():
    detector = CalibratedDetector()
    for step in range(300):
        many = (HardwareEvent(float(step), "ecc"),) * (step >= 240)
        loss = 2.0 + 0.15 * (step >= 290)
        detector.update(Record(step=step, training_loss=loss, events=many))
        if step == 289:
            assert not detector.alarm
            assert detector.evidence["hardware_events"] > 1
    assert detector.alarm
    assert "50 hardware events in 50 records, usual 2" in detector.reason


def test_the_r_metric_is_explained_by_its_parts():
    metric = CalibratedRMetric()
    for record in records([2.0] * 60 + [6.0] * 3):
        metric.update(record)
    assert (metric.score, metric.alarm) == (pytest.approx(0.7), True)
    assert metric.reason.startswith("R 0.70, limit 0.57, parts: ΔL 0.70: roll back to a checkpoint")


def test_a_threshold_of_never_is_never_even_for_nan():
    never = CalibratedDetector(Thresholds(alone={}, together={}, full_scale={}))
    never.update(Record(step=1, training_loss=nan))
    assert (never.score, never.alarm, never.evidence) == (0.0, False, {"not_finite": 0.0})


#: One of each kind of evidence.
GOLDEN_RUNS = (
    "seed001_FIRST_MOMENT_CORRUPTED_s30_b039",
    "seed004_WEIGHT_BIT_FLIP_s4_b001",
    "seed007_DATA_CORRUPTION_s0.6_b038",
    "seed010_GRADIENT_EXPLOSION_s10_b000",
    "seed013_GRADIENT_EXPLOSION_s10_b082",
    "seed019_SIGN_FLIP_s3_b001",
    "seed019_LR_SPIKE_s15_b041",
)


def reasons_of_real_runs() -> dict[str, str]:
    """The reason at the first alarm, by run."""
    reasons: dict[str, str] = {}
    for run in read_runs(CALIBRATION):
        if run.id in GOLDEN_RUNS:
            detector = CalibratedDetector()
            alarm = next(r for r in run.records if detector.update(r).alarm)
            reasons[run.id] = f"step {alarm.step}: {detector.reason}"
        if len(reasons) == len(GOLDEN_RUNS):
            break
    return reasons


def test_reasons_of_real_runs_are_as_they_were():
    """To rewrite the file: python -m tests.detectors.test_calibrated"""
    assert reasons_of_real_runs() == json.loads(GOLDEN.read_text())


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(reasons_of_real_runs(), indent=1) + "\n")
