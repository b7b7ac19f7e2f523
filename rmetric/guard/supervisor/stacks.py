"""What the ranks of a running launch do, collected while it hangs and before it is ended.

Each look is a folder of the run folder, ``stacks/N``, which `rmetric diagnose` reads: of each rank
of this node the stack of its main thread in the form of py-spy (`rank_3.txt`), its flight recorder
(`nccl_trace_rank_3`), and in `processes.log` its last step and the state of its process. Nothing
is stopped or ended: py-spy reads without a pause, and a rank answers the signal of
`register_stacks` in between. Processes of other nodes are looked at there, by the same command.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rmetric._util.durable import no_follow, write_atomically
from rmetric.guard.run_folder import STACK_SIGNAL, Heartbeat, RunFolder
from rmetric.guard.supervisor.allocation import all_of
from rmetric.guard.supervisor.journal import read_journal
from rmetric.guard.supervisor.journal_lines import launch_log
from rmetric.guard.supervisor.process_states import STATES, STOPPED, ProcessState, read_states
from rmetric.guard.trust import make_private

#: Seconds that py-spy, a rank's answer to the signal, its recorder and NVML may take.
PY_SPY_SECONDS, ANSWER_SECONDS, RECORDER_SECONDS, NVML_SECONDS = 10.0, 1.0, 2.0, 3.0
#: Greatest part of a launch's output that is diagnosed at once, from its end; bytes.
LOG_BYTES = 32 << 20
#: Environment variables of torch: where it dumps its recorder, and the pipe that asks for a dump.
_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_DEFAULT_DUMP = "/tmp/nccl_trace_rank_"
_FRAME = re.compile(r'^\s*File "([^"\n]+)", line (\d+) in (\S+)', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class RankLook:
    """One rank at one time.

    Attributes:
        rank, node, pid, step, phase: of its last heartbeat.
        silent_seconds: since that, by the clock of its node.
        state: of its process, in words.
        stack: program that gave its stack, `py-spy` or `faulthandler`; else why there is none.
        recorder: the file of its flight recorder; empty without one.
        gpu: use of its GPU in words; empty where NVML does not answer.
    """

    rank: int
    node: str
    pid: int
    step: int
    phase: str
    silent_seconds: float
    state: str
    stack: str
    recorder: str = ""
    gpu: str = ""

    def __str__(self) -> str:
        more = "".join(f", {words}" for words in (self.gpu, self.recorder) if words)
        return (
            f"rank {self.rank} (process {self.pid} on {self.node}): step {self.step}, {self.phase},"
            f" last heartbeat {self.silent_seconds:.0f} s ago; {self.state}; "
            f"stack: {self.stack}{more}"
        )


def collect(folder: RunFolder, into: Path) -> list[RankLook]:
    """Look at the ranks of the last launch that are on this node, and write files to `into`.

    Returns their looks, in the order of ranks; empty if no rank of this node has a heartbeat.

    Raises:
        OSError: `into` cannot be written.
    """
    newest = max(folder.beats().values(), key=lambda beat: beat.time, default=None)
    here = os.uname().nodename
    beats = folder.beats(newest.launch) if newest else {}
    beats = {rank: beat for rank, beat in sorted(beats.items()) if beat.node == here}
    if not beats:
        return []
    make_private(into.parent)
    make_private(into)
    states, use = read_states(beats), _gpu_use(folder, here)

    def look(beat: Heartbeat) -> RankLook:
        rank, state = beat.rank, states[beat.rank].state
        alive = state not in ("", "Z", "X")
        # Where a stopped process was is no reason; that it is stopped, is.
        moves = alive and state not in STOPPED
        text, source = _stack(folder, beat) if moves else ("", "none")
        if text:
            _write(into / f"rank_{rank}.txt", f"rank {rank}\n{text}")
        return RankLook(
            rank=rank, node=here, pid=beat.pid, step=beat.step, phase=beat.phase,
            silent_seconds=round(max(0.0, time.time() - beat.time), 1),
            state=states[rank].words, stack=source, gpu=use.get(rank, ""),
            recorder=_recorder(beat, into) if alive else "",
        )  # fmt: skip

    with ThreadPoolExecutor(8) as pool:
        looks = list(pool.map(look, beats.values()))
    lines = [line for beat in beats.values() for line in _lines(beat, states[beat.rank])]
    _write(into / f"processes-{here}.log", "".join(lines))
    _write(into / f"ranks-{here}.json", json.dumps([asdict(one) for one in looks], indent=1))
    return looks


def new_look(folder: RunFolder) -> Path:
    """Folder of the next look, which does not exist yet."""
    numbers = [int(path.name) for path in folder.stacks.glob("*") if path.name.isdigit()]
    return folder.stacks / str(max(numbers, default=0) + 1)


def add_output(folder: RunFolder, into: Path) -> None:
    """Add the output of the last launch, if there is one, to the folder of a look."""
    log = folder.path / launch_log(_last_launch(folder).get("launch", 0))
    if log.is_file():
        log_end(log, into / log.name)


def log_end(log: Path, into: Path) -> None:
    """Make `into` a link to a log, or, of a long one, a file with its last `LOG_BYTES`."""
    if log.stat().st_size <= LOG_BYTES:
        into.symlink_to(log.resolve())
        return
    with open(log, "rb", opener=no_follow) as file:
        file.seek(-LOG_BYTES, os.SEEK_END)
        file.readline()  # cut off
        write_atomically(into, file)


def _last_launch(folder: RunFolder) -> dict[str, Any]:
    launches = (line for line in read_journal(folder.journal) if line["event"] == "launch")
    return max(launches, key=lambda line: line["time"], default={})


def _write(path: Path, text: str) -> None:
    write_atomically(path, [text.encode("utf-8", "replace")])


def _lines(beat: Heartbeat, state: ProcessState) -> list[str]:
    """The last step, and the state of the process as /proc has it."""
    who = f"[rank{beat.rank}]:"
    lines = [f"{who} step {beat.step}\n"]
    if state.state in STOPPED:
        lines.append(f"{who} State:\t{state.state} ({STATES[state.state].split()[0]})\n")
    return lines


def _stack(folder: RunFolder, beat: Heartbeat) -> tuple[str, str]:
    """Stack of the main thread in the form of py-spy, and the program that gave it."""
    beside = Path(sys.executable).with_name("py-spy")
    program = shutil.which("py-spy") or (str(beside) if beside.exists() else None)
    why = "py-spy is not installed"
    if program:
        command = [program, "dump", "--nonblocking", "--pid", str(beat.pid)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=PY_SPY_SECONDS
            )
            if done.returncode == 0 and "MainThread" in done.stdout:
                return done.stdout, "py-spy"
            said = f"{done.stdout} {done.stderr}".split()
            why = f"py-spy: {' '.join(said)[-120:] or 'no main thread'}"
        except (OSError, subprocess.TimeoutExpired) as error:
            why = f"py-spy: {type(error).__name__}"
    if answer := _ask(folder.stacks_of(beat.rank), beat.pid):
        frames = _FRAME.findall(answer.rpartition("(most recent call first):")[2])
        lines = [f"    {name} ({file}:{line})\n" for file, line, name in frames]
        return f'Process {beat.pid}: python\n\nThread {beat.pid}: "MainThread"\n{"".join(lines)}', (
            "faulthandler"
        )
    return "", f"{why}; the rank has not registered the signal"


def _ask(path: Path, pid: int) -> str:
    """Stacks that a rank writes on `STACK_SIGNAL`; empty if it would not, or does not in time."""
    try:
        before = path.stat().st_size
        caught = re.search(r"SigCgt:\s*(\S+)", Path(f"/proc/{pid}/status").read_text())
        # Without a handler the signal would end the process.
        if caught is None or not int(caught[1], 16) >> (STACK_SIGNAL - 1) & 1:
            return ""
        os.kill(pid, STACK_SIGNAL)
        until, size = time.monotonic() + ANSWER_SECONDS, before
        while time.monotonic() < until:
            time.sleep(0.05)
            last, size = size, path.stat().st_size
            if size == last > before:
                break
        with open(path, "rb", opener=no_follow) as file:
            file.seek(before)
            return file.read().decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def _recorder(beat: Heartbeat, into: Path) -> str:
    """Copy the dump of a rank's flight recorder, asked for where torch listens; its name."""
    try:
        data = Path(f"/proc/{beat.pid}/environ").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
    environ = dict(pair.partition("=")[::2] for pair in data.split("\0"))
    prefix = next((environ[name] for name in _DUMPS if environ.get(name)), _DEFAULT_DUMP)
    dump, began = Path(f"{prefix}{beat.rank}"), time.time()
    if environ.get(_PIPE):
        with suppress(OSError):  # nobody reads it
            pipe = os.open(f"{environ[_PIPE]}{beat.rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            os.write(pipe, b"1\n")
            os.close(pipe)
            _await_dump(dump, began)
    try:
        # A dump of an earlier launch tells nothing of this one.
        if dump.stat().st_mtime < Path(f"/proc/{beat.pid}").stat().st_mtime:
            return ""
        shutil.copyfile(dump, into / f"nccl_trace_rank_{beat.rank}")
    except OSError:
        return ""
    return f"nccl_trace_rank_{beat.rank}"


def _await_dump(dump: Path, began: float) -> None:
    """Wait until a dump is written since `began` and has stopped growing."""
    until, size = time.monotonic() + RECORDER_SECONDS, -1
    while time.monotonic() < until:
        time.sleep(0.1)
        with suppress(OSError):
            status = dump.stat()
            if status.st_mtime >= began and status.st_size == size > 0:
                return
            size = status.st_size if status.st_mtime >= began else -1


def _gpu_use(folder: RunFolder, here: str) -> dict[int, str]:
    """Rank -> use of its GPU, where the journal assigns it one of this machine."""
    from rmetric.telemetry.nvml import NvmlEvents

    gpus = all_of(_last_launch(folder).get("gpus", {}))
    own = {rank: gpu for rank, (node, gpu) in enumerate(gpus) if node in ("", here)}
    if not own or not any(Path("/dev").glob("nvidia[0-9]*")):
        return {}
    with NvmlEvents() as hardware:
        if not hardware.ready(NVML_SECONDS):
            return {}
        readings = {reading.gpu: reading for reading in hardware.readings()}
    return {
        rank: f"GPU {gpu} {one.utilisation_percent} % busy at {one.power_watts} W"
        for rank, gpu in own.items()
        if (one := readings.get(gpu)) is not None
    }
