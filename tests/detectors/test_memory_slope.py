"""Memory that runs out, and courses that look like it: none of these may be called a leak."""

from math import exp

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric.detectors.input_wait import InputWait
from rmetric.detectors.memory_slope import ADVICE, MemorySlope
from rmetric.evaluation import judge_run
from rmetric.records import Record

GB = 1e9
STEPS = 2_000


def found(course, *, steps=STEPS, every=10, limit=60.0, name="device", seed=0):
    """Reasons at any step, and the detector at the end; `course` gives GB by step and noise."""
    rng, slope, reasons = np.random.default_rng(seed), MemorySlope(), []
    for step in range(every, steps + 1, every):
        memory = {name: GB * course(step, rng)}
        if limit:
            memory[f"{name}_limit"] = GB * limit
        slope.update(Record(step=step, memory=memory))
        reasons += [(step, slope.reason)] if slope.reason else []
    return reasons, slope


def rounded(value, unit=0.5):
    return unit * np.ceil(value / unit)


def peak(step, rng, seen=[0.0, 0]):  # noqa: B006
    seen[:] = [0.0, 0] if step < seen[1] else [max(seen[0], rng.normal(20, 3)), step]
    return rounded(max(seen[0], 1.0))


HEALTHY = {
    "constant": lambda t, rng: 20.0,
    "noise": lambda t, rng: 20 + rng.normal(0, 1),
    "warm-up": lambda t, rng: 10 + 20 * min(1, t / 200),
    "saturating": lambda t, rng: 20 + 20 * (1 - exp(-t / 400)) + rng.normal(0, 0.1),
    "slowly saturating": lambda t, rng: 20 + 20 * (1 - exp(-t / 900)),
    "logarithm": lambda t, rng: 20 + 3 * np.log(t),
    "garbage": lambda t, rng: 20 + (t % 370) / 20,
    "evaluations": lambda t, rng: 20 + (15 if t % 250 < 20 else 0),
    "steps of an allocator": lambda t, rng: rounded(20 + 10 * (1 - exp(-t / 300)), 2),
    "peaks": peak,
    "falling": lambda t, rng: 40 - t / 200,
    "one step up": lambda t, rng: 20 + 10 * (t > 1_300),
}
LEAKS = {
    "leak": lambda t, rng: 20 + t / 100,
    "noisy leak": lambda t, rng: 20 + t / 100 + rng.normal(0, 1),
    "leak and garbage": lambda t, rng: 20 + t / 100 + (t % 130) / 20,
    "leak of blocks": lambda t, rng: rounded(20 + t / 100, 0.25),
    "late leak": lambda t, rng: 20 + max(0, t - 800) / 60,
}


@pytest.mark.parametrize("limit", [80.0, None])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_level_is_no_leak(name, limit):
    for seed in range(5):
        reasons, slope = found(HEALTHY[name], limit=limit, seed=seed)
        assert slope.reason == ""
        if limit:  # else it is judged at the end of a log alone
            assert reasons == []


@pytest.mark.parametrize("limit", [60.0, None])
@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_found_with_the_step_of_its_end(name, limit):
    reasons, slope = found(LEAKS[name], limit=limit)
    assert slope.reason
    assert slope.reason == reasons[-1][1]
    assert slope.since >= STEPS // 3
    if limit is None:
        assert slope.end_step is None
        assert "ends" not in slope.reason
    else:
        assert slope.end_step == pytest.approx(3_200 if name == "late leak" else 4_000, rel=0.1)


def test_the_words():
    _, slope = found(LEAKS["leak"])
    assert slope.reason == (
        "device memory rises by 10 GB in 1,000 steps since step 1,050, it ends about step 4,000"
    )
    _, slope = found(lambda t, rng: (20 + t / 50) / GB, name="host_percent", limit=None)
    assert "host memory rises by 20 points" in slope.reason
    assert slope.end_step == pytest.approx(4_000, rel=0.02)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), level=st.floats(1, 60), noise=st.floats(0, 0.3),
       every=st.sampled_from([1, 10, 50]))  # fmt: skip
def test_noise_around_a_level_is_no_leak(seed, level, noise, every):
    def course(step, rng):
        return level * (1 + noise * rng.standard_normal())

    assert found(course, every=every, seed=seed)[0] == []


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rate=st.floats(0.005, 0.1), begin=st.integers(0, 600),
       every=st.sampled_from([1, 10, 25]))  # fmt: skip
def test_a_steady_rise_is_a_leak(seed, rate, begin, every):
    def course(step, rng):
        return 20 + rate * max(0, step - begin) + 0.1 * rng.random()

    limit = 20 + 1.5 * rate * (STEPS - begin)
    reasons, slope = found(course, every=every, limit=limit, seed=seed)
    assert reasons
    assert slope.end_step == pytest.approx(begin + 1.5 * (STEPS - begin), rel=0.1)


def waiting(share, steps=100):
    for step in range(1, steps + 1):
        seconds = 30.0 if step < 4 else 0.5
        yield Record(step, training_loss=3.0, step_seconds=seconds, data_wait_seconds=share * 0.5)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.43, 0.9])
def test_waiting_for_data_is_stated_above_a_quarter(share):
    wait = InputWait()
    for record in waiting(share):
        wait.update(record)
    words = f"input-bound: {100 * share:.0f} % of the step waits for data"
    assert wait.words == (words if share > 0.25 else "")


def test_both_stand_beside_the_verdict_and_leave_its_class():
    plain = judge_run([Record(r.step, training_loss=r.training_loss) for r in waiting(0.43)])
    records = list(waiting(0.43))
    for record in records:
        record.memory = {"device": GB * (20 + record.step), "device_limit": 200 * GB}
    verdict = judge_run(records)
    assert (verdict.kind, verdict.text) == (plain.kind, plain.text)
    assert "it ends about step 180; input-bound: 43 % of the step" in verdict.detail
    assert verdict.advice == f"{plain.advice}; {ADVICE}"
