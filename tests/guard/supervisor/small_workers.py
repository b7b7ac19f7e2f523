"""A training in miniature, without torch, and an agent that starts its ranks as torchrun does.

    python small_workers.py agent --ranks 4 [--steps 20] [...]

Each rank counts steps, beats, and follows the run folder: rank 0 saves the step number
every `--every` steps and when it is asked. What goes wrong is written in
FOLDER/faults.json: a list of {"launch": 1, "rank": 1, "step": 9, "do": "kill" | "raise" |
"hang" | "agent" | "leave"}; `launch` counts from 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time

from rmetric.guard.run_folder import LAUNCH_VARIABLE, RunFolder


def agent(options: argparse.Namespace) -> int:
    """Start the ranks; the first that fails ends the rest, and is reported as by torchrun."""
    workers = [
        subprocess.Popen([sys.executable, *sys.argv, "--rank", str(rank)])
        for rank in range(options.ranks)
    ]
    pids = {worker.pid: rank for rank, worker in enumerate(workers)}
    while pids:
        pid, status = os.wait()
        rank, code = pids.pop(pid), os.waitstatus_to_exitcode(status)
        if code:
            for worker in workers:
                worker.kill()
            print(
                f"train.py FAILED\nRoot Cause (first observed failure):\n[0]:\n"
                f"  rank      : {rank} (local_rank: {rank})\n"
                f"  exitcode  : {code} (pid: {pid})\n",
                flush=True,
            )
            return 1
    return 0


def worker(options: argparse.Namespace) -> int:
    folder, rank = RunFolder.of_environment(), options.rank
    launch = int(os.environ[LAUNCH_VARIABLE].rpartition("-")[2])
    faults = json.loads((folder.path / "faults.json").read_text())
    mine = [fault for fault in faults if fault["rank"] == rank and fault["launch"] in (launch, 0)]
    saved = folder.path / "saved"
    before = folder.answered()
    step = int(saved.read_text()) if saved.exists() else 0
    folder.beat(rank, step, "starting")
    while step < options.steps:
        wait_for_all(folder, step, options)
        step += 1
        time.sleep(options.seconds)
        print(f"rank {rank} step {step} of layout {folder.layout().data}", flush=True)
        folder.beat(rank, step)
        for fault in mine:
            if fault["step"] == step:
                happen(fault["do"], step)
        if rank == 0 and follow(folder, saved, step, options.every):
            return 0
        if any((fault["do"], fault["step"]) == ("leave", step) for fault in mine):
            return 0
        if rank > 0 and stops(folder, before):
            return 0
    if not any(fault["do"] == "leave" for fault in mine):
        folder.beat(rank, step, "finished")
    return 0


def wait_for_all(folder: RunFolder, step: int, options: argparse.Namespace) -> None:
    """No rank is a step ahead, as where gradients are reduced."""
    launch = os.environ[LAUNCH_VARIABLE]
    while True:
        if sum(beat.step >= step for beat in folder.beats(launch).values()) == options.ranks:
            return
        time.sleep(0.003)


def happen(what: str, step: int) -> None:
    print(f"fault: {what}", flush=True)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what in ("hang", "agent"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as one that hangs in a driver
    if what == "agent":
        os.kill(os.getppid(), signal.SIGKILL)
    if what == "raise":
        raise RuntimeError(f"the loss of step {step} is a cat")
    if what in ("hang", "agent"):
        time.sleep(600)


def follow(folder: RunFolder, saved, step: int, every: int) -> bool:
    """Save where it is time to or somebody asks; whether it shall stop."""
    request = folder.request()
    requested = request is not None and request.number > folder.answered()
    if requested or step % every == 0:
        part = saved.with_name("saved.part")
        part.write_text(str(step))
        part.replace(saved)
    if requested:
        folder.answer(request.number, step)
        return request.stop
    return False


def stops(folder: RunFolder, before: int) -> bool:
    request = folder.request()
    return request is not None and request.stop and folder.answered() > before


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["agent", "worker"], help="worker: a rank of torchrun")
    parser.add_argument("--ranks", type=int, default=os.environ.get("WORLD_SIZE"))
    parser.add_argument("--rank", type=int, default=os.environ.get("RANK"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.02)
    given = parser.parse_args()
    sys.exit(agent(given) if given.rank is None else worker(given))
