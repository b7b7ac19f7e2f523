"""World size and rank placement, from lines and from file names."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis.reading.file_names import identify_files
from rmetric.diagnosis.reading.prefixes import NO_PREFIX, Prefix, PrefixParser
from rmetric.diagnosis.reading.world import World, describes, expanded, may_describe_world
from tests.diagnosis_corpus import TABLES


def world(*lines: str, stream: str = "a.log") -> World:
    """What a world knows by lines that pass the gate, as the pass over a file gives them."""
    found = World()
    take(found, *lines, stream=stream)
    return found


def take(found: World, *lines: str, stream: str = "a.log") -> None:
    prefixes = PrefixParser()
    for line in lines:
        who, start = prefixes.split(line.encode())
        text = line.encode()[start:]
        if may_describe_world(text.lower().translate(None, b"0123456789")):
            found.take(text.decode(), who, stream)


def test_the_largest_group_is_the_world():
    lines = [f"h:{pid}:1 [0] NCCL INFO comm 0x1 rank {pid} nranks 8 - Init" for pid in range(8)]
    groups = [
        f"h:{pid}:1 [0] NCCL INFO comm 0x2 rank {pid % 2} nranks 2 - Init" for pid in range(8)
    ]
    found = world(*groups, *lines, *groups)
    assert found.size == 8
    assert [found.rank_of_process(Prefix(node="h", pid=pid)) for pid in range(8)] == [*range(8)]


def test_two_sizes_are_told():
    found = world(*["WORLD_SIZE=8"] * 3, "WORLD_SIZE=16")
    assert found.size == 8
    assert "different numbers of ranks (8, 16)" in found.notes()[0]
    assert world("WORLD_SIZE=8").notes() == []


SIZES = {line: size for size, line in TABLES["sizes"]}
NODES = {line: nodes.split() for nodes, line in TABLES["nodes"]}
ON = {line: (rank, node) for rank, node, line in TABLES["places"]}


def test_the_number_of_ranks():
    assert {line: world(line).size for line in SIZES} == SIZES


def test_the_node_of_a_rank():
    for line, (rank, node) in ON.items():
        assert world(line).node_of_rank == {rank: node}
        assert world(line).node(Prefix(rank=rank), rank) == node


@pytest.mark.parametrize("line", NODES)
def test_nodes_of_a_list_hold_the_ranks_in_blocks(line):
    nodes = NODES[line]
    found = world(line, f"WORLD_SIZE={2 * len(nodes)}")
    assert found.nodes == nodes
    assert [found.node(Prefix(), rank) for rank in range(2 * len(nodes))] == sorted(nodes * 2)
    assert found.node(Prefix(), 2 * len(nodes)) is None
    assert found.node(Prefix(task=1), None) == nodes[1]


def test_the_node_of_a_task():
    assert world("srun: error: gpu-07: tasks 2-3: Killed").node_of_task == {
        2: "gpu-07",
        3: "gpu-07",
    }


@pytest.mark.parametrize("line", ["rank 3 waits on step12", "hangs on cuda0, rank 3 world_size 8"])
def test_what_is_no_node(line):
    assert world(line).node_of_rank == {}


def test_the_report_of_torchrun():
    found = world("  host      : gpu-07", "  rank      : 3 (local_rank: 1)")
    assert found.node_of_rank == {3: "gpu-07"}


def test_a_host_name_that_all_share_is_the_launchers():
    same = [f"[rank{rank}]: HOSTNAME=node0" for rank in range(4)]
    assert world(*same).node(Prefix(), 3) is None
    each = [f"[rank{rank}]: HOSTNAME=node{rank // 2}" for rank in range(4)]
    assert world(*each).node(Prefix(), 3) == "node1"


def test_workers_of_ray_by_their_process():
    found = world("- (node_id=a1, ip=10.0.0.2, pid=77) world_rank=3, local_rank=3")
    assert found.rank_of_process(Prefix(kinds=("ray",), pid=77, node="10.0.0.2")) == 3
    assert found.rank_of_process(Prefix(kinds=("ray",), pid=78, node="10.0.0.2")) is None


def test_a_file_that_says_which_rank_it_is():
    found = World()
    for rank in range(3):
        take(found, f"init process group: rank {rank}", stream=f"{rank}.log")
    assert [found.rank_of(f"{rank}.log") for rank in range(3)] == [0, 1, 2]
    # What rank 0 prints into a log that all share does not make it rank 0's.
    shared = world("global_rank .................. 0", "world_size ....... 8")
    assert shared.rank_of("a.log") is None
    assert world("global rank 5").rank_of("a.log") == 5
    assert world("global rank 5", "global rank 6").rank_of("a.log") is None
    assert world("global rank 0", "WORLD_SIZE=1").rank_of("a.log") == 0


def test_worlds_of_several_files_are_put_together():
    sizes = [line for line in SIZES if "world_rank" not in line]  # of rank 3, as the first of `ON`
    lines = [*sizes, *NODES, *list(ON)[:1], "rank 4 on host gpu-08", "init: rank 5"]
    parts = [world(line, stream=f"{at}.log") for at, line in enumerate(lines)]
    together, whole = World(), World()
    for at, (part, line) in enumerate(zip(parts, lines, strict=True)):
        together.merge(part)
        take(whole, line, stream=f"{at}.log")
    assert together.size == whole.size
    assert together.node_of_rank == whole.node_of_rank
    assert together.notes() == whole.notes()
    streams = [f"{at}.log" for at in range(len(lines))]
    assert [*map(together.rank_of, streams)] == [*map(whole.rank_of, streams)]


def test_no_files():
    assert identify_files([]) == []


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


@given(st.text(max_size=200))
def test_any_line_may_be_taken(text):
    found = World()
    found.take(text, NO_PREFIX, "a.log")
    found.node(NO_PREFIX, None)
    assert found.size is None or found.size > 0


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
    """Whatever its digits are, and where they stand: the form is told without them."""
    text, who = gap.join(pieces), Prefix(kinds=("torch",), rank=rank)
    bare = re.sub("[0-9]", "", text)
    form = bare.lower().encode()
    every, some = World(), World()
    if may_describe_world(form):
        every.take(text, who, "a.log")
    if may := describes(bare, form):
        some.take(text, who, "a.log", may)
    assert vars(every) == vars(some)
