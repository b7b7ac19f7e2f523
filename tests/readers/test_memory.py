"""Memory and times in the units of the programs that log them."""

import json

import pytest

from rmetric.readers import read_log

GIB = 2.0**30
PROGRAMS = {
    "ms-swift": ({"memory(GiB)": 20.5}, {"device": 20.5 * GIB}),
    "torchtitan": (
        {"memory/max_reserved(GiB)": 20.5, "memory/max_reserved(%)": 25.0},
        {"device": 20.5 * GIB, "device_percent": 25.0},
    ),
    "composer": ({"memory/current_allocated_mem": 20.5}, {"device": 20.5e9}),
    "wandb": (
        {
            "system.proc.memory.rssMB": 700.0,
            "system.gpu.0.memoryAllocated": 40.0,
            "system.memory": 55,
        },
        {"host": 700e6, "device_percent": 40.0, "host_percent": 55.0},
    ),
    "verl": (
        {"perf/max_memory_reserved_gb": 20.5, "perf/cpu_memory_used_gb": 90.0},
        {"device": 20.5e9, "host": 90e9},
    ),
    "megatron": ({"mem-allocated-bytes": 2e10}, {"device": 2e10}),
    "mmcv": ({"memory": 4321}, {"device": 4321 * 2.0**20}),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_memory_is_read_in_bytes(tmp_path, program):
    columns, expected = PROGRAMS[program]
    path = tmp_path / "log.jsonl"
    rows = [{"step": step, "loss": 3.0 - step / 100, **columns} for step in range(1, 31)]
    path.write_text("\n".join(map(json.dumps, rows)))
    records = read_log(path).run.records
    assert [record.memory for record in records] == [expected] * 30
    assert records[0].training_loss == 2.99


def test_ms_swift_prints_a_dict(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("\n".join(str({"loss": 2.0, "memory(GiB)": 2.5, "epoch": n}) for n in (1, 2)))
    assert [record.memory for record in read_log(path).run.records] == [{"device": 2.5 * GIB}] * 2


@pytest.mark.parametrize(
    ("wait", "step", "scale"),
    [
        ("data_time", "time", 1),
        ("time/data_loading_ms", "time/step_ms", 1000),
        ("time_metrics/data_loading(s)", "time_metrics/end_to_end(s)", 1),
    ],
)
def test_the_time_of_waiting_for_data(tmp_path, wait, step, scale):
    path = tmp_path / "log.jsonl"
    rows = [{"step": n, "loss": 3.0, wait: 0.3 * scale, step: 0.5 * scale} for n in range(1, 31)]
    path.write_text("\n".join(map(json.dumps, rows)))
    for record in read_log(path).run.records:
        assert (record.data_wait_seconds, record.step_seconds) == pytest.approx((0.3, 0.5))


def test_a_time_alone_is_not_taken_for_that_of_a_step(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("step,loss,time\n1,3.0,12.5\n2,2.9,13.5\n")
    assert [record.step_seconds for record in read_log(path).run.records] == [None, None]


def test_a_row_of_memory_alone_is_no_record(tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [
        {"step": n, "loss": 3.0} if n % 2 else {"step": n, "gpu_memory_gb": 4} for n in range(9)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [record.step for record in read_log(path).run.records] == [1, 3, 5, 7]
