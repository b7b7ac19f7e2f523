"""World size and rank placement, from lines and from file names; ranks within nodes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric.diagnosis.facts.layout import IdentityGraph, JobTopology
from rmetric.diagnosis.facts.statements import STATEMENTS, expanded, identities, may_state
from rmetric.diagnosis.ingest import ingest
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.reading.file_names import identify_files
from rmetric.diagnosis.reading.prefixes import NO_PREFIX, Prefix, PrefixParser
from studies.diagnosis_benchmark.corpus import TABLES


def graph(*lines: str, file: str = "a.log") -> IdentityGraph:
    """The graph of lines, each with what its form may state, as the pass over a file gives it."""
    found, prefixes = IdentityGraph(file), PrefixParser()
    for line in lines:
        who, start = prefixes.split(line.encode())
        text = line.encode()[start:].decode()
        bare = re.sub("[0-9]", "", text)
        found.take(text, who, may_state(bare, bare.lower().encode()))
    return found


def world(*lines: str, file: str = "a.log") -> JobTopology:
    return JobTopology(graph(*lines, file=file))


def together(*graphs: IdentityGraph) -> JobTopology:
    whole = IdentityGraph()
    for other in graphs:
        whole.merge(other)
    return JobTopology(whole)


def test_the_largest_group_is_the_world():
    lines = [f"h:{pid}:1 [0] NCCL INFO comm 0x1 rank {pid} nranks 8 - Init" for pid in range(8)]
    groups = [
        f"h:{pid}:1 [0] NCCL INFO comm 0x2 rank {pid % 2} nranks 2 - Init" for pid in range(8)
    ]
    found = world(*groups, *lines, *groups)
    assert found.size == 8
    assert [found.rank_of_process(Prefix(node="h", pid=pid)) for pid in range(8)] == [*range(8)]


def test_two_sizes_are_noted():
    found = world(*["WORLD_SIZE=8"] * 3, "WORLD_SIZE=16")
    assert found.size == 8
    assert "different numbers of ranks (8, 16)" in found.notes()[0]
    assert world("WORLD_SIZE=8").notes() == []


EXAMPLES = [(row, *example) for row in STATEMENTS for example in row.examples.items()]
SIZES = {line: size for size, line in TABLES["sizes"]}
SIZES |= {line: states["size"] for _, line, states in EXAMPLES if "size" in states}
NODES = {line: states["hosts"] for _, line, states in EXAMPLES if "hosts" in states}
ON = {line: (rank, node) for rank, node, line in TABLES["places"]}
ON |= {
    line: (states["rank"], states["node"]) for _, line, states in EXAMPLES
    if {"rank", "node"} <= {*states}
}  # fmt: skip
OWN_RANKS = {line: {rank} - {None} for rank, line in TABLES["own_ranks"]}
OWN_RANKS |= {
    line: {states["rank"]} for row, line, states in EXAMPLES if ("stream", "rank") in row.ties
}


@pytest.mark.parametrize(("row", "line", "states"), EXAMPLES, ids=[line for _, line, _ in EXAMPLES])
def test_an_example_passes_the_gates_of_its_row_and_states_this(row, line, states):
    found = identities(row.pattern.search(line)).items()
    found = {name: value for name, value in found if value is not None}
    if "hosts" in found:
        found["hosts"] = list(found["hosts"])
    assert found == states
    bare = re.sub("[0-9]", "", line)
    assert row in may_state(bare, bare.lower().encode())


def test_the_number_of_ranks_and_the_node_of_a_rank():
    assert {line: world(line).size for line in SIZES} == SIZES
    for line, (rank, node) in ON.items():
        assert world(line).node_of_rank == {rank: node}
        assert world(line).node(Prefix(rank=rank), rank) == node
    task = world("srun: error: gpu-07: tasks 2-3: Killed")
    assert task.node_of_rank == {2: "gpu-07", 3: "gpu-07"}
    report = world("  host      : gpu-07", "  rank      : 3 (local_rank: 1)")
    assert report.node_of_rank == {3: "gpu-07"}
    for line in ("rank 3 waits on step12", "hangs on cuda0, rank 3 world_size 8"):
        assert world(line).node_of_rank == {}


@pytest.mark.parametrize("line", NODES)
def test_nodes_of_a_list_hold_the_ranks_in_blocks(line):
    nodes = NODES[line]
    found = world(line, f"WORLD_SIZE={2 * len(nodes)}")
    assert found.nodes == nodes
    assert [found.node(Prefix(), rank) for rank in range(2 * len(nodes))] == sorted(nodes * 2)
    assert found.node(Prefix(), 2 * len(nodes)) is None
    assert found.node(Prefix(task=1), None) == nodes[1]


def test_the_node_that_most_lines_state_is_a_ranks():
    lines = ["rank 3 on host gpu-07", "rank 3 on host gpu-08", "rank 3 on host gpu-08"]
    assert world(*lines).node_of_rank == {3: "gpu-08"}


def test_a_file_that_says_which_rank_it_is():
    found = together(
        *(graph(f"init process group: rank {rank}", file=f"{rank}.log") for rank in range(3))
    )
    assert [found.rank_of(f"{rank}.log") for rank in range(3)] == [0, 1, 2]
    # What rank 0 prints into a log that all share does not make it rank 0's.
    shared = world("global_rank .................. 0", "world_size ....... 8")
    assert shared.rank_of("a.log") is None
    assert world("global rank 5").rank_of("a.log") == 5
    assert world("global rank 5", "global rank 6").rank_of("a.log") is None
    assert world("global rank 0", "WORLD_SIZE=1").rank_of("a.log") == 0


def test_worlds_of_several_files_are_put_together():
    lines = [*SIZES, *NODES, *list(ON)[:1], "rank 4 on host gpu-08", "init: rank 5"]
    whole, apart = world(*lines), together(*(graph(line) for line in lines))
    assert apart.size == whole.size
    assert apart.node_of_rank == whole.node_of_rank
    assert apart.notes() == whole.notes()
    assert apart.rank_of("a.log") == whole.rank_of("a.log")


@given(st.lists(st.text("ab_-/.0123456789rankode", max_size=20), max_size=6))
def test_any_names(names):
    assert len(identify_files(names)) == len(names)


@given(st.integers(0, 300), st.integers(0, 30), st.integers(1, 4))
def test_a_range_of_hosts(first, count, width):
    last = first + count
    hosts = expanded(f"gpu[{first:0{width}d}-{last:0{width}d}]")
    assert hosts == [f"gpu{number:0{width}d}" for number in range(first, last + 1)]


@pytest.mark.parametrize("hosts", ["", "gpu[1-", "gpu[-3]", "gpu[1-99999999999]", "[]"])
def test_lists_that_are_none(hosts):
    assert len(expanded(hosts)) <= 1


def stated(what: str, *lines: str) -> set[int]:
    """What lines without prefix state of their writer."""
    return set(graph(*lines).of(f"stream {what}", ("a.log", NO_PREFIX)))


def test_what_tells_the_own_rank_and_the_number_of_the_node():
    assert {line: stated("rank", line) for line in OWN_RANKS} == OWN_RANKS
    lines = ("group_rank=2", "--node_rank 2", "  global_ranks=[16, 17, 18, 19]")
    assert (stated("rank", *lines), stated("number", *lines)) == (set(), {2})


@settings(max_examples=30)
@given(st.data())
def test_stated_ranks_are_found_whatever_the_order_of_nodes(tmp_path_factory, data):
    """Each rank states its rank within the node, and one of each node its own."""
    nodes, each = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    folder: Path = tmp_path_factory.mktemp("job")
    expected = {}
    for at, number in enumerate(data.draw(st.permutations(range(nodes)))):
        writer = data.draw(st.integers(0, each - 1))
        lines = [f"[default{gpu}]:loading shard of {gpu}" for gpu in range(each) for _ in range(3)]
        lines += [f"[default{writer}]:[rank{number * each + writer}]: gone"]
        (folder / f"node-{at}.log").write_text("\n".join(lines))
        expected |= {number * each + local: {f"node-{at}.log"} for local in range(each)}
    streams = ingest([folder], SignatureLibrary.shipped()).streams.values()
    assert {stream.rank: stream.files for stream in streams if stream.rank is not None} == expected


PARTS = st.sampled_from(
    [
        "rank", "ranks[", "rankNum[", "nranks", "RANK=", "WORLD_SIZE=", "world", "size",
        "world_rank=", "local_rank", "node_rank=", "global_ranks=[", "of", "on", "node", "host",
        ":", "=", "/", ",", "init", "MEMBER:", "total", "processes", "num", "nnodes=",
        "nproc_per_node", "hosts=", "nodelist=", "node[01-03]", "srun:", "error:", "tasks",
        "SLURMD_NODENAME=", "HOSTNAME=", "ip=10.0.0.2,", "pid=", "gpu-7", "0", "3", "12", "00017",
        "٣", "i", "am", "my", "0x7f3a", "(local_rank", "host", "rank_train", "export",
    ]
)  # fmt: skip


@given(st.lists(PARTS, max_size=10), st.sampled_from(["", " "]), st.sampled_from([None, 3]))
def test_what_a_form_cannot_state_no_line_of_it_states(pieces, gap, rank):
    """Whatever its digits are, and where they stand: the form is known without them."""
    text, who = gap.join(pieces), Prefix(kinds=("torch",), rank=rank)
    bare = re.sub("[0-9]", "", text)
    form = bare.lower().encode()
    every, some = IdentityGraph(), IdentityGraph()
    every.take(text, who)
    some.take(text, who, may_state(bare, form))
    assert vars(every) == vars(some)


@given(st.text(max_size=200))
def test_any_line_may_be_taken(text):
    found = IdentityGraph("a.log")
    found.take(text, NO_PREFIX)
    JobTopology(found).node(NO_PREFIX, None)
    assert JobTopology(found).size is None or JobTopology(found).size > 0
