"""Rules on what reinforcement learning logs: each with a run that has it and one that has not."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.detectors.log_end import WithLogEnd
from rmetric.detectors.policy_collapse import RULES, PolicyCollapse
from rmetric.detectors.registry import make_detector
from rmetric.detectors.rolling_baseline import Stretches
from rmetric.evaluation import judge_run
from rmetric.evaluation.verdict_words import SEVERITY
from rmetric.records import Record

STEPS = 200


def run(seed=0, steps=STEPS, loss=None, **courses):
    """Records of a healthy run of GRPO, with some of its courses replaced (share done -> value)."""
    rng = np.random.default_rng(seed)
    healthy = {
        "reward": lambda t: 0.2 + 0.5 * t**0.5 + rng.normal(0, 0.04),
        "reward_spread": lambda t: 0.25 + rng.normal(0, 0.02),
        "equal_rewards": lambda t: 0.2 + rng.uniform(0, 0.2),
        "kl": lambda t: 0.05 * t + rng.uniform(0, 0.003),
        "entropy": lambda t: 1.2 - 0.8 * t + rng.normal(0, 0.03),
        "response_length": lambda t: 200 + 150 * t + rng.normal(0, 10),
    }
    courses = {**healthy, **courses}
    return [
        Record(
            step=step,
            training_loss=loss,
            policy={name: float(at(step / steps)) for name, at in courses.items() if at},
        )
        for step in range(1, steps + 1)
    ]


def late(before, after, since=0.6):
    return lambda t: before if t < since else after


#: Kind -> the courses that show it.
FAILING = {
    "reward_collapsed": {"reward": late(0.7, 0.02)},
    "kl_ran_away": {"kl": lambda t: 0.02 * math.exp(6 * t)},
    "entropy_collapsed": {"entropy": lambda t: 1.2 * math.exp(-5 * t)},
    "no_advantage": {"equal_rewards": late(0.3, 1.0), "reward": lambda t: 0.0},
    "length_ran_away": {"response_length": lambda t: 200 * math.exp(2 * t)},
    "learns_nothing": {"reward": lambda t: 0.2 + 0.02 * math.sin(900 * t)},
}


@pytest.mark.parametrize("kind", FAILING)
def test_each_failure_is_named_with_its_step_and_what_to_do(kind):
    verdict = judge_run(run(**FAILING[kind]))
    assert verdict.kind == kind, verdict
    assert verdict.advice == RULES[kind].advice.format(step=f"{verdict.onset_step:,}")
    assert verdict.text == f"{kind.replace('_', ' ').upper()} since step {verdict.onset_step:,}"
    assert verdict.detail.count("reward ") == 1
    assert kind == "learns_nothing" or 0.4 * STEPS < verdict.onset_step <= STEPS


def test_every_rule_has_a_run_and_a_severity():
    assert FAILING.keys() == RULES.keys() == RULES.keys() & SEVERITY.keys()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("steps", [30, 200, 3000])
def test_a_healthy_run_is_not_accused(seed, steps):
    assert judge_run(run(seed, steps)).kind == "healthy"


HEALTHY = {
    "the task is learnt": {"reward": lambda t: min(1.0, 0.2 + 2 * t),
                           "equal_rewards": late(0.3, 1.0)},
    "another scale": {"reward": lambda t: 100 * t - 300},
    "longer answers": {"response_length": lambda t: 200 + 300 * t},
    "one high KL": {"kl": lambda t: 8 * (0.5 < t < 0.51)},
    "negative entropy": {"entropy": lambda t: -40 - 6 * t, "reward_spread": None, "kl": None},
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_what_looks_like_a_failure_and_is_none(name):
    assert judge_run(run(**HEALTHY[name])).kind == "healthy"


def test_the_loss_of_a_policy_is_not_judged_unless_it_is_not_finite():
    records = run()
    for record in records:
        record.training_loss = 1e-3 * (-1) ** record.step * record.step
    assert judge_run(records).kind == "healthy"
    for record in records[150:]:
        record.training_loss = math.nan
    assert judge_run(records).kind == "not_finite"


@given(st.permutations(sorted(FAILING)), st.floats(1e-3, 1e3))
def test_the_scale_of_the_reward_does_not_matter(kinds, scale):
    courses = FAILING[kinds[0]]
    expected = judge_run(run(**courses)).kind
    scaled = run(**courses)
    for record in scaled:
        for name in ("reward", "reward_spread"):
            record.policy[name] *= scale
    assert judge_run(scaled).kind == expected


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=300))
def test_any_values_are_taken(values):
    policy = PolicyCollapse()
    for step, value in enumerate(values):
        policy.update(Record(step=step, policy=dict.fromkeys(RULES["kl_ran_away"].needs, value)))
        policy.update(Record(step=step, policy={"reward": value, "kl": value, "entropy": value}))
    assert policy.alarm == bool(policy.reason)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=1000))
def test_stretches_are_means_of_all_values_in_order(values):
    stretches = Stretches()
    for step, value in enumerate(values):
        stretches.add(step, value)
    length = (len(values) // max(1, len(stretches.levels))) if len(values) >= 64 else 1
    length = 1 << (length.bit_length() - 1)
    means = [np.mean(values[i : i + length]) for i in range(0, len(values), length)]
    means = means[: len(values) // length]
    assert stretches.levels == pytest.approx(means, abs=1e-6)
    assert stretches.begins == list(range(0, len(means) * length, length))


def test_watch_alarms_on_the_reward_and_not_on_the_loss():
    detector = WithLogEnd(make_detector("loss_z_score"))
    alarmed = []
    for record in run(**FAILING["reward_collapsed"]):
        record.training_loss = 50.0 if record.step % 40 == 0 else 0.1
        if detector.update(record).alarm:
            alarmed.append((record.step, detector.reason))
    assert alarmed[0][0] in range(120, 160)
    assert alarmed[0][1].startswith("reward collapsed since step 11")
    assert "go back to a checkpoint" in alarmed[0][1]
