"""Each source of the calibrated detector against a plain computation, at every prefix."""

from __future__ import annotations

from math import inf, log, log10, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rmetric.detectors.calibrated.gradients import Gradients
from rmetric.detectors.calibrated.hardware import HardwareEvents, poisson_surprise
from rmetric.detectors.calibrated.held_out_loss import (
    PRIOR,
    ProbeLoss,
    ValidationLoss,
    evaluation_prior,
)
from rmetric.detectors.calibrated.rate_change import RateBeyondPeak
from rmetric.detectors.calibrated.source import Deviation, LaggedPast
from rmetric.detectors.calibrated.training_loss import TrainingLoss
from rmetric.detectors.calibrated.updates import Updates
from rmetric.records import HardwareEvent, Record
from studies.fault_lab.evaluation_prior import main

VALUES = st.lists(st.floats(-1e6, 1e6), max_size=40)


def window(values, size, lag):
    """What a lagged past remembers after `values`."""
    held = list(values)[: max(0, len(values) - lag)]
    return held[-size:]


def plain_spread(held):
    ordered, count = sorted(held), len(held)
    quartiles = (ordered[int(0.75 * count)] - ordered[int(0.25 * count)]) / 1.349
    upper = (ordered[9 * count // 10] - np.median(held)) / 1.2816
    return max(quartiles, upper) * (1 + 8 / count)


def plain_deviation(values, size, lag, least, relative, absolute):
    """usual, rise and z of the last of `values`; None while too few are before it."""
    held = window(values[:-1], size, lag)
    if len(held) < least:
        return None
    usual = float(np.median(held))
    spread = max(plain_spread(held), relative * abs(usual), absolute)
    return usual, values[-1] - usual, (values[-1] - usual) / spread


def smoothed(values, weight):
    """An EWMA that begins at 0, as a weighted sum."""
    ages = np.arange(len(values))[::-1]
    return float(np.sum(weight * (1 - weight) ** ages * np.asarray(values)))


@given(VALUES, st.integers(4, 12), st.integers(0, 6), st.integers(4, 8))
def test_a_lagged_past_is_a_sorted_window(values, size, lag, least):
    past = LaggedPast(window=max(size, least), lag=lag, least=least)
    for n, value in enumerate(values, start=1):
        past.remember(value)
        held = window(values[:n], max(size, least), lag)
        assert past.ready == (len(held) >= least)
        if past.ready:
            assert past.usual == pytest.approx(float(np.median(held)), rel=1e-12, abs=1e-12)
            assert past.spread == pytest.approx(plain_spread(held), rel=1e-9, abs=1e-9)
            assert past.spread >= 0
    past.forget()
    assert not past.ready


@given(VALUES, st.sampled_from([(0.0, 0.5), (0.01, 1e-4), (0.5, 0.0)]))
def test_a_deviation_is_taken_from_the_values_before(values, floors):
    if floors[1] == 0.0:
        values = [x + 2e6 for x in values]  # there the usual value is never 0
    deviation = Deviation(LaggedPast(window=9, lag=2, least=4), relative=floors[0],
                          absolute=floors[1])  # fmt: skip
    for n in range(1, len(values) + 1):
        z = deviation.update(values[n - 1])
        expected = plain_deviation(values[:n], 9, 2, 4, *floors)
        if expected is None:
            assert z != z
        else:
            found = (deviation.usual, deviation.rise, z)
            assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


def plain_resolution(losses):
    """Smallest step five values ago; 0 until eight of them differed."""
    steps = np.abs(np.diff(losses[: max(0, len(losses) - 5)]))
    steps = steps[steps > 0]
    return float(steps.min()) if len(steps) >= 8 else 0.0


def plain_limits(values):
    """Limit of the drift at each of `values`, from the docstring of `ExcursionLimit`."""
    limits, peaks, peak = [], [0.0], 0.0
    for n, x in enumerate(values, start=1):
        base = 0.75 * max(1.0, log(n) / log(400))
        limits.append(max(base, 1.8 * min(max(peaks), 1.5)))
        if x > 0.25:
            peak = max(peak, x)
        elif x < 0.1 and peak > 0:
            peaks.append(peak)
            peak = 0.0
    return limits


def plain_training_loss(losses, steps):
    """loss_jump, loss_drift and loss_climb after all of `losses`, from the docstring."""
    jumps, zs, rises, usual = [], [], [], 0.0
    every_step = len(steps) < 2 or steps[-1] - steps[-2] <= 1
    lag, least = (5, 8) if every_step else (2, 5)
    for n in range(1, len(losses) + 1):
        resolution = plain_resolution(losses[:n])
        found = plain_deviation(losses[:n], 40, lag, least, 0.01, resolution)
        if found is None:
            continue
        usual, rise, z = found
        jumps.append(min(z, 4 * rise / (0.1 * abs(usual))))
        zs.append(min(max(z, -3), 3))
        rises.append(rise)
    statistics = {}
    if jumps:
        drifts = [smoothed(zs[: n + 1], 0.1) for n in range(len(zs))]
        share = smoothed(rises, 0.1) / (0.06 * abs(usual))
        statistics["loss_drift"] = min(drifts[-1] / plain_limits(drifts)[-1], share)
        needed = 3 if every_step else 2
        lasting = min(jumps[-needed:]) if len(jumps) >= needed else 0.0
        statistics["loss_jump"] = lasting if every_step else max(lasting, 0.45 * jumps[-1])
    elif len(losses) >= 5 and max(losses[:-3]) > 0:
        statistics["loss_jump"] = max(2 * (min(losses[-3:]) / max(losses[:-3]) - 1), 0.0)
    if len(losses) >= 5:
        statistics["loss_climb"] = plain_climb(losses)
    return statistics


def plain_climb(losses):
    levels = [float(np.median(losses[n - 5 : n])) for n in range(5, len(losses) + 1)]
    steps = np.abs(np.diff(losses))[-40:]
    if len(levels) < 2 or len(steps) < 8 or levels[-1] <= min(levels[:-1]):
        return 0.0
    lowest = min(levels[:-1])
    noise = float(np.median(steps)) / 0.954 * (1 + 8 / len(steps))
    noise = max(noise, 0.02 * abs(losses[-1]), plain_resolution(losses))
    above = levels[-1] - lowest
    ratio = above / abs(lowest)
    early = min(ratio / 0.7, above / noise / 4) if len(losses) <= 40 else 0.0
    late = min(ratio / 0.33, above / noise / 9) if len(losses) > 20 else 0.0
    return max(early, late)


@pytest.mark.parametrize("stride", [1, 10])
@pytest.mark.parametrize("kind", ["falling", "jump", "around zero", "flat"])
def test_training_loss_against_plain_arithmetic(kind, stride):
    rng = np.random.default_rng(3)
    t = np.arange(130)
    losses = {
        "falling": 2 + 3 * np.exp(-t / 30) + 0.05 * rng.normal(size=130),
        "jump": 2 + 0.1 * rng.standard_t(3, size=130) + 1.5 * (t > 70),
        "around zero": 0.02 * rng.normal(size=130) + 0.4 * (t > 100),
        "flat": np.where(t < 90, 2.0, 2.5),
    }[kind].tolist()
    source, steps = TrainingLoss(), []
    for n, loss in enumerate(losses, start=1):
        steps.append(stride * n)
        source.update(Record(step=steps[-1], training_loss=loss))
        expected = plain_training_loss(losses[:n], steps)
        assert source.statistics == pytest.approx(expected, rel=1e-9, abs=1e-9), n


def test_validation_loss_against_plain_arithmetic():
    rng = np.random.default_rng(5)
    losses = (3 - 0.02 * np.arange(60) + 0.03 * rng.normal(size=60)).tolist()
    losses[40:] = [x + 0.2 for x in losses[40:]]
    scale, freedom = evaluation_prior()
    source = ValidationLoss()
    for n, loss in enumerate(losses):
        source.update(Record(step=n, validation_loss=loss))
        rises = [log(losses[i] / min(losses[:i])) for i in range(1, n + 1)]
        own = [r for r in rises[:-2] if r > 0][-8:]
        squares = freedom * scale**2 + sum(r * r for r in own)
        usual = sqrt(squares / (freedom + len(own)))
        expected = {"validation_rise": rises[-1] / usual} if rises else {}
        assert source.statistics == pytest.approx(expected, rel=1e-9)
    source.forget_best()
    source.update(Record(step=n + 1, validation_loss=9.0))
    assert not source.statistics  # the first after a restart of the schedule


def test_the_shipped_prior_is_what_its_command_fits(tmp_path):
    assert main(["--out", str(tmp_path / "prior.json")]) == 0
    assert (tmp_path / "prior.json").read_bytes() == PRIOR.read_bytes()


@pytest.mark.parametrize(
    ("rates", "peak"),
    [
        ([1e-3] * 6 + [2e-3, 3e-3, 4e-3], 1e-3),  # a plateau, then growth
        ([1e-4, 1e-3, *[5e-4] * 5, 2e-3, 3e-3, 4e-3], 1e-3),  # a warm-up and a decay before it
        ([1e-3] * 6 + [2e-3, 3e-3], None),  # twice is not growth
        ([1e-3] * 6 + [5e-2] * 9, None),  # a jump is none
        ([1e-3] * 5 + [2e-3, 3e-3, 4e-3], None),  # the level was not held
        ([1e-4 * n for n in range(1, 40)], None),  # a warm-up
        ([1e-3] * 6 + [2e-3, 3e-3] + [4e-3] * 31, None),  # usual by now
        ([1e-3] * 6 + [2e-3, 3e-3, 4e-3, 1e-3], None),  # it came back
    ],
)
def test_a_rate_beyond_its_peak(rates, peak):
    source = RateBeyondPeak()
    for step, rate in enumerate(rates):
        source.update(Record(step=step, learning_rate=rate))
        source.update(Record(step=step))  # a record without a rate changes nothing
    expected = {} if peak is None else {"rate_beyond": log(rates[-1] / peak)}
    assert source.statistics == pytest.approx(expected)


@pytest.mark.parametrize("slope", [-0.01, 0.02])
def test_probe_loss_against_plain_arithmetic(slope):
    rng = np.random.default_rng(6)
    losses = (3 + slope * np.arange(60) + 0.2 * rng.normal(size=60)).tolist()
    losses[4:8] = [3.0, 1.0, 4.0, 5.0]  # the sixth is the lowest that counts
    source, levels = ProbeLoss(), []
    for n, loss in enumerate(losses, start=1):
        levels.append(loss if n == 1 else 0.7 * levels[-1] + 0.3 * loss)
        source.update(Record(step=n, probe_loss=loss))
        expected = {}
        if n > 15:
            lowest = min(levels[5:-1])
            expected = {"probe_rise": (levels[-1] - lowest) / (0.02 * lowest)}
        assert source.statistics == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_update_size_against_plain_arithmetic():
    rng = np.random.default_rng(7)
    steps = np.arange(160)
    rates = 1e-3 * np.minimum(1, (steps + 1) / 20)
    norms = 30 * rates * np.exp(0.1 * rng.normal(size=160)) * np.where(steps > 120, 1e4, 1.0)
    source, ratios, above = Updates(), [], []
    for step, norm, rate in zip(steps.tolist(), norms.tolist(), rates.tolist(), strict=True):
        source.update(Record(step=step, update_norm=norm, learning_rate=rate))
        held = window(ratios, 80, 10)
        ratios.append(log(norm / rate))
        if len(held) >= 12:
            above.append(min(max(ratios[-1] - np.median(held), -3), 5))
        expected = {"update_size": smoothed(above, 0.3)} if above else {}
        assert source.statistics == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_finished_schedule_says_nothing_of_updates():
    source = Updates()
    for step in range(60):
        source.update(Record(step=step, update_norm=1e-3, learning_rate=1e-3))
    before = dict(source.statistics)
    source.update(Record(step=60, update_norm=1.0, learning_rate=1e-5))
    assert source.statistics == before
    source.update(Record(step=61, update_norm=1.0, learning_rate=1.1e-5))
    assert source.statistics["update_size"] > before["update_size"] + 1


def gradient_records(rng, workers, number, *, turned=None):
    """Records of explicit gradients, and the true cosine of each to the mean of the others.

    Shapes: vectors (workers, 6), cosines (number, workers).
    """
    records, cosines = [], []
    for step in range(number):
        vectors = rng.normal(size=(workers, 6)) + 1.0
        if turned is not None and step > number // 2:
            vectors[turned] *= -1
        mean = vectors.mean(axis=0)
        lengths = np.linalg.norm(vectors, axis=1)
        to_mean = vectors @ mean / lengths / np.linalg.norm(mean)
        others = (vectors.sum(axis=0) - vectors) / (workers - 1)
        cosines.append(np.sum(vectors * others, axis=1) / lengths / np.linalg.norm(others, axis=1))
        records.append(
            Record(step=step, gradient_norm=float(np.linalg.norm(mean)),
                   worker_gradient_norms=tuple(lengths.tolist()),
                   worker_gradient_cosines=tuple(to_mean.tolist()))
        )  # fmt: skip
    return records, np.array(cosines)


@pytest.mark.parametrize("workers", [2, 4, 7])
@settings(max_examples=5)
@given(seed=st.integers(0, 1000))
def test_opposed_worker_is_the_true_cosine_to_the_mean_of_the_others(workers, seed):
    records, cosines = gradient_records(np.random.default_rng(seed), workers, 30, turned=1)
    source = Gradients()
    for n, record in enumerate(records, start=1):
        source.update(record)
        if n <= 10:
            assert "opposed_worker" not in source.statistics
            continue
        levels = [smoothed(cosines[:n, worker], 0.2) for worker in range(workers)]
        assert source.statistics["opposed_worker"] == pytest.approx(-min(levels), abs=1e-9)
    # Two workers oppose each other.
    worst = int(np.argmin(levels)) if workers > 2 else int(source.words("opposed_worker")[17])
    assert f"cosine of worker {worst}'s gradient to" in source.words("opposed_worker")
    more, _ = gradient_records(np.random.default_rng(seed), workers + 1, 20)
    for n, record in enumerate(more, start=1):  # with another number it begins anew
        source.update(record)
        assert ("opposed_worker" in source.statistics) == (n > 10)


@pytest.mark.parametrize("cosines", [None, (0.5, 0.5), (0.5, float("nan"), 0.5)])
def test_without_a_cosine_for_each_worker_nothing_is_stated_of_directions(cosines):
    source = Gradients()
    for step in range(30):
        source.update(Record(step=step, gradient_norm=1.0, worker_gradient_norms=(1.0, 2.0, 3.0),
                             worker_gradient_cosines=cosines))  # fmt: skip
    assert "opposed_worker" not in source.statistics
    assert "worker_norm" in source.statistics


def test_gradients_against_plain_arithmetic():
    rng = np.random.default_rng(8)
    norms = np.exp(0.2 * rng.normal(size=150) + 2.0 * (np.arange(150) > 100))
    workers = norms[:, None] * np.exp(0.1 * rng.normal(size=(150, 5)))
    workers[60:, 3] *= 3
    source, logs, variances, apart, z, z_variance = Gradients(), [], [], [], [], []
    for step in range(150):
        source.update(
            Record(step=step, gradient_norm=float(norms[step]),
                   worker_gradient_norms=tuple(workers[step].tolist()))
        )  # fmt: skip
        logs.append(float(np.log(norms[step])))
        variances.append(float(np.log(workers[step].var())))
        apart.append(np.log(workers[step]) - np.log(np.median(workers[step])))
        for values, into, least in ((logs, z, 0.02), (variances, z_variance, 0.05)):
            found = plain_deviation(values, 80, 5, 12, 0.0, least)
            if found is not None:
                into.append(min(max(found[2], -6), 6))
        levels = [abs(smoothed(np.array(apart)[:, worker], 0.1)) for worker in range(5)]
        expected = {"worker_norm": max(levels)}
        if z:
            expected |= {"gradient_norm": smoothed(z, 0.1)}
            expected |= {"gradient_variance": smoothed(z_variance, 0.1)}
        assert source.statistics == pytest.approx(expected, rel=1e-6, abs=1e-9), step
    norm, middle = workers[-1, 3], np.median(workers[-1])
    assert source.words("worker_norm") == (
        f"worker 3's gradient norm {norm:.3g}, the workers' median {middle:.3g} "
        "(2.9 times, smoothed)"
    )
    assert source.advice("worker_norm", 9) == "check the data and the GPU of worker 3"


@settings(max_examples=300)
@given(st.integers(1, 5000), st.floats(1e-3, 5000))
def test_poisson_surprise_is_the_tail_of_the_law(count, expected):
    surprise = poisson_surprise(count, expected)
    if count <= expected:
        assert surprise == 0.0
        return
    tail = stats.poisson.logsf(count - 1, expected) / np.log(10)
    if np.isfinite(tail):
        assert surprise == pytest.approx(-tail, rel=1e-6, abs=1e-9)
    else:
        assert 200 < surprise < inf  # there SciPy's tail is 0


def test_hardware_events_against_plain_arithmetic():
    rng = np.random.default_rng(9)
    counts = rng.poisson(0.05, size=300)
    counts[220:240] += 1
    source = HardwareEvents()
    for n, count in enumerate(counts.tolist(), start=1):
        ours = HardwareEvent(float(n), "application_xid_13")
        source.update(Record(step=n, events=(HardwareEvent(float(n), "ecc"),) * count + (ours,)))
        source.update(Record(step=n))  # states nothing of the hardware
        if n < 100:
            assert not source.statistics
            continue
        recent, before = int(counts[n - 50 : n].sum()), int(counts[: n - 50].sum())
        expected = 50 * (before + 1) / (n - 50)
        surprise = 0.0
        if recent > expected:
            surprise = -log10(stats.poisson.sf(recent - 1, expected))
        assert source.statistics["hardware_events"] == pytest.approx(surprise, rel=1e-9)
    assert max(counts) >= 1
