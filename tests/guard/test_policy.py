"""When to save: laws that hold whatever is asked, and whatever goes wrong."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rmetric.guard.policy import (
    CONDITIONS,
    SOURCES,
    CheckpointPolicy,
    PolicyConfig,
    Vote,
    expected_ettr,
    young,
)

HOUR = 3600.0
COSTS = {"save_seconds": 1.0, "restart_seconds": 0.0, "failures_per_hour": 1.0}


def a_policy(**settings):
    config = {"interval_steps": 100} | settings
    return CheckpointPolicy(PolicyConfig(**config), now=0.0, step=0)


class PolicyMachine(RuleBasedStateMachine):
    """A training that steps, saves when the policy says so, and is asked by every source."""

    @initialize(
        by_steps=st.booleans(),
        interval=st.integers(4, 60),
        least_gap=st.sampled_from([0.0, 0.25, 1.0]),
        most=st.integers(1, 4),
    )
    def begin(self, by_steps, interval, least_gap, most):
        name = "interval_steps" if by_steps else "interval_seconds"
        self.config = PolicyConfig(
            **{name: interval}, least_gap=least_gap, most_per_hour=most, retry_seconds=10.0
        )
        self.now, self.at = 0.0, 0
        self.policy = CheckpointPolicy(self.config, now=0.0, step=0)
        self.durable = (0, 0.0)  # step and time of the state that is durable
        self.flight = None  # step, time, and what waited when it began
        self.begun = {Vote.EMERGENCY: [], Vote.FATAL: []}
        self.durable_steps = [0]
        self.requests = {}  # number -> the latest request of that number
        self.answered = set()
        self.failed_at, self.failures, self.final_since_failure = None, 0, False

    def gap(self):
        step, time = self.durable
        if self.config.interval_steps:
            return (self.at - step) / self.config.interval_steps
        return (self.now - time) / self.config.interval_seconds

    @rule(
        source=st.sampled_from(SOURCES),
        what=st.integers(0, 2),
        fatal=st.booleans(),
        final=st.integers(0, 9).map(lambda n: n == 0),
    )
    def ask(self, source, what, fatal, final):
        number = self.policy.request(source, str(what), fatal=fatal, final=final)
        if number is None:
            assert source in CONDITIONS
            return
        assert number in self.policy.pending
        before = self.requests.get(number)
        self.requests[number] = self.policy.pending[number]
        if final and not (before and before.final):
            self.final_since_failure = True
        assert self.requests[number].final >= final
        assert self.requests[number].fatal >= (fatal or final)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 30.0, 700.0]), steps=st.integers(0, 3))
    def go_on(self, seconds, steps):
        for _ in range(steps or 1):
            self.now += seconds
            self.at += steps > 0
            self.boundary()

    def boundary(self):
        waiting = dict(self.policy.pending)
        vote = self.policy.vote(self.now, self.at)
        assert self.policy.vote(self.now, self.at) is vote  # asking changes nothing
        if vote is Vote.NOTHING:
            assert not waiting or self.policy.why_not
            return
        assert self.flight is None, "two in flight"
        assert self.at != self.durable[0], "two of the same step"
        grave = [request.vote for request in waiting.values()]
        if vote is Vote.REGULAR:
            assert self.gap() >= 1
        elif vote is Vote.EMERGENCY:
            assert self.gap() >= self.config.least_gap
            assert max(grave) is Vote.EMERGENCY
        else:
            assert vote in grave  # the filter is skipped for nothing less
        if self.failed_at is not None and not self.final_since_failure:
            wait = min(10.0 * 2.0 ** (self.failures - 1), 600.0)
            assert self.now >= self.failed_at + wait, "tried again too soon"
        if vote in self.begun:
            hour = [time for time in self.begun[vote] if time > self.now - HOUR]
            assert len(hour) < self.config.most_per_hour, "too many in an hour"
            self.begun[vote].append(self.now)
        self.policy.begin(self.now, self.at, vote)
        self.final_since_failure = False
        self.flight = (self.at, self.now, set(waiting))
        with pytest.raises(RuntimeError, match="in flight"):
            self.policy.begin(self.now, self.at, vote)

    @precondition(lambda self: self.flight is not None)
    @rule()
    def becomes_durable(self):
        step, began, waited = self.flight
        assert {request.number for request in self.policy.committed()} == waited
        self.answered |= waited
        assert step not in self.durable_steps
        self.durable_steps.append(step)
        self.durable, self.flight, self.failed_at, self.failures = (step, began), None, None, 0
        assert not self.answered & set(self.policy.pending)

    @precondition(lambda self: self.flight is not None)
    @rule()
    def fails(self):
        waited = self.flight[2]
        assert 10.0 <= self.policy.failed(self.now) <= 600.0
        self.flight, self.failed_at, self.failures = None, self.now, self.failures + 1
        self.final_since_failure = False
        assert waited <= set(self.policy.pending), "a request was lost"

    @invariant()
    def a_request_waits_until_it_is_answered(self):
        if hasattr(self, "policy"):
            assert set(self.requests) - self.answered == set(self.policy.pending)

    @invariant()
    def numbers_count_up(self):
        if hasattr(self, "policy"):
            assert list(self.requests) == list(range(1, len(self.requests) + 1))


PolicyMachine.TestCase.settings = settings(stateful_step_count=40, deadline=None)
TestPolicy = PolicyMachine.TestCase


@pytest.mark.parametrize("fatal", [False, True])
def test_a_condition_that_lasts_a_day_asks_once(fatal):
    """Steps take ten seconds, saves twenty."""
    policy, saves, ends = a_policy(interval_seconds=HOUR, interval_steps=None), [], 0.0
    for at in range(1, 24 * 360 + 1):
        now = 10.0 * at
        if policy.in_flight and now >= ends:
            policy.committed()
        policy.request("rule", "GPU 3 overheats", fatal=fatal, key="GPU 3")
        if vote := policy.vote(now, at):
            policy.begin(now, at, vote)
            saves.append(vote)
            ends = now + 20.0
    assert sum(vote > Vote.REGULAR for vote in saves) == 1
    assert len(saves) <= 25


def test_a_condition_answered_is_asked_again_when_it_is_fatal_or_was_away():
    policy = a_policy()

    def save(step):
        policy.begin(0.0, step, policy.vote(0.0, step))
        policy.committed()

    assert policy.request("risk", "hot", key="GPU 3") == 1
    save(30)
    assert policy.request("risk", "hot", key="GPU 3") is None
    save(130)
    assert policy.request("risk", "hot", key="GPU 3") is None, "repeated in between"
    assert policy.request("rule", "lost", key="GPU 3", fatal=True) == 2
    save(140)
    save(240)  # nobody spoke of it since
    assert policy.request("risk", "hot", key="GPU 3") == 3


def test_the_last_save_waits_for_no_bound_and_once_for_no_failure():
    policy = a_policy(most_per_hour=1)
    policy.request("rule", "Xid 79", fatal=True)
    policy.begin(1.0, 5, policy.vote(1.0, 5))
    policy.failed(2.0)
    assert policy.vote(3.0, 6) is Vote.NOTHING
    policy.request("signal", "SIGTERM", final=True)
    assert policy.ending
    assert policy.vote(3.0, 6) is Vote.FINAL
    policy.begin(3.0, 6, Vote.FINAL)
    policy.failed(4.0)
    policy.request("signal", "SIGTERM", final=True)
    assert policy.vote(5.0, 7) is Vote.NOTHING, "the same signal does not skip a second wait"


@pytest.mark.parametrize(
    ("call", "wrong", "words"),
    [
        (a_policy, {"interval_steps": 0}, "interval_steps is 0"),
        (a_policy, {"interval_steps": 1.5}, "interval_steps is 1.5"),
        (a_policy, {"interval_steps": None}, "one of the two"),
        (a_policy, {"interval_seconds": 10.0}, "one of the two"),
        (a_policy, {"interval_steps": None, "interval_seconds": 0.0}, "interval_seconds is 0.0"),
        (a_policy, {"interval_steps": None, "interval_seconds": float("nan")}, "_seconds is nan"),
        (a_policy, {"least_gap": 1.1}, "least_gap is 1.1"),
        (a_policy, {"least_gap": -0.1}, "least_gap is -0.1"),
        (a_policy, {"most_per_hour": 0}, "most_per_hour is 0"),
        (a_policy, {"retry_seconds": 0.0}, "retry_seconds is 0.0"),
        (a_policy, {"retry_seconds": 700.0}, "at most 600"),
        (young, {"save_seconds": 0.0, "failure_seconds": 100.0}, "save_seconds is 0.0"),
        (young, {"save_seconds": 1.0, "failure_seconds": 0.0}, "failure_seconds is 0.0"),
        (expected_ettr, COSTS | {"interval_seconds": 0.0}, "interval_seconds is 0.0"),
    ],
)
def test_bad_numbers_are_named(call, wrong, words):
    with pytest.raises(ValueError, match=words):
        call(**wrong)


# -- how often


@given(save=st.floats(0.01, 1.0), failure=st.floats(1e5, 1e6), by=st.floats(0.3, 3.0))
def test_youngs_interval_is_close_to_the_best_where_saves_are_cheap(save, failure, by):
    costs = COSTS | {"save_seconds": save, "failures_per_hour": HOUR / failure}
    interval = young(save, failure)
    assert expected_ettr(by * interval, **costs) <= expected_ettr(interval, **costs) + 1e-5
