"""What the ranks of a launch do while it hangs, and the diagnosis of it.

A look is a folder of the run folder, ``stacks/N``, that `rmetric diagnose` reads: of each rank of
this node the stack of its main thread in the form of py-spy (`rank_3.txt`), its flight recorder
(`nccl_trace_rank_3`), and in `processes-NODE.log` its last step, whether it is stopped, and what
NCCL's RAS service reports of it, whose reply is `nccl_ras-NODE.txt`. Nothing is stopped or ended.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from rmetric._util.durable import no_follow, write_atomically
from rmetric._util.errors import error_text
from rmetric.guard.run_folder import STACK_SIGNAL, Heartbeat, RunFolder
from rmetric.guard.supervisor import nccl_ras
from rmetric.guard.supervisor.journal import launch_log, read_journal
from rmetric.guard.supervisor.processes import GONE, SUSPENDED, Program, require_psutil, states_of
from rmetric.guard.trust import make_private
from rmetric.telemetry.nvml import NvmlEvents

#: Seconds that py-spy, a rank's answer to the signal, its recorder and NVML may take.
PY_SPY_SECONDS, ANSWER_SECONDS, RECORDER_SECONDS, NVML_SECONDS = 10.0, 1.0, 2.0, 3.0
_RMETRIC = (sys.executable, "-m", "rmetric")
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_FRAME = re.compile(r'^\s*File "([^"\n]+)", line (\d+) in (\S+)', re.MULTILINE)


def collect(folder: RunFolder, into: Path) -> list[str]:
    """Look at the ranks of the last launch that are on this node, and write files to `into`.

    Returns a line about each rank, those of NCCL's RAS service, and one about the GPUs where NVML
    answers; nothing if no rank of this node has a heartbeat. Raises OSError if `into` cannot be
    written, ModuleNotFoundError without psutil.
    """
    require_psutil()
    here, every = os.uname().nodename, folder.beats().values()
    newest = max(every, key=lambda beat: beat.time, default=None)
    launch = [beat for beat in every if newest and beat.launch == newest.launch]
    beats = {beat.rank: beat for beat in launch if beat.node == here}
    if not beats:
        return []
    make_private(into)
    launches = [line["launch"] for line in read_journal(folder.journal) if "pids" in line]
    log = folder.path.resolve() / launch_log(max(launches, default=0))
    if log.is_file() and not (into / log.name).is_symlink():
        (into / log.name).symlink_to(log)
    states = states_of(beats)

    def look(beat: Heartbeat) -> str:
        state, text, source, recorder = states[beat.rank], "", "none", ""
        if state not in GONE:
            recorder = _recorder(beat, into)
            if state not in SUSPENDED:  # where a stopped one was explains nothing
                text, source = _stack(folder.heartbeats / f"rank-{beat.rank}.stacks", beat.pid)
        if text:
            write_atomically(into / f"rank_{beat.rank}.txt", [text.encode()])
        silent = max(0.0, time.time() - beat.time)
        return (
            f"rank {beat.rank} (process {beat.pid}): step {beat.step}, {beat.phase}, heartbeat "
            f"{silent:.0f} s ago; {state}; stack: {source}{recorder}"
        )

    with ThreadPoolExecutor(8) as pool:
        reply = pool.submit(_state_by_ras, launch, here, into)
        looks = list(pool.map(look, beats.values()))
    stated = reply.result()
    lines = [f"[rank{rank}]: step {beat.step}\n" for rank, beat in beats.items()]
    lines += [f"[rank{r}]: State:\tT (stopped)\n" for r in beats if states[r] in SUSPENDED]
    lines += [f"{line}\n" for line in stated]
    write_atomically(into / f"processes-{here}.log", ["".join(lines).encode()])
    return looks + stated + _gpu_use()


def new_look(folder: RunFolder) -> Path:
    """Folder of the next look, which does not exist yet."""
    numbers = [int(path.name) for path in folder.stacks.glob("*") if path.name.isdigit()]
    return folder.stacks.resolve() / str(max(numbers, default=0) + 1)


def _stack(answers: Path, pid: int) -> tuple[str, str]:
    """Stack of the main thread in the form of py-spy, and the program that gave it."""
    beside = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    if program := shutil.which("py-spy", path=beside):
        command = [program, "dump", "--nonblocking", "--pid", str(pid)]
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, timeout=PY_SPY_SECONDS)
            if b"MainThread" in done.stdout:
                return done.stdout.decode("utf-8", "replace"), "py-spy"
    # The main thread is the last.
    frames = _FRAME.findall(_ask(answers, pid).rpartition("(most recent call first):")[2])
    lines = [f"    {name} ({file}:{line})\n" for file, line, name in frames]
    text = f'Process {pid}: python\n\nThread {pid}: "MainThread"\n{"".join(lines)}'
    return (text, "faulthandler") if frames else ("", "none")


def _ask(answers: Path, pid: int) -> str:
    """Stacks that a rank writes on `STACK_SIGNAL`; empty if it would not, or does not in time."""
    with suppress(OSError), open(answers, "rb", opener=no_follow) as file:
        before = file.seek(0, os.SEEK_END)
        caught = re.search(r"SigCgt:\s*(\S+)", Path(f"/proc/{pid}/status").read_text())
        # Without a handler the signal would end the process.
        if caught and int(caught[1], 16) >> (STACK_SIGNAL - 1) & 1:
            os.kill(pid, STACK_SIGNAL)
            _await_growth(answers, before, ANSWER_SECONDS)
            return file.read().decode("utf-8", "replace")
    return ""


def _await_growth(path: Path, size: int, seconds: float) -> None:
    """Wait until a file is larger than `size`, at most so many seconds, and a little for more."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not (path.exists() and path.stat().st_size > size):
        time.sleep(0.05)
    time.sleep(0.3)


def _environ(beat: Heartbeat) -> dict[str, str]:
    pairs = Path(f"/proc/{beat.pid}/environ").read_bytes().decode("utf-8", "replace").split("\0")
    return dict(pair.partition("=")[::2] for pair in pairs)


def _state_by_ras(launch: Sequence[Heartbeat], here: str, into: Path) -> list[str]:
    """Lines of NCCL's RAS service about the ranks of a launch; its reply is saved."""
    address = nccl_ras.ADDRESS
    for beat in launch:
        with suppress(OSError):
            own = _environ(beat) if beat.node == here else {}
            address = own.get("NCCL_RAS_ADDR") or address
    if reply := nccl_ras.ask(address):
        write_atomically(into / f"nccl_ras-{here}.txt", [reply.encode()])
    return nccl_ras.findings(reply, launch)


def _recorder(beat: Heartbeat, into: Path) -> str:
    """Copy the dump of a rank's flight recorder, requested where torch listens; words about it."""
    process, name = Path(f"/proc/{beat.pid}"), f"nccl_trace_rank_{beat.rank}"
    with suppress(OSError):
        environ = _environ(beat)
        prefix = next(filter(None, map(environ.get, _DUMPS)), "/tmp/nccl_trace_rank_")
        dump = Path(f"{prefix}{beat.rank}")
        if environ.get(_PIPE):
            pipe = os.open(f"{environ[_PIPE]}{beat.rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            dump.unlink(missing_ok=True)
            os.write(pipe, b"1\n")
            os.close(pipe)
            _await_growth(dump, 0, RECORDER_SECONDS)
        if dump.stat().st_mtime >= process.stat().st_mtime:  # none of an earlier launch
            with open(dump, "rb", opener=no_follow) as file:
                write_atomically(into / name, file)
            return f"; {name}"
    return ""


def _gpu_use() -> list[str]:
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return []
    with NvmlEvents() as hardware:
        hardware.ready(NVML_SECONDS)
        return [f"GPU {gpu.gpu}: {gpu.utilisation_percent} % busy" for gpu in hardware.readings()]


class Adviser:
    """Asks for diagnoses, each of at most `seconds`, by commands in processes of their own.

    The answers are lines of the journal: `advice`, or `trouble` with why there is none.
    """

    def __init__(self, folder: RunFolder, program: Program, seconds: float) -> None:
        self.folder, self.program, self.seconds = folder, program, seconds
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def of_hang(self, launch: int) -> dict[str, Any]:
        """Look at the ranks of a launch that hangs, on all nodes, and diagnose what is seen."""
        into = new_look(self.folder)
        look = [*_RMETRIC, "stacks", str(self.folder.path.resolve()), "--into", str(into)]
        nodes = [node for node, prefix in self.program.prefixes.items() if prefix]
        with ThreadPoolExecutor(1 + len(nodes)) as pool:
            list(pool.map(self._run, [look, *(self.program.behind(n, look, {}) for n in nodes)]))
        found = self._diagnosis(launch, into, "--json-file", str(into / "diagnosis.json"))
        return found | {"look": f"stacks/{into.name}"}

    def of_failure(self, launch: int) -> dict[str, Any]:
        """Diagnose the outputs of a launch and of the one before it, as two attempts."""
        with tempfile.TemporaryDirectory(prefix="rmetric-") as folder:
            for number in (launch - 1, launch):
                log = self.folder.path.resolve() / launch_log(number)
                if log.is_file():
                    Path(folder, f"attempt_{number}").mkdir()
                    Path(folder, f"attempt_{number}", log.name).symlink_to(log)
            return self._diagnosis(launch, folder)

    def _diagnosis(self, launch: int, *arguments: Path | str) -> dict[str, Any]:
        """The line of the journal about a launch, from what is diagnosed with these arguments."""
        printed, errors = self._run([*_RMETRIC, "diagnose", *map(str, arguments), "--json"])
        try:
            found = json.loads(printed)
        except ValueError:
            why = errors.decode("utf-8", "replace").strip().rpartition("\n")[2] or "no answer"
            return {"event": "trouble", "words": f"launch {launch}: no diagnosis: {why}"}
        # The first suspect is named, else the only rank that logged the cause.
        causes = [event["who"] for event in found["events"] if event["role"] == "cause"]
        name = causes[0][0].removeprefix("rank ") if causes and len(causes[0]) == 1 else ""
        rank = int(name) if name.isdigit() else None
        rank = found["nodes"][0]["rank"] if found["nodes"] else rank
        known = rank is None or f"rank {rank} " in found["title"]
        words = found["title"] if known else f"{found['title']}, rank {rank}"
        if found["restart"]:
            words += f" ({found['confidence']:.0%}); restart: {found['restart']['text']}"
        kept = {name: found[name] for name in ("outcome", "cause", "confidence", "restart")}
        return {"event": "advice", "launch": launch, "words": words, "rank": rank, **kept}

    def _run(self, command: Sequence[str]) -> tuple[bytes, bytes]:
        """Standard output and errors of a command; of one that takes too long, why."""
        nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
        try:
            process = subprocess.Popen(command, stdin=nothing, stdout=pipe, stderr=pipe)
        except OSError as error:
            return b"", error_text(error).encode()
        self.processes[process.pid] = process
        with process:
            try:
                return process.communicate(timeout=self.seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                return b"", f"it took longer than {self.seconds:g} s".encode()
            finally:
                del self.processes[process.pid]
