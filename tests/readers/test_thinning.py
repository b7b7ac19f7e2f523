"""Thinning of records: even, bounded, and nothing that matters lost without a word."""

from __future__ import annotations

from math import inf, isfinite, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric import Record, Run
from rmetric.readers.thinning import Thinning
from rmetric.records import HardwareEvent

VALUES = {
    "ordinary": {"training_loss": 2.0},
    "evaluation": {"training_loss": 2.0, "validation_loss": 2.5},
    "stated": {"stated_score": 0.1},
    "alarm": {"stated_score": 0.9},
    "nan": {"training_loss": nan},
    "inf": {"gradient_norm": inf},
    "worker": {"worker_gradient_norms": (1.0, nan)},
    "hardware": {"events": (HardwareEvent(1.0, "ecc_corrected"),)},
    "planned": {"planned_events": ("learning_rate",)},
    "skipped": {"training_loss": 2.0, "skipped": True},
}


def records_of(kinds: list[str]) -> list[Record]:
    return [Record(step, **VALUES[kind]) for step, kind in enumerate(kinds)]


def thinned(records: list[Record], most: int, config: dict | None = None) -> Thinning:
    run = Run(id="a", records=[], config=config or {})
    thinning = Thinning(most, {"a": run})
    thinning.take("a", records)
    return thinning


@given(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=300), st.integers(6, 40))
def test_it_is_bounded_in_order_and_keeps_the_first_that_is_not_finite(kinds, most):
    records = records_of(kinds)
    thinning = thinned(records, most)
    kept = thinning.records("a")
    steps = [record.step for record in kept]
    assert len(kept) <= most + 1
    assert steps == sorted(set(steps))
    assert all(record is records[record.step] for record in kept)
    assert (steps[0], steps[-1]) == (0, len(records) - 1)
    strange = [i for i, kind in enumerate(kinds) if kind in ("nan", "inf", "worker")]
    assert not strange or strange[0] in steps
    assert (thinning.note("a") == "") == (len(records) <= most)
    if len(records) <= most:
        assert kept == records


def test_every_kth_is_kept_and_the_note_is_a_sentence():
    thinning = thinned(records_of(["ordinary"] * 4500), 200)
    assert [r.step for r in thinning.records("a")] == [*range(0, 4500, 32), 4499]
    assert thinning.note("a") == (
        "every 32nd of 4,500 records was judged; the log holds more than --most-records 200; "
        "steps between them were not seen; windows count records and span 32 times as many steps"
    )


@pytest.mark.parametrize("kind", ["evaluation", "hardware", "planned", "skipped", "nan", "alarm"])
def test_the_rare_ones_are_all_kept(kind):
    kinds = ["ordinary"] * 10_000
    rare = [77, 4321, 9001]
    for place in rare:
        kinds[place] = kind
    thinning = thinned(records_of(kinds), 200)
    kept = {record.step for record in thinning.records("a")}
    # The state of an alarm holds until the log states another.
    assert kept >= ({77} if kind == "alarm" else set(rare))
    assert "and also " in thinning.note("a")


def test_many_evaluations_are_thinned_too_and_the_note_says_so():
    kinds = ["evaluation" if step % 3 == 0 else "ordinary" for step in range(3000)]
    kinds[100] = "nan"
    thinning = thinned(records_of(kinds), 300)
    kept = thinning.records("a")
    assert len(kept) <= 300
    assert sum(record.validation_loss is not None for record in kept) >= 100
    assert sum(not isfinite(record.training_loss or 0.0) for record in kept) == 1
    assert "of 1,000 records with an evaluation" in thinning.note("a")
    assert "the one record with a value that is not finite" in thinning.note("a")


def test_a_log_that_states_r_on_every_line_keeps_the_beginning_of_each_alarm():
    records = [Record(step, stated_score=0.1) for step in range(5000)]
    for step in (*range(1001, 1010), *range(3333, 3340)):
        records[step].stated_score = 0.9
    kept = {record.step for record in thinned(records, 100).records("a")}
    assert {1001, 3333} <= kept
    own = thinned(records, 100, {"alert_thresholds": {"r_metric": 0.95}})
    assert "alarm" not in own.note("a")


def test_several_runs_share_the_limit():
    thinning = Thinning(100, {})
    for step in range(5000):
        thinning.take("long", [Record(step, training_loss=2.0)])
        if step < 20:
            thinning.take("short", [Record(step, training_loss=2.0)])
    assert thinning.note("short") == ""
    assert len(thinning.records("short")) == 20
    assert 20 < len(thinning.records("long")) <= 81


def test_more_runs_than_records_keep_the_first_of_each():
    thinning = Thinning(5, {})
    for run in range(50):
        thinning.take(str(run), [Record(step, training_loss=2.0) for step in range(3)])
    assert all(thinning.records(str(run))[0].step == 0 for run in range(50))
