"""Builds the stand-in for NVIDIA's library and plays histories to the real bindings.

A history runs in a process of its own, which finds our libnvidia-ml.so.1 by
LD_LIBRARY_PATH; nvidia-ml-py is the real one.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".c")

Line = tuple[int, int, str, int]  # tick, GPU, name, value: see the C file


def build(folder: Path) -> Path:
    """Compile the library into `folder`; skips the test where that cannot be done."""
    import pytest  # here, since each history's process loads this module

    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler (cc)")
    library = folder / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    return folder


def environment_of(folder: Path, history: list[Line], gpus: int) -> dict[str, str]:
    """What a process needs around it to find the library in `folder` and have it play."""
    script = folder / "history.txt"
    script.write_text("".join(f"{t} {g} {n} {v}\n" for t, g, n, v in sorted(history)))
    return {
        "LD_LIBRARY_PATH": str(folder),
        "FAKE_NVML_SCRIPT": str(script),
        "FAKE_NVML_GPUS": str(gpus),
        "PYTHONPATH": str(SOURCE.parents[1]),
    }


def play(
    folder: Path,
    history: list[Line],
    *,
    ticks: int,
    gpus: int = 1,
    hung_after: float = 10.0,
    linger: float = 0.0,
    cuda_visible: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Watch `history` for so many ticks and `linger` seconds; returns what `watch` saw."""
    task = {"ticks": ticks, "hung_after": hung_after, "linger": linger}
    task["settings"] = {"interval": 1e-3} | settings
    return run(["watch", json.dumps(task)], folder, history, gpus, cuda_visible)


def play_verdicts(
    folder: Path,
    history: list[Line],
    *,
    gpus: int = 1,
    record: Path | None = None,
    **task: Any,
) -> dict[str, Any]:
    """What `judge` thinks of a history with these settings; events go to the file `record`."""
    task["record"] = record and str(record)
    return run(["judge", json.dumps(task)], folder, history, gpus)


def run(
    arguments: list[str],
    folder: Path,
    history: list[Line],
    gpus: int,
    cuda_visible: str | None = None,
) -> dict[str, Any]:
    environment = os.environ | environment_of(folder, history, gpus)
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if cuda_visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = cuda_visible
    command = [sys.executable, "-m", "tests.telemetry.fake_nvml", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def rounds(ticks: int, linger: float) -> Iterator[None]:
    """Until the history has run so many ticks, and for `linger` seconds more."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    end = float("inf")
    while time.monotonic() < end:
        if end == float("inf") and library.fake_nvml_tick() >= ticks:
            end = time.monotonic() + linger
        yield
        time.sleep(0.002)


def watch(ticks: int, hung_after: float, linger: float, settings: dict[str, Any]) -> dict[str, Any]:
    """In the other process: poll until the history has run so many ticks."""
    from rmetric.telemetry import nvml

    nvml.HUNG_AFTER_SECONDS = hung_after
    watcher = nvml.NvmlEvents(**settings)
    seen: dict[str, Any] = {"events": [], "states": [], "slowest_poll_seconds": 0.0}
    for _ in rounds(ticks, linger):
        look(watcher, seen)
    look(watcher, seen)  # also where the machine stood still until the end
    seen["readings"] = [
        {name: plain(getattr(reading, name)) for name in reading.__dataclass_fields__}
        for reading in watcher.readings()
    ]
    began = time.monotonic()
    watcher.close()
    seen["close_seconds"] = time.monotonic() - began
    seen["events"] += [[e.kind, e.worker] for e in watcher.poll()]
    return seen


def look(watcher: Any, seen: dict[str, Any]) -> None:
    began = time.monotonic()
    events = watcher.poll()
    slowest = max(seen["slowest_poll_seconds"], time.monotonic() - began)
    seen["slowest_poll_seconds"] = slowest
    seen["events"] += [[event.kind, event.worker] for event in events]
    state = [watcher.available, watcher.problem]
    if seen["states"][-1:] != [state]:
        seen["states"].append(state)


def judge(
    ticks: int,
    seconds_a_tick: float | None = 10.0,
    hung_after: float = 10.0,
    linger: float = 0.0,
    silence: float = 60.0,
    record: str | None = None,
    pace: float = 1e-6,
    **config: Any,
) -> dict[str, Any]:
    """In the other process: what a GpuWatch thinks up to the reading at tick `ticks`.

    Readings come every `pace` seconds and are taken to be `seconds_a_tick` apart; None: they are
    what they are, `interval` seconds apart.
    """
    from rmetric.telemetry import nvml, sources
    from rmetric.telemetry.export import JsonlFile
    from rmetric.telemetry.risk import RiskConfig

    nvml.HUNG_AFTER_SECONDS = hung_after
    if seconds_a_tick is not None:
        sources.NvmlEvents = lambda *a, interval, **k: nvml.NvmlEvents(*a, interval=pace, **k)
    kept = JsonlFile(Path(record)).write_event if record else None
    watch = sources.GpuWatch(config=RiskConfig(**config), silence=silence, record=kept)
    if seconds_a_tick is not None:
        watch.hardware.recorded = stretched(watch.hardware.recorded, seconds_a_tick, ticks - 2)
    seen: dict[str, Any] = {"verdicts": [], "problems": []}
    for _ in rounds(ticks, linger):
        seen["verdicts"] += [verdict.as_json() for verdict in watch.poll()]
        if [watch.problem] != seen["problems"][-1:]:
            seen["problems"].append(watch.problem)
    watch.close()
    seen["verdicts"] += [verdict.as_json() for verdict in watch.poll()]
    seen["last"] = {key: verdict.as_json() for key, verdict in watch.verdicts().items()}
    return seen


def stretched(recorded: Any, seconds_a_tick: float, most: int) -> Any:
    """`recorded` with its readings `seconds_a_tick` apart, and its signs between them.

    What comes after `most` readings of a GPU is left out: how much that is, is chance.
    """
    number: dict[int, int] = {}
    began = time.monotonic()

    def take() -> Any:
        for item in recorded():
            is_reading = hasattr(item, "power_watts")
            number[item.gpu] = number.get(item.gpu, 0) + is_reading
            if number[item.gpu] <= most:
                offset = number[item.gpu] + (0.0 if is_reading else 0.4)
                yield replace(item, time=began + seconds_a_tick * offset)

    return lambda: tuple(take())


def plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else value


if __name__ == "__main__":
    print(json.dumps({"watch": watch, "judge": judge}[sys.argv[1]](**json.loads(sys.argv[2]))))
