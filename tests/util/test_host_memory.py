"""Room in host memory: of the machine, of control groups, of one rank; snapshots that lack it."""

from __future__ import annotations

import pytest

from rmetric._util import host_memory
from rmetric._util.host_memory import available_memory, available_to_rank
from rmetric.rescue import Rescue, RescueConfig
from rmetric.rescue import snapshot as snapshots
from rmetric.rescue.snapshot_keeper import snapshots_kept
from tests.rescue.trainings import same, train

GB = 10**9


def system(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   64000000 kB\nBuffers: 1 kB\n"}


def unified(path, limit, use, cache=0):
    group = f"sys/fs/cgroup{path}"
    return {
        f"{group}/memory.max": f"{limit}\n",
        f"{group}/memory.current": f"{use}\n",
        f"{group}/memory.stat": f"anon 1\ninactive_file {cache}\n",
    }


def test_it_is_unknown_where_the_system_does_not_tell(tmp_path, monkeypatch):
    assert available_memory(tmp_path) is None
    monkeypatch.setattr(host_memory, "available_memory", lambda: None)
    assert available_to_rank() is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64 * 1024 * 10**6),
        (unified("/job/step", 10 * GB, 7 * GB), 3 * GB),
        (unified("/job/step", 10 * GB, 7 * GB, cache=2 * GB), 5 * GB),
        (unified("/job/step", "max", 7 * GB) | unified("/job", 9 * GB, 8 * GB), 1 * GB),
        (unified("", 9 * GB, 4 * GB), 5 * GB),  # a container sees its own group as the root
        (unified("/job/step", 5 * GB, 7 * GB), 0),
        (unified("/other", 1 * GB, 0), 64 * 1024 * 10**6),
    ],
)
def test_a_control_group_may_allow_less(tmp_path, files, expected):
    own = {"proc/self/cgroup": "0::/job/step\n"}
    assert available_memory(system(tmp_path, MACHINE | own | files)) == expected


def test_the_first_version_of_control_groups_has_other_names(tmp_path):
    group = "sys/fs/cgroup/memory/slurm/job_7"
    files = {
        "proc/self/cgroup": "5:cpuacct,memory:/slurm/job_7\n4:pids:/x\n0::/\n",
        f"{group}/memory.limit_in_bytes": f"{8 * GB}\n",
        f"{group}/memory.usage_in_bytes": f"{6 * GB}\n",
        f"{group}/memory.stat": f"cache 5\ntotal_inactive_file {GB}\n",
    }
    assert available_memory(system(tmp_path, MACHINE | files)) == 3 * GB


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("LOCAL_WORLD_SIZE", "4", 16),
        ("SLURM_NTASKS_PER_NODE", "8", 8),
        ("LOCAL_WORLD_SIZE", "many", 64),
        ("OTHER", "4", 64),
    ],
)
def test_the_ranks_of_a_node_share_it(monkeypatch, name, ranks, expected):
    for known in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(known, raising=False)
    monkeypatch.setattr(host_memory, "available_memory", lambda: 64)
    monkeypatch.setenv(name, ranks)
    assert available_to_rank() == expected


def test_snapshots_that_do_not_fit_are_given_up_and_the_training_goes_on(monkeypatch):
    monkeypatch.setattr(host_memory, "available_to_rank", lambda: 1000)
    rescued = train(Rescue())
    assert "5 snapshots of" in rescued["problem"]
    assert "do not fit into host memory, of which 1e-06 GB is available" in rescued["problem"]
    assert same(rescued, train())


def test_snapshots_that_fit_take_no_more_than_they_need(monkeypatch):
    """The room shrinks by what they take, and those without the optimiser's state go."""
    config, made = RescueConfig(every=5, probation=5, far=10), []
    init = snapshots.Buffer.__init__

    def counted(self, size, device, **more):
        made.append(size)
        init(self, size, device, **more)

    monkeypatch.setattr(snapshots.Buffer, "__init__", counted)
    train(Rescue(config))
    most, sizes = snapshots_kept(config), sorted(set(made))
    total = int(most * sizes[-1] / host_memory.MOST_OF_MEMORY) + 1
    made.clear()
    monkeypatch.setattr(
        host_memory,
        "available_to_rank",
        lambda: total - sum(n == sizes[-1] for n in made) * sizes[-1],
    )
    assert train(Rescue(config))["problem"] == ""
