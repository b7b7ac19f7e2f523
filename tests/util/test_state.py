"""A stream that is stopped, stored as JSON and restored goes on as if it had not been."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric import RMetric
from rmetric._util.state import restore_state, state_of
from rmetric.detectors.registry import DETECTORS
from rmetric.records import Record
from tests.detectors.streams import TAME, WILD, streams

# A peer's state is its own; the live monitor does not offer them.
ONLINE = [n for n, e in DETECTORS.items() if not e.sees_future and e.kind != "peer"]


def through_json(state):
    return json.loads(json.dumps(state))


@pytest.mark.long
@pytest.mark.parametrize("name", ONLINE)
@given(streams(values=TAME | WILD, mixed=True, max_size=30), st.integers(0, 30))
@settings(max_examples=30)
def test_every_detector_goes_on_where_it_was(name, records, cut):
    whole = DETECTORS[name].make(np.random.default_rng(1))
    for record in records[:cut]:
        whole.update(record)
    resumed = DETECTORS[name].make(np.random.default_rng(2))
    restore_state(resumed, through_json(state_of(whole)))
    for record in records[cut:]:
        whole.update(record)
        resumed.update(record)
        assert repr(resumed.score) == repr(whole.score)
        assert resumed.alarm == whole.alarm


FORMER = {
    "_loss": "loss_slope loss_z_score",
    "_norm": "gradient_norm robust_gradient_norm",
    "_dispersion": "worker_dispersion",
    "": "isolation_forest_online loss_ewma loss_cusum page_hinkley bayesian_change_point "
    "lightning_spike",
}


@pytest.mark.parametrize(
    ("name", "former"), [(name, old) for old, names in FORMER.items() for name in names.split()]
)
def test_a_state_of_before_the_detectors_had_one_base_is_read(name, former):
    made = lambda: DETECTORS[name].make(np.random.default_rng(1))  # noqa: E731
    whole, resumed = made(), made()
    for step in range(30):
        norms = (1.0, 1.2 + step % 3, 1.5)
        loss = 2.0 + step % 5
        whole.update(
            Record(step=step, validation_loss=loss, gradient_norm=loss, worker_gradient_norms=norms)
        )
    state = through_json(state_of(whole))
    value = state.pop("_value")
    if former:
        state[former] = value
    if name == "lightning_spike":
        del state["_bound"]
    restore_state(resumed, state)
    if former:
        assert repr(resumed._value) == repr(value)
    record = Record(step=31, validation_loss=9.0, gradient_norm=9.0, worker_gradient_norms=(1, 2))
    assert repr(resumed.update(record).score) == repr(whole.update(record).score)
    assert resumed.reason == whole.reason


def test_a_state_of_something_else_is_refused():
    with pytest.raises(ValueError, match="not that of a RMetric"):
        restore_state(RMetric(), {"level": 1.0})
    with pytest.raises(TypeError, match="has no plain state"):
        state_of(object())
