"""Tables of nvidia-smi beside the logs tell a hang, and the rank that the others wait for."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from rmetric.diagnosis import Diagnosis, diagnose

BEGIN = datetime(2025, 8, 14, 20, 0, tzinfo=timezone.utc)
HEADER = "timestamp, host, index, utilization.gpu [%], power.draw [W], memory.used [MiB]"
STEP = timedelta(seconds=10)
#: Steps of 10 s, then readings of a minute.
STEPS, READINGS = 60, 60


def at(time: datetime, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    return time.strftime(form)


def written(
    folder: Path,
    *,
    power: float = 130.0,
    idle: tuple[int, ...] = (),
    busy: str = "100 %",
    minutes: int = READINGS,
    last: str = "",
    above: tuple[str, ...] = (),
) -> Diagnosis:
    """Logs of 8 ranks on two nodes that stop, and a table of their GPUs, which goes on."""
    for rank in range(8):
        lines = [f"[rank{rank}]: {at(BEGIN)} INFO hostname=node-{rank // 4} world_size=8"]
        lines += [
            f"[rank{rank}]: {at(BEGIN + step * STEP)} INFO step {step} loss 2.{step}"
            for step in range(1, STEPS)
        ]
        lines += [f"[rank{rank}]: {at(BEGIN + STEPS * STEP)} INFO {last}"] if last else []
        (folder / f"node-{rank // 4}_rank_{rank}.log").write_text("\n".join(lines) + "\n")
    rows = [*above, HEADER]
    stopped = BEGIN + STEPS * STEP
    for minute in range(10 + minutes):
        time = BEGIN + timedelta(minutes=minute)
        for rank in range(8):
            load = "97 %, 520.31 W"
            if time >= stopped:
                load = "0 %, 75.10 W" if rank in idle else f"{busy}, {power} W"
            shown = at(time, "%Y/%m/%d %H:%M:%S.123")
            rows.append(f"{shown}, node-{rank // 4}, {rank % 4}, {load}, 38811 MiB")
    (folder / "gpus.csv").write_text("\n".join(rows) + "\n2025/08/14 20:1")  # a row is cut
    return diagnose([folder])


COMMAND = "$ nvidia-smi --query-gpu=timestamp,host,index,utilization.gpu --format=csv -l 60"


@pytest.mark.parametrize("above", [(), (COMMAND,), ("# node-0", COMMAND, "")])
def test_gpus_that_spin_at_little_power_tell_a_hang(above: tuple[str, ...], tmp_path: Path) -> None:
    found = written(tmp_path, above=above)
    assert (found.outcome, found.cause) == ("failed", "training_hung")
    assert "8 GPUs were busy at little power" in found.why
    assert found.nodes == ()


def test_the_rank_of_the_idle_gpu_is_named(tmp_path: Path) -> None:
    found = written(tmp_path, idle=(6,))
    assert found.cause == "training_hung"
    assert [one.rank for one in found.nodes] == [6]
    assert "GPU 2 of node-1 is idle while 7 others spin" in found.nodes[0].why


@pytest.mark.parametrize(
    "told",
    [
        {"power": 510.0},  # the training goes on; the log was copied before
        {"busy": "40 %"},
        {"busy": "0 %", "power": 70.0},  # the job has ended
        {"idle": (1, 2, 3, 5)},
        {"minutes": 1},
        {"last": "saving checkpoint at step 60", "minutes": 8},
    ],
)
def test_other_loads_tell_no_hang(tmp_path: Path, told: dict[str, object]) -> None:
    assert written(tmp_path, **told).cause is None  # type: ignore[arg-type]


def test_a_table_without_power_tells_nothing(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / "gpus.csv"
    path.write_text(path.read_text().replace("power.draw", "temperature.gpu"))
    assert diagnose([tmp_path]).cause is None


def test_another_table_is_left_out_as_before(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("step 1 loss 2\nstep 2 loss 2\n")
    (tmp_path / "table.csv").write_text("timestamp,loss\n1,2\n")
    assert any("left out" in note for note in diagnose([tmp_path]).notes)


def test_a_table_that_was_quoted_is_read(tmp_path: Path) -> None:
    written(tmp_path, idle=(6,))
    path = tmp_path / "gpus.csv"
    path.write_text("".join(f"> {line}\n" for line in path.read_text().splitlines()))
    assert [one.rank for one in diagnose([tmp_path]).nodes] == [6]


def test_a_table_whose_times_have_another_name_is_a_note(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / "gpus.csv"
    path.write_text(path.read_text().replace("timestamp,", "x timestamp,", 1))
    found = diagnose([tmp_path])
    assert any("without a column timestamp" in note for note in found.notes)


def test_a_table_without_pandas_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert any("cannot be read without pandas" in note for note in diagnose([tmp_path]).notes)
