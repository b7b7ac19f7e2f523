"""The cost of failures under the supervisor: seconds to detect and resume, lost steps.

    python benchmarks/recovery.py [--kills 20]

Each failure is injected once into the supervised reference training on CPU processes, and many
random kills into another. The losses are compared with those of one undisturbed process. Seconds
and ETTR are those of the supervisor's summary (docs/supervisor.md); steps lost are counted by the
training's own log, because a heartbeat may be a second old. On a small model a start takes longer
than the training, so the ETTR is not representative. Writes results/benchmarks/recovery.json and
the table of docs/supervisor_measured.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.report import RESULTS, write_between, write_report
from rmetric.guard.run_folder import RunFolder
from rmetric.guard.supervisor.journal import Line, read_journal
from rmetric.logs import read_log
from rmetric.telemetry.lines import GpuVerdict, verdict_line

PAGE = Path(__file__).resolve().parents[1] / "docs" / "supervisor_measured.md"
MODULE = "studies.tiny_llama"
SAVE_EVERY = 10
TRAINING = ["--layers=2", "--hidden=64", "--batch=12", "--micro-batch=1", "--print-every=1000",
            f"--save-every={SAVE_EVERY}", "--sleep=0.1"]  # fmt: skip
STEPS, STRUCK_AT = 80, 25


class Supervised:
    """One supervised training in a folder."""

    def __init__(self, folder: Path, ranks: int, steps: int, *injected: str) -> None:
        self.folder = RunFolder(folder)
        self.output = open(folder.with_suffix(".log"), "w")  # noqa: SIM115
        layout = f"data={ranks},micro_batch=1,accumulation={12 // ranks}"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "rmetric", "supervise", str(folder), "--layout", layout),
                *("--batch", "12", "--gpus", f"0-{ranks - 1}", "--hang-seconds", "10"),
                *("--poll-seconds", "0.2", "--max-restarts", "100"),
                *("--", sys.executable, "-m", "torch.distributed.run"),
                *("--nproc-per-node", str(ranks), "-m", MODULE),
                *(*TRAINING, f"--steps={steps}", *(f"--inject={fault}" for fault in injected)),
            ],
            stderr=self.output,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
        self.farthest: dict[int, int] = {}  # launch -> last step in the training's log
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._follower.start()

    def _follow(self) -> None:
        while self.process.poll() is None:
            self._look()
            time.sleep(0.05)

    def _look(self) -> None:
        """The last step of the log, before a later launch truncates it."""
        path = self.folder.path / "losses.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if self.lines("launch") and lines and lines[-1].endswith(b"\n"):
            step = json.loads(lines[-1]).get("step") or 0
            launch = len(self.lines("resumed"))
            self.farthest[launch] = max(step, self.farthest.get(launch, 0))

    @property
    def steps_lost(self) -> list[int]:
        """Steps completed before each failure and lost by it."""
        resumed = [line["step"] for line in self.lines("resumed")]
        return [
            max(0, self.farthest.get(launch, 0) - step)
            for launch, step in enumerate(resumed[1:], start=1)
        ]

    def lines(self, event: str) -> list[Line]:
        return [line for line in read_journal(self.folder.journal) if line["event"] == event]

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """True if the condition became true before the end of the training."""
        while self.process.poll() is None:
            if condition():
                return True
            time.sleep(0.02)
        return False

    def wait_for_step(self, step: int) -> bool:
        return self.wait_until(lambda: self.step >= step)

    @property
    def step(self) -> int:
        launches = self.lines("launch")
        beats = self.folder.beats(launches[-1]["token"]) if launches else {}
        return max((beat.step for beat in beats.values() if beat.phase == "training"), default=0)

    def end(self, losses: list[float]) -> dict[str, Any]:
        code = self.process.wait()
        self.output.close()
        if code != 0:
            raise SystemExit(f"{self.folder.path.name}: the supervisor ended with {code}")
        summary = json.loads(self.folder.summary.with_suffix(".json").read_text())
        own = losses_of(self.folder.path)
        if not summary["incidents"]:
            raise SystemExit(f"{self.folder.path.name}: nothing befell it")
        return {
            "failures": len(summary["incidents"]),
            "cause": summary["incidents"][0]["cause"],
            "layouts": [line["words"] for line in self.lines("launch")],
            "notice_seconds": times(summary, "notice_seconds"),
            "resume_seconds": times(summary, "resume_seconds"),
            "steps_lost": sum(self.steps_lost),
            "most_steps_lost_at_once": max(self.steps_lost),
            "ettr": summary["ettr"],
            "largest_loss_difference": max(abs(a - b) for a, b in zip(own, losses, strict=True)),
        }


def times(summary: dict[str, Any], name: str) -> float | None:
    """Median over the failures."""
    known = [incident[name] for incident in summary["incidents"] if incident[name] is not None]
    return round(median(known), 1) if known else None


def losses_of(folder: Path) -> list[float]:
    records = read_log(folder / "losses.jsonl").records
    return [record.training_loss for record in records if record.training_loss is not None]


def undisturbed(folder: Path, steps: int) -> list[float]:
    command = [sys.executable, "-m", MODULE, f"--folder={folder}", *TRAINING, f"--steps={steps}"]
    subprocess.run([*command, "--sleep=0"], check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)  # fmt: skip
    return losses_of(folder)


def kill_agent(run: Supervised) -> None:
    run.wait_for_step(STRUCK_AT)
    os.kill(run.lines("started")[-1]["pids"][""], signal.SIGKILL)


def kill_starting(run: Supervised) -> None:
    """A worker of the second launch, before it trains."""
    run.wait_until(lambda: len(run.lines("launch")) == 2)
    token = run.lines("launch")[-1]["token"]
    run.wait_until(lambda: 0 in run.folder.beats(token))
    os.kill(run.folder.beats(token)[0].pid, signal.SIGKILL)


def lose_gpu(run: Supervised) -> None:
    """Write a verdict in the form of `rmetric telemetry`, after an Xid 79."""
    run.wait_for_step(STRUCK_AT)
    reasons = ("Xid 79: the GPU has fallen off the bus",)
    verdict = GpuVerdict(gpu=1, time=time.time(), level="fatal", action="reboot",
                         rules=("xid_79",), reasons=reasons)  # fmt: skip
    run.folder.telemetry.mkdir(exist_ok=True)
    with open(run.folder.telemetry / "node.jsonl", "ab") as file:
        file.write(verdict_line(verdict))


def kill_at_random(run: Supervised, kills: int) -> None:
    """A random worker, a random time after it trains again."""
    rng = np.random.default_rng(20)
    for number in range(1, kills + 1):
        trains = run.wait_until(lambda number=number: len(run.lines("resumed")) >= number)
        time.sleep(float(rng.uniform(1.0, 5.0)))
        beats = run.folder.beats(run.lines("launch")[-1]["token"]) if trains else {}
        if not beats:
            return
        os.kill(beats[int(rng.integers(len(beats)))].pid, signal.SIGKILL)
        run.wait_until(lambda number=number: len(run.lines("launch")) > number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    kills = parser.parse_args().kills
    cases: dict[str, tuple[int, tuple[str, ...], Callable[[Supervised], None] | None]] = {
        "a worker is killed (kill -9)": (2, (f"kill@{STRUCK_AT}:1",), None),
        "an exception on one rank": (2, (f"exception@{STRUCK_AT}:1",), None),
        "a rank hangs (10 s of patience)": (2, (f"hang@{STRUCK_AT}:1",), None),
        "the agent is killed": (2, (), kill_agent),
        "a GPU falls off the bus, 4 to 3 ranks": (4, (), lose_gpu),
        "a worker, and another while it starts again": (2, (f"kill@{STRUCK_AT}:1",), kill_starting),
    }
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        losses = undisturbed(folder / "alone", STEPS)
        for place, (what, (ranks, injected, strike)) in enumerate(cases.items()):
            run = Supervised(folder / f"case-{place}", ranks, STEPS, *injected)
            if strike is not None:
                strike(run)
            measured[what] = run.end(losses)
            print(what, json.dumps(measured[what]), flush=True)
        steps = 20 * kills
        run = Supervised(folder / "kills", 2, steps)
        kill_at_random(run, kills)
        what = f"{kills} random kills of a worker"
        measured[what] = run.end(undisturbed(folder / "alone-long", steps))
        print(what, json.dumps(measured[what]), flush=True)
    write_report("recovery", {"save_every_steps": SAVE_EVERY, "cases": measured})
    write_between(PAGE, "recovery", table(measured))


def table(measured: dict[str, Any]) -> str:
    """The page's table, from the results alone."""
    rows = [
        "| failure | number | noticed after (s) | trains again after (s) "
        "| steps lost (most at once) | ETTR | largest difference of a loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for what, of in measured.items():
        seconds = (of["notice_seconds"], of["resume_seconds"])
        shown = " | ".join("–" if value is None else f"{value:.1f}" for value in seconds)
        rows.append(
            f"| {what} | {of['failures']} | {shown} "
            f"| {of['steps_lost']} ({of['most_steps_lost_at_once']}) "
            f"| {100 * of['ettr']:.0f} % | {of['largest_loss_difference']:.0e} |"
        )
    return "\n".join(rows) + "\n"


def results() -> dict[str, Any]:
    report: dict[str, Any] = json.loads((RESULTS / "recovery.json").read_text())
    return report


if __name__ == "__main__":
    main()
