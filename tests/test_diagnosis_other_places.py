"""What logs beside a job's say of other jobs, nodes and times, and of the job itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.ingest import ingest
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.reading.file_names import identify_files
from rmetric.diagnosis.reading.other_jobs import is_of_another, numbers_in
from rmetric.diagnosis.result import Diagnosis

DAY = "2025-06-28"


def steps(number: int = 60, *, hour: int = 1) -> list[str]:
    return [f"{DAY} {hour:02d}:{at:02d}:00 INFO step {at} loss 2.10" for at in range(number)]


def written(folder: Path, **files: str | list[str]) -> Diagnosis:
    """The diagnosis of files; "__" in a name stands for its dots."""
    for name, text in files.items():
        lines = text if isinstance(text, list) else [text]
        (folder / name.replace("__", ".")).write_text("\n".join(lines) + "\n")
    return diagnose([folder])


def controller(*own: str) -> list[str]:
    others = [
        f"[{DAY}T01:{at:02d}:30.123] _job_complete: JobId={7000 + at} WEXITSTATUS {at % 2 * 137}"
        for at in range(0, 58, 3)
    ]
    late = [
        f"[{DAY}T01:59:40.000] Time limit exhausted for JobId=7099",
        f"[{DAY}T02:09:10.000] _job_complete: JobId=7098 WEXITSTATUS 0",
    ]
    return [*others, *own, *late]


@pytest.mark.parametrize("named_in", ["log", "name"])
def test_other_jobs_of_a_schedulers_log_are_left_out(named_in: str, tmp_path: Path) -> None:
    own = f"[{DAY}T02:00:00.000] Time limit exhausted for JobId=6500"
    end = (
        f"slurmstepd: error: *** JOB 6500 ON cn-1 CANCELLED AT {DAY}T02:00:00 DUE TO TIME LIMIT ***"
    )
    log = [*steps(), end] if named_in == "log" else steps()
    found = written(tmp_path, train_6500__out=log, slurmctld__log=controller(own))
    assert (found.outcome, found.cause) == ("terminated", "slurm_time_limit")
    assert not any("7099" in one.text for one in found.events)


def test_a_job_that_nothing_names_keeps_all_of_a_schedulers_log(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("\n".join(steps()) + "\n")
    (tmp_path / "slurmctld.log").write_text("\n".join(controller()) + "\n")
    job = ingest([tmp_path], SignatureLibrary.shipped())
    assert ("slurm_time_limit", "slurmctld.log") in job.matches


@pytest.mark.parametrize(
    ("line", "other"),
    [
        (b"[2024-04-18T12:00:31.781] [77.0] error: *** STEP 77.0 ON a CANCELLED ***", False),
        (b"[2024-04-18T12:00:31.781] [88.batch] done with job", True),
        (b"launch task StepId=88.0 request from UID:1", True),
        (b"requeue JobId=88 to reclaim resources for JobId=77", False),
        (b"step 88 loss 2.1", False),
    ],
)
def test_the_job_that_a_schedulers_line_is_about(line: bytes, other: bool) -> None:
    assert is_of_another(line, {b"77"}) is other


def test_numbers_of_jobs_in_names() -> None:
    assert numbers_in("logs/train-90211.out.3") == {"90211"}


EVENTS = [
    "LAST SEEN   TYPE      REASON         OBJECT           MESSAGE",
    "66m         Normal    Scheduled      pod/fit-0-0-hx4rz   "
    "Successfully assigned a/fit-0-0-hx4rz to pool-7c1d",
    "40m         Warning   NodeNotReady   node/{node}   Node {node} status is now: NodeNotReady",
]


def test_a_node_that_no_pod_was_given_does_not_end_the_job(tmp_path: Path) -> None:
    events = [line.format(node="pool-11aa") for line in EVENTS]
    found = written(tmp_path, pod__log=steps(), events__txt=events)
    assert found.outcome == "healthy"


def test_the_node_of_a_pod_does(tmp_path: Path) -> None:
    events = [line.format(node="pool-7c1d") for line in EVENTS]
    found = written(tmp_path, pod__log=steps(), events__txt=events)
    assert (found.outcome, found.cause) == ("failed", "node_not_ready")


def test_a_row_to_be_remapped_did_not_end_a_job_that_ended_as_planned(tmp_path: Path) -> None:
    kernel = "[79222.100000] NVRM: Xid (PCI:0000:87:00): 63, pid=1305, name=python3, Row Remapper"
    ended = written(tmp_path, train__log=[*steps(), "mpirun exit status: 0"], dmesg__gpu_1=kernel)
    assert ended.outcome == "healthy"
    (tmp_path / "train.log").write_text("\n".join(steps()) + "\n")
    assert diagnose([tmp_path]).outcome == "failed"


TAKEN_DOWN = [
    "[rank{rank}]:[E0628 {hour}:30:03.600 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=70, OpType={op}, NumelIn=1, NumelOut=8, "
    "Timeout(ms)=1800000) ran for 1800026 milliseconds before timing out.",
    "[rank{rank}]:[E0628 {hour}:30:05.400 ProcessGroupNCCL.cpp:684] [Rank {rank}] Some NCCL "
    "operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, "
    "subsequent GPU operations might run on corrupted/incomplete data.",
    "[rank{rank}]:[E0628 {hour}:30:05.400 ProcessGroupNCCL.cpp:698] [Rank {rank}] To avoid data "
    "inconsistency, we are taking the entire process down.",
]


@pytest.mark.parametrize("hour", ["13", "07"])
def test_errors_by_the_clock_of_another_zone_were_not_outlived(hour: str, tmp_path: Path) -> None:
    for rank in range(4):
        folder = tmp_path / "none_x" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        op = "ALLGATHER" if rank == 2 else "ALLREDUCE"
        errors = [line.format(rank=rank, hour=hour, op=op) for line in TAKEN_DOWN]
        (folder / "stderr.log").write_text("\n".join(errors) + "\n")
        lines = [line.replace("INFO", f"INFO rank={rank}") for line in steps(hour=13)]
        (folder / "stdout.log").write_text("\n".join(lines) + "\n")
    found = diagnose([tmp_path])
    assert (found.outcome, found.cause) == ("failed", "collectives_differ")
    assert found.nodes[0].rank == 2
    behind = any("h behind the others" in note for note in found.notes)
    assert behind is (hour == "07")


def test_hydras_report_follows_what_ended_its_program(tmp_path: Path) -> None:
    ends = [line.format(rank=1, hour="02", op="ALLREDUCE") for line in TAKEN_DOWN]
    report = [
        "Error executing job with overrides: ['trainer.save_freq=20']",
        "Traceback (most recent call last):",
        '  File "main.py", line 64, in main',
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    ]
    found = written(tmp_path, job__log=[*steps(), *ends, *report])
    assert found.cause in ("nccl_timeout", "nccl_failed_or_timed_out")


def test_who_tells_of_a_failed_node_has_not_failed(tmp_path: Path) -> None:
    ends = [
        "srun: error: Node failure on c3-14",
        f"slurmstepd: error: *** JOB 6500 ON c3-11 CANCELLED AT {DAY}T02:00:00 DUE TO NODE "
        "FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
    ]
    found = written(tmp_path, node0__log=[*steps(), *ends], node1__log=steps())
    assert [one.node for one in found.nodes] == ["c3-14"]


LOST = (
    "{host}:{pid}:77 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote "
    "peer {peer}<4{pid}>"
)


@pytest.mark.parametrize(
    ("peer", "node"),
    [
        ("fit-worker-1.fit.train.svc.cluster.local", "fit-worker-1"),
        ("10-42-3-18.fit.ml.svc.cluster.local", "10.42.3.18"),
    ],
)
def test_the_log_of_one_node_names_the_one_it_lost(peer: str, node: str, tmp_path: Path) -> None:
    lost = [LOST.format(host="fit-worker-2", pid=410 + at, peer=peer) for at in range(3)]
    found = written(tmp_path, **{"fit-worker-2__log": [*steps(), *lost]})
    assert [one.node for one in found.nodes][:1] == [node]


def test_the_node_that_lost_connections_itself_is_not_the_one(tmp_path: Path) -> None:
    peer = "cn-16.hpc"
    lost = [LOST.format(host="cn-15", pid=410 + at, peer=peer) for at in range(3)]
    own = (
        "cn-16:903:909 [4] transport/net_ib.cc:1895 NCCL WARN NET/IB: Got completion from peer "
        "10.8.2.17<45225> with status=12 opcode=0 len=0 vendor err 129"
    )
    found = written(tmp_path, job__log=[*steps(), own, *lost, "srun: error: Node failure on cn-17"])
    assert found.nodes[0].node == "cn-17"


def test_what_a_rank_lacks_tells_nothing_where_a_node_without_logs_was_lost(tmp_path: Path) -> None:
    for rank in range(4):
        lost = [LOST.format(host=f"w-{rank // 2}", pid=410 + rank, peer="w-7.hpc")] * (rank != 3)
        lines = [
            line.replace("INFO", f"INFO [rank{rank}]") for line in steps(58 if rank == 3 else 60)
        ]
        (tmp_path / f"rank_{rank}.log").write_text("\n".join([*lines, *lost]) + "\n")
    found = diagnose([tmp_path])
    assert found.nodes[0].node == "w-7"


HCCN = [
    "===== hccn_tool -i 3 -link_stat -g",
    "[device 3]link down count     : 2",
    "[device 3]link change records :",
    "[device 3]    Sat Jun 28 02:00:20 2025    LINK UP",
    "[device 3]    Sat Jun 28 02:00:01 2025    LINK DOWN",
    "[device 3]    Tue Jun 24 18:47:36 2025    LINK UP",
    "[device 3]    Tue Jun 24 18:47:25 2025    LINK DOWN",
]
CQE = (
    "EI0013: [PID: {pid}] 2025-06-28-02:00:26.770.496 A ROCE CQE error occurred during operator "
    "execution. Local information: server 172.16.7.{own}, device ID 3, device IP 29.81.7.14. Peer "
    "information: server 172.16.7.{peer}, device ID 3, device IP 29.81.8.14."
)


def test_the_end_of_a_link_whose_nodes_tool_lists_it_as_down(tmp_path: Path) -> None:
    """The tool lists the newest record first, so its last one is of long before."""
    registered = [
        f"ProcessRegister] The new node: {rank}(role: MSWORKER), rank id: {rank}, device id: "
        f"{rank % 8}, hostname: npu-n1{rank // 8 + 1}, ip: 172.16.7.1{rank // 8 + 1} is registered"
        for rank in range(16)
    ]
    for node, ranks in ((0, (0, 3)), (1, (8, 11))):
        folder = tmp_path / f"msrun_log_node{node}"
        folder.mkdir()
        for rank in ranks:
            error = [CQE.format(pid=41251 + rank, own=11 + node, peer=12 - node)] * (
                rank in (3, 11)
            )
            (folder / f"worker_{rank}.log").write_text("\n".join([*steps(), *error]) + "\n")
    (tmp_path / "msrun_log_node0" / "scheduler.log").write_text("\n".join(registered) + "\n")
    (tmp_path / "hccn_npu-n12.txt").write_text("\n".join(HCCN) + "\n")
    found = diagnose([tmp_path])
    assert (found.cause, found.nodes[0].rank) == ("hccl_link_error", 11)


@pytest.mark.parametrize(
    ("names", "nodes"),
    [
        (
            ["fit-worker-0-0-k7xwq.log", "fit-worker-0-1-9tbz4.log", "fit-worker-0-2-m2rlf.log"],
            ["fit-worker-0-0", "fit-worker-0-1", "fit-worker-0-2"],
        ),
        (["ift-node-0-0-hx4rz.log", "ift-node-0-1-q8m2d.log"], ["ift-node-0-0", "ift-node-0-1"]),
    ],
)
def test_pods_of_a_jobset(names: list[str], nodes: list[str]) -> None:
    found = identify_files(names)
    assert [one.node for one in found] == nodes
    assert not any(one.ranked for one in found)


def test_a_rack_is_no_rank() -> None:
    assert identify_files(["kernel.h800-r12-n07.jsonl"])[0].rank is None
    assert identify_files(["r12.log"])[0].rank == 12


def test_ranks_of_mindspore_on_several_nodes() -> None:
    names = ["node0/scheduler.log", "node0/worker_3.log", "node1/worker_11.log"]
    assert [one.rank for one in identify_files(names)] == [None, 3, 11]
    again = ["node0/scheduler.log", "node0/worker_3.log", "node1/worker_3.log"]
    assert [one.rank for one in identify_files(again)][:2] == [None, 3]


def test_a_log_whose_newest_line_comes_first(tmp_path: Path) -> None:
    lines = [*steps(40), f"{DAY} 01:50:00 torch.OutOfMemoryError: CUDA out of memory."]
    for name, order in (("old", 1), ("new", -1)):
        (tmp_path / f"{name}.log").write_text("\n".join(lines[::order]) + "\n")
    old, new = (diagnose([tmp_path / f"{name}.log"]) for name in ("old", "new"))
    assert (new.outcome, new.cause, new.iteration) == (old.outcome, old.cause, 39)
    assert (old.events[0].line, new.events[0].line) == (41, 1), "as the file has them"


def test_a_log_that_falls_back_once_is_not_turned_round(tmp_path: Path) -> None:
    """As where an hour is set back, or one file holds two attempts."""
    lines = [*steps(40), *steps(40), f"{DAY} 01:50:00 KeyError: 'a'"]
    (tmp_path / "train.log").write_text("\n".join(lines) + "\n")
    assert [one.line for one in diagnose([tmp_path]).events][:1] == [81]


COMPLAINT = "/var/spool/slurmd/job1/slurm_script: line 14: module: command not found"


def test_what_all_nodes_complain_of_at_first_was_outlived_by_who_trained(tmp_path: Path) -> None:
    log = [COMPLAINT, *steps()]
    assert (
        written(tmp_path, slurm_0__out=log, slurm_1__out=[COMPLAINT, "setup"]).outcome == "healthy"
    )
    (tmp_path / "slurm_0.out").write_text(COMPLAINT + "\n")
    assert diagnose([tmp_path]).cause == "command_not_found"


def test_the_node_that_knows_no_name_keeps_the_others_waiting(tmp_path: Path) -> None:
    waits = ["torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"]
    unknown = (
        "[W socket.cpp:601] [c10d] The IPv6 network addresses of (jwb0097i, 6000) cannot be "
        "retrieved (gai error: -3 - Temporary failure in name resolution)."
    )
    own = [
        unknown,
        unknown,
        "RendezvousConnectionError: The connection to the C10d store has failed.",
    ]
    found = written(tmp_path, jwb0097__log=waits, jwb1203__log=own, jwb1204__log=waits)
    assert found.cause == "rendezvous_name_unknown"


def test_kernels_of_several_nodes_are_of_one_attempt(tmp_path: Path) -> None:
    (tmp_path / "kern").mkdir()
    for at in range(3):
        begin = 1000000 * (at + 1)
        lines = [
            f"[{begin + 600 * line}.300000] LustreError: 11-0: scratch-OST0021: Connection lost"
            for line in range(9)
        ]
        (tmp_path / "kern" / f"nid00210{at}.dmesg").write_text("\n".join(lines) + "\n")
    assert len(written(tmp_path, all__log=steps()).attempts) == 0


def test_events_of_an_earlier_attempt_in_a_folder_of_its_own(tmp_path: Path) -> None:
    for attempt, hour in enumerate((1, 3)):
        (tmp_path / f"try{attempt}").mkdir()
        lines = [f"{DAY} {hour:02d}:00:00 begins", *steps(50, hour=hour), "KeyError: 'a'"]
        (tmp_path / f"try{attempt}" / "rank.log").write_text("\n".join(lines) + "\n")
    events = [
        f"{DAY} 01:00:02  Normal   Started       pod/fit-0   Started container fit",
        f"{DAY} 01:49:40  Warning  NodeNotReady  pod/fit-0   Node is not ready",
        f"{DAY} 03:00:02  Normal   Started       pod/fit-0   Started container fit",
    ]
    found = written(tmp_path, events__txt=events)
    assert (found.cause, len(found.attempts)) == ("key_error", 2)


@pytest.mark.parametrize("watched", [True, False])
def test_a_watcher_that_saw_nothing_new_tells_the_hang(watched: bool, tmp_path: Path) -> None:
    """The hour between the last step and the end may else be one between two zones."""
    end = "slurmstepd: error: *** JOB 55 ON gh-1 CANCELLED AT 2025-06-28T02:59:25 ***"
    said = ["[watch.sh 02:56:25] all.log unchanged for 3400 s"] * watched
    found = written(tmp_path, all__log=steps(), slurm__out=[*said, end])
    assert found.outcome == ("failed" if watched else "terminated")


def test_a_stopped_process_explains_the_end_of_a_job_that_waited_for_it(tmp_path: Path) -> None:
    end = f"slurmstepd: error: *** JOB 55 ON gh-1 CANCELLED AT {DAY}T20:00:31 DUE TO TIME LIMIT ***"
    ps = [
        "ann  51951  51880 Rl  Sat Jun 28 00:59:18 2025  13:31:02  99.2 -          python train.py",
        "ann  51952  51880 {}  Sat Jun 28 00:59:18 2025  13:31:02   5.5 {} python train.py",
    ]
    pids = "INFO rank 0 pid 51951, rank 1 pid 51952, rank 2 pid 51953"
    log = [pids, *[f"iter {at}: loss 2.10, time 510.58ms" for at in range(60)], end]
    waits = written(tmp_path, train__out=log, ps__txt="\n".join(ps).format("Sl", "do_sys_poll    "))
    assert waits.outcome == "terminated"
    found = written(tmp_path, train__out=log, ps__txt="\n".join(ps).format("Tl", "do_signal_stop "))
    assert (found.outcome, found.cause) == ("failed", "process_stopped")
    assert [one.rank for one in found.nodes] == [1]
