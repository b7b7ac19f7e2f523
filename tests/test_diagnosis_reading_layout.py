"""Ranks within nodes become global ones by what the logs say, or stay what they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric.diagnosis.ingest import ingest
from rmetric.diagnosis.job import Job
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.reading.stated_ranks import StatedRanks
from rmetric.diagnosis.reading.world import may_describe_world

LIBRARY = SignatureLibrary.shipped()


@pytest.fixture
def read(tmp_path):
    def read(**files: list[str]) -> Job:
        for name, lines in files.items():
            path = tmp_path / name.replace("__", "/").replace("_o", ".o").replace("_l", ".log")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{line}\n" for line in lines))
        return ingest([tmp_path], LIBRARY)

    return read


def node(*local_ranks: int) -> list[str]:
    """What ranks say that tells nothing but their rank within the node."""
    return [f"[default{one}]:loading shard of {one}" for one in local_ranks for _ in range(3)]


def seats(job: Job) -> dict[str, tuple[int | None, str | None]]:
    return {name: (one.rank, one.node) for name, one in sorted(job.streams.items())}


def ranks(job: Job) -> dict[int, set[str]]:
    """Rank -> its files."""
    return {one.rank: one.files for one in job.streams.values() if one.rank is not None}


OWN = {
    "starting on node-02 pid 77: RANK=17 LOCAL_RANK=1 WORLD_SIZE=24": {17},
    "RANK=17": {17},
    "export RANK=17": {17},
    "process group initialised: backend gloo, rank 17, world size 24": {17},
    "{'rank': 17, 'world_size': 24}": {17},
    "{'world_size': 24, 'rank': 17}": {17},
    "world size: 24 | rank: 17": {17},
    "Initializing distributed: GLOBAL_RANK: 17, MEMBER: 18/24": {17},
    "global rank 17": {17},
    "global_rank .................. 17": {17},
    "I am rank 17": {17},
    "this is global rank 17 of world size 24": {17},
    "rank 17 of 24 is up": {17},
    "[Rank 17/24] is up": {17},
    "Entry-HcclCommInitRootInfo:ranks[24], rank[17], rootinfo: host": {17},
    # of others, or of other groups
    "waiting for rank 3, world size 24": set(),
    "no heartbeat from rank 3 of world size 24": set(),
    "timeout: rank 3 did not join": set(),
    "LOCAL_RANK=1 WORLD_SIZE=24": set(),
    "local rank 1, world size 24": set(),
    "node_rank 1, world_size 24": set(),
    "tensor parallel rank 1, world size 4": set(),
    "tp_rank=1, world_size=4": set(),
    "NODE_RANK=2": set(),
    "first failure: rank 3 (local_rank: 3)": set(),
}


@pytest.mark.parametrize("line", list(OWN))
def test_what_tells_the_own_rank(line):
    own = StatedRanks()
    own.take(line)
    assert own.ranks == OWN[line]
    form = line.lower().encode().translate(None, b"0123456789")
    assert may_describe_world(form) or not own.ranks


def test_other_things_that_are_told_of_a_place():
    own = StatedRanks()
    for line in ("LOCAL_RANK: 3 - CUDA_VISIBLE_DEVICES: [0]", "group_rank=2", "--node_rank 2"):
        own.take(line)
    own.take("  global_ranks=[16, 17, 18, 19]")
    assert own == StatedRanks(locals={3}, node_ranks={2}, first_ranks={16})


# rule 1: a line of the speaker


def test_a_prefix_behind_the_local_one(read):
    job = read(
        a_l=[*node(0, 1), "[default0]:[rank0]: Traceback", "[default1]:[rank1]: Traceback"],
        b_l=[*node(0, 1), "[default0]:[rank2]: Traceback", "[default1]:[rank3]: Traceback"],
    )
    assert ranks(job) == {0: {"a.log"}, 1: {"a.log"}, 2: {"b.log"}, 3: {"b.log"}}


def test_ranks_that_are_dealt_out_in_turn(read):
    told = "[default{}]:init process group: rank {}, world size 4"
    job = read(
        a_l=[*node(0, 1), told.format(0, 0), told.format(1, 2)],
        b_l=[*node(0, 1), told.format(0, 1), told.format(1, 3)],
    )
    assert ranks(job) == {0: {"a.log"}, 2: {"a.log"}, 1: {"b.log"}, 3: {"b.log"}}


def test_one_that_speaks_of_another_is_outvoted(read):
    told = "[default{}]:init process group: rank {}, world size 8"
    job = read(
        a_l=node(0, 1, 2, 3),
        b_l=[
            *node(0, 1, 2, 3),
            *(told.format(one, 4 + one) for one in (0, 1, 2)),
            "[default3]:global rank 5 is not alive",
        ],
    )
    assert {rank for rank, files in ranks(job).items() if files == {"b.log"}} == {4, 5, 6, 7}


def test_another_rank_that_one_names_is_not_its_own(read):
    job = read(a_l=["--nproc_per_node=4", *node(0, 1, 2, 3), "[default0]:global rank 3 is gone"])
    assert set(ranks(job)) == {0, 1, 2, 3}


# rule 2: the distance that others of the node have


def test_one_line_of_one_rank_tells_those_of_its_node(read):
    job = read(**{
        "node-01_l": [*node(0, 1, 2), "torchrun: agent"],
        "node-02_l": [*node(0, 1, 2), "[default1]:[rank4]: Traceback"],
        "node-03_l": [*node(0, 1, 2), "[default0]:RANK=6 LOCAL_RANK=0 WORLD_SIZE=12"],
    })  # fmt: skip
    said = seats(job)
    assert {name: said[name] for name in said if name.startswith("rank")} == {
        f"rank {3 + at}": (3 + at, f"node-0{2 + at // 3}") for at in range(6)
    }
    # The first node's are of no known rank, and nobody else's; its agent is the node's stream.
    assert [name for name in said if not name.startswith("rank")] == [
        "node node-01", *(f"node node-01 local {one}" for one in range(3)),
    ]  # fmt: skip
    assert said["node node-01 local 1"] == (None, "node-01")


def test_files_of_ranks_below_folders_of_hosts(read):
    told = "init process group: rank {}, world size 4"
    job = read(**{
        "gpu041__attempt_0__0__stderr_l": [told.format(2)],
        "gpu041__attempt_0__1__stderr_l": ["silent about itself"],
        "gpu047__attempt_0__0__stderr_l": ["silent about itself"],
        "gpu047__attempt_0__1__stderr_l": [told.format(1)],
    })  # fmt: skip
    assert seats(job) == {
        "rank 0": (0, "gpu047"), "rank 1": (1, "gpu047"),
        "rank 2": (2, "gpu041"), "rank 3": (3, "gpu041"),
    }  # fmt: skip


def test_a_file_of_torchrun_is_of_the_one_rank_that_states_itself(read):
    """Whichever files of the folder are missing, and whatever the folders of nodes are called."""
    job = read(**{
        "clip-a__attempt_0__3__stderr_l": ["loading", "[rank3]: out of memory", "bye"],
        "clip-b__attempt_0__3__stderr_l": ["loading", "[rank11]: out of memory", "bye"],
        "clip-b__attempt_0__6__stderr_l": ["loading", "[rank14]: out of memory", "bye"],
    })  # fmt: skip
    assert set(ranks(job)) == {3, 11, 14}


def test_what_was_copied_from_another_log_tells_nothing(read):
    copied = "/logs/worker_1953.log-11454-[rank1953]: Traceback"
    job = read(**{f"worker-{at}__rank-0_l": ["loading", copied] for at in range(2)})
    assert set(ranks(job)) == {0, 1, 1953}


# rule 3: the node's number


@pytest.mark.parametrize(
    "tells",
    [
        "[launch.py:3] nnodes=2, num_local_procs=4, node_rank={}",
        "torchrun --nnodes=2 --nproc_per_node=4 --node_rank={} train.py",
        "  group_rank={} group_world_size=2 global_world_sizes=[8, 8]",
    ],
)
def test_the_number_of_a_node_by_its_agent(read, tells):
    job = read(a_l=[tells.format(1), *node(0, 2)], b_l=[tells.format(0), *node(0, 2)])
    assert ranks(job) == {4: {"a.log"}, 6: {"a.log"}, 0: {"b.log"}, 2: {"b.log"}}


def test_the_first_rank_that_an_agent_started(read):
    job = read(a_l=["  global_ranks=[4, 5]", *node(0, 1)], b_l=["  global_ranks=[0]", *node(0, 1)])
    assert ranks(job) == {4: {"a.log"}, 5: {"a.log"}, 0: {"b.log"}, 1: {"b.log"}}


def test_a_number_that_all_files_tell_is_none(read):
    line = "--nnodes=2 --nproc_per_node=4 --node_rank=0"
    job = read(a_l=[line, *node(0, 1)], b_l=[line, *node(0, 1, 2)])
    assert ranks(job) == {}


def test_the_tasks_of_srun_are_nodes(read):
    lines = [f"{task}: {line}" for task in range(2) for line in node(0, 1, 2)]
    assert set(ranks(read(a_l=["torchrun --nproc_per_node=4 --nnodes=2", *lines]))) == {
        0, 1, 2, 4, 5, 6,
    }  # fmt: skip


def test_a_list_of_nodes_and_prefixes_of_nodes_with_local_ranks(read):
    said = [f"[gpu04{at}:{one}] loading {one}" for at in (7, 5) for one in (0, 1) for _ in range(5)]
    job = read(a_l=["SLURM_JOB_NODELIST=gpu[045,047]", "[gpu045:0] WORLD_SIZE=4", *said])
    assert {name: one for name, one in seats(job).items() if name != "a.log"} == {
        "rank 0": (0, "gpu045"), "rank 1": (1, "gpu045"),
        "rank 2": (2, "gpu047"), "rank 3": (3, "gpu047"),
    }  # fmt: skip


# rule 4: the natural order of the nodes


def test_the_order_of_nodes_counts_where_all_is_said(read):
    size = "[default0]:WORLD_SIZE=6"
    files = {f"node-{at}_l": [size, *node(0, 1)] for at in (9, 10, 11)}
    assert ranks(read(**files)) == {
        2 * at + one: {f"node-{9 + at}.log"} for at in range(3) for one in range(2)
    }


@pytest.mark.parametrize(
    ("size", "local_ranks"),
    [("WORLD_SIZE=8", (0, 1)), ("no size", (0, 1)), ("WORLD_SIZE=6", (1, 2))],
)
def test_else_no_two_nodes_are_one(read, size, local_ranks):
    files = {f"node-{at}_l": [f"[default1]:{size}", *node(*local_ranks)] for at in (9, 10, 11)}
    job = read(**files)
    assert ranks(job) == {}
    assert all(len(one.files) == 1 for one in job.streams.values())
    assert len(job.streams) == 6
    assert job.streams["node node-9 local 1"].node == "node-9"


def test_an_order_that_lines_contradict_is_none(read):
    files = {f"node-{at}_l": ["[default0]:WORLD_SIZE=4", *node(0, 1)] for at in (1, 2)}
    files["node-1_l"].append("[default1]:[rank3]: Traceback")
    assert ranks(read(**files)) == {2: {"node-1.log"}, 3: {"node-1.log"}}


# as many nodes as ranks


def one_log_of_nodes(*stated: int | None) -> list[str]:
    """Lines of a log of as many nodes, each prefixed by its node; some state their rank."""
    own = [f"node-{at}: [rank{rank}]: step" for at, rank in enumerate(stated) if rank is not None]
    loads = [f"node-{at}: loading a shard" for at in range(len(stated)) for _ in range(3)]
    return [f"node-0: world_size={len(stated)}", *loads, *own]


def test_the_last_node_has_the_rank_that_is_left(read):
    job = read(a_l=one_log_of_nodes(None, 2, 0))
    assert {one.node: one.rank for one in job.streams.values()} == {
        "node-0": 1, "node-1": 2, "node-2": 0,
    }  # fmt: skip


@pytest.mark.parametrize("stated", [(None, 0, 7), (None, 2, 2)])
def test_ranks_that_cannot_be_one_each_leave_the_silent_node_without(read, stated):
    nodes = {one.node: one.rank for one in read(a_l=one_log_of_nodes(*stated)).streams.values()}
    assert nodes["node-0"] is None


# one node


@pytest.mark.parametrize("more", [[], ["[default0]:WORLD_SIZE=4"], ["--nproc_per_node=8"]])
def test_the_ranks_of_one_node_are_global(read, more):
    assert set(ranks(read(a_l=[*more, *node(0, 1, 3)]))) == {0, 1, 3}


def test_the_output_and_the_errors_of_one_node(read):
    job = read(train_out=[*node(0, 1)], train_err=[*node(0, 1), "[default1]:ValueError: of one"])
    assert {rank: len(files) for rank, files in ranks(job).items()} == {0: 2, 1: 2}


def test_one_log_of_several_nodes(read):
    job = read(a_l=["[default0]:WORLD_SIZE=6", *node(0, 1)])
    assert set(job.streams) == {"a.log local 0", "a.log local 1"}


def test_lines_of_libraries_name_the_node_of_a_file(read):
    nccl = "[default{}]:gpu041:{}:9 [0] NCCL INFO comm 0x1 rank {} nranks 4 cudaDev 0 - Init"
    job = read(a_l=[*node(0, 1), nccl.format(0, 70, 2), nccl.format(1, 71, 3)])
    assert seats(job) == {"rank 2": (2, "gpu041"), "rank 3": (3, "gpu041")}


def test_processes_that_tell_their_local_rank_only(read):
    files = {f"out{at}_l": [f"LOCAL_RANK: {at} - CUDA_VISIBLE_DEVICES: [0,1]"] for at in range(2)}
    assert ranks(read(**files)) == {0: {"out0.log"}, 1: {"out1.log"}}


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


@pytest.mark.parametrize(
    ("said", "size", "known"),
    [
        ("MASTER_ADDR=t-master-0 WORLD_SIZE=3 RANK={}", 3, True),
        ("RANK={} WORLD_SIZE=3", 3, True),
        ("MASTER_ADDR=t-master-0 WORLD_SIZE=3 RANK={}", 24, False),
        ("PET_NPROC_PER_NODE=8 --nproc-per-node=8 WORLD_SIZE=3 RANK={}", 3, False),
    ],
)
def test_the_environment_of_a_pod_of_one_process(read, said, size, known):
    """Of a pod of several processes it is the node's number."""
    sizes = [f"world size {size}"] * 8
    pods = {
        f"t-worker-{rank}_l": ["loading", "pod up " + said.format(rank + 1), *sizes, "ready"]
        for rank in range(2)
    }
    job = read(**pods, **{"t-master-0_l": ["loading", said.format(0), *sizes, "ready"]})
    assert set(ranks(job)) == ({0, 1, 2} if known else set())


@pytest.mark.parametrize(
    "said",
    [
        "JAX initialized coordinator: llama-0-0.llama:6002 process {} of 4",
        "I0708 06:23:54.9 130 manager.py:1964] [process={}][thread=MainThread][step=9] Saved",
    ],
)
def test_the_process_of_jax_is_its_rank(read, said):
    """The names of the files tell nothing."""
    files = {f"x{name}": ["begin", said.format(at), "end"] for at, name in enumerate("dcba")}
    assert set(ranks(read(**files))) == {0, 1, 2, 3}


def test_another_process_is_no_rank(read):
    said = "tokenizing: process {} of 4"
    files = {f"x{name}": ["begin", said.format(at), "end"] for at, name in enumerate("dcba")}
    assert ranks(read(**files)) == {}
