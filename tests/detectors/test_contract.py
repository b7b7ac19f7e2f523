"""What every registered detector promises, whatever it is."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import studies.detector_benchmark  # noqa: F401 (registers the peers)
from rmetric import detectors
from rmetric._util.state import restore_state, state_of
from rmetric.detectors import DETECTORS, IN_PAPER
from rmetric.detectors.contract import LossDetector
from rmetric.evaluation import trace
from rmetric.records import HardwareEvent, Record, Run
from tests.detectors.streams import WILD, full_records, streams

EVERY = pytest.mark.parametrize("name", DETECTORS)
CAUSAL = pytest.mark.parametrize("name", [n for n, e in DETECTORS.items() if not e.sees_future])
OURS = pytest.mark.parametrize(
    "name", [n for n, e in DETECTORS.items() if not e.sees_future and e.kind != "peer"]
)
WATCHING = pytest.mark.parametrize("name", [n for n, e in DETECTORS.items() if e.kind != "anchor"])
#: Fitting a forest costs a fifth of a second.
FEW = settings(max_examples=6, deadline=None)
#: Long enough for every window to fill.
LONG = settings(max_examples=3, deadline=None)


def run_of(records: list[Record]) -> Run:
    return Run(id="a run", records=records)


def losses(values: list[float]) -> Run:
    """All that a detector looks at is the same number, but for the rate and the cosines."""
    return run_of(
        [
            Record(step=i, time=5.0 * i, training_loss=x, validation_loss=x, probe_loss=x,
                   gradient_norm=x, update_norm=x, parameter_norm=x, learning_rate=1e-3, events=(),
                   worker_gradient_norms=(x, x), worker_gradient_cosines=(1.0, 1.0))
            for i, x in enumerate(values, start=1)
        ]
    )  # fmt: skip


def same(ours, theirs) -> bool:
    return np.array_equal(ours.scores, theirs.scores, equal_nan=True) and np.array_equal(
        ours.alarms, theirs.alarms
    )


def test_the_papers_tables_keep_their_rows():
    """Rows and bytes of published tables hang on these names and their order."""
    assert " ".join(IN_PAPER) == (
        "r_metric r_metric_lambda r_metric_sigma r_metric_delta_l r_metric_first_loss "
        "isolation_forest loss_rise loss_slope loss_z_score gradient_norm always never random"
    )


@EVERY
@FEW
@given(records=streams(WILD))
def test_the_same_seed_gives_the_same_scores(name, records):
    assert same(trace(name, run_of(records), seed=3), trace(name, run_of(records), seed=3))


@CAUSAL
@settings(max_examples=25, deadline=None)
@given(records=streams(WILD), data=st.data())
def test_no_detector_looks_ahead_unless_it_says_so(name, records, data):
    length = data.draw(st.integers(0, len(records)))
    whole, prefix = trace(name, run_of(records)), trace(name, run_of(records[:length]))
    assert np.array_equal(whole.scores[:length], prefix.scores, equal_nan=True)
    assert np.array_equal(whole.alarms[:length], prefix.alarms)


def test_the_one_that_says_so_does_look_ahead():
    quiet, loud = losses([2.0, 2.1, 2.0, 2.2]), losses([2.0, 2.1, 2.0, 2.2, 900.0, 901.0])
    before, after = trace("isolation_forest", quiet), trace("isolation_forest", loud)
    assert not np.array_equal(before.scores, after.scores[:4])


# Inside scikit-learn's forest, rounding decides over a constant run; see its docstring. A
# flat loss is one of the failures that trainproof looks for.
CONSTANT = [(n, 2.5) for n, e in DETECTORS.items()
            if e.kind != "anchor" and not e.sees_future and n != "trainproof"]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "level"), [*CONSTANT, *(("calibrated", level) for level in (0.0, 1e9, -1e9))]
)
def test_a_constant_run_never_alarms(name, level):
    assert not trace(name, losses([level] * 150)).alarms.any()


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize(
    "name",
    ["r_metric", "r_metric_delta_l", "r_metric_first_loss", "loss_slope", "loss_z_score",
     "gradient_norm", "isolation_forest_online", "robust_gradient_norm", "worker_dispersion",
     "loss_ewma", "loss_cusum", "page_hinkley", "bayesian_change_point", "lightning_spike"],
)  # fmt: skip
def test_what_stops_being_finite_alarms_and_is_not_remembered(name, bad):
    clean, dirty = (DETECTORS[name].make(np.random.default_rng(0)) for _ in range(2))
    noise = np.random.default_rng(0).normal(size=120)
    values = [3 - i / 100 + (i > 90) + x / 20 for i, x in enumerate(noise.tolist())]
    for i, record in enumerate(losses(values).records):
        seen = dirty.update(replace(losses([bad]).records[0], step=record.step, time=record.time))
        assert i < 10 or seen.alarm
        if isinstance(seen, LossDetector):
            assert (seen.score, str(bad) in seen.reason) == (inf, True)
        assert outputs_of(dirty.update(record)) == outputs_of(clean.update(record))


@EVERY
@FEW
@given(records=full_records())
def test_whatever_is_logged_an_alarm_has_a_reason_and_nothing_else_has(name, records):
    entry = DETECTORS[name]
    detector = entry.make(np.random.default_rng(0))
    if entry.sees_future:
        detector.fit(run_of(records))
    for record in records:
        assert detector.update(record) is detector
        assert isinstance(detector.score, float | int)
        assert bool(detector.reason) == bool(detector.alarm)


@CAUSAL
def test_two_runs_beside_each_other_share_nothing(name):
    entry = DETECTORS[name]
    ours, alone, other = (entry.make(np.random.default_rng(1)) for _ in range(3))
    for record in training(1):
        alone.update(record)
    for record, unrelated in zip(training(1), training(2), strict=True):
        ours.update(record)
        other.update(unrelated)
    assert (repr(ours.score), ours.alarm) == (repr(alone.score), alone.alarm)


@OURS
@LONG
@given(seed=st.integers(0, 9), cut=st.integers(0, 330))
@example(seed=0, cut=0)
@example(seed=0, cut=152)
@example(seed=1, cut=160)
def test_a_state_carries_all_that_a_detector_reports(name, seed, cut):
    records = training(seed)
    whole, resumed = (DETECTORS[name].make(np.random.default_rng(n)) for n in (1, 2))
    for record in records[:cut]:
        whole.update(record)
    restore_state(resumed, json.loads(json.dumps(state_of(whole))))
    for record in records[cut : cut + 40]:
        assert resumed.reason == whole.reason
        assert outputs_of(resumed.update(record)) == outputs_of(whole.update(record))


def outputs_of(detector) -> str:
    names = ("score", "alarm", "reason", "verdict", "ended", "evidence", "contributions")
    return repr([getattr(detector, name, None) for name in names])


@OURS
def test_a_state_does_not_grow_with_the_run(name):
    detector, sizes = DETECTORS[name].make(np.random.default_rng(1)), []
    for record in training(1, length=2600):
        detector.update(record)
        if record.step % 200 == 0:
            sizes.append(len(json.dumps(state_of(detector))))
    assert max(sizes[9:]) <= 1.1 * max(sizes[:9])


def training(seed: int, length: int = 330) -> list[Record]:
    """A falling loss that jumps, with norms, workers and now and then something that is not
    finite."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(length, 6)).tolist()
    records = []
    for i, (a, b, *workers) in enumerate(noise):
        loss = 2 + 3 / (1 + i / 40) + 0.05 * a + (2.0 if 150 < i < 200 else 0.0)
        norm = float(np.exp(0.3 * b + (2.0 if 150 < i < 160 else 0.0)))
        records.append(
            Record(
                step=i + 1, time=float(i), training_loss=nan if i in (77, 240) else loss,
                validation_loss=loss + 0.1 if i % 10 == 9 else None, probe_loss=loss,
                gradient_norm=inf if i == 77 else norm, update_norm=norm, learning_rate=1e-3,
                worker_gradient_norms=tuple(norm * (1 + 0.1 * w) for w in workers),
                worker_gradient_cosines=(0.9,) * len(workers),
                events=(HardwareEvent(float(i), "ecc"),) * (i % 40 == 0),
            )
        )  # fmt: skip
    return records


@EVERY
def test_an_empty_run_has_no_alert(name):
    seen = trace(name, run_of([]))
    assert seen.first_alert is None
    assert len(seen.alert_steps) == 0


@WATCHING
@FEW
@given(records=streams(WILD))
def test_a_record_with_nothing_logged_leaves_a_detector_as_it_was(name, records):
    # Every record, then nothing at the same step.
    silent = trace(name, run_of([record for r in records for record in (r, Record(step=r.step))]))
    assert np.array_equal(silent.scores[::2], silent.scores[1::2], equal_nan=True)
    halved = replace(silent, scores=silent.scores[::2], alarms=silent.alarms[::2])
    assert same(trace(name, run_of(records)), halved)


@EVERY
def test_no_detector_touches_the_global_random_state(name):
    np.random.seed(5)  # noqa: NPY002
    expected = np.random.random()  # noqa: NPY002
    np.random.seed(5)  # noqa: NPY002
    trace(name, losses([2.0, 1.9, 1.8, 1.9]))
    assert np.random.random() == expected  # noqa: NPY002


def test_each_run_has_its_own_chance():
    records = losses([2.0] * 30).records
    first, second = (trace("random", Run(id=name, records=records)) for name in ("a", "b"))
    assert not same(first, second)


#: All numbers that a class takes.
SETTINGS = [
    (name, setting, value)
    for name in detectors.__all__
    if isinstance(kind := getattr(detectors, name), type)
    for setting, parameter in inspect.signature(kind).parameters.items()
    if type(parameter.default) in (int, float)
    for value in (nan, -1)
]


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        *SETTINGS,
        ("LossRise", "times", 0), ("LossSlope", "window", 2), ("LossZScore", "least", 21),
        ("GradientNorm", "factor", 1.0), ("GradientNorm", "least", 21),
        ("RobustGradientNorm", "threshold", 0), ("RobustGradientNorm", "least", 101),
        ("WorkerDispersion", "threshold", inf), ("WorkerDispersion", "least", 1),
        ("LossEwma", "smoothing", 0), ("LossEwma", "least", 101), ("LossCusum", "limit", 0),
        ("PageHinkley", "least", 0), ("PageHinkley", "slack", inf), ("PageHinkley", "limit", 0),
        ("PageHinkley", "forgetting", 1.5), ("BayesianChangePoint", "hazard", 1),
        ("BayesianChangePoint", "recent", 0), ("OnlineIsolationForest", "threshold", 1.0),
        ("OnlineIsolationForest", "least", 2), ("LightningSpike", "factor", 0),
        ("LightningSpike", "window", 0), ("LlmFoundrySpike", "factor", 1.0),
        ("LlmFoundrySpike", "window", 0), ("Random", "probability", 1.5),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(name, setting, value):
    drawn = {"generator": np.random.default_rng(0)} if name == "Random" else {}
    # A negative window may be named by what must fit into it.
    found = f"{setting} is" if setting != "window" or value >= 0 else "window (is|of)"
    with pytest.raises(ValueError, match=f"{found} {value}"):
        getattr(detectors, name)(**drawn, **{setting: value})
