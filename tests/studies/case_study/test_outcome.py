"""What counts as a failure of a real run; the definitions themselves are those of the simulator."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.records import Record, Truth
from studies.case_study.report import truth_of

INJECTED = Truth(fault="LR_SPIKE", severity=15.0, onset_step=50, duration_steps=20)
losses = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=30)


def evaluated(*values: float) -> list[Record]:
    return [Record(step=10 * i, validation_loss=value) for i, value in enumerate(values, 1)]


def trained(*values: float, since: int = 1) -> list[Record]:
    return [Record(step=i, training_loss=value) for i, value in enumerate(values, since)]


@given(losses)
def test_a_falling_loss_fails_by_no_definition_and_a_twin_is_never_degraded(values):
    falling = evaluated(*sorted(values, reverse=True))
    worse = evaluated(*(value + 1.0 for value in sorted(values, reverse=True)))
    assert truth_of(Truth(), falling, None).outcome == "healthy"
    assert truth_of(INJECTED, falling, worse).outcome == "absorbed"
    itself = truth_of(INJECTED, evaluated(*values), evaluated(*values))
    assert itself.failure_kind in (None, "diverged")


@pytest.mark.parametrize(
    ("records", "twin", "kind", "step"),
    [
        # The median of three is up from the second high value on.
        (evaluated(3, 2, 1, 1, 1, 2, 2, 2, 2), None, "diverged", 70),
        (evaluated(3, 2, 1, 2, 2, 2, 1, 1, 1), None, None, None),
        (evaluated(5.5, 3.2, 2.5), None, None, None),  # it still falls fast
        (evaluated(3, 2, 1, *[1.05] * 4), evaluated(3, 2, 1, *[0.9] * 4), "degraded", 50),
        (trained(*[2.0] * 59, *[nan] * 4), trained(*[2.0] * 63), "non_finite", 60),
        (trained(*[2.0] * 59, *[inf] * 4), None, "non_finite", 60),
        # It ended early, and is compared as far as it goes.
        ([*evaluated(3, 2), *trained(nan, since=25)], evaluated(3, 2, 1, 1), "non_finite", 25),
        # One strange loss that is gone again, and a gradient that overflows.
        ([*evaluated(3), Record(step=11, training_loss=nan, gradient_norm=inf),
          Record(step=20, validation_loss=2.0, gradient_norm=inf)], None, None, None),
    ],
)  # fmt: skip
def test_what_became_of_a_run(records, twin, kind, step):
    truth = truth_of(INJECTED, records, twin)
    assert (truth.failure_kind, truth.failure_step) == (kind, step)
    assert truth.outcome == ("failed" if kind else "absorbed")
