"""Demonstration of the guard on a CPU, in under two minutes.

    python -m studies.tiny_llama.guard_demo [--out guard_demo]

A small Llama is trained twice: undisturbed in one process, and under `rmetric supervise` on
four processes that represent four GPUs. The telemetry of GPU 2 degrades, which triggers a
checkpoint; then the GPU falls off the bus and its process is killed. The supervisor drops
it, splits the batch of 16 over the remaining three (6, 5 and 5 samples) and resumes from the
checkpoint. Both trainings must end with the same losses.

Only the GPUs are simulated: their readings are generated here and replayed like a recording
of real ones (`rmetric telemetry --play`).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rmetric.guard.run_folder import RunFolder
from rmetric.guard.supervisor.journal import Line, read_journal
from rmetric.logs import read_log
from rmetric.telemetry.lines import TelemetryEvent, event_line
from rmetric.telemetry.reading import GpuSign, Reading
from studies.common.command import FAILED, command_parser, exit_with, fail

STEPS = 60
WARNED_AT, KILLED_AT = 20, 32  # steps
BAD_GPU, GPUS = 2, 4
TOLERANCE = 1e-5  # nats
TIMEOUT_SECONDS = 120.0
#: Files of the demo, which it may delete.
OURS = {"undisturbed", "guarded", "supervisor.log", "warning.jsonl", "xid.jsonl"}
MODEL = ["--layers", "4", "--heads", "4", "--kv-heads", "2", "--hidden", "64"]
TRAINING = [*MODEL, "--batch", "16", "--steps", str(STEPS), "--save-every", "40"]
MODULE = "studies.tiny_llama"
#: Event of the journal -> printed text.
EVENT_TEXT: dict[str, Callable[[Line], str]] = {
    "launch": lambda line: f"starts the training: {line['words']} (importing torch takes a while)",
    "resumed": lambda line: f"training resumed at step {line['step']}",
    "verdict": lambda line: line["words"],
    "asked": lambda line: (
        "requests a checkpoint from all processes, "
        + ("and a stop" if line["stop"] else "ahead of its interval")
    ),
    "answered": lambda line: f"the checkpoint of step {line['step']} is durable and verified",
    "dropped": lambda line: f"drops GPU {BAD_GPU}",
    "ended": lambda line: f"{line['words']}; every process of that launch has ended",
    "over": lambda line: f"{line['outcome']}: {line['words']}",
}


def main() -> int:
    parser = command_parser("tiny_llama.guard_demo", __doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("guard_demo"), metavar="DIR",
        help="folder for the results; an earlier demo in it is replaced (default: %(default)s)",
    )  # fmt: skip
    folder = parser.parse_args().out
    try:
        return demonstrate(folder)
    except OSError as error:
        return fail(f"the results cannot be written to {folder}: {error}", FAILED)


def demonstrate(folder: Path) -> int:
    """Train twice and compare; returns the exit code. Raises OSError from writing to `folder`."""
    if folder.exists() and {path.name for path in folder.iterdir()} - OURS:
        return fail(f"{folder} contains other files than results of this demo")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()
    try:
        code = compare(train_undisturbed(folder / "undisturbed"), train_guarded(folder))
    except subprocess.CalledProcessError as error:
        return fail(f"{error}; its output is in {folder}", FAILED)
    print(f"\nTotal time {time.monotonic() - began:.0f} s. Results are in {folder}/: "
          "guarded/summary.md, guarded/journal.jsonl, guarded/logs/")  # fmt: skip
    return code


def train_undisturbed(folder: Path) -> list[float]:
    """Train in one process without failures; returns the losses."""
    say(f"1. {STEPS} steps undisturbed, in one process")
    folder.mkdir()
    with open(folder / "output.log", "w") as output:
        subprocess.run(
            [sys.executable, "-m", MODULE, "--folder", str(folder), *TRAINING],
            stdout=output, stderr=subprocess.STDOUT, check=True,
        )  # fmt: skip
    return losses_of(folder)


def train_guarded(folder: Path) -> list[float]:
    """Train on four processes under the supervisor with injected failures; returns the losses."""
    say(
        f"\n2. The same on {GPUS} processes, each in a GPU's place, supervised: four\n"
        "   copies, whose weights are sharded over them. Seconds, and what the supervisor does; a\n"
        "   batch is micro-batch x accumulation x copies, or copies x samples of each:\n"
    )
    run = RunFolder(folder / "guarded")
    with open(folder / "supervisor.log", "w") as output:
        supervisor = subprocess.Popen(supervise(run), stdout=output, stderr=output)
        printer = JournalPrinter(run, supervisor)
        try:
            inject_failures(printer, folder)
            printer.print_until(lambda: supervisor.poll() is not None)
        finally:
            if supervisor.poll() is None:
                supervisor.terminate()
                supervisor.wait()
    if supervisor.returncode != 0:
        raise subprocess.CalledProcessError(supervisor.returncode, "rmetric supervise")
    return losses_of(run.path)


class JournalPrinter:
    def __init__(self, run: RunFolder, supervisor: subprocess.Popen[bytes]) -> None:
        self.run, self.supervisor = run, supervisor
        self.num_printed, self.launched = 0, False

    def print_until(self, happened: Callable[[], bool]) -> None:
        """Raises CalledProcessError if the supervisor ends first, or all takes too long."""
        until = time.monotonic() + TIMEOUT_SECONDS
        while not happened():
            if time.monotonic() > until or self.supervisor.poll() is not None:
                raise subprocess.CalledProcessError(self.supervisor.poll() or 1, "the training")
            self.print_new()
            time.sleep(0.1)
        self.print_new()

    def print_new(self) -> None:
        lines = read_journal(self.run.journal)
        for line in lines[self.num_printed :]:
            self.launched = self.launched or line["event"] == "launch"
            if self.launched and line["event"] in EVENT_TEXT:
                seconds = line["time"] - lines[0]["time"]
                say(f"   {seconds:5.1f}  {EVENT_TEXT[line['event']](line)}")
        self.num_printed = len(lines)

    def all_have_done(self, step: int) -> bool:
        beats = self.run.beats()
        return len(beats) == GPUS and all(beat.step >= step for beat in beats.values())


def supervise(run: RunFolder) -> list[str]:
    return [
        *(sys.executable, "-m", "rmetric", "supervise", str(run.path)),
        *("--batch", "16", "--uneven-batch", "--layout", "data=4,micro_batch=2"),
        *("--poll-seconds", "0.2", "--backoff-seconds", "1.5", "--"),
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(GPUS)),
        *("-m", MODULE, "--folder", str(run.path), "--sleep", "0.1", *TRAINING),
    ]  # fmt: skip


def inject_failures(printer: JournalPrinter, folder: Path) -> None:
    """Degrade a GPU, then lose it and kill its process."""
    printer.print_until(lambda: printer.all_have_done(WARNED_AT))
    say(f"          ... step {WARNED_AT}: GPU {BAD_GPU} reports a row of memory to be replaced")
    now = time.time()
    replay(folder / "warning.jsonl", printer, [
        Reading(gpu=BAD_GPU, time=now - 10 * (2 - i), temperature_celsius=70.0 + i,
                ecc_corrected_errors=100 * i, row_remap_pending=i > 1)
        for i in range(3)
    ])  # fmt: skip
    printer.print_until(lambda: printer.all_have_done(KILLED_AT))
    say(f"          ... step {KILLED_AT}: it falls off the bus (Xid 79), its process is killed")
    victim = printer.run.beats()[BAD_GPU].pid
    replay(folder / "xid.jsonl", printer, [GpuSign(gpu=BAD_GPU, time=time.time(), kind="xid_79")])
    with suppress(ProcessLookupError):  # it has already stopped as requested
        os.kill(victim, signal.SIGKILL)


def replay(recording: Path, printer: JournalPrinter, events: list[TelemetryEvent]) -> None:
    """Replay readings to `rmetric telemetry` as if they came from a machine."""
    before = printer.run.request()
    recording.write_bytes(b"".join(map(event_line, events)))
    command = [sys.executable, "-m", "rmetric", "telemetry", "--play", str(recording)]
    subprocess.Popen([*command, "--run", str(printer.run.path)], stdout=subprocess.DEVNULL)
    printer.print_until(lambda: printer.run.request() != before)


def compare(alone: list[float], guarded: list[float]) -> int:
    """Compare the losses of both trainings; returns the exit code."""
    print("\n3. The losses, undisturbed and guarded:\n")
    print("   step  undisturbed    guarded")
    for step in (1, KILLED_AT, STEPS):
        print(f"   {step:4d}  {alone[step - 1]:11.6f}  {guarded[step - 1]:9.6f}")
    largest = max(abs(a - b) for a, b in zip(alone, guarded, strict=True))
    same = largest <= TOLERANCE
    print(f"\n   The largest difference of {STEPS} steps is {largest:.1e} nats: "
          f"{'the same training' if same else f'MORE than {TOLERANCE:g}'}")  # fmt: skip
    return 0 if same else 1


def losses_of(folder: Path) -> list[float]:
    records = read_log(folder / "losses.jsonl").records
    return [record.training_loss for record in records if record.training_loss is not None]


def say(words: str) -> None:
    print(words, flush=True)


if __name__ == "__main__":
    exit_with(main)
