"""Generate missing planned jobs, two at a time; an interrupted job is restarted."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.diagnosis_benchmark.injected import world
from studies.diagnosis_benchmark.injected.labels import label
from studies.diagnosis_benchmark.injected.plan import Plan
from studies.diagnosis_benchmark.injected.verify import NotHappened, verify

MANIFEST = "manifest.json"
#: A fault may miss by chance, when a port is taken for example.
TRIES = 3


def generate(jobs: Sequence[Plan], out: Path, *, lanes: int = 2) -> dict[str, int]:
    """Makes what is missing; how many were there, made and failed.

    Each job is a child process that leads a group of its own; the group is killed when the job
    ends in whatever way, and its ranks die with it should this process be killed.
    """
    world.prepare()
    shutil.rmtree(_scratch(out), ignore_errors=True)
    left = [plan for plan in jobs if not is_done(plan, out)]
    counts = {"there": len(jobs) - len(left), "made": 0, "failed": 0}
    running: dict[int, tuple[Plan, float]] = {}
    try:
        while left or running:
            while left and len(running) < lanes:
                plan = left.pop(0)
                siblings = [
                    other.name
                    for other in jobs
                    if (other.split, other.group, other.part) == (plan.split, plan.group, "sibling")
                    and other.name != plan.name
                ]
                running[_fork(plan, out, siblings)] = (plan, time.time())
            pid, status = os.wait()
            plan, start = running.pop(pid)
            _clear(pid)
            made = os.waitstatus_to_exitcode(status) == 0 and is_done(plan, out)
            counts["made" if made else "failed"] += 1
            word = "made" if made else "FAILED"
            what = f"{plan.split}/{plan.name} {plan.kind} {plan.variant or '-'}"
            print(f"{what}: {word} in {time.time() - start:.1f} s", flush=True)
    finally:
        for pid in running:
            _clear(pid)
        shutil.rmtree(_scratch(out), ignore_errors=True)
    return counts


def _scratch(out: Path) -> Path:
    """For data and checkpoints; the same at a restart, which thus clears what a killed run left."""
    return Path(tempfile.gettempdir()) / f"run-{zlib.crc32(str(out.resolve()).encode()):08x}"


def is_done(plan: Plan, out: Path) -> bool:
    path = out / plan.split / plan.name / MANIFEST
    return path.exists() and json.loads(path.read_text())["fingerprint"] == plan.fingerprint()


def _fork(plan: Plan, out: Path, siblings: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        world.die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for attempt in range(1, TRIES + 1):
            try:
                make(plan, out, siblings, attempt)
                code = 0
                break
            except (NotHappened, TimeoutError) as error:
                what = f"{plan.split}/{plan.name}, attempt {attempt}: {error}"
                print(what, file=sys.stderr, flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _clear(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def make(plan: Plan, out: Path, siblings: list[str], attempt: int = 1) -> None:
    """One job, in a folder of its own that takes its name once it is whole.

    Raises:
        NotHappened, TimeoutError: nothing is left then.
    """
    (out / plan.split).mkdir(parents=True, exist_ok=True)
    final = out / plan.split / plan.name
    partial = final.with_name(f".{plan.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "logs").mkdir(parents=True)
    try:
        scratch = _scratch(out)
        scratch.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=scratch) as own:
            record = world.run(plan, partial / "logs", Path(own))
        text = json.dumps(manifest(plan, record, siblings, attempt), indent=1)
        (partial / MANIFEST).write_text(text + "\n")
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def manifest(
    plan: Plan, record: world.RunRecord, siblings: list[str], attempt: int
) -> dict[str, Any]:
    """Manifest of the job; `plan` depends on the seed only, the rest was measured."""
    settings = plan.settings
    failed = any(code for code, _ in record.exits.values())
    # A slow rank's job may have finished: it is healthy by its outcome.
    outcome = "terminated" if record.by == "limit" else "failed" if failed else "healthy"
    return {
        "fingerprint": plan.fingerprint(),
        "outcome": outcome,
        "kind": plan.kind,
        "variant": plan.variant,
        "rank": plan.rank,
        "node": None if plan.rank is None else settings.node(plan.rank),
        "stage": plan.stage,
        "step": plan.step,
        "time": record.onset["time"] if record.onset else None,
        "world_size": settings.world_size,
        "layout": settings.layout,
        "group": plan.group,
        "siblings": siblings,
        "verified": verify(plan, record),
        "ended_by": record.by,
        "exits": {str(rank): list(record.exits[rank]) for rank in sorted(record.exits)},
        "labels": label(plan, record),
        "lines": len(record.lines),
        "seconds": round(record.end - record.start, 2),
        "attempt": attempt,
        "plan": plan.as_json(),
    }
