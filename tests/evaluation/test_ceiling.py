"""What no detector can exceed."""

from __future__ import annotations

import pytest

from rmetric.records import Record, Run, Truth
from studies.paper.analysis import ceiling


def failing(onset: int, failure: int) -> Run:
    truth = Truth(fault="F", onset_step=onset, outcome="failed", failure_step=failure)
    records = [Record(step=step) for step in (100, 200, 300)]
    return Run(id=f"{onset}", records=records, truth=truth)


RUNS = [
    failing(150, 250),  # the record at 200 lies between
    failing(200, 250),  # only the one at its onset step
    failing(210, 290),  # none
    failing(250, 300),  # only the one at its failure step
    Run(id="healthy", records=[Record(step=100)], truth=Truth()),
]


@pytest.mark.parametrize("protocol", ["causal", "causal_unlatched"])
def test_a_run_without_a_record_between_onset_and_failure_is_out_of_reach(protocol):
    best = ceiling(RUNS, protocol)
    assert best.hit.tolist() == [True, True, False, False, False]
    assert best.lead_steps[:2].tolist() == [50, 50]
    assert not best.false_alarm.any()


def test_a_record_at_the_onset_step_shows_nothing_of_a_fault_in_the_update():
    later = ceiling(RUNS, "causal", after_onset=True)
    assert later.hit.tolist() == [True, False, False, False, False]
