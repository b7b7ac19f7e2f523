"""Hypothesis strategies for streams of records, tame and wild."""

from __future__ import annotations

from hypothesis import strategies as st

from rmetric.metric import RMetricConfig
from rmetric.records import HardwareEvent, Record

#: Eighths, which sums, halves and quarters of keep exact: rounding cannot part two versions.
TAME = st.integers(-80, 80).map(lambda n: n / 8)
ODDITIES = st.sampled_from([float("nan"), float("inf"), float("-inf")])
WILD = st.floats(allow_nan=True, allow_infinity=True)

RATE_SOURCES = ("events", "failure_rate", None)
VARIANCE_SOURCES = ("worker_gradient_norms", "gradient_variance", "gradient_norm", None)
DRIFT_SOURCES = ("validation_loss", "loss_drift", None)

TAME_CONFIGS = st.builds(
    RMetricConfig,
    component_window=st.integers(2, 6),
    event_window=st.integers(1, 4),
    loss_window=st.integers(1, 2),
    norm_window=st.just(2),
    absolute_loss_drift=st.booleans(),
)
CONFIGS = st.builds(
    RMetricConfig,
    component_window=st.integers(2, 9) | st.just(1000),
    event_window=st.integers(1, 9),
    loss_window=st.integers(1, 9),
    norm_window=st.integers(2, 9),
    absolute_loss_drift=st.booleans(),
)


@st.composite
def streams(draw, values=TAME, *, max_size: int = 30) -> list[Record]:
    """Records in order, each saying something of each signal, from any source, or not."""
    numbers = values | ODDITIES
    workers = draw(st.sampled_from([2, 4]))
    sources = st.tuples(*map(st.sampled_from, (RATE_SOURCES, VARIANCE_SOURCES, DRIFT_SOURCES)))
    records, time = [], 0.0
    for step in range(1, draw(st.integers(0, max_size)) + 1):
        begin, time = time, time + draw(st.integers(0, 4)) * 450.0
        fields: dict = {"time": time}
        for source in draw(sources):
            if source is None or not draw(st.integers(0, 4)):
                continue
            if source == "events":
                fields[source] = draw(events(begin, time))
            elif source == "worker_gradient_norms":
                fields[source] = tuple(draw(numbers) for _ in range(workers))
            else:
                fields[source] = draw(numbers)
        records.append(Record(step=step, **fields))
    return records


@st.composite
def full_records(draw, values=WILD, max_size: int = 60) -> list[Record]:
    """Records of a training: any of the fields that a step logs, mostly tame, some wild."""
    usual = st.integers(1, 64).map(lambda n: n / 16)
    numbers = st.none() | usual | usual | usual | values | ODDITIES
    several = st.none() | st.lists(usual | values | ODDITIES, max_size=4).map(tuple)
    return [
        Record(
            step=step, time=draw(st.none() | st.just(float(step))), training_loss=draw(numbers),
            validation_loss=draw(numbers), gradient_norm=draw(numbers),
            worker_gradient_norms=draw(several), learning_rate=draw(numbers),
            update_norm=draw(numbers), parameter_norm=draw(numbers),
            events=draw(st.none() | st.just(())),
        )
        for step in range(1, draw(st.integers(0, max_size)) + 1)
    ]  # fmt: skip


@st.composite
def events(draw, begin: float, end: float) -> tuple[HardwareEvent, ...]:
    quarters = sorted(draw(st.lists(st.integers(0, 4), max_size=3)))
    kinds = st.sampled_from(["ecc_corrected", "application_xid_13"])
    return tuple(
        HardwareEvent(
            begin + (end - begin) * quarter / 4, draw(kinds), draw(st.none() | st.just(1))
        )
        for quarter in quarters
    )
