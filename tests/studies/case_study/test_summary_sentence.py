"""The sentence and the table at the end of a case study."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from studies.case_study.summary_sentence import (
    DETECTORS,
    HEADINGS,
    Alarms,
    Result,
    rows_of,
    sentence,
    table,
    verdict,
)

R, OURS = DETECTORS
ONSET = 200


def result(name="LR_SPIKE", failure=None, r=None, ours=None, again=None, kind="diverged") -> Result:
    control = name == "control"
    outcome = "failed" if failure else "healthy" if control else "absorbed"
    alarms = {R: Alarms(first=r, since_onset=again), OURS: Alarms(first=ours, since_onset=ours)}
    return Result(
        name=name,
        outcome=outcome,
        kind=kind if failure else None,
        onset=None if control else ONSET,
        failure=failure,
        alarms=alarms,
    )


def test_the_sentence_of_the_tiny_case_study():
    twins = [
        result("control", r=30),
        result("LR_SPIKE", r=30, ours=203),
        result("LR_RUNAWAY", failure=230, r=30, ours=221),
    ]
    assert sentence(twins) == (
        "Of the faults at step 200 LR_RUNAWAY broke its run by step 230 (diverged) and LR_SPIKE "
        "was absorbed; the calibrated detector alarmed at 221 in LR_RUNAWAY, 9 steps before the "
        "failure, at 203 in LR_SPIKE, 3 steps after its start, and not in the undisturbed run; "
        "R-Metric alarmed at 30 in every run, 170 steps before any fault, and not between the "
        "start and the failure of LR_RUNAWAY."
    )


def test_an_early_alarm_that_comes_again_in_time_is_told():
    text = sentence([result("control", r=30), result(failure=230, r=30, again=210)])
    assert "and again at 210 in LR_SPIKE, 20 steps before the failure" in text
    assert "the calibrated detector did not alarm" in text
    text = sentence([result("control", failure=90, kind="non_finite")])
    assert text.startswith("The undisturbed run failed by step 90 (non-finite); ")


def test_the_detector_that_warned_in_time_comes_first():
    text = sentence([result("control"), result(failure=230, r=215, ours=260)])
    assert text.index("R-Metric alarmed at 215") < text.index("the calibrated detector alarmed")
    assert "at 260 in LR_SPIKE, 30 steps after the failure" in text


@pytest.mark.parametrize(
    ("failure", "first", "said"),
    [
        (230, None, "missed"),
        (None, None, "no alarm"),
        (230, 199, "199: false alarm"),
        (230, 200, "200: 30 steps ahead"),
        (230, 229, "229: 1 step ahead"),
        (230, 230, "230: too late"),
        (None, 199, "199: false alarm"),
        (None, 200, "200: on a fault that was absorbed"),
    ],
)
def test_the_verdict_is_that_of_the_causal_rule(failure, first, said):
    one = result(failure=failure, ours=first)
    assert verdict(one, one.alarms[OURS].first) == said


steps = st.none() | st.integers(1, 400)


@st.composite
def twins(draw) -> list[Result]:
    found = [result("control", failure=draw(steps), r=draw(steps), ours=draw(steps))]
    for name in draw(st.sets(st.sampled_from(["A", "B", "C"]))):
        failure = draw(st.none() | st.integers(ONSET, 400))
        found.append(
            result(name, failure=failure, r=draw(steps), ours=draw(steps), again=draw(steps))
        )
    return found[draw(st.integers(0, 1)) if len(found) > 1 else 0 :]


@given(twins())
def test_every_study_ends_in_one_sentence_that_names_its_faults_and_failures(results):
    text = sentence(results)
    assert text.endswith(".")
    assert text.count(". ") == 0
    assert text[0].isupper()
    assert "None" not in text
    assert "-1 step" not in text
    for one in results:
        if one.onset is not None:
            assert one.name in text
        if one.failure is not None:
            assert f"by step {one.failure} (diverged)" in text
        for alarms in one.alarms.values():
            if alarms.first is not None:
                assert f"at {alarms.first} in" in text
    assert len(rows_of(results)) == len(results)
    assert all(len(row) == len(HEADINGS) for row in rows_of(results))
    assert len(table(results).splitlines()) == 1 + len(results)
