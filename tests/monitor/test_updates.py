"""Learning rates against their plan, and steps that change nothing."""

from math import cos, inf, nan, pi
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rmetric.detectors.no_update import NoUpdate
from rmetric.evaluation import judge_run
from rmetric.monitor import Monitor
from rmetric.monitor.actions import SkipStep
from rmetric.monitor.judges import UpdateJudge
from rmetric.monitor.rules import LearningRates
from rmetric.records import Record


class Schedule:
    def __init__(self, *rates):
        self.rates = list(rates)

    def get_last_lr(self):
        return self.rates


def first_off(rates, plans=None):
    """Step, from 1, of the first rate that is off its plan; None for none."""
    found = LearningRates()
    for step, rate in enumerate(rates, start=1):
        found.update([{"lr": rate}], [] if plans is None else [Schedule(plans[step - 1])])
        if found.off:
            return step
    return None


SCHEDULES = {
    "constant": lambda t: 1.0,
    "cosine": lambda t: (1 + cos(pi * t)) / 2,
    "linear": lambda t: 1 - t,
    "restarts": lambda t: (1 + cos(pi * (4 * t % 1))) / 2,
    "step": lambda t: 0.1 ** int(3 * t),
}


@given(
    st.sampled_from(sorted(SCHEDULES)), st.integers(0, 60), st.floats(1e-6, 1.0),
    st.integers(70, 300), st.booleans(),
)  # fmt: skip
def test_no_planned_schedule_is_off(kind, warm_up, peak, steps, known):
    rates = [peak * (step + 1) / warm_up for step in range(warm_up)]
    rates += [peak * SCHEDULES[kind](step / steps) for step in range(steps)]
    assert first_off(rates, rates if known else None) is None


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("onset", [6, 40, 80])
@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_a_rate_fifty_times_too_large_is_off_at_its_step(kind, onset, known):
    plans = [min(1, (step + 1) / 4) * SCHEDULES[kind](step / 120) for step in range(120)]
    rates = [rate * 50 if step >= onset else rate for step, rate in enumerate(plans, start=1)]
    if not known and onset == 6:
        assert first_off(rates) is None  # still the warm-up, for all that can be known
    else:
        assert first_off(rates, plans if known else None) == onset


@pytest.mark.parametrize(("known", "most"), [(True, 2), (False, 9)])
def test_a_rate_that_runs_away_does_not_take_its_limit_along(known, most):
    plans = [SCHEDULES["cosine"](step / 120) for step in range(120)]
    rates = [x * 1.3 ** max(0, step - 39) for step, x in enumerate(plans, start=1)]
    assert 40 < first_off(rates, plans if known else None) <= 40 + most


@pytest.mark.parametrize(
    ("rates", "plans", "off"),
    [
        *(([1.0] * 10 + [wrong], [1.0] * 11, 11) for wrong in (nan, inf, 0.0)),
        ([1.0] * 10 + [0.0], [1.0] * 10 + [0.0], None),
        ([3.0] * 40, [1.0] * 40, None),  # a loop that scales the scheduler's rate from the start
        *(([odd] * 20, [1.0] * 20, None) for odd in (None, "x", torch.ones(1, device="meta"))),
    ],
)
def test_a_rate_that_is_no_number_or_zero_against_its_plan_is_off(rates, plans, off):
    assert first_off(rates, plans) == off


class Broken:
    def get_last_lr(self):
        raise AttributeError("_last_lr")


@pytest.mark.parametrize("scheduler", [Broken(), Schedule(1.0, 1.0), Schedule(None), object()])
def test_a_scheduler_without_a_rate_for_each_group_is_none(scheduler):
    found = LearningRates()
    for _ in range(20):
        found.update([{"lr": 8.0}], [scheduler])
    assert not found.off


ALIVE = {"gradient_norm": 0.53, "learning_rate": 1.7e-3, "update_norm": 0.13}


def reasons(records):
    watch = NoUpdate()
    return [(watch.update(record), watch.reason, watch.since)[1:] for record in records]


@pytest.mark.parametrize("name", sorted(ALIVE))
def test_what_was_above_zero_and_stays_zero_alarms_at_the_fifth_record(name):
    dead = {"gradient_norm": 0.0} if name == "gradient_norm" else {name: 0.0, "update_norm": 0.0}
    records = [Record(step=step, **ALIVE) for step in range(1, 11)]
    records += [Record(step=step, **(ALIVE | dead)) for step in range(11, 20)]
    found = reasons(records)
    assert all(not reason for reason, _ in found[:14])
    assert all(since == 11 for _, since in found[14:])


@given(st.integers(1, 60), st.integers(1, 200))
def test_a_planned_warm_up_never_alarms(warm_up, steps):
    rates = [min(1.0, step / warm_up) for step in range(steps)]
    records = [Record(step=i, **(ALIVE | {"learning_rate": r})) for i, r in enumerate(rates)]
    assert not any(reason for reason, _ in reasons(records))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_gradients_that_are_zero_now_and_then_never_alarm(rows):
    norms = [x for row in rows for x in (0.53, *[0.0] * row)]
    records = [Record(step=i, gradient_norm=norm) for i, norm in enumerate(norms)]
    assert not any(reason for reason, _ in reasons(records))


LEFT_OUT = [Record(step=1, gradient_norm=1.0)]
LEFT_OUT += [Record(step=i, gradient_norm=0.0, skipped=True) for i in range(2, 30)]
LEFT_OUT += [Record(step=i) for i in range(30, 60)]
#: A number of one digit may have been rounded to zero.
ROUNDED = [
    [Record(step=i, learning_rate=last if i < 20 else 0.0) for i in range(60)]
    for last in (0.0003, 5e-7, 1.0)
]


@pytest.mark.parametrize("records", [LEFT_OUT, *ROUNDED])
def test_steps_that_are_left_out_missing_values_and_rounded_ones_say_nothing(records):
    assert not any(reason for reason, _ in reasons(records))


@pytest.mark.parametrize("name", ["gradient_norm", "learning_rate"])
def test_a_log_that_ends_in_steps_that_change_nothing_is_stuck(name):
    def verdict(end):
        records = [
            Record(step=i, training_loss=2 - 0.005 * min(i, 40) + 0.01 * (i % 3), **ALIVE)
            for i in range(1, 100)
        ]
        for record in records[40:end]:
            setattr(record, name, 0.0)
            record.update_norm = 0.0
        return judge_run(records)

    stuck, healthy = verdict(99), verdict(60)
    assert (stuck.kind, stuck.severity, stuck.onset_step) == ("stuck", "bad", 41)
    assert stuck.text.startswith("STUCK: the ")
    assert healthy.kind != "stuck"


def trained(at, *, scheduler=False, actions=(), steps=30):
    """Alerts of a small training; `at(step, optimizer)` runs after each backward pass."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with Monitor(model, optimizer, actions=actions) as monitor:
        if scheduler:
            monitor.schedulers = [torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)]
        for step in range(1, steps + 1):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            at(step, optimizer, monitor)
            monitor.check_before_step(loss)
            optimizer.step()
            optimizer.zero_grad()
    return [(alert.step, alert.source, alert.since) for alert in monitor.alerts]


def rate(step, optimizer, monitor):
    optimizer.param_groups[0]["lr"] = 0.5 if step >= 20 else 0.01


def announced(step, optimizer, monitor):
    if step == 20:
        monitor.planned("learning_rate", "to 0.5")
    rate(step, optimizer, monitor)


def dead(step, optimizer, monitor):
    if step >= 20:
        for param in optimizer.param_groups[0]["params"]:
            param.grad.zero_()


@pytest.mark.parametrize("scheduler", [True, False])
def test_an_alert_of_its_own_names_the_rate_at_its_step(scheduler, caplog):
    assert trained(rate, scheduler=scheduler)[0] == (20, "learning_rate", 20)
    assert "the learning rate of group 0 is 0.5, 50 times " in caplog.text
    found = trained(announced, scheduler=scheduler)
    assert "learning_rate" not in [source for _, source, _ in found]


def test_an_alert_of_its_own_names_gradients_that_are_zero():
    assert trained(dead) == [(24, "no_update", 20)]


def test_a_lost_reward_is_forgotten_where_the_training_goes_back():
    raised = []
    delivery = SimpleNamespace(
        new_alert=lambda *alert: alert,
        deliver=lambda alert, own: raised.append(alert[:2]),
    )  # fmt: skip
    judge = UpdateJudge(None, delivery)
    records = [Record(step=n, policy={"reward": n / 20 if n <= 20 else 0.0}) for n in range(1, 30)]
    for record in records:
        judge.update(record)
    assert raised[0] == (22, "policy")
    raised.clear()
    judge.restart()
    for record in records[20:]:
        judge.update(record)
    assert raised == []


def test_the_step_with_the_wrong_rate_is_the_one_that_is_skipped():
    skipped = []

    class Noted(SkipStep):
        def record(self, record, monitor):
            skipped.append(record.step) if record.skipped else None

    trained(lambda step, *more: rate(20 if step == 20 else 1, *more), actions=[Noted()])
    assert skipped == [20]
