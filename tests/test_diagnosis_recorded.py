"""What schedulers, launchers and shells record of a job's end, its restarts and its processes."""

from __future__ import annotations

import pytest

from rmetric.diagnosis.render import headline
from rmetric.diagnosis.result import Diagnosis, Suspect


@pytest.mark.parametrize("length", range(20, 120))
def test_a_headline_keeps_its_cause_however_long_a_nodes_name_is(length: int) -> None:
    name = "a" * length
    suspect = Suspect(name=f"node {name}", rank=None, node=name, score=1.0, why="")
    title = "The training hung after step 1210 and was ended 40 min later"
    line = headline(
        Diagnosis(outcome="failed", cause="training_hung", title=title, nodes=(suspect,))
    )
    assert title[:12] in line
