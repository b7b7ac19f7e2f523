"""Advice on the next start, by what the diagnosis says."""

from dataclasses import replace

import pytest

from rmetric.diagnosis.result import Attempt, Diagnosis, Suspect

FAILED = Diagnosis(
    outcome="failed", cause="some_error", actor="framework", confidence=0.7, iteration=40
)


def attempt(number, cause="some_error", step=40):
    return Attempt(
        number=number, file="a.log", line=1, first_time=None, last_time=None, last_step=step,
        outcome="failed", cause=cause, title="", confidence=0.7,
    )  # fmt: skip


SUSPECTS = tuple(
    Suspect(name=f"node {node}", rank=None, node=node, score=score, why="")
    for node, score in (("n1", 0.9), ("n2", 0.85), ("n3", 0.3))
)


@pytest.mark.parametrize(
    ("changes", "action", "nodes"),
    [
        ({}, "restart", ()),
        ({"actor": "user"}, "stop", ()),
        ({"actor": "platform", "family": "disk full"}, "stop", ()),
        ({"actor": "platform", "iteration": None}, "restart", ()),
        ({"attempts": (attempt(1), attempt(2))}, "stop", ()),
        ({"attempts": (attempt(1), attempt(2, step=41))}, "stop", ()),
        ({"attempts": (attempt(1, step=None), attempt(2, step=None))}, "stop", ()),
        ({"attempts": (attempt(1), attempt(2, step=None))}, "restart", ()),
        ({"attempts": (attempt(1), attempt(2, step=80))}, "restart", ()),
        ({"attempts": (attempt(1, cause="another"), attempt(2))}, "restart", ()),
        ({"actor": "hardware"}, "restart", ()),
        ({"actor": "hardware", "nodes": SUSPECTS[:1]}, "restart_without", ("n1",)),
        ({"actor": "hardware", "nodes": SUSPECTS}, "restart_without", ("n1", "n2")),
        ({"outcome": "terminated", "actor": "platform"}, "restart", ()),
        ({"outcome": "terminated", "actor": "user", "family": "cancelled"}, "stop", ()),
    ],
)
def test_the_advice_follows_from_the_diagnosis(changes, action, nodes):
    advice = replace(FAILED, **changes).restart
    assert (advice.action, advice.nodes, advice.confidence) == (action, nodes, 0.7)
    assert ("--exclude=" + ",".join(nodes) in advice.text) == bool(nodes)
    assert replace(FAILED, **changes).as_json()["restart"]["action"] == action


@pytest.mark.parametrize("outcome", ["healthy", "unknown", "failed"])
def test_without_a_cause_there_is_no_advice(outcome):
    diagnosis = Diagnosis(outcome=outcome)
    assert diagnosis.restart is None
    assert diagnosis.as_json()["restart"] is None
    assert "Restart" not in diagnosis.summary
