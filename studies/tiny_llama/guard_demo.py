"""The guard at work, on any machine with a CPU, in under two minutes.

    python -m studies.tiny_llama.guard_demo [--out guard_demo]

A small Llama is trained twice. Once undisturbed, in one process. Once on four processes
that stand for four GPUs, under `rmetric supervise`: the telemetry of GPU 2 goes bad, which
asks for a checkpoint; then the GPU falls off the bus and its process is killed. The
supervisor drops it, plans a layout for the three that are left and goes on from the
checkpoint. In the end both trainings must have the same losses.

All of it is real but the GPUs: their readings were made up here, and go the way that a
recording of real ones would go (`rmetric telemetry --play`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rmetric._util.errors import exit_with
from rmetric.guard.run_folder import RunFolder
from rmetric.guard.supervisor.journal import Line, read_journal
from rmetric.logs import read_log
from rmetric.telemetry.lines import Heard, heard_line
from rmetric.telemetry.reading import Reading, Sign

STEPS = 60
WARNED_AT, KILLED_AT = 20, 32  # steps
BAD_GPU, GPUS = 2, 4
TOLERANCE = 1e-5  # nats
PATIENCE_SECONDS = 120.0
#: What the demo leaves in its folder, and so may delete there.
OURS = {"undisturbed", "guarded", "model.json", "supervisor.log", "warning.jsonl", "xid.jsonl"}
MODEL = ["--layers", "4", "--heads", "4", "--kv-heads", "2", "--hidden", "64"]
TRAINING = [*MODEL, "--batch", "12", "--steps", str(STEPS), "--save-every", "40"]
MODULE = "studies.tiny_llama"
#: Event of the journal -> what it means.
TOLD: dict[str, Callable[[Line], str]] = {
    "launch": lambda line: f"starts the training: {line['words']} (importing torch takes a while)",
    "resumed": lambda line: f"it trains, from step {line['step']} on",
    "verdict": lambda line: line["words"],
    "asked": lambda line: (
        "asks all processes for a checkpoint, "
        + ("and to stop" if line["stop"] else "ahead of its time")
    ),
    "answered": lambda line: (
        f"the checkpoint of step {line['step']} is on disk, read back and good"
    ),
    "dropped": lambda line: f"uses GPU {BAD_GPU} no more",
    "ended": lambda line: f"{line['words']}; every process of that launch is gone",
    "over": lambda line: f"{line['outcome']}: {line['words']}",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m studies.tiny_llama.guard_demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("guard_demo"),
        metavar="DIR",
        help="folder for the results; an earlier demo in it is replaced (default: %(default)s)",
    )
    folder = parser.parse_args().out
    if folder.exists() and {path.name for path in folder.iterdir()} - OURS:
        print(f"error: {folder} holds something else than this demo's results", file=sys.stderr)
        return 2
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()
    try:
        alone = train_undisturbed(folder / "undisturbed")
        guarded = train_guarded(folder)
    except subprocess.CalledProcessError as error:
        print(f"error: {error}; what it printed stands in {folder}", file=sys.stderr)
        return 1
    code = compare(alone, guarded)
    print(f"\nThe whole took {time.monotonic() - began:.0f} s. All of it lies in {folder}/: "
          "guarded/summary.md, guarded/journal.jsonl, guarded/logs/")  # fmt: skip
    return code


def train_undisturbed(folder: Path) -> list[float]:
    """One process, nothing happens; returns the losses."""
    say(f"1. {STEPS} steps undisturbed, in one process")
    folder.mkdir()
    with open(folder / "output.log", "w") as output:
        subprocess.run(
            [sys.executable, "-m", MODULE, "--folder", str(folder), *TRAINING],
            stdout=output, stderr=subprocess.STDOUT, check=True,
        )  # fmt: skip
    return losses_of(folder)


def train_guarded(folder: Path) -> list[float]:
    """Four processes under the supervisor, and what befalls them; returns the losses."""
    say(
        f"\n2. The same on {GPUS} processes, each in a GPU's place, supervised: TP2 x DP2,\n"
        "   two copies of the model, each cut in two. Seconds, and what the supervisor does;\n"
        "   a batch is micro-batch x accumulation x copies:\n"
    )
    run = RunFolder(folder / "guarded")
    shape = folder / "model.json"
    command = [sys.executable, "-m", MODULE, "--model-json", *MODEL]
    shape.write_bytes(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    with open(folder / "supervisor.log", "w") as output:
        supervisor = subprocess.Popen(supervise(run, shape), stdout=output, stderr=output)
        story = Story(run, supervisor)
        try:
            strike(story, folder)
            story.tell_until(lambda: supervisor.poll() is not None)
        finally:
            if supervisor.poll() is None:
                supervisor.terminate()
                supervisor.wait()
    if supervisor.returncode != 0:
        raise subprocess.CalledProcessError(supervisor.returncode, "rmetric supervise")
    return losses_of(run.path)


class Story:
    """Tells what the supervisor writes down, as it does."""

    def __init__(self, run: RunFolder, supervisor: subprocess.Popen[bytes]) -> None:
        self.run, self.supervisor = run, supervisor
        self.told, self.launched = 0, False

    def tell_until(self, happened: Callable[[], bool]) -> None:
        """Raises CalledProcessError if the supervisor ends first, or all takes too long."""
        until = time.monotonic() + PATIENCE_SECONDS
        while not happened():
            if time.monotonic() > until or self.supervisor.poll() is not None:
                raise subprocess.CalledProcessError(self.supervisor.poll() or 1, "the training")
            self.tell()
            time.sleep(0.1)
        self.tell()

    def tell(self) -> None:
        lines = read_journal(self.run.journal)
        for line in lines[self.told :]:
            self.launched = self.launched or line["event"] == "launch"
            if self.launched and line["event"] in TOLD:
                seconds = line["time"] - lines[0]["time"]
                say(f"   {seconds:5.1f}  {TOLD[line['event']](line)}")
        self.told = len(lines)

    def all_have_done(self, step: int) -> bool:
        beats = self.run.beats()
        return len(beats) == GPUS and all(beat.step >= step for beat in beats.values())


def supervise(run: RunFolder, shape: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "rmetric", "supervise", str(run.path)),
        *("--model", str(shape), "--batch", "12", "--layout", "tensor=2,data=2,micro_batch=3"),
        *("--poll-seconds", "0.2", "--backoff-seconds", "1.5", "--"),
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(GPUS)),
        *("-m", MODULE, "--folder", str(run.path), "--sleep", "0.1", *TRAINING),
    ]  # fmt: skip


def strike(story: Story, folder: Path) -> None:
    """A GPU goes bad, then it is gone, and its process with it."""
    story.tell_until(lambda: story.all_have_done(WARNED_AT))
    say(f"          ... step {WARNED_AT}: GPU {BAD_GPU} reports a row of memory to be replaced")
    now = time.time()
    play(folder / "warning.jsonl", story, [
        Reading(gpu=BAD_GPU, time=now - 10 * (2 - i), temperature_celsius=70.0 + i,
                ecc_corrected_errors=100 * i, row_remap_pending=i > 1)
        for i in range(3)
    ])  # fmt: skip
    story.tell_until(lambda: story.all_have_done(KILLED_AT))
    say(f"          ... step {KILLED_AT}: it falls off the bus (Xid 79), its process is killed")
    victim = story.run.beats()[BAD_GPU].pid
    play(folder / "xid.jsonl", story, [Sign(gpu=BAD_GPU, time=time.time(), kind="xid_79")])
    with suppress(ProcessLookupError):  # it has obeyed already, and stopped
        os.kill(victim, signal.SIGKILL)


def play(recording: Path, story: Story, heard: list[Heard]) -> None:
    """Let `rmetric telemetry` judge readings, as if they were a machine's."""
    before = story.run.request()
    recording.write_bytes(b"".join(map(heard_line, heard)))
    command = [sys.executable, "-m", "rmetric", "telemetry", "--play", str(recording)]
    subprocess.Popen([*command, "--run", str(story.run.path)], stdout=subprocess.DEVNULL)
    story.tell_until(lambda: story.run.request() != before)


def compare(alone: list[float], guarded: list[float]) -> int:
    """Whether both trainings had the same losses; the exit code."""
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
