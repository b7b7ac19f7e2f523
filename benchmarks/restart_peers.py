"""Seconds from a failure to the next step, under `rmetric supervise` and under other launchers.

    python benchmarks/restart_peers.py [--turns 5]

The same training (`benchmarks/restart_worker.py`), two ranks on CPU, is started under each
launcher in turn, so that the load of the machine falls on all alike. A rank is killed; a later step
hangs. Seconds run from the failure to the end of the first step afterwards, by the training's
own notes; the patience with a hang is 10 s for each. torchrun detects no hang before the
timeout of the collectives. torchft trains two replica groups; one is killed, and what
is measured is the pause of the other. Launchers that are not installed are named and left out.
Writes results/benchmarks/restart_peers.json and the table of docs/supervisor_measured.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.report import write_between, write_report

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "supervisor_measured.md"
WORKER = str(ROOT / "benchmarks" / "restart_worker.py")
KILLED_AT, HUNG_AT = 15, 30
PATIENCE = 10
TRAINING = ["--layers=2", "--hidden=64", "--batch=12", "--micro-batch=1", "--print-every=1000",
            "--save-every=10", "--sleep=0.05", "--steps=400"]  # fmt: skip
#: What the training imports beside its own modules.
PRELOAD = (
    "torch.distributed.tensor.parallel,torch.distributed.fsdp,torch.distributed.checkpoint,"
    "rmetric.guard.guard"
)
PYTHON = sys.executable


def script(folder: Path, *, hangs: bool) -> list[str]:
    struck = [f"--inject=kill@{KILLED_AT}:1"] + [f"--inject=hang@{HUNG_AT}:1"] * hangs
    return [WORKER, f"--folder={folder}", *TRAINING, *struck]


def torchrun(folder: Path) -> list[str]:
    return [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            "--max-restarts=20", *script(folder, hangs=False)]  # fmt: skip


def ft_launcher(folder: Path) -> list[str]:
    return [
        *(PYTHON, str(Path(PYTHON).with_name("ft_launcher")), "--standalone"),
        *("--nproc-per-node=2", "--max-restarts=20", "--ft-initial-rank-heartbeat-timeout=120"),
        *(f"--ft-rank-heartbeat-timeout={PATIENCE}", "--ft-workload-check-interval=1"),
        *("--ft-enable-nic-monitor=False", *script(folder, hangs=True)),
    ]


def supervise(folder: Path, *options: str) -> list[str]:
    return [
        *(PYTHON, "-m", "rmetric", "supervise", str(folder), "--batch", "12", "--gpus", "0-1"),
        *("--layout", "data=2,micro_batch=1,accumulation=6", "--poll-seconds", "0.2"),
        *("--hang-seconds", str(PATIENCE), *options, "--", PYTHON, "-m", "torch.distributed.run"),
        *("--nproc-per-node", "2", *script(folder, hangs=True)),
    ]


def supervise_warm(folder: Path) -> list[str]:
    return supervise(folder, "--preload", PRELOAD)


#: Name -> command, and the package that it needs.
LAUNCHERS: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "torchrun --max-restarts": (torchrun, "torch"),
    "ft_launcher": (ft_launcher, "nvidia-resiliency-ext"),
    "rmetric supervise": (supervise, "rmetric"),
    "rmetric supervise --preload": (supervise_warm, "rmetric"),
}


def notes(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    with suppress(OSError):
        whole, _, _ = (folder / f"steps-{rank}.jsonl").read_bytes().rpartition(b"\n")
        return [json.loads(line) for line in whole.splitlines()]
    return []


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[bytes], seconds: float) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if found := condition():
            return found
        time.sleep(0.05)
    return None


def injected(folder: Path, kind: str) -> float | None:
    for path in (folder / "injected").glob(f"{kind}@*.json"):
        with suppress(ValueError):
            return float(json.loads(path.read_text())["time"])
    return None


def recovery(folder: Path, kind: str, process: subprocess.Popen[bytes]) -> dict[str, float] | None:
    """Seconds from the failure to the first step of a new process, and the steps repeated."""
    at = wait_for(lambda: injected(folder, kind), process, 180.0)
    if at is None:
        return None

    def first_step() -> dict[str, Any] | None:
        lines = notes(folder)
        last = next((line for line in reversed(lines) if line["time"] < at + 1e-3), None)
        return next(
            (
                {
                    "seconds": round(line["time"] - at, 2),
                    "repeated": last["step"] - line["step"] + 1,
                }
                for line in lines
                if last and line["time"] > at and line["pid"] != last["pid"]
            ),
            None,
        )

    return wait_for(first_step, process, 180.0)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a launcher and all that descends from it."""
    with suppress(psutil.Error):
        every = [psutil.Process(process.pid)]
        every += every[0].children(recursive=True)
        for member in every:
            with suppress(psutil.Error):
                member.kill()
        psutil.wait_procs(every, timeout=10.0)


def turn(folder: Path, name: str) -> dict[str, Any]:
    """One training under one launcher: a kill and, if it detects them, a hang."""
    folder.mkdir()
    with open(folder / "output.log", "wb") as log:
        process = subprocess.Popen(
            LAUNCHERS[name][0](folder), stdout=log, stderr=subprocess.STDOUT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT),
                 # A restarted rank must not read addresses of the ranks before it.
                 "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )  # fmt: skip
    try:
        found = {"kill": recovery(folder, "kill", process)}
        if name != "torchrun --max-restarts":
            found["hang"] = recovery(folder, "hang", process)
    finally:
        end(process)
    return found


def torchft_turn(folder: Path) -> dict[str, Any]:
    """Two replica groups of torchft; one is killed while both take part."""
    folder.mkdir()
    port = 29600 + os.getpid() % 300
    light = [str(Path(PYTHON).with_name("torchft_lighthouse")), "--min_replicas", "1",
             "--bind", f"[::]:{port}", "--join_timeout_ms", "1000"]  # fmt: skip
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT),
                   "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}  # fmt: skip
    processes = []
    with open(folder / "output.log", "wb") as log:
        commands = [light] + [
            [PYTHON, WORKER, "torchft", f"--folder={folder}", f"--replica={n}", "--steps=10000"]
            for n in (0, 1)
        ]
        for command in commands:
            peer = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            processes.append(peer)
    try:

        def both() -> bool:
            lines = notes(folder)[-20:]
            return len(lines) == 20 and all(line["replicas"] == 2 for line in lines)

        if not wait_for(both, processes[1], 120.0):
            return {"kill": None}
        at = time.time()
        processes[2].send_signal(signal.SIGKILL)

        def goes_on() -> bool:
            return len([line for line in notes(folder) if line["time"] > at + 0.5]) > 20

        if not wait_for(goes_on, processes[1], 60.0):
            return {"kill": None}
        lines = [line for line in notes(folder) if line["time"] > at - 5.0]
        pauses = [
            (b["time"] - a["time"], a["step"] - b["step"] + 1)
            for a, b in pairwise(lines)
            if b["time"] > at
        ]
        seconds, repeated = max(pauses)
        return {"kill": {"seconds": round(seconds, 2), "repeated": repeated}}
    finally:
        for process in processes:
            end(process)


def installed(package: str) -> str:
    with suppress(PackageNotFoundError):
        return "here" if package == "rmetric" else version(package)
    return "here" if package == "rmetric" else ""


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the turns, with all seconds."""
    found: dict[str, Any] = {}
    for kind in ("kill", "hang"):
        known = [result[kind] for result in turns if result.get(kind)]
        if known:
            found[kind] = {
                "seconds": [pause["seconds"] for pause in known],
                "median_seconds": round(median(pause["seconds"] for pause in known), 1),
                "median_steps_repeated": median(pause["repeated"] for pause in known),
            }
        found.setdefault("failed", 0)
        found["failed"] += sum(kind in result and not result[kind] for result in turns)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    names = {name: package for name, (_, package) in LAUNCHERS.items()} | {"torchft": "torchft"}
    versions = {name: installed(package) for name, package in names.items()}
    for name in [name for name, found in versions.items() if not found]:
        print(f"{name} is left out: {names[name]} is not installed", flush=True)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name, found in versions.items() if found}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.turns):
            for place, name in enumerate(turns):
                folder = Path(scratch) / f"{number}-{place}"
                found = torchft_turn(folder) if name == "torchft" else turn(folder, name)
                found["load"] = round(os.getloadavg()[0], 1)
                turns[name].append(found)
                print(number, name, json.dumps(found), flush=True)
                if not found.get("kill"):
                    print((folder / "output.log").read_text(errors="replace")[-2000:], flush=True)
            # After each turn, so that a run that is cut short has its results.
            report(number + 1, versions, turns)


def report(number: int, versions: dict[str, str], turns: dict[str, list[dict[str, Any]]]) -> None:
    measured = {
        "turns": number, "patience_seconds": PATIENCE, "save_every_steps": 10,
        "versions": versions,
        "load": [result["load"] for group in turns.values() for result in group],
        "launchers": {name: summary(group) for name, group in turns.items()},
    }  # fmt: skip
    write_report("restart_peers", measured)
    write_between(PAGE, "peers", table(measured))


def table(measured: dict[str, Any]) -> str:
    """The page's table, from the results alone."""
    rows = [
        "| launcher | a rank is killed: trains again after (s) | steps repeated "
        f"| a rank hangs, {measured['patience_seconds']} s of patience: trains again after (s) |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, found in measured["launchers"].items():
        kill, hang = found.get("kill"), found.get("hang")
        cells = f"| {seconds(kill)} | {kill['median_steps_repeated']:g} " if kill else "| – | – "
        rows.append(f"| {name} {cells}| {seconds(hang)} |")
    return "\n".join(rows) + "\n"


def seconds(found: dict[str, Any] | None) -> str:
    if not found:
        return "–"
    every = found["seconds"]
    return f"{found['median_seconds']:.1f} ({min(every):.1f} to {max(every):.1f})"


if __name__ == "__main__":
    main()
