"""Iterations: the distance against a plain one, what is flagged and what is not."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric.diagnosis.facts.job import Occurrence
from rmetric.diagnosis.patterns.iterations import (
    LEAST_PAST,
    MAX_ITERATION_EVENTS,
    MAX_ODD_ITERATIONS,
    MIN_EXCESS_SECONDS,
    MIN_EXCESS_WHOLE_SECONDS,
    SLOW_RATIO,
    WINDOW,
    IterationWatch,
    distance,
    similarity,
    usual_if_slow,
)
from rmetric.readers.step_forms import StepMatch

STEP, DATA, GRADIENTS, WARNING, EVALUATION = 0, 1, 2, 7, 9
SEQUENCES = st.lists(st.integers(0, 4), max_size=12).map(tuple)


def plain(first, second):
    """Dynamic time warping as in the textbook."""
    if not first or not second:
        return max(len(first), len(second))
    best = np.full((len(first) + 1, len(second) + 1), np.inf)
    best[0, 0] = 0.0
    for i, event in enumerate(first, 1):
        for j, other in enumerate(second, 1):
            before = min(best[i - 1, j], best[i, j - 1], best[i - 1, j - 1])
            best[i, j] = (event != other) + before
    return int(best[-1, -1])


@settings(max_examples=200)
@given(SEQUENCES, SEQUENCES)
def test_distance_is_the_textbooks(first, second):
    assert distance(first, second) == plain(first, second)
    assert 0.0 <= similarity(first, second) <= 1.0 == similarity(first, first)


def plain_usual_if_slow(before, seconds, steps):
    """Three sigma above the mean, several times the median, more than any before."""
    if len(before) < LEAST_PAST or seconds <= max(before):
        return None
    usual, mean = np.median(before), np.mean(before)
    whole = all((value * steps).is_integer() for value in (seconds, *before))
    least = (MIN_EXCESS_WHOLE_SECONDS if whole else MIN_EXCESS_SECONDS) / steps
    slow_from = max(mean + 3.0 * np.std(before), SLOW_RATIO * usual, usual + least)
    return usual if seconds > slow_from else None


@settings(max_examples=300)
@given(st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, 7.0, 30.0, 200.0]), max_size=60))
def test_slow_is_what_the_plain_formula_says(all_of):
    kept = deque(maxlen=12)
    for at, seconds in enumerate(all_of):
        before = all_of[max(0, at - 12) : at]
        assert usual_if_slow(kept, seconds, 1) == plain_usual_if_slow(before, seconds, 1)


class Training:
    """Feeds a watch as an ingest would; `seconds` a step."""

    def __init__(self, watch=None, stream="rank 0", seconds=1.25):
        self.watch = watch or IterationWatch()
        self.stream, self.seconds, self.time = stream, seconds, 0.0

    def place(self, step):
        return Occurrence(
            file="a.log", line=1, stream=self.stream, time=self.time, order=0, event=STEP,
            text="", step=step,
        )  # fmt: skip

    def step(self, step, *events, seconds=None, form="step"):
        self.watch.add_events(self.stream, events)
        self.time += self.seconds if seconds is None else seconds
        return self.watch.add_step(
            self.stream, StepMatch(form, step), STEP, self.place(step), self.time
        )

    def run(self, first, last, *events):
        for step in range(first, last):
            self.step(step, *(events or (DATA, GRADIENTS)))

    def odd(self):
        first = self.watch.first_odd().get(self.stream)
        return [] if first is None else [first]


def test_the_first_iteration_that_differs_and_where_it_began():
    training = Training()
    training.run(0, 200)
    assert training.odd() == []
    training.step(200, DATA, WARNING, GRADIENTS)
    training.run(201, 210)
    (odd,) = training.odd()
    assert (odd.step, odd.place.step) == (200, 199)


@pytest.mark.parametrize("events", [(DATA,), (DATA, WARNING, GRADIENTS)], ids=["less", "more"])
def test_what_differs_from_then_on_is_flagged_once(events):
    training = Training()
    training.run(0, 100)
    training.run(100, 200, *events)
    assert [iteration.step for iteration in training.odd()] == [100]


def test_a_step_line_of_another_event_is_neither_new_nor_lacked():
    training = Training()
    training.run(0, 50)
    training.watch.add_events(training.stream, (DATA, GRADIENTS))
    training.watch.add_step(
        training.stream, StepMatch("step", 50), 33, training.place(50), training.time
    )
    assert training.odd() == []


@pytest.mark.parametrize("before", [0, 1, LEAST_PAST - 1])
def test_a_stream_must_have_a_past(before):
    training = Training()
    training.run(0, before + 1)
    training.step(before + 1, DATA, WARNING, GRADIENTS)
    assert training.odd() == []


def test_evaluations_and_checkpoints_are_left_out():
    training = Training()
    for step in range(300):
        if step % 100 == 50:
            training.watch.enter(training.stream, "evaluate")
            training.watch.add_events(training.stream, [EVALUATION] * 20)
        training.step(step, DATA, GRADIENTS, seconds=60.0 if step % 100 == 50 else None)
    assert training.odd() == []


@pytest.mark.parametrize(
    ("period", "events", "seconds"),
    [(50, [EVALUATION] * 5, None), (100, [], 30.0)],
    ids=["events", "slowness"],
)
def test_what_comes_back_now_and_then_is_a_habit(period, events, seconds):
    training = Training()
    for step in range(400):
        habit = step % period == period - 1
        more = events if habit else []
        training.step(step, *more, DATA, GRADIENTS, seconds=seconds if habit else None)
    assert training.odd() == []


def test_an_event_known_from_the_start_is_not_new():
    training = Training()
    training.watch.add_events(training.stream, [WARNING])
    training.run(0, 50)
    training.step(50, DATA, WARNING, GRADIENTS)
    assert training.odd() == []


def test_a_slow_iteration_is_reported_with_its_seconds():
    training = Training()
    training.run(0, 50)
    training.step(50, DATA, GRADIENTS, seconds=30.0)
    training.run(51, 60)
    (odd,) = training.odd()
    assert (odd.step, odd.seconds, odd.usual_seconds) == (50, 30.0, 1.25)


def test_the_same_pace_at_another_stride_is_not_slow():
    training = Training()
    training.run(0, 50)
    for step in range(60, 200, 10):
        training.step(step, DATA, GRADIENTS, seconds=12.5)
    assert training.odd() == []


def test_ranks_that_share_a_stream_make_no_extra_borders():
    training = Training()
    watch = training.watch
    for step in range(100):
        for late in (0, 0, 1):
            watch.add_step(
                "rank 0", StepMatch("step", max(0, step - late)), STEP, training.place(step), 0.0
            )
    assert training.odd() == []


def test_a_run_that_begins_again_is_counted_anew():
    training = Training()
    training.run(0, 50)
    training.run(0, 20)
    assert training.step(20, DATA, GRADIENTS) == 20


def test_memory_is_bounded():
    training = Training()
    for step in range(40):
        training.step(step, *range(10 + step, 10 + step + 3 * MAX_ITERATION_EVENTS))
    (past,) = training.watch._pasts.values()
    assert len(past.window) == WINDOW
    assert max(map(len, past.window)) <= MAX_ITERATION_EVENTS
    assert len(past.odd) <= MAX_ODD_ITERATIONS


@given(st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=30, max_size=40))
def test_batches_make_no_difference(iterations):
    whole, single = Training(), Training()
    for step, events in enumerate(iterations):
        whole.step(step, *events)
        for event in events:
            single.watch.add_events(single.stream, [event])
        single.step(step)
    assert whole.odd() == single.odd()
