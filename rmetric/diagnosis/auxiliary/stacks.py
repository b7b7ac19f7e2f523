"""Read the stacks of a job's processes.

They are of py-spy dump, in files of their own, or of Python's faulthandler, in the logs: torch and
JAX register it for signals, and some trainings for every few minutes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rmetric.diagnosis.library.stages import awaited
from rmetric.diagnosis.reading.source import unwrapped

#: A function, its file and the line in it.
Frame = tuple[str, str, str]

#: Frames that are shown of a stack.
MAX_SHOWN = 4
#: Lines above a stack in which its host is sought.
MAX_ABOVE = 3
#: Least share of a file's lines below its first stack that are of stacks.
MIN_STACK_SHARE = 0.6
_PROCESS = re.compile(r"^ *Process (?P<pid>\d+): (?P<command>.*)$")
_THREAD = re.compile(r"^ *Thread (?P<id>\S+)(?: \((?:\w[\w+]*)\))?(?:: \"(?P<name>.*)\")?\s*$")
#: A frame of py-spy; its indent is lost in some copies.
_FRAME = re.compile(
    r"^(?:\s+|(?=\S.* \([^()\s]+:\d+\)\s*$))(?P<name>\S.*?) \((?P<file>[^()\n]+?)"
    r"(?::(?P<line>\d+))?\)\s*$"
)
#: What py-spy writes with --locals, and about its process.
_BESIDES = re.compile(r"^(?:\s+(?:Arguments|Locals):|\s{8,}\S+: |Python v\d|\s*$)")
#: The host or the task that pdsh or srun puts before each line.
_BEFORE = re.compile(
    r"^ *(?:(?P<host>[A-Za-z][\w.-]*\d[\w-]*)|\d{1,5}): ?(?=Process |Thread |Python v|  |$)"
)
#: Heads of the threads of faulthandler, the main thread's last, and their frames.
_FAULT_THREAD = re.compile(
    r"^(?:Current t|T)hread (?P<id>0x[0-9a-f]+) .*\(most recent call first\):", re.MULTILINE
)
_FAULT_FRAME = re.compile(
    r"^\s*File \"(?P<file>[^\"\n]+)\", line (?P<line>\d+) in (?P<name>\S+)", re.MULTILINE
)
#: What a command, or the lines above a stack, state of its process.
_RANK_OF_COMMAND = re.compile(r"(?:--?(?:global_?)?rank[= ]|\bRANK=)(\d+)")
_RANK_ABOVE = re.compile(
    r"(?i)(?:(?<![a-z_])(?:global[ _])?rank|SLURM_PROCID|WORLD_RANK|PMI\w?_RANK|PALS_RANKID"
    r"|FLUX_TASK_RANK|JSM_NAMESPACE_RANK|(?<![a-z\d])t\dv-n-[0-9a-f]{6,}-w)[ =:#_-]{0,2}(\d+)"
)
_LOCAL_ABOVE = re.compile(r"(?i)(?:(?<![a-z])local[ _]?rank|\blocal|\bgpu)[ =:#_]{0,2}(\d+)")
#: A worker process that reads data for another one.
_WORKER = "_worker_loop"
#: Operations that all ranks of a group enter together.
_TOGETHER = (
    r"all_?(?:gather|reduce|to_?all)|reduce_scatter|broadcast|barrier|mesh_reduce|rendezvous"
    r"|sync_global_devices|process_allgather"
)
_OPERATION = re.compile(rf"(?i)_?(?:{_TOGETHER}|reduce|gather|scatter)")
#: Where a process waits for the others, or for its GPU, which waits for them.
_COLLECTIVE = re.compile(
    rf"(?i){_TOGETHER}|^_?(?:scatter|gather)|^_?(?:send|recv)(?!\S* (?:ssl|socket|connection)\.py)"
    r"|mark_step|wait_device_ops|synchronize|wait_tensor|block_?until_?ready|run_backward"
    r"|^(?:backward|item|tolist|cpu)$|^wait \(?[^ ]*(?:distributed|c10d)"
)
#: What keeps few activations and computes the others once more: no checkpoint of a training.
_RECOMPUTES = re.compile(
    r"utils/checkpoint\.py$|tensor_parallel/random\.py$|activation_checkpointing/"
    r"|checkpoint_wrapper\.py$|^\w*checkpointed_\w*forward |^custom_forward "
)


@dataclass(kw_only=True)
class Stack:
    """The main thread of one process, its innermost frame first.

    Attributes:
        stream: of the job, usually a rank; "" where it is not known.
        rank, local_rank, node, pid: as the file states them, None where it does not.
        stays: it did not move: taken after the process hung, or twice in one place.
        above: the lines above it, which may name its host or pod.
    """

    file: str
    frames: tuple[Frame, ...]
    stream: str = ""
    rank: int | None = None
    local_rank: int | None = None
    node: str | None = None
    pid: int | None = None
    stays: bool = True
    above: str = ""

    @property
    def place(self) -> tuple[tuple[str, str], ...]:
        """Functions and files without the lines, which may differ within a loop."""
        return tuple((name, file) for name, file, _ in self.frames)

    @property
    def is_main(self) -> bool:
        """False for a worker that reads data for another process, and for one without frames."""
        return bool(self.frames) and _WORKER not in dict(self.place)

    @property
    def stage(self) -> str:
        """What it waits for outside the job; "" if it waits for others, or for its GPU."""
        for name, file, _ in self.frames:
            # The file's folder may tell too.
            words = " ".join([name, *file.split("/")[-1:-3:-1]])
            if _RECOMPUTES.search(f"{name} {file}"):
                continue
            if _COLLECTIVE.search(words):
                return ""
            if stage := awaited(words):
                return stage
        return ""

    @property
    def collective(self) -> str:
        """The innermost function by which it waits for others; "" for none."""
        named = (name for name, _, _ in self.frames if _OPERATION.match(name))
        return next(named, "") if not self.stage else ""

    @property
    def shown(self) -> str:
        """The innermost frames, in words."""
        return _shown(self.frames[:MAX_SHOWN])

    def words(self, other: Stack) -> str:
        """The frames from where it leaves another stack, which is another rank's."""
        pairs = zip(reversed(self.place), reversed(other.place), strict=False)
        common = next((at for at, (one, two) in enumerate(pairs) if one != two), 0)
        first, *rest = self.frames[: len(self.frames) - common] or self.frames[:1]
        return _shown((first, *rest[1 - MAX_SHOWN :]))

    def differs(self, other: Stack) -> bool:
        """It waits for others in another collective than they do, who have not come or will not."""
        return bool(self.collective) and not other.stage and self.collective != other.collective


def _shown(frames: Sequence[Frame]) -> str:
    return " > ".join(
        f"{name} ({file.rsplit('/', 1)[-1]}:{line})" for name, file, line in reversed(frames)
    )


def holds_stacks(head: bytes) -> bool:
    """True for the first bytes of a text with stacks of py-spy in it, whatever else there is."""
    return bool(_from_first(head))


def is_stack_dump(head: bytes) -> bool:
    """True for the first bytes of a file with stacks of py-spy, and little else below the first.

    A person's commands and what they printed may stand above it.
    """
    lines = _from_first(head)
    below = [line for line in lines[:-1] or lines if line.strip()]
    known = (_PROCESS, _THREAD, _FRAME, _BESIDES)
    ours = sum(any(one.match(line) for one in known) for line in below)
    return bool(below) and ours >= MIN_STACK_SHARE * len(below)


def _from_first(head: bytes) -> list[str]:
    """The lines from the first process, or thread with its frames; none without."""
    if b"Thread " not in head and b"Process " not in head:
        return []
    text = unwrapped(head).decode("utf-8", "replace")
    lines = [_BEFORE.sub("", line) for line in text.splitlines()]
    for at, line in enumerate(lines):
        after = next((line for line in lines[at + 1 : at + 3] if line.strip()), "")
        of_process = after == "" or after.startswith("Python v") or _THREAD.match(after)
        if (_PROCESS.match(line) and of_process) or (_THREAD.match(line) and _FRAME.match(after)):
            return lines[at:]
    return []


def read_stacks(text: str, name: str, rank: int | None, node: str | None = None) -> list[Stack]:
    """The main threads of a file's processes, without workers that read data for them."""
    found: list[Stack] = []
    above: list[str] = []
    main = False

    for line in text.splitlines():
        if before := _BEFORE.match(line):
            node, line = before["host"] or node, line[before.end() :]
        if process := _PROCESS.match(line):
            found.append(_stated(name, node, process["pid"], process["command"], above))
            main = True
        elif thread := _THREAD.match(line):
            of_main, number = thread["name"] == "MainThread", thread["id"]
            if not found or (of_main and found[-1].frames and number != str(found[-1].pid)):
                # of a process whose own line was left out
                found.append(_stated(name, node, number, "", above))
            if of_main:
                found[-1].frames = ()
            main = not found[-1].frames
        elif found and (frame := _FRAME.match(line)):
            if main:
                found[-1].frames += ((frame["name"], frame["file"], frame["line"] or "?"),)
            above = []
        elif not _BESIDES.match(line):
            above.append(line)
    stacks = [one for one in found if one.is_main]
    if len(stacks) == 1 and stacks[0].rank is None:
        stacks[0].rank = rank
    return stacks


def _stated(file: str, node: str | None, pid: str, command: str, above: Sequence[str]) -> Stack:
    """A stack with what its command, or the lines above it, state; its frames follow."""
    text = "\n".join(above)
    ranks = _RANK_OF_COMMAND.findall(command) or _RANK_ABOVE.findall(text)[-1:]
    local = _LOCAL_ABOVE.findall(text)
    return Stack(
        file=file, frames=(), node=node, above="\n".join(above[-MAX_ABOVE:]),
        rank=int(ranks[0]) if ranks else None, local_rank=int(local[-1]) if local else None,
        pid=int(pid) if pid.isdigit() else None,
    )  # fmt: skip


def states_stack(text: str) -> bool:
    """True for a log's entry that holds a stack of faulthandler."""
    return "(most recent call first)" in text and _FAULT_THREAD.search(text) is not None


def main_threads(text: str) -> list[tuple[Frame, ...]]:
    """The main thread in each dump of faulthandler in an entry: the thread that comes last."""
    heads = [*_FAULT_THREAD.finditer(text)]
    ends = [*(one.start() for one in heads[1:]), len(text)]
    return [
        tuple(
            (one["name"], one["file"], one["line"])
            for one in _FAULT_FRAME.finditer(text, head.end(), end)
        )
        for head, end in zip(heads, ends, strict=True)
        if head["id"] == heads[-1]["id"]
    ]


def process_of(text: str) -> tuple[str, str]:
    """The rank that an entry with a stack of faulthandler names above it, and the main thread."""
    heads = [*_FAULT_THREAD.finditer(text)]
    ranks = _RANK_ABOVE.findall(text[: heads[0].start()]) if heads else []
    return (f"rank {ranks[-1]}" if ranks else ""), (heads[-1]["id"] if heads else "")
