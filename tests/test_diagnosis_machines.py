"""Kernel logs beside the logs of ranks: clocks, names, the rank that its node's log confirms."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from rmetric.diagnosis.reading.file_names import identify_files

BEGIN = datetime(2025, 3, 4, 10, 0, 0)


def at(seconds):
    return f"{BEGIN + timedelta(seconds=seconds):%Y-%m-%d %H:%M:%S}"


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("dmesg-10.60.14.22.txt", "10.60.14.22"),
        ("logs/gpu-07.kern.log", "gpu-07"),
        ("dmesg_gpu-07.log.gz", "gpu-07"),
        ("journal-ip-26-0-161-60.log", "ip-26-0-161-60"),
        ("kern.log", None),
        ("syslog.1", None),
        ("messages-20250821.gz", None),
        ("dmesg-job1234.log", None),
    ],
)
def test_a_kernel_log_is_of_the_machine_that_its_name_states(name, node):
    assert identify_files([name])[0].node == node


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


def test_a_kernel_log_in_a_folder_is_of_the_machine_that_its_name_is():
    names = ["dmesg/dgx-c06.txt", "journal/10.2.0.9.log", "dmesg/run1.txt", "kernel/bench.log"]
    assert [one.node for one in identify_files(names)] == ["dgx-c06", "10.2.0.9", None, None]
