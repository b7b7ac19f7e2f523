"""The cost of a diagnosis of many small files: seconds, processor time, peak memory.

    python benchmarks/many_files.py [--files 20000] [--lines 100] [--jobs 1]

One file for each rank, with times, step lines and other lines; one rank runs out of memory. The
diagnosis is made in a separate process, from the import on; the peak memory is that of the process
without its children, and the processor time is that of all. Goals: 20,000 files in 60 seconds and
1 GB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.diagnosis import rank_lines, write
from benchmarks.report import write_report

GOAL_SECONDS, GOAL_MEMORY = 60.0, 1e9
ERROR = (
    "Traceback (most recent call last):",
    '  File "/opt/train.py", line 7, in <module>',
    "    main()",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79 GiB",
)
DIAGNOSE = """
import json, resource, sys, time
began = time.perf_counter()
from rmetric.diagnosis.decide import diagnose
found = diagnose(sys.argv[2], jobs=int(sys.argv[1]))
took = time.perf_counter() - began
processes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
own, children = (resource.getrusage(which) for which in processes)
cpu = sum(one.ru_utime + one.ru_stime for one in (own, children))
print(json.dumps([took, cpu, 1024 * own.ru_maxrss, found.cause, [one.name for one in found.nodes]]))
"""


def write_files(folder: Path, files: int, lines: int) -> None:
    """A log of each rank, one of which ends with an error."""
    for rank in range(files):
        content = [*rank_lines(lines, rank, step_every=5), *(ERROR if rank == files // 3 else ())]
        write(folder / f"rank_{rank:05d}.log", iter(content))


def measure(files: int, lines: int, jobs: int) -> dict[str, object]:
    """Diagnose so many files of so many lines in a separate process."""
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name), files, lines)
        size = sum(path.stat().st_size for path in Path(name).iterdir())
        done = subprocess.run(
            [sys.executable, "-c", DIAGNOSE, str(jobs), name],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    took, cpu, peak, cause, nodes = json.loads(done.stdout)
    return {
        "files": files,
        "lines": files * lines,
        "megabytes": round(size / 1e6, 1),
        "jobs": jobs,
        "seconds": round(took, 1),
        "processor_seconds": round(cpu, 1),
        "peak_memory_megabytes": round(peak / 1e6, 1),
        "cause": cause,
        "nodes": nodes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--lines", type=int, default=100, help="of each file")
    parser.add_argument("--jobs", type=int, default=1, help="processes that read files")
    options = parser.parse_args()
    measured: dict[str, object] = {
        "goals": {"seconds": GOAL_SECONDS, "peak_memory_megabytes": GOAL_MEMORY / 1e6}
    }
    measured |= measure(options.files, options.lines, options.jobs)
    print(json.dumps(measured, indent=2))
    print(f"written: results/benchmarks/{write_report('many_files', measured).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
