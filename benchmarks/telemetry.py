"""The cost of GPU telemetry: processor time of the collector, as a share of one core.

    python benchmarks/telemetry.py [--seconds 60] [--real]

A separate process reads GPUs at the default interval of 10 s and judges them; its processor time
over the given seconds, user and system, is the collector's. The parts are measured too: reading
one GPU, judging one reading, one wait for an Xid. The goal is at most 0.1 % of a core.

By default the library is the tests' replacement, so the times are those of the bindings and of
rmetric, without a driver. A real driver adds system time to every call: --real measures it on a
machine with GPUs, prints the result and writes no file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.report import write_report

ROOT = Path(__file__).resolve().parents[1]
INTERVAL, GOAL_PERCENT = 10.0, 0.1
GPUS = (1, 8)
#: Before the first measurement: imports, and the first reading, are paid once.
SETTLE_SECONDS = 2.0
TURNS, CALLS = 7, 200


def watch(seconds: float) -> dict[str, Any]:
    """Measure in a separate process the share of a core over the given seconds, and the parts."""
    from rmetric.telemetry.sources import GpuWatch

    with GpuWatch() as watch:
        if not watch.hardware.ready(30.0):
            raise SystemExit(f"no GPU can be read: {watch.problem}")
        watch.poll()
        time.sleep(SETTLE_SECONDS)
        began, used = time.monotonic(), time.process_time()
        for _ in range(round(seconds / INTERVAL)):
            time.sleep(INTERVAL)
            watch.poll()
        percent = 100 * (time.process_time() - used) / (time.monotonic() - began)
        number = len(watch.readings())
    return {"gpus": number, "percent_of_a_core": round(percent, 4)} | parts()


def parts() -> dict[str, float]:
    """Processor time of one reading, one judgement and one wait, in microseconds."""
    import pynvml

    from rmetric.telemetry.judge import Judge
    from rmetric.telemetry.nvml import WAIT_SECONDS
    from rmetric.telemetry.nvml_library import NvmlLibrary

    library, judge = NvmlLibrary(pynvml), Judge(0)
    gpu = library.find(None)[0]
    times = iter(range(10**9))
    costs = {
        "reading_us": lambda: library.read(gpu, next(times) * INTERVAL),
        "judging_us": lambda: judge.take(library.read(gpu, next(times) * INTERVAL)),
        "waiting_us": lambda: library.next_xid(1e-3, otherwise=time.sleep),
    }
    found = {name: microseconds(action) for name, action in costs.items()}
    found["judging_us"] -= found["reading_us"]
    library.close()
    waits = {"waits_an_interval": round(INTERVAL / WAIT_SECONDS)}
    return {name: round(value, 1) for name, value in found.items()} | waits


def microseconds(action: Any) -> float:
    def once() -> float:
        began = time.process_time()
        for _ in range(CALLS):
            action()
        return (time.process_time() - began) / CALLS * 1e6

    once()
    return median(once() for _ in range(TURNS))


def beside_the_stand_in(seconds: float) -> list[dict[str, Any]]:
    """One process for each number of GPUs, one after the other, with the replacement library."""
    from tests.telemetry.fake_nvml import build, environment_of

    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = build(Path(name))
        for number in GPUS:
            done = subprocess.run(
                [sys.executable, __file__, "--watch", "--seconds", str(seconds)],
                env=os.environ | environment_of(folder, [], number),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found.append(json.loads(done.stdout))
            print(found[-1], flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of watching (default: 60)")
    parser.add_argument("--real", action="store_true", help="this machine's own library")
    parser.add_argument("--watch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.seconds < INTERVAL:
        parser.error(f"--seconds {options.seconds:g}: at least one interval of {INTERVAL:g}")
    if options.watch or options.real:
        print(json.dumps(watch(options.seconds)))
        return 0
    measured = beside_the_stand_in(options.seconds)
    report = {
        "library": "stand-in (tests/telemetry/fake_nvml.c)",
        "interval_seconds": INTERVAL,
        "goal_percent_of_a_core": GOAL_PERCENT,
        "watched_seconds": options.seconds,
        "watches": measured,
    }
    print(f"written: results/benchmarks/{write_report('telemetry', report).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
