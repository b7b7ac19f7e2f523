"""Time and peak memory of the studies of 720 logs, and their growth with the number of runs.

    python benchmarks/study.py [--jobs N]

The emergent study, once and ten times over, and the published one, which is one stream of draws in
one process. Each runs in a separate process, logs included, into a temporary folder. Memory is the
resident, unshared memory of the process and its workers, sampled ten times per second. Goals: 20
s, 1 GB, and for the emergent study at most 10.5 times as long for ten times the runs at the same
memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.report import write_report
from rmetric._util.options import add_jobs
from rmetric.simulation.study import RECIPES, emergent_specs, run_study
from studies.paper.published_study import run_published_study

FACTOR = 10


def run(out: Path, study: str, factor: int, processes: int) -> None:
    """The study; the emergent one `factor` times over under other ids."""
    if study == "published":
        for _ in run_published_study(out):
            pass
        return
    specs = [
        replace(spec, experiment_id=f"{spec.experiment_id}_x{copy}")
        for copy in range(factor)
        for spec in emergent_specs()
    ]
    for _ in run_study(specs, RECIPES["emergent"].modes, out, num_processes=processes):
        pass


def measure(study: str, factor: int = 1, processes: int = 1) -> dict[str, float]:
    """Wall seconds and peak memory of one study and size, in a fresh process."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, __file__, "--child", out, study, str(factor), str(processes)]
        began = time.perf_counter()
        process = subprocess.Popen(command)
        peak = 0
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            time.sleep(0.1)
        seconds = time.perf_counter() - began
        if process.returncode:
            sys.exit(f"the study failed with exit status {process.returncode}")
        logs = sum(1 for _ in Path(out).rglob("*.jsonl"))
    return {"logs": logs, "wall_s": round(seconds, 2), "peak_memory_mb": round(peak / 1e6, 1)}


def resident(pid: int) -> int:
    """Bytes of a process and its descendants, with shared pages counted once."""
    total = 0
    try:
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            total += process.memory_full_info().pss
    except psutil.Error:
        pass  # it ended meanwhile
    return total


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        run(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    add_jobs(parser, "processes of the emergent study")
    processes = parser.parse_args().jobs
    published = measure("published")
    once, often = (measure("emergent", factor, processes) for factor in (1, FACTOR))
    ratio = often["wall_s"] / once["wall_s"]
    print(f"published: {published}")
    print(f"emergent, once: {once}\n{FACTOR} times: {often}\nwall ratio: {ratio:.2f}")
    emergent = {"once": once, "ten_times": often, "wall_ratio": round(ratio, 2)}
    write_report("study", {"published": published, "emergent": emergent})
    return 0


if __name__ == "__main__":
    sys.exit(main())
