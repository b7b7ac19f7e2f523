"""World size and rank placement, from lines and from file names."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis.facts.graph import IdentityGraph
from rmetric.diagnosis.facts.statements import expanded, may_state
from rmetric.diagnosis.facts.world import World
from rmetric.diagnosis.reading.file_names import identify_files
from rmetric.diagnosis.reading.prefixes import NO_PREFIX, Prefix, PrefixParser


def graph(*lines: str, file: str = "a.log") -> IdentityGraph:
    """The graph of lines, each with what its form may state, as the pass over a file gives it."""
    found, prefixes = IdentityGraph(file), PrefixParser()
    for line in lines:
        who, start = prefixes.split(line.encode())
        text = line.encode()[start:].decode()
        bare = re.sub("[0-9]", "", text)
        found.take(text, who, may_state(bare, bare.lower().encode()))
    return found


def world(*lines: str, file: str = "a.log") -> World:
    return World(graph(*lines, file=file))


def together(*graphs: IdentityGraph) -> World:
    whole = IdentityGraph()
    for one in graphs:
        whole.merge(one)
    return World(whole)


SIZES = {
    "WORLD_SIZE=16": 16,
    "world_size ................. 64": 64,
    "using world size: 64, data-parallel-size: 4": 64,
    "{'world_size': 8, 'rank': 0}": 8,
    "Initializing distributed: GLOBAL_RANK: 3, MEMBER: 4/16": 16,
    "Total ranks: 32": 32,
    "Number of processes: 8": 8,
    "rank 3 of 16 is up": 16,
    "dedicated_ranks = 0, num_training_ranks = 8, images": 8,
    "  global_world_sizes=[16, 16]": 16,
    "torchrun --nnodes 4 --nproc_per_node 8 train.py": 32,
    "[INFO] [launch.py:3] nnodes=2, num_local_procs=8, node_rank=0": 16,
    "gpu041:22011:22055 [0] NCCL INFO comm 0x1 rank 3 nranks 16 cudaDev 0 - Init COMPLETE": 16,
    "[op_base.cc:413]Entry-HcclCommInitRootInfo:ranks[4], rank[0], rootinfo: host": 4,
    "tensor_model_parallel_world_size: 4": None,
    "LOCAL_WORLD_SIZE=8": None,
    "pipeline parallel world size: 4": None,
    "said": None,
    "hello world 16": None,
}


@pytest.mark.parametrize("line", list(SIZES))
def test_the_number_of_ranks(line):
    assert world(line).size == SIZES[line]


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


NODES = {
    "hosts=n0 n1 n2 n3 ": "n0 n1 n2 n3",
    ":::DLPAL image.sqsh 513 3 node[002-003,007] 'unknown' DGX": "node002 node003 node007",
    "SLURM_JOB_NODELIST=gpu[1-2]": "gpu1 gpu2",
    "slurm_job_nodelist=a1,b[08-09]": "a1 b08 b09",
}


@pytest.mark.parametrize("line", list(NODES))
def test_nodes_of_a_list_hold_the_ranks_in_blocks(line):
    nodes = NODES[line].split()
    found = world(line, f"WORLD_SIZE={2 * len(nodes)}")
    assert found.nodes == nodes
    assert [found.node(Prefix(), rank) for rank in range(2 * len(nodes))] == sorted(nodes * 2)
    assert found.node(Prefix(), 2 * len(nodes)) is None
    assert found.node(Prefix(task=1), None) == nodes[1]


ON = {
    "rank 3 is running on host gpu-07": (3, "gpu-07"),
    "starting on gpu-07 pid 77: RANK=3 LOCAL_RANK=1": (3, "gpu-07"),
    "host: gpu-07, rank: 3": (3, "gpu-07"),
    "[rank3]: SLURMD_NODENAME=gpu-07": (3, "gpu-07"),
    "- (node_id=a1, ip=10.0.0.2, pid=77) world_rank=3, local_rank=3": (3, "10.0.0.2"),
    "SetupAgent rankNum[4], rank[3], identifier[1], server[10.0.0.2%eth0]": (3, "10.0.0.2"),
}


@pytest.mark.parametrize("line", list(ON))
def test_the_node_of_a_rank(line):
    rank, node = ON[line]
    assert world(line).node_of_rank == {rank: node}
    assert world(line).node(Prefix(rank=rank), rank) == node


def test_the_node_of_a_task():
    assert world("srun: error: gpu-07: tasks 2-3: Killed").node_of_rank == {
        2: "gpu-07",
        3: "gpu-07",
    }


def test_the_node_that_most_lines_state_is_a_ranks():
    lines = ["rank 3 on host gpu-07", "rank 3 on host gpu-08", "rank 3 on host gpu-08"]
    assert world(*lines).node_of_rank == {3: "gpu-08"}


@pytest.mark.parametrize("line", ["rank 3 waits on step12", "hangs on cuda0, rank 3 world_size 8"])
def test_what_is_no_node(line):
    assert world(line).node_of_rank == {}


def test_the_report_of_torchrun():
    found = world("  host      : gpu-07", "  rank      : 3 (local_rank: 1)")
    assert found.node_of_rank == {3: "gpu-07"}


def test_workers_of_ray_by_their_process():
    found = world("- (node_id=a1, ip=10.0.0.2, pid=77) world_rank=3, local_rank=3")
    assert found.rank_of_process(Prefix(kinds=("ray",), pid=77, node="10.0.0.2")) == 3
    assert found.rank_of_process(Prefix(kinds=("ray",), pid=78, node="10.0.0.2")) is None


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


FILES = {
    "rank_3.log rank_10.log launcher.log": [(3, None), (10, None), (None, None)],
    "rank3.err rank3.out": [(3, None), (3, None)],
    "worker-0/rank-0.txt worker-1/rank-0.txt": [(0, "worker-0"), (1, "worker-1")],
    "node0/gpu_0.log node0/gpu_1.log node1/gpu_0.log node1/gpu_1.log": [
        (0, "node0"), (1, "node0"), (2, "node1"), (3, "node1"),
    ],
    "node0/rank_0.log node0/rank_1.log node1/rank_2.log node1/rank_3.log": [
        (0, "node0"), (1, "node0"), (2, "node1"), (3, "node1"),
    ],
    "node-07.out node-12.out": [(None, "node-07"), (None, "node-12")],
    "train_gpu041.err train_gpu042.err": [(None, "gpu041"), (None, "gpu042")],
    "r6i4n5.log r6i4n6.log": [(None, "r6i4n5"), (None, "r6i4n6")],
    "x/attempt_0/0/stderr.log x/attempt_0/1/stderr.log x/attempt_0/1/stdout.log": [
        (0, None), (1, None), (1, None),
    ],
    "w_1/device-1/plog-9.log w_1/device-2/plog-8.log": [(1, "w_1"), (2, "w_1")],
    "train_0000.log train_0001.log train_0002.log train_0003.log": [(r, None) for r in range(4)],
    "gpu041/rank_0.log gpu041/rank_1.log gpu042/rank_2.log gpu042/rank_3.log": [
        (0, "gpu041"), (1, "gpu041"), (2, "gpu042"), (3, "gpu042"),
    ],
    "tp_rank_0.log": [(None, None)],
    "result_0.txt result_1.txt result_2.txt result_3.txt": [(None, None)] * 4,
    "slurm-9_0.out slurm-9_1.out slurm-9_2.out slurm-9_3.out": [(None, None)] * 4,
    "train.log train.log.1 train.log.2": [(None, None)] * 3,
    "gpt2_n16-1832552.out gpt2_n4-1832555.out": [(None, None)] * 2,
    "run_2024.log": [(None, None)],
    "": [(None, None)],
}  # fmt: skip


@pytest.mark.parametrize("names", list(FILES))
def test_who_wrote_a_file(names):
    assert [(one.rank, one.node) for one in identify_files(names.split(" "))] == FILES[names]


def test_ranks_within_nodes_that_no_number_puts_in_order():
    names = [
        f"{node}/attempt_0/{rank}/stderr.log" for node in ("gpu041", "gpu047") for rank in range(2)
    ]
    said = identify_files(names)
    assert [one.node for one in said] == ["gpu041", "gpu041", "gpu047", "gpu047"]
    assert [(one.rank, one.local_rank) for one in said] == [(None, 0), (None, 1)] * 2


def test_ranks_within_nodes_of_which_one_is_missing():
    said = identify_files(
        ["node0/local_rank_0.log", "node0/local_rank_1.log", "node1/local_rank_1.log"]
    )
    assert [(one.rank, one.local_rank) for one in said] == [(None, 0), (None, 1), (None, 1)]


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
    found = IdentityGraph("a.log")
    found.take(text, NO_PREFIX)
    World(found).node(NO_PREFIX, None)
    assert World(found).size is None or World(found).size > 0


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
    every, some = IdentityGraph(), IdentityGraph()
    every.take(text, who)
    some.take(text, who, may_state(bare, form))
    assert vars(every) == vars(some)


@pytest.mark.parametrize(
    "line",
    [
        "world_size=99999999999",
        "torchrun --nnodes=99999999 --nproc_per_node=99999 train.py",
        "NCCL INFO comm 0x1 rank 5 nranks 999999999 cudaDev 0 - Init COMPLETE",
        "(TorchTrainer pid=1) - (node_id=e, ip=10.2.0.9, pid=7) world_rank=3, local_rank=2",
    ],
)
def test_what_is_no_number_of_ranks_is_no_size(line):
    assert world(line).size is None
