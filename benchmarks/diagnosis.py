"""The cost of reading a job's logs: lines per second compared with drain3, memory for 10 GB.

    python benchmarks/diagnosis.py [--lines 400000] [--mebibytes 256] [--full] [--no-large]

The logs have few templates: the log of one rank (one step line in twenty), the same of eight
ranks in one file with srun's prefixes, a log of NCCL at level INFO, and three logs of step lines
alone, which cost most: long ones with times, short ones and progress bars without. `ingest` does
the whole pass of a diagnosis. For comparison drain3 only groups the same lines, without masks (its
Drain alone, and its TemplateMiner), and with the masks of rmetric, which the same templates need.
Each is warmed up by a tenth of the lines. Alternating runs, processor time of one core, medians.
Goals: 300,000 lines per second, and 5 times drain3 without masks.

The large log is written, read in a separate process and deleted; --full is 10 GB, in less
than 2 GB of memory. Then the same bytes are read as eight files, by one process and by one per
core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from drain3.drain import Drain
from drain3.masking import MaskingInstruction
from drain3.template_miner import TemplateMiner
from drain3.template_miner_config import TemplateMinerConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.report import write_report
from rmetric.diagnosis.ingest import ingest
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.templates import MASKS

TURNS = 3
GOAL_LINES, GOAL_TIMES, GOAL_MEMORY = 300_000, 5.0, 2e9
FULL = 10_000_000_000
READ = """
import json, re, sys, time
from pathlib import Path
from rmetric.diagnosis.ingest import ingest
from rmetric.diagnosis.library import SignatureLibrary
began = time.perf_counter()
job = ingest(sys.argv[2:], SignatureLibrary.shipped(), cores=int(sys.argv[1]))
took = time.perf_counter() - began
peak = 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
print(json.dumps([job.lines, len(job.events), took, peak]))
"""

#: Lines of a rank beside its steps; numbers are filled in.
FORMS = (
    "[INFO] [timer.py:{a}:stop] time (ms) | fwd: {f:.2f} | bwd: {g:.2f} | optimizer: {h:.2f}",
    "[INFO] [logging.py:96:log_dist] [Rank {r}] rank={r} time (ms) | allreduce: {f:.2f}",
    "[INFO] data.sampler: shard {b} of /data/corpus/part-{b:05d}.bin opened, {c} samples",
    "[INFO] data.prefetch: queue {a} of 64, waited {f:.3f} ms for worker {r}",
    "[DEBUG] memory: allocated {f:.2f} GiB, reserved {g:.2f} GiB, peak {h:.2f} GiB",
    "[INFO] optimizer: group 0 lr {l:.3e} weight_decay 0.1 clipped {c} of {b} tensors",
    "[DEBUG] comm: bucket {a} of {b} bytes, ring of {c} in {f:.2f} us",
    "[INFO] tokenizer: packed {b} documents to {c} sequences of 4096 tokens",
    "[INFO] gpu {r}: {a} C, {f:.1f} W, clock {b} MHz, utilisation {c} %",
    "[DEBUG] activation recomputation of layers {a} to {b}: {f:.2f} ms",
)


def rank_lines(number: int, rank: int = 0, step_every: int = 20) -> Iterator[str]:
    """A rank's log: its steps and the lines between them, with times."""
    for at in range(number):
        stamp = f"2024-04-{1 + at // 8_000_000 % 28:02d} {at // 3600 % 24:02d}:{at // 60 % 60:02d}"
        stamp = f"[{stamp}:{at % 60:02d},{at % 1000:03d}]"
        a, b, c = at % 97, 1024 + at % 7919, at % 1009
        if at % step_every == 0:
            step = at // step_every
            yield (
                f"{stamp} iteration {step:8d}/ 500000 | consumed samples: {512 * step:12d} | "
                f"elapsed time per iteration (ms): {1200 + a:.1f} | learning rate: 1.5E-04 | "
                f"lm loss: {2 + a / 1e3:.6E} | grad norm: {c / 1e3:.3f} |"
            )
        else:
            form = FORMS[at % len(FORMS)]
            words = form.format(
                a=a, b=b, c=c, r=rank, f=a / 7, g=b / 11, h=c / 13, l=1e-4 + a / 1e9
            )
            yield f"{stamp} {words}"


def shared_lines(number: int) -> Iterator[str]:
    """Eight ranks in one file, as srun --label writes them."""
    ranks = [rank_lines(number // 8, rank) for rank in range(8)]
    for lines in zip(*ranks, strict=True):
        yield from (f"{rank}: {line}" for rank, line in enumerate(lines))


def nccl_lines(number: int) -> Iterator[str]:
    for at in range(number):
        host, gpu, channel = f"gpu{at // 8 % 16:03d}", at % 8, at // 8 % 32
        head = f"{host}:{2000 + gpu}:{3000 + gpu} [{gpu}] NCCL INFO"
        peer = f"{at % 128}[{gpu}] -> {(at + 1) % 128}[{(gpu + 1) % 8}]"
        if at % 2:
            yield f"{head} Channel {channel:02d}/0 : {peer} via P2P/CUMEM"
        else:
            yield f"{head} Channel {channel:02d}/0 : {peer} [send] via NET/IB/{gpu}/GDRDMA"


def short_step_lines(number: int) -> Iterator[str]:
    for at in range(number):
        loss, speed = 2 + at % 97 / 1e2, 900 + at % 97
        yield f"step {at}/500000 | loss {loss:.2f} | lr 1.5e-04 | {speed} tok/s"


def bar_lines(number: int) -> Iterator[str]:
    """Progress bar of tqdm, one line for each update."""
    for at in range(number):
        tenths, took, left = 10 * at // number, at // 4, (number - at) // 4
        bar = "█" * tenths + " " * (10 - tenths)
        times = f"{took // 3600:02d}:{took // 60 % 60:02d}:{took % 60:02d}<{left // 3600:02d}"
        yield (
            f"{100 * at // number:3d}%|{bar}| {at}/{number} [{times}:{left // 60 % 60:02d}:"
            f"{left % 60:02d}, {3.5 + at % 97 / 1e2:.2f}it/s]"
        )


LOGS: dict[str, Callable[[int], Iterator[str]]] = {
    "one rank": rank_lines,
    "eight ranks with prefixes": shared_lines,
    "nccl": nccl_lines,
    "steps alone": lambda number: rank_lines(number, step_every=1),
    "short steps alone": short_step_lines,
    "progress bars": bar_lines,
}


def compare(path: Path, library: SignatureLibrary) -> dict[str, float]:
    """Lines a second of `ingest`, and of drain3 on the lines in memory."""
    lines = path.read_text().splitlines()
    # With masks it is so slow that a tenth is enough.
    plain: dict[str, tuple[Callable[[str], object], int]] = {
        "drain3_alone": (Drain().add_log_message, 1),
        "drain3": (TemplateMiner(config=TemplateMinerConfig()).add_log_message, 1),
        "drain3_with_masks": (with_masks().add_log_message, 10),
    }
    for add, _ in plain.values():
        for line in lines[: len(lines) // 10]:
            add(line)
    ours: list[float] = []
    theirs: dict[str, list[float]] = {name: [] for name in plain}
    for _ in range(TURNS):
        for name, (add, share) in plain.items():
            some = lines[: len(lines) // share]
            theirs[name].append(seconds(partial(_all, add, some)) * share)
        ours.append(seconds(lambda: ingest([path], library)))
    return (
        {
            "lines": len(lines),
            "bytes_a_line": round(path.stat().st_size / len(lines)),
            "lines_per_s": round(len(lines) / median(ours)),
        }
        | {f"{name}_lines_per_s": round(len(lines) / median(took)) for name, took in theirs.items()}
        | {f"times_{name}": times(took, ours) for name, took in theirs.items()}
    )


def with_masks() -> TemplateMiner:
    config = TemplateMinerConfig()
    config.masking_instructions = [
        MaskingInstruction(_with_digits("|".join(mask["patterns"])), name)
        for name, mask in MASKS.items()
    ]
    return TemplateMiner(config=config)


def _all(add: Callable[[str], object], lines: list[str]) -> None:
    for line in lines:
        add(line)


def _with_digits(pattern: str) -> str:
    """The masks of rmetric get "0" for every number; drain3's get the original line."""
    return pattern.replace("[0", "[0-9").replace("0", r"\d+").replace(r"[\d+-9", "[0-9")


def seconds(action: Callable[[], object]) -> float:
    began = time.process_time()
    action()
    return time.process_time() - began


def times(theirs: list[float], ours: list[float]) -> float:
    """The median over the turns, so that a drifting clock does not count."""
    return round(median(t / o for t, o in zip(theirs, ours, strict=True)), 2)


def write(path: Path, lines: Iterator[str]) -> None:
    with path.open("w") as file:
        file.writelines(f"{line}\n" for line in lines)


def write_large(path: Path, size: int) -> None:
    """A rank's log of about the given size, from one repeated block."""
    block = "".join(f"{line}\n" for line in rank_lines(200_000)).encode()
    with path.open("wb") as file:
        while file.tell() < size:
            file.write(block)


def read_apart(paths: list[Path], cores: int) -> dict[str, float]:
    """Read in a separate process and return its peak memory, without that of its children."""
    done = subprocess.run(
        [sys.executable, "-c", READ, str(cores), *map(str, paths)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines, events, took, peak = json.loads(done.stdout)
    return {
        "gigabytes": round(sum(path.stat().st_size for path in paths) / 1e9, 3),
        "files": len(paths),
        "cores": cores,
        "lines": lines,
        "events": events,
        "seconds": round(took, 1),
        "lines_per_s": round(lines / took),
        "peak_memory_mib": round(peak / 2**20, 1),
    }


def large(size: int) -> Iterator[tuple[str, dict[str, float]]]:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "rank_0.log"
        write_large(path, size)
        yield "large", read_apart([path], 1)
        path.unlink()
        paths = [Path(name) / f"rank_{rank}.log" for rank in range(8)]
        for path in paths:
            write_large(path, min(size, 2_000_000_000) // 8)
        cores = os.cpu_count() or 1
        yield "eight files, one core", read_apart(paths, 1)
        yield "eight files, all cores", read_apart(paths, cores)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=400_000, help="of each of the small logs")
    parser.add_argument("--mebibytes", type=int, default=256, help="of the large log")
    parser.add_argument("--full", action="store_true", help="a large log of 10 GB")
    parser.add_argument("--no-large", action="store_true", help="the speed alone, not written")
    options = parser.parse_args()
    library = SignatureLibrary.shipped()
    measured: dict[str, Any] = {
        "goals": {
            "lines_per_s": GOAL_LINES,
            "times_drain3": GOAL_TIMES,
            "peak_memory_mib": round(GOAL_MEMORY / 2**20),
        }
    }
    with tempfile.TemporaryDirectory() as name:
        for kind, lines in LOGS.items():
            path = Path(name) / f"{kind.replace(' ', '_')}.log"
            write(path, lines(options.lines))
            measured[kind] = compare(path, library)
            print(kind, measured[kind], flush=True)
    if options.no_large:
        return 0
    for kind, figures in large(FULL if options.full else options.mebibytes << 20):
        measured[kind] = figures
        print(kind, figures, flush=True)
    print(f"written: results/benchmarks/{write_report('diagnosis', measured).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
