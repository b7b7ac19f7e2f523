"""Read the stacks of a job's processes, and find those that stand elsewhere than most.

They are of py-spy dump, in files of their own, or of Python's faulthandler, in the logs: torch and
JAX register it for signals, and some trainings for every few minutes.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rmetric.diagnosis.facts.job import STACKS_OF_RANK, Job, JobStream, Occurrence, short
from rmetric.diagnosis.library.stages import awaited
from rmetric.diagnosis.reading.file_names import names_in, natural
from rmetric.diagnosis.reading.source import unwrapped

#: A function, its file and the line in it.
Frame = tuple[str, str, str]

#: Frames that are shown of a stack, and lines above it in which its host is sought.
MAX_SHOWN = 4
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
_WRITER_BEFORE = re.compile(
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

    Rank, local rank, node and number are as the file states them, None where it does not.
    """

    file: str
    frames: tuple[Frame, ...]
    stream: str = ""  # of the job, usually a rank; "" where it is not known
    rank: int | None = None
    local_rank: int | None = None
    node: str | None = None
    pid: int | None = None
    stays: bool = True  # it did not move: taken after the process hung, or twice in one place
    above: str = ""  # the lines above it, which may name its host or pod

    @property
    def place(self) -> tuple[tuple[str, str], ...]:
        """Functions and files without the lines, which may differ within a loop."""
        return tuple((name, file) for name, file, _ in self.frames)

    @property
    def stage(self) -> str:
        """What it waits for outside the job; "" if it waits for others, or for its GPU."""
        for name, file, _ in self.frames:
            # The file's folder may name it too.
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

    def words(self, other: Stack) -> str:
        """The frames from where it leaves another stack, which is another rank's."""
        pairs = zip(reversed(self.place), reversed(other.place), strict=False)
        common = next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), 0)
        first, *rest = self.frames[: len(self.frames) - common] or self.frames[:1]
        return _shown((first, *rest[1 - MAX_SHOWN :]))


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
    ours = sum(any(pattern.match(line) for pattern in known) for line in below)
    return bool(below) and ours >= MIN_STACK_SHARE * len(below)


def _from_first(head: bytes) -> list[str]:
    """The lines from the first process, or thread with its frames; none without."""
    if b"Thread " not in head and b"Process " not in head:
        return []
    text = unwrapped(head).decode("utf-8", "replace")
    lines = [_WRITER_BEFORE.sub("", line) for line in text.splitlines()]
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
        if before := _WRITER_BEFORE.match(line):
            node, line = before["host"] or node, line[before.end() :]
        if process := _PROCESS.match(line):
            found.append(_stated(name, node, process["pid"], process["command"], above))
            main = True
        elif thread := _THREAD.match(line):
            of_main, number = thread["name"] == "MainThread", thread["id"]
            if not found or (of_main and _is_another(found[-1], number)):
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
    stacks = [stack for stack in found if stack.frames and _WORKER not in dict(stack.place)]
    if len(stacks) == 1 and stacks[0].rank is None:
        stacks[0].rank = rank
    return stacks


def _is_another(last: Stack, number: str) -> bool:
    """True if a main thread is of a process whose own line was left out."""
    return bool(last.frames) and number != str(last.pid)


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
    _, *parts = _FAULT_THREAD.split(text)
    threads, bodies = parts[::2], parts[1::2]
    return [
        tuple((name, file, line) for file, line, name in _FAULT_FRAME.findall(body))
        for thread, body in zip(threads, bodies, strict=True)
        if thread == threads[-1]
    ]


# -- who stands elsewhere, and whose processes they are

#: Least number of processes with stacks, and least share of them in one place, for one to be odd.
MIN_STACKS = 3
MIN_SHARE_IN_ONE_PLACE = 0.6
#: Largest share of all stacks that may wait outside the job, to be those that hold up the others.
MAX_ODD_SHARE = 0.4
#: What faulthandler writes when a time that was set is over: once, where it watches for a hang.
_WATCHED = "Timeout ("
_AWAITS = {
    "": "stands in",
    "load data": "waits for its data in",
    "checkpoint": "is at a checkpoint in",
}


class OddStack(NamedTuple):
    """How a stream's stack differs from the majority's, and what it waits for outside the job.

    It may wait for others in a collective that they have not entered, and it may stay there.
    """

    words: str
    awaits: str
    collective: bool = False
    stays: bool = False


def odd_stacks(stacks: Sequence[Stack]) -> dict[str, OddStack]:
    """The few streams that stand in another function than most, or that alone await no other.

    Those of them that wait for data or a checkpoint delay the others, which are left out.
    The last of several stacks of one rank counts; no more is known of a stream "".
    """
    ranked = {stack.stream: stack for stack in stacks if stack.stream.startswith("rank ")}
    others = [stack for stack in stacks if stack.stream not in ranked]
    every = [*ranked.values(), *others]
    found = _apart_from_most(every)
    if others:  # of a node there may be several: only what they wait for distinguishes them
        known = all(stack.stream for stack in every)
        found = {name: odd for name, odd in found.items() if known and odd.collective}
    waiting = [stack for stack in every if stack.stage]
    if waiting and (len(every) <= 2 or len(waiting) <= MAX_ODD_SHARE * len(every)):
        where, found = {name: odd.words for name, odd in found.items()}, {}
        for stack in waiting:
            words = where.get(stack.stream, _shown(stack.frames[:MAX_SHOWN]))
            found[stack.stream] = OddStack(words, stack.stage)
    stay = {stack.stream for stack in stacks if stack.stays}
    return {
        name: odd._replace(words=f"{_AWAITS[odd.awaits]} {odd.words}", stays=name in stay)
        for name, odd in found.items()
    }


def _apart_from_most(stacks: Sequence[Stack]) -> dict[str, OddStack]:
    """The streams of other places than that of most, in their natural order."""
    usual, times = Counter(stack.place for stack in stacks).most_common(1)[0] if stacks else ((), 0)
    if len(stacks) < MIN_STACKS or times < MIN_SHARE_IN_ONE_PLACE * len(stacks):
        return {}
    example = next(stack for stack in stacks if stack.place == usual)
    found = {}
    for stack in sorted(stacks, key=lambda stack: natural(stack.stream)):
        if stack.place != usual:
            words = f"{stack.words(example)}, {times} others in {example.words(stack)}"
            # In another collective than the others, who have not come or will not.
            in_other = bool(stack.collective) and stack.collective != example.collective
            found[stack.stream] = OddStack(words, "", in_other and not example.stage)
    return found


def stacks_in_logs(job: Job, after: Callable[[Occurrence, Occurrence], bool]) -> list[Stack]:
    """The last stack of every process that logged one, and no step behind it."""
    furthest = job.furthest.last_step_at if job.furthest else None
    processes = [
        (name, stream, dumps, [d for d in dumps if _is_last(stream, d, furthest, after)])
        for name, stream, dumps in _by_process(job)
    ]
    rounds = {len(every) for _, _, every, last in processes if last}
    found = []
    for name, stream, every, last in processes:
        if not last and stream.last_step is None and rounds == {len(every)}:
            last = every  # without a time, but all were dumped as often
        threads = [frames for dump in last for frames in main_threads(dump.text)]
        if threads and threads[-1]:
            watched = len(every) == 1 and every[0].text.startswith(_WATCHED)
            stays = watched or threads[-1] in threads[:-1]
            found.append(Stack(file=last[-1].file, stream=name, frames=threads[-1], stays=stays))
    return found


def _is_last(
    stream: JobStream,
    dump: Occurrence,
    furthest: Occurrence | None,
    after: Callable[[Occurrence, Occurrence], bool],
) -> bool:
    if stream.last_step is not None:
        return dump.step == stream.last_step
    ends = stream.last is not None and stream.last.order <= dump.order  # "Fatal Python error"
    return furthest is None or ends or after(dump, furthest)


def _by_process(job: Job) -> Iterator[tuple[str, JobStream, list[Occurrence]]]:
    """The rank, or the stream, and the stream of each process, with its last stacks.

    Processes of a node may share its stream: the rank above a stack or its main thread
    distinguishes them. A process of a rank may be started again.
    """
    for stream in job.streams.values():
        written = defaultdict[tuple[str, str], list[Occurrence]](list)
        for dump in stream.stacks:
            heads = [*_FAULT_THREAD.finditer(dump.text)] if stream.rank is None else []
            above = dump.text[: heads[0].start()] if heads else ""
            rank = "".join(f"rank {number}" for number in _RANK_ABOVE.findall(above)[-1:])
            thread = heads[-1]["id"] if heads and stream.node is not None and not rank else ""
            written[rank or stream.name, thread].append(dump)
        for (name, _), dumps in written.items():
            yield name, stream, dumps[-STACKS_OF_RANK:]


def assign(
    job: Job, stacks: Sequence[Stack], on_node: Callable[[str, str], Sequence[str]]
) -> list[Stack]:
    """The stacks with the streams of the job that they are of.

    A process is known by its rank, by its number, or by its rank within its node. Where none of a
    file's is, processes of consecutive numbers are those of one launcher, in the order of their
    ranks. Else it is the node's, if that is known.
    """
    nodes = {*map(job.node_of, job.streams.values()), *job.node_of_rank.values()} - {None}
    whole = {short(node): node for node in sorted(filter(None, nodes))}
    by_file = defaultdict[str, list[Stack]](list)
    for stack in stacks:
        by_file[stack.file].append(stack)
        if stack.node not in nodes:
            named = names_in(stack.node or stack.above, whole) or names_in(stack.file, whole)
            stack.node = whole[named[0]] if named else stack.node
        rank = _rank_of(job, stack)
        stack.stream = f"rank {rank}" if rank is not None else ""
    ranks = [stream.rank for stream in job.streams.values() if stream.rank is not None]
    size = job.world_size or max(ranks, default=-1) + 1 or None
    each = job.ranks_per_node or (size // max(1, len(nodes)) if size else None)
    # A file for each process, or for all of a node.
    alone = all(len(group) == 1 for group in by_file.values())
    for group in [list(stacks)] if alone else by_file.values():
        _by_order(group, each)
    all_there = len(stacks) >= MIN_STACKS and size in (None, len(stacks))
    _by_local_rank(stacks, on_node, one_node=all_there and len(nodes) <= 1)
    return list(stacks)


def _rank_of(job: Job, stack: Stack) -> int | None:
    """The rank that the stack states, or that of its process's number."""
    if stack.rank is not None or stack.pid is None:
        return stack.rank
    alike = [*job.ranks_of_numbers.get(stack.pid, ())]
    return job.rank_of_pid.get((stack.node, stack.pid), alike[0] if len(alike) == 1 else None)


def _by_local_rank(
    stacks: Sequence[Stack], on_node: Callable[[str, str], Sequence[str]], *, one_node: bool
) -> None:
    """The rank of a number within its node, else the node, of those that are not known."""
    left = [stack for stack in stacks if not stack.stream]
    local = [stack.local_rank for stack in left if stack.local_rank is not None]
    one_node = one_node and len(set(local)) == len(local)
    for stack in left:
        if stack.node is not None:
            at = on_node(stack.node, str(stack.local_rank)) if stack.local_rank is not None else ()
            stack.stream = at[0] if len(at) == 1 else f"node {stack.node}"
        if one_node and stack.local_rank is not None and "rank " not in stack.stream:
            stack.stream = f"rank {stack.local_rank}"


def _by_order(group: Sequence[Stack], each: int | None) -> None:
    """Local ranks by the processes' numbers, where nothing else states them and all are there."""
    numbers = sorted({stack.pid for stack in group if stack.pid is not None})
    sure = any(stack.stream or stack.local_rank is not None or stack.pid is None for stack in group)
    in_row = len(numbers) > 1 and numbers[-1] - numbers[0] + 1 == len(numbers)
    if sure or not in_row or each not in (None, len(numbers)):
        return
    for stack in group:
        stack.local_rank = numbers.index(stack.pid or 0)
        if stack.node is None:
            stack.rank, stack.stream = stack.local_rank, f"rank {stack.local_rank}"
