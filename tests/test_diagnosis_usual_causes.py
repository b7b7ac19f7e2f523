"""What an answer leaves open: causes that no line of the logs states."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rmetric.diagnosis.inferred_causes import HUNG, INFERRED
from rmetric.diagnosis.usual_causes import MOST_ADDED, with_usual

from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.result import SURE, Candidate

KNOWN = [(one.id, one.family) for one in (*SignatureLibrary.shipped(), *INFERRED)]
evidence = st.builds(
    Candidate,
    cause=st.sampled_from([cause for cause, _ in KNOWN]),
    title=st.just("seen"),
    confidence=st.floats(0, 1),
    why=st.just("logged once"),
)


@given(
    lead=st.sampled_from([*KNOWN, (None, "")]),
    stage=st.sampled_from(["", "train", "load data", "checkpoint"]),
    confidence=st.floats(0, 1),
    seen=st.lists(evidence, max_size=6, unique_by=lambda one: one.cause),
    rivals=st.sets(st.sampled_from([cause for cause, _ in KNOWN]), max_size=9),
)
def test_what_is_added_takes_no_more_than_the_answer_leaves(lead, stage, confidence, seen, rivals):
    found = with_usual(seen, *lead, stage=stage, confidence=confidence, rivals=rivals, most=5)
    added = [one for one in found if one not in seen]
    assert len(found) <= 5
    assert len(added) <= MOST_ADDED
    assert sum(one.confidence for one in added) <= 1.001 - confidence
    shares = [one.confidence for one in added]
    assert shares == sorted(shares, reverse=True)
    first = [one for one in seen if one.cause in rivals]
    if added:
        assert list(found[: len(first)]) == first
    else:
        assert {one.cause for one in found} <= {one.cause for one in seen}
    if confidence >= SURE:
        assert list(found) == seen[:5]


def test_no_cause_is_added_that_the_answer_names_itself():
    for stage, missing in (("load data", "hung_in_reading"), ("checkpoint", "hung_in_checkpoint")):
        named = [
            one.cause
            for one in with_usual((), HUNG.id, HUNG.family, stage=stage, confidence=0.6, most=5)
        ]
        assert named
        assert missing not in named
    ended = with_usual((), "slurm_cancelled", "cancelled", stage="", confidence=0.6, most=5)
    assert {"hung_in_reading", HUNG.id} < {one.cause for one in ended}


def test_a_sure_answer_leaves_nothing_open():
    lead = "nccl_timeout", "collective communication"
    added = [
        len(with_usual((), *lead, stage="", confidence=sure, most=5))
        for sure in (SURE - 0.01, SURE)
    ]
    assert added == [MOST_ADDED, 0]
