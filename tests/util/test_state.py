"""A stream that is stopped, stored as JSON and restored goes on as if it had not been."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric import RMetric
from rmetric._util.state import restore_state, state_of
from rmetric.detectors.registry import DETECTORS
from tests.detectors.streams import TAME, WILD, streams

# A peer's state is its own; the live monitor does not offer them.
ONLINE = [n for n, e in DETECTORS.items() if not e.sees_future and e.kind != "peer"]


def through_json(state):
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("name", ONLINE)
@given(streams(values=TAME | WILD, max_size=30), st.integers(0, 30))
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


def test_a_state_of_something_else_is_refused():
    with pytest.raises(ValueError, match="not that of a RMetric"):
        restore_state(RMetric(), {"level": 1.0})
    with pytest.raises(TypeError, match="has no plain state"):
        state_of(object())
