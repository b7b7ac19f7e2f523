"""Ranks within nodes become global ones by what the logs say, or stay what they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric.diagnosis.facts.job import Job
from rmetric.diagnosis.facts.world import IdentityGraph
from rmetric.diagnosis.ingest import ingest
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.reading.prefixes import NO_PREFIX
from studies.diagnosis_benchmark.corpus import TABLES

LIBRARY = SignatureLibrary.shipped()


def node(*local_ranks: int) -> list[str]:
    """What ranks say that tells nothing but their rank within the node."""
    return [f"[default{one}]:loading shard of {one}" for one in local_ranks for _ in range(3)]


def ranks(job: Job) -> dict[int, set[str]]:
    """Rank -> its files."""
    return {one.rank: one.files for one in job.streams.values() if one.rank is not None}


def stated(what: str, *lines: str) -> set[int]:
    """What lines without prefix state of their writer."""
    graph = IdentityGraph("a.log")
    for line in lines:
        graph.take(line, NO_PREFIX)
    return set(graph.of(f"stream {what}", ("a.log", NO_PREFIX)))


def test_what_tells_the_own_rank():
    for rank, line in TABLES["own_ranks"]:
        assert stated("rank", line) == ({rank} - {None}), line


def test_other_things_that_are_told_of_a_place():
    lines = ("group_rank=2", "--node_rank 2", "  global_ranks=[16, 17, 18, 19]")
    assert {what: stated(what, *lines) for what in ("rank", "number")} == {
        "rank": set(), "number": {2}
    }  # fmt: skip


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_told_ranks_are_found_whatever_the_order_of_nodes(tmp_path_factory, data):
    nodes, each = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    order = data.draw(st.permutations(range(nodes)))
    folder: Path = tmp_path_factory.mktemp("job")
    for at, number in enumerate(order):
        teller = data.draw(st.integers(0, each - 1))
        lines = [*node(*range(each)), f"[default{teller}]:[rank{number * each + teller}]: gone"]
        (folder / f"node-{at}.log").write_text("\n".join(lines))
    job = ingest([folder], LIBRARY)
    assert ranks(job) == {
        number * each + local: {f"node-{at}.log"}
        for at, number in enumerate(order)
        for local in range(each)
    }
