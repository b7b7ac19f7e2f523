"""Laws of the fitted model, and of the evidence that it weighs."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis import evidence
from rmetric.diagnosis.answer import BECAUSE
from rmetric.diagnosis.evidence import EXTRACTORS, Row, Switches
from rmetric.diagnosis.facts.job import Job
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.model import (
    NOBODY,
    Model,
    candidates,
    probabilities,
    reasons,
    score,
    suspects,
)
from rmetric.diagnosis.signature import CHOICES
from tests.diagnosis.jobs import scene_of

MODEL = Model.shipped()
SOURCE = "".join(path.read_text() for path in Path(evidence.__file__).parent.glob("*.py"))
KINDS = sorted(MODEL.suspects.keys() - {"nobody", "a node", "a file"})
rows = st.builds(
    Row,
    target=st.sampled_from(["rank 1", "rank 2", "node a", "job.log"]),
    kind=st.sampled_from(KINDS),
    words=st.just("it was"),
    strength=st.floats(0, 1),
)


@pytest.mark.parametrize("kind", KINDS)
def test_each_weight_is_of_evidence_that_there_is_and_never_speaks_for_a_rank(kind):
    assert f'"{kind}"' in SOURCE
    assert MODEL.suspects[kind] > 0


def test_each_extractor_is_of_a_part_that_can_be_switched_off():
    assert set(EXTRACTORS) <= {*Switches.__dataclass_fields__}
    for extractor in (extractor for of_part in EXTRACTORS.values() for extractor in of_part):
        assert list(extractor(scene_of(Job()))) == []


@given(st.lists(rows, max_size=8), rows)
def test_a_row_more_never_makes_its_target_less_suspect(some, more):
    scene = scene_of(Job())

    def of(found):
        ranked = suspects(scene, found, MODEL.suspects)
        return next((who.score for who in ranked if who.name == more.target), 0.0)

    assert of(some) <= of([*some, more])


@given(st.lists(rows, max_size=8))
def test_nobody_is_always_a_candidate_and_the_suspects_are_in_order(some):
    assert NOBODY in candidates(some)
    ranked = suspects(scene_of(Job()), some, MODEL.suspects)
    assert {who.name for who in ranked} == {row.target for row in some}
    assert [who.score for who in ranked] == sorted((who.score for who in ranked), reverse=True)


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=9))
def test_probabilities_are_those_of_all_candidates(scores):
    shares = probabilities(scores)
    assert sum(shares) == pytest.approx(1.0)
    assert max(range(len(shares)), key=shares.__getitem__) == scores.index(max(scores)) or len(
        {round(value, 12) for value in shares}
    ) < len(shares)


def test_a_feature_without_a_weight_counts_nothing():
    assert score({"confidence": 1.0, "what nobody knows": 9.0}, {"confidence": 2.0}) == 2.0


@given(st.sampled_from(sorted(MODEL.shares)), st.floats(0, 1), st.floats(0, 1))
def test_surer_evidence_is_never_worth_less(kind, strength, other):
    low, high = (MODEL.limit(kind, at) for at in sorted((strength, other)))
    assert 0 <= low <= high <= 1
    assert MODEL.sure_from[kind] >= 0.5


def test_what_carries_an_answer_is_what_it_has_or_what_the_other_lacks():
    weights = {"confidence": 2.0, "survived": -4.0, "first": 0.1}
    found = reasons({"confidence": 1.0}, {"survived": 1.0, "confidence": -1.0}, weights)
    assert found == ["confidence", "survived"]
    assert reasons({}, {"confidence": -1.0}, weights) == []
    assert {*BECAUSE} <= {*MODEL.causes}


@pytest.mark.parametrize("trait", CHOICES["traits"])
def test_each_trait_is_known_to_the_diagnosis_and_of_a_signature(trait):
    root = Path(evidence.__file__).parents[1]
    assert f'"{trait}"' in "".join(path.read_text() for path in root.rglob("*.py"))
    assert any(trait in signature.traits for signature in SignatureLibrary.shipped())
