"""Kernel logs beside the logs of ranks: clocks, names, the rank that its node's log confirms."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from rmetric.diagnosis import diagnose
from rmetric.diagnosis.reading.file_names import identify_files

BEGIN = datetime(2025, 3, 4, 10, 0, 0)


def at(seconds):
    return f"{BEGIN + timedelta(seconds=seconds):%Y-%m-%d %H:%M:%S}"


def kernel(seconds, node, text):
    return (
        f"{BEGIN + timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%S.000000+00:00} {node} kernel: {text}"
    )


def nccl(rank):
    return (
        f"[rank{rank}]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:33,"
        " unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.22.3"
    )


def written(folder, files):
    for name, lines in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join(lines) + "\n")
    return diagnose(folder)


def broken_link(device_line, pace=3):
    """16 ranks on two nodes; the ranks beside rank 13 log their communication's error first."""
    train = [f"{at(pace * step)} INFO gpu-a step {step} loss 2.1" for step in range(1, 200)]
    errors = [nccl(rank) for rank in (8, 12)]
    errors += [device_line, *(nccl(rank) for rank in (9, 10, 11, 14))]
    starts = [
        f"gpu-{'ab'[rank // 8]}:{4100 + rank}:{4200 + rank} [{rank % 8}] NCCL INFO"
        f" comm 0x55{rank:02} rank {rank} nranks 16 cudaDev {rank % 8} - Init COMPLETE"
        for rank in range(16)
    ]
    report = [
        "Root Cause (first observed failure):",
        "[0]:",
        f"  time      : {at(200 * pace).replace(' ', '_')}",
        "  host      : gpu-b",
        "  rank      : 12 (local_rank: 4)",
        "  exitcode  : 1 (pid: 4100)",
    ]
    of_node = [
        kernel(60 * pace, "gpu-b", "mlx5_core 0000:9c:00.0: mlx5_pcie_event: power (75W)."),
        kernel(
            200 * pace,
            "gpu-b",
            "NVRM: Xid (PCI:0000:c3:00): 74, pid=88, NVLink: fatal error",
        ),
    ]
    return {"train.log": [*starts, *train, *errors, *report], "kern.log": of_node}


def test_the_kernel_explains_errors_of_communication_that_are_logged_before_it(tmp_path):
    link = "[rank13]: RuntimeError: CUDA error: uncorrectable NVLink error detected"
    found = written(tmp_path, broken_link(link))
    assert found.family == "NVLink"
    assert found.nodes[0].rank == 13, "not rank 12, which only lost its communication"


def test_a_kernel_log_that_begins_later_and_ends_later_has_no_other_clock(tmp_path):
    files = broken_link("[rank13]: RuntimeError: CUDA error: uncorrectable NVLink error", pace=60)
    files["kern.log"].append(kernel(200 * 60 + 60, "gpu-b", "ib3: link down"))
    found = written(tmp_path, files)
    assert not [note for note in found.notes if "clock" in note]


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("dmesg-10.60.14.22.txt", "10.60.14.22"),
        ("logs/gpu-07.kern.log", "gpu-07"),
        ("dmesg_gpu-07.log.gz", "gpu-07"),
        ("journal-ip-26-0-161-60.log", "ip-26-0-161-60"),
        ("nodes/gpu-worker-17.journal.txt", "gpu-worker-17"),
        ("dmesg-train-worker-0.log", "train-worker-0"),
        ("kern.log", None),
        ("syslog.1", None),
        ("messages-20250821.gz", None),
        ("dmesg-job1234.log", None),
    ],
)
def test_a_kernel_log_is_of_the_machine_that_its_name_states(name, node):
    assert identify_files([name])[0].node == node


def test_the_kernels_kill_names_its_node(tmp_path):
    train = [f"{at(3 * step)} INFO step {step} loss 2.1" for step in range(1, 100)]
    killed = [
        "[Tue Mar  4 10:04:57 2025] python invoked oom-killer: gfp_mask=0x140cca, order=0",
        "[Tue Mar  4 10:04:57 2025] Out of memory: Killed process 77566 (python) total-vm:398120kB",
    ]
    found = written(tmp_path, {"train.log": train, "dmesg-10.60.14.22.txt": killed})
    assert found.cause == "kernel_out_of_memory"
    assert [one.node for one in found.nodes] == ["10.60.14.22"]
    assert found.stage == "train"


@pytest.mark.parametrize(("times", "named"), [(1, [2]), (4, [])])
def test_lightning_names_the_rank_whose_process_ended(tmp_path, times, named):
    train = [f"Epoch 0: {step}%|##   | {step}/100 [00:10<00:10, 1.0it/s]" for step in range(1, 80)]
    end = [
        *["ERROR: Unexpected segmentation fault encountered in worker."] * times,
        "[rank: 2] Child process with PID 39806 terminated with code 1. Forcefully terminating all"
        " other processes to avoid zombies",
        "line 19: 39744 Killed                  python train.py",
    ]
    begin = [
        f"Initializing distributed: GLOBAL_RANK: {rank}, MEMBER: {rank + 1}/4" for rank in range(4)
    ]
    found = written(tmp_path, {"train.log": [*begin, *train, *end]})
    assert found.cause == "segmentation_fault"
    assert [one.rank for one in found.nodes] == named, "what all ranks log accuses none"


def ready(rank, per_node=8):
    node = "gpu-" + "ab"[rank // per_node]
    return (
        f"{node}:{4100 + rank}:{4200 + rank} [{rank % per_node}] NCCL INFO comm 0x55{rank:02} rank"
        f" {rank} nranks 16 cudaDev {rank % per_node} busId {rank % per_node + 1:x}b000 - Init"
    )


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0000:6b:00): 79, pid=1, GPU has fallen off the bus.",
        "Out of memory: Killed process 4113 (python) total-vm:1kB",
    ],
)
def test_the_rank_of_a_gpu_or_a_process_that_the_kernel_names(tmp_path, line):
    train = [f"{at(3 * step)} INFO gpu-a step {step} loss 2.1" for step in range(1, 200)]
    found = written(
        tmp_path,
        {
            "train.log": [*map(ready, range(16)), *train],
            "kern.log": [kernel(600, "gpu-b", line)],
        },
    )
    assert (found.nodes[0].rank, found.nodes[0].node) == (13, "gpu-b")


def test_the_gpu_of_another_node_is_not_the_ranks(tmp_path):
    line = "NVRM: Xid (PCI:0000:6b:00): 79, pid=1, GPU has fallen off the bus."
    train = [f"{at(3 * step)} INFO gpu-a step {step} loss 2.1" for step in range(1, 200)]
    files = {
        "train.log": [*map(ready, range(16)), *train],
        "kern.log": [kernel(600, "gpu-c", line)],
    }
    assert [one.node for one in written(tmp_path, files).nodes] == ["gpu-c"]


@pytest.mark.parametrize(("back", "blamed"), [(True, False), (False, True)])
def test_a_file_server_that_came_back_explains_nothing(tmp_path, back, blamed):
    server = [kernel(300, "gpu-a", "nfs: server nas-03 not responding, still trying")]
    server += [kernel(302, "gpu-a", "nfs: server nas-03 OK")] if back else []
    train = [f"{at(3 * step)} INFO step {step} loss 2.1" for step in range(1, 100)]
    error = ["Traceback (most recent call last):", '  File "t.py", line 3', "KeyError: 'text'"]
    found = written(tmp_path, {"train.log": [*train, *error], "kern.log": server})
    named = [found.cause, *(one.cause for one in found.candidates)]
    assert ("network_file_system_trouble" in named) == blamed


def test_a_kill_of_days_before_did_not_end_the_job(tmp_path):
    train = [f"step {step} loss 2.1" for step in range(1, 100)]
    lost = [f"{at(86400)} [rank1]: ncclRemoteError: remote process exited or network error"]
    kills = [
        "[Tue Mar  4 10:00:00 2025] Memory cgroup out of memory: Killed process 7 (jupyter-lab)",
        "[Wed Mar  5 09:59:58 2025] Out of memory: Killed process 9 (python) total-vm:1kB",
    ]
    found = written(tmp_path, {"train.log": [*train, *lost], "dmesg-gpu-1.txt": kills})
    assert found.cause == "kernel_out_of_memory"


def test_folders_of_hosts_with_the_same_files_name_the_nodes():
    names = [f"bjyz-a800-0{node}/log/workerlog.{rank}" for node in (7, 8) for rank in range(4)]
    assert {one.node for one in identify_files(names)} == {"bjyz-a800-07", "bjyz-a800-08"}
    assert {one.node for one in identify_files(["run1/a.log", "run2/a.log"])} == {None}
    assert {one.node for one in identify_files(["x1/a.log", "x2/b.log"])} == {None}


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("train_a3-node-12.log", "a3-node-12"),
        ("plog/a3-node-12/plog-1.log", "a3-node-12"),
        ("train-node-12.log", "node-12"),
        ("node-12.log", "node-12"),
        ("run.gpu-node-3.out", "gpu-node-3"),
    ],
)
def test_the_whole_name_of_a_node(name, node):
    (one,) = identify_files([name])
    assert (one.node, one.node_number) == (node, int(node.rpartition("-")[2]))


def test_the_number_of_a_pod_stands_before_what_kubernetes_adds():
    pods = [f"pods/llama-slice-0-{at}-{end}.log" for at, end in enumerate(["b6rqk", "9vxw2"] * 2)]
    assert [one.rank for one in identify_files(pods)] == [0, 1, 2, 3]
    words = [f"llama-{at}-{end}.log" for at, end in enumerate(["train", "other"] * 2)]
    assert {one.rank for one in identify_files(words)} == {None}


def test_the_files_beside_a_schedulers_are_of_ranks():
    names = ["out/scheduler.log", "out/worker_0.log", "out/worker_11.log"]
    assert [one.rank for one in identify_files(names)] == [None, 0, 11]
    assert [one.rank for one in identify_files(["out/worker_0.log", "out/worker_1.log"])] == [
        None,
        None,
    ], "a worker may be a node"


def worker(rank, *end):
    """A rank of MindSpore's whose first attempt to join failed."""
    retry = (
        f"[WARNING] DISTRIBUTED({900 + rank},ffff,python):{BEGIN:%Y-%m-%d-%H:%M:%S}.813.853"
        " [cluster_context.cc:151] BuildCluster] Topology build timed out., retry(1/1200)."
    )
    steps = [
        f"{at(10 * step)},108 - mindformers[callback.py:529] - INFO - {{ step:[{step:5}/ 1000],"
        " loss: 2.057, per_step_time: 2475ms }"
        for step in range(1, 40)
    ]
    frames = [f'  File "/src/model_{line}.py", line {line}, in call' for line in range(30)]
    return [retry, *steps, *end, *(f"note {line}" for line in frames)]


def failed_link(own, other, second):
    when = f"{BEGIN + timedelta(seconds=second):%Y-%m-%d-%H:%M:%S}.833.707"
    return (
        f"EI0013: [PID: {900 + own}] {when} Execution_Error_ROCE_CQE(EI0013): An error CQE occurred"
        f" during operator execution. Local information: server 10.0.0.{own}, device ID 5, device"
        f" IP 192.168.0.{own}. Peer information: server 10.0.0.{other}, device ID 5, device IP"
        f" 192.168.0.{other}."
    )


def test_the_device_at_which_failed_links_end_is_named(tmp_path):
    """The others of its ring log their ends of the links before it does."""
    ends = {1: failed_link(1, 2, 400), 3: failed_link(3, 2, 401), 2: failed_link(2, 3, 402)}
    files = {
        f"worker_{rank}.log": worker(rank, *filter(None, [ends.get(rank)])) for rank in range(6)
    }
    found = written(tmp_path, {"scheduler.log": ["scheduler starts"], **files})
    assert (found.cause, found.nodes[0].name) == ("hccl_link_error", "rank 2")
    assert "2 of 2 failed links end at it" in found.nodes[0].why


def test_a_kernel_log_in_a_folder_is_of_the_machine_that_its_name_is():
    names = ["dmesg/dgx-c06.txt", "journal/10.2.0.9.log", "dmesg/run1.txt", "kernel/bench.log"]
    assert [one.node for one in identify_files(names)] == ["dgx-c06", "10.2.0.9", None, None]


def test_the_process_that_deepspeeds_launcher_started_is_a_rank(tmp_path):
    """The kernel names a process, and the launcher states its local rank and the nodes' order."""
    info = "{'gpu-1': [0, 1, 2, 3], 'gpu-2': [0, 1, 2, 3]}"
    spawned = [
        f"gpu-{node}: [{at(0)},200] [INFO] [launch.py:256:main] process {first + 2 * local} spawned"
        f" with command: ['/bin/python', 'sft.py', '--local_rank={local}', '--deepspeed']"
        for node, first in ((1, 7210), (2, 9210))
        for local in range(4)
    ]
    train = [f"gpu-1: [{at(9 * step)},100] step={step} loss=2.1" for step in range(1, 60)]
    lost = [f"gpu-{node}: {nccl(rank)}" for node, rank in ((1, 0), (2, 4), (1, 2))]
    ends = ["pdsh@gpu-1: gpu-1: ssh exited with exit code 250"]
    killed = "Out of memory: Killed process 9216 (python) total-vm:9kB, anon-rss:9kB, file-rss:0kB"
    files = {
        "launch.log": [
            f"gpu-1: [{at(0)},000] [INFO] [launch.py:146:main] WORLD INFO DICT: {info}",
            *spawned,
            *train,
            *lost,
            *ends,
        ],
        "journal/gpu-2.kern": [
            kernel(60, "gpu-2", "perf: interrupt took too long (2512 > 2500)"),
            kernel(540, "gpu-2", killed),
        ],
    }
    found = written(tmp_path, files)
    assert (found.cause, found.nodes[0].name) == ("kernel_out_of_memory", "rank 7")


def test_an_error_without_a_time_came_when_the_line_before_it_in_its_file_did(tmp_path):
    """Not when its own stream last stated one, minutes before the scheduler ended the job."""
    rank = [
        *(
            f"[titan] {at(20 * step)},252 - root - INFO - step: {step} loss: 2.4"
            for step in range(30)
        ),
        f"[rank6]:[E304 {at(702)[11:]}.999612882 ProcessGroupNCCL.cpp:555] [Rank 6] raised",
        "ncclRemoteError: A call failed possibly due to a network error",
        "Last error:",
        "NET/IB : Got completion from peer 10.128.12.3<41812> with status=12 opcode=0 len=0 vendor",
    ]
    when = at(700).replace(" ", "T")
    end = f"slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT {when} DUE TO PREEMPTION ***"
    found = written(tmp_path, {"n1/rank6.log": rank, "slurm.out": ["starting", end]})
    assert (found.outcome, found.cause) == ("terminated", "slurm_preempted")


def test_a_task_of_srun_that_starts_the_ranks_of_its_node_is_no_rank(tmp_path):
    lines = [f"{task}: [rank{8 * task + local}]: up" for task in range(8) for local in range(8)]
    lines += [
        "5: slurmstepd: error: pyxis: container start failed with error code: 1",
        "srun: error: pool0-0057: task 5: Exited with exit code 1",
    ]
    lines += [
        f"{rank // 8}: [rank{rank}]: torch.distributed.DistStoreError: Timed out after 601 seconds"
        " waiting for clients. 56/64 clients joined."
        for rank in range(64)
        if rank // 8 != 5
    ]
    found = written(tmp_path, {"job.err": lines})
    assert found.cause == "container_start_failed"
    assert found.nodes[0].node in ("pool0-0057", "task 5")
    assert found.nodes[0].name != "rank 5"


def test_the_worker_of_ray_whose_traceback_is_in_the_drivers_log(tmp_path):
    workers = [
        f"(TorchTrainer pid=9, ip=10.0.0.1) - (node_id=ab, ip=10.0.0.{1 + rank // 2},"
        f" pid={300 + rank}) world_rank={rank}, local_rank={rank % 2}, node_rank={rank // 2}"
        for rank in range(4)
    ]
    lines = [
        *workers,
        *(
            f"(RayTrainWorker pid=300, ip=10.0.0.1) {at(5 * step)} step {step} loss 2.1"
            for step in range(60)
        ),
        "ray.exceptions.RayTaskError(KeyError): ray::_RayTrainWorker__execute.get_next() (pid=303,"
        " ip=10.0.0.2, actor_id=a90b, repr=<ray.train._internal.worker_group.RayTrainWorker>)",
        '  File "/app/collate.py", line 67, in __call__',
        "    grid = self.grid_for[key]",
        "KeyError: (5, 1)",
    ]
    found = written(tmp_path, {"driver.log": lines})
    assert (found.cause, found.nodes[0].name) == ("key_error", "rank 3")


def test_an_error_at_the_end_of_a_file_without_times_was_not_outlived(tmp_path):
    """The last time in its file is of the start, and other ranks logged steps after it."""
    files = {
        f"log/workerlog.{rank}": [
            f"[{at(0)},000] [    INFO] - Total optimization steps = 12,000",
            *(
                [
                    f"[{at(5 * step)},000] [    INFO] - step: {step} loss: 2.1"
                    for step in range(1, 90)
                ]
                if rank == 0
                else []
            ),
        ]
        for rank in range(4)
    }
    files["log/workerlog.2"] += [
        "Traceback (most recent call last):",
        '  File "/work/run_pretrain.py", line 578, in <module>',
        "ExternalError: CUDA error(220), uncorrectable NVLink error detected during the execution.",
    ]
    found = written(tmp_path, files)
    assert (found.outcome, found.cause, found.nodes[0].name) == ("failed", "nvlink_error", "rank 2")


@pytest.mark.parametrize(("after", "outcome"), [(7000, "healthy"), (150, "failed")])
def test_a_machine_that_breaks_after_the_planned_end_is_no_failure_of_the_job(
    tmp_path, after, outcome
):
    """Whether two hours later, or before by a clock of another zone."""
    train = [f"{at(3 * step)} INFO step {step}/100 loss 2.1" for step in range(1, 101)]
    if outcome == "failed":
        train = train[:50]
    else:
        train.append(f"{at(301)} INFO Training completed")
    lost = "NVRM: Xid (PCI:0000:bb:00): 79, pid=4, name=python, GPU has fallen off the bus."
    kern = [kernel(-900, "gpu-a", "nvidia-nvswitch0: up"), kernel(after, "gpu-a", lost)]
    found = written(tmp_path, {"train.log": train, "gpu-a.dmesg": kern})
    assert found.outcome == outcome


@pytest.mark.parametrize(
    ("zone", "behind", "lost"),
    [
        (-9, 0, True),  # the kernel in UTC, the job nine hours later
        (5, 0, True),
        (0, 0, True),
        (-9, 240, True),  # and the node's own clock is behind those of the others
        (-9.4, 0, False),  # of this morning: whole hours alone are a difference of zones
        (-3.2, 0, False),
    ],
)
def test_a_gpu_lost_by_the_clock_of_another_zone_ended_its_node(tmp_path, zone, behind, lost):
    train = [f"{at(5 * step)} gpu-07 step {step} loss 2.1" for step in range(200)]
    end = 1000 - behind
    local = [f"{at(30)} rank 8 of 16 ready", f"{at(end)} ERROR a worker process ended with code 1"]
    fault = "NVRM: Xid (PCI:0000:c3:00): 79, pid=7, name=python, GPU has fallen off the bus."
    found = written(
        tmp_path,
        {
            "gpu-07.log": [*train, f"{at(1001)} gpu-07 {nccl(0)}"],
            "gpu-08.log": local,
            "dmesg_gpu-08.txt": [
                kernel(-40_000, "gpu-08", "perf: interrupt took too long"),
                kernel(end - 15 + 3600 * zone, "gpu-08", fault),
            ],
        },
    )
    assert (found.cause in ("gpu_fell_off_the_bus", "xid_79_fallen_off_the_bus")) is lost


@pytest.mark.parametrize("ended", [True, False])
def test_a_planned_end_outlives_a_fault_by_a_clock_since_boot(tmp_path, ended):
    train = [f"{at(5 * step)} step {step} loss 2.1" for step in range(200)]
    end = "Training completed successfully" if ended else "Segmentation fault (core dumped)"
    fault = "[81244.300187] NVRM: Xid (PCI:0000:41:00): 31, pid=6120, name=python3, MMU Fault"
    boot = "[    0.000000] Linux version 6.8.0-52-generic"
    found = written(
        tmp_path, {"train.log": [*train, f"{at(1001)} {end}"], "dmesg.txt": [boot, fault]}
    )
    assert found.outcome == ("healthy" if ended else "failed")


@pytest.mark.parametrize("since", [1500, 5])
def test_a_cuda_error_without_a_time_is_of_the_gpu_that_the_kernel_lost(tmp_path, since):
    """The last line with a time may stand long before it; the kernel's comes in between."""
    train = [f"{at(5 * step)} gpu-07 step {step} loss 2.1" for step in range(400)]
    said = [*TRACED.splitlines(), "RuntimeError: CUDA error: unspecified launch failure"]
    begin, end = f"{at(2000 - since)} [rank8]: at work", f"{at(2020)} [rank8]: ended"
    rank = [begin, *(f"[rank8]: {line}" for line in said), end]
    faults = [
        "pcieport 0000:be:01.0: pciehp: Slot(12): Link Down",
        "NVRM: Xid (PCI:0000:c3:00): 79, pid=7, name=python, GPU has fallen off the bus.",
    ]
    kern = [kernel(0, "gpu-08", "up"), *(kernel(2001, "gpu-08", fault) for fault in faults)]
    found = written(tmp_path, {"gpu-07.log": train, "gpu-08.log": rank, "dmesg_gpu-08.txt": kern})
    assert found.cause == "gpu_fell_off_the_bus"
    why = {one.cause: one.why for one in found.candidates}
    assert why["cuda_launch_failure"] == "follows gpu_fell_off_the_bus"
    assert "cuda_launch_failure" not in why["xid_79_fallen_off_the_bus"]


TRACED = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    step()'
