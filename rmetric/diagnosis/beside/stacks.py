"""Read the stacks of a job's processes, and find the rank that stands elsewhere.

They are of py-spy dump, in files of their own, or of Python's faulthandler, in the logs: torch and
JAX register it for signals, and some trainings for every few minutes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rmetric.diagnosis.job import STACKS_OF_RANK, Job, JobStream, Occurrence, short
from rmetric.diagnosis.patterns.stages import awaited
from rmetric.diagnosis.reading.file_names import TPU_HOST, names_in, natural
from rmetric.diagnosis.reading.lines import unwrapped

#: Least number of ranks with stacks, and least share of them in one place, for one to be odd.
MIN_RANKS = 3
MIN_AGREEING_SHARE = 0.6
#: Largest share of all stacks that may wait outside the job, to be those that hold up the others.
MAX_ODD_SHARE = 0.4
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
#: Heads of the threads of faulthandler, the main thread's last, and their frames.
_FAULT_THREAD = re.compile(
    r"^(?:Current t|T)hread (?P<id>0x[0-9a-f]+) .*\(most recent call first\):", re.MULTILINE
)
_FAULT_FRAME = re.compile(
    r"^\s*File \"(?P<file>[^\"\n]+)\", line (?P<line>\d+) in (?P<name>\S+)", re.MULTILINE
)
#: What faulthandler writes when a time that was set is over: once, where it watches for a hang.
_WATCHED = "Timeout ("
_AWAITS = {
    "": "stands in",
    "load data": "waits for its data in",
    "checkpoint": "is at a checkpoint in",
}
_RANK_OF_COMMAND = re.compile(r"(?:--?(?:global_?)?rank[= ]|\bRANK=)(\d+)")
_RANK_ABOVE = re.compile(
    r"(?i)(?:(?<![a-z_])(?:global[ _])?rank|SLURM_PROCID|WORLD_RANK|PMI\w?_RANK|PALS_RANKID"
    rf"|FLUX_TASK_RANK|JSM_NAMESPACE_RANK|{TPU_HOST})[ =:#_-]{{0,2}}(\d+)"
)
_LOCAL_ABOVE = re.compile(r"(?i)(?:(?<![a-z])local[ _]?rank|\blocal|\bgpu)[ =:#_]{0,2}(\d+)")
#: The host in a heading, with the rank within it behind it.
_HOST_ABOVE = re.compile(
    r"(?im)(?<![\w.-])([a-z][a-z\d]*(?:-[a-z\d]+)*\d[\w.-]*)\b[^\n]{0,20}?(?<![a-z])local"
)
#: The host or the task that pdsh or srun puts before each line.
_BEFORE = re.compile(
    r"^ *(?:(?P<host>[A-Za-z][\w.-]*\d[\w-]*)|\d{1,5}): ?(?=Process |Thread |Python v|  |$)"
)
#: The host in a shell's prompt.
_PROMPT = re.compile(r"(?:^|\s)[\w.-]+@([\w.-]*\d[\w-]*)\b", re.MULTILINE)
#: The operations among them that all ranks of a group enter together.
_OPERATION = re.compile(
    r"(?i)_?(?:all_?(?:gather|reduce|to_?all)|reduce|broadcast|barrier|gather|scatter"
    r"|mesh_reduce|rendezvous|sync_global_devices|process_allgather)"
)
#: Functions that all ranks enter, or none.
_ASIDE = re.compile(r"(?i)_?(?:eval|valid|test|save|predict|generat)")
#: What keeps few activations and computes the others once more.
_RECOMPUTES = re.compile(
    r"utils/checkpoint\.py$|tensor_parallel/random\.py$|activation_checkpointing/"
    r"|checkpoint_wrapper\.py$|^\w*checkpointed_\w*forward |^custom_forward "
)
#: The name of a Ray worker's file, with its number as a process.
_OF_RAY_WORKER = re.compile(r"(?:^|/)worker-[0-9a-f]{20,}-\d+-(\d+)\.(?:out|err)$")
#: A worker process that reads data for another one.
_WORKER = "_worker_loop"
#: Where a process waits for the others, or for its GPU, which waits for them.
_COLLECTIVE = re.compile(
    r"(?i)all_?(?:gather|reduce|to_?all)|reduce_scatter|broadcast|barrier|^_?(?:scatter|gather)"
    r"|^_?(?:send|recv)(?!\S* (?:ssl|socket|connection)\.py)"
    r"|mesh_reduce|rendezvous|sync_global_devices|mark_step|wait_device_ops"
    r"|synchronize|wait_tensor|block_?until_?ready|run_backward|^(?:backward|item|tolist|cpu)$"
    r"|^wait \(?[^ ]*(?:distributed|c10d)"
)


@dataclass(kw_only=True)
class Stack:
    """The main thread of one process.

    Attributes:
        frames: (function, file, line), the innermost first.
        stream: of the job, usually a rank; "" where it is not known.
        rank, local_rank, node, pid: as the file states them, None where it does not.
        stays: it did not move: taken after the process hung, or twice in one place.
        above: the lines above it, which may name its host or pod.
    """

    file: str
    frames: tuple[tuple[str, str, str], ...]
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

    def words(self, other: Stack) -> str:
        """The frames from where it leaves another stack, which is another rank's."""
        apart = self._apart(other)
        if len(apart) > MAX_SHOWN:
            apart = (apart[0], *apart[1 - MAX_SHOWN :])
        return _shown(apart)

    def awaits(self, other: Stack) -> str:
        """What it waits for outside the job, data or a checkpoint, where it leaves another stack.

        torch.utils.checkpoint is no such wait: it computes activations once more. Nor is a
        collective within either: there it waits for the others.
        """
        if self.collective:
            return ""
        return awaited(" ".join(_words(self._apart(other))))

    @property
    def stage(self) -> str:
        """As `awaits`, by itself: "" for a process that waits for others, or for its GPU."""
        for words in _words(self.frames):
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

    def differs(self, other: Stack) -> bool:
        """It waits for others, or for its GPU, where the others have not come or will not come."""
        if self.collective and not other.stage:
            return self.collective != other.collective
        waits = any(map(_COLLECTIVE.search, _words(self.frames)))
        if self.stage or other.stage or self.awaits(other) or not waits:
            return False
        own, others = self._apart(other), other._apart(self)
        aside = [any(_ASIDE.match(name) for name, *_ in frames) for frames in (own, others)]
        return aside == [True, False]

    @property
    def shown(self) -> str:
        """The innermost frames, in words."""
        return _shown(self.frames[:MAX_SHOWN])

    def _apart(self, other: Stack) -> tuple[tuple[str, str, str], ...]:
        pairs = zip(reversed(self.place), reversed(other.place), strict=False)
        common = next((at for at, (one, two) in enumerate(pairs) if one != two), 0)
        return self.frames[: len(self.frames) - common] or self.frames[:1]


class OddStack(NamedTuple):
    """Where a stream stands other than most, in words, and what it waits for outside the job.

    Attributes:
        collective: it waits for others in a collective that they have not entered.
    """

    words: str
    awaits: str
    collective: bool = False


def _shown(frames: Sequence[tuple[str, str, str]]) -> str:
    return " > ".join(
        f"{name} ({file.rsplit('/', 1)[-1]}:{line})" for name, file, line in reversed(frames)
    )


def _words(frames: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """A function, its file and the file's folder, of each frame that may be a wait."""
    for name, file, _ in frames:
        if not _RECOMPUTES.search(f"{name} {file}"):
            yield " ".join([name, *file.split("/")[-1:-3:-1]])


def holds_stacks(head: bytes) -> bool:
    """True for the first bytes of a text with stacks of py-spy in it, whatever else there is."""
    lines = _lines_of(head)
    return any(_begins(lines, at) for at in range(len(lines)))


def _lines_of(head: bytes) -> list[str]:
    if b"Thread " not in head and b"Process " not in head:
        return []
    text = unwrapped(head).decode("utf-8", "replace")
    return [_BEFORE.sub("", line) for line in text.splitlines()]


def is_stack_dump(head: bytes) -> bool:
    r"""True for the first bytes of a file with stacks of py-spy, and little else below the first.

    A person's commands and what they printed may stand above it.

    >>> is_stack_dump(b"Process 4711: python train.py\nPython v3.10.12 (/bin/python3.10)\n")
    True
    """
    lines = _lines_of(head)
    first = next((at for at, line in enumerate(lines) if _begins(lines, at)), None)
    if first is None:
        return False
    below = [line for line in lines[first:-1] or lines[first:] if line.strip()]
    known = (_PROCESS, _THREAD, _FRAME, _BESIDES)
    return sum(any(one.match(line) for one in known) for line in below) >= MIN_STACK_SHARE * len(
        below
    )


def _begins(lines: Sequence[str], at: int) -> bool:
    """True for the first line of a process, or of a thread with its frames."""
    after = next((line for line in lines[at + 1 : at + 3] if line.strip()), "")
    if _PROCESS.match(lines[at]):
        return after == "" or after.startswith("Python v") or _THREAD.match(after) is not None
    return _THREAD.match(lines[at]) is not None and _FRAME.match(after) is not None


def read_stacks(text: str, name: str, rank: int | None, node: str | None = None) -> list[Stack]:
    """The main threads of a file's processes, without workers that read data for them.

    Args:
        text: content of the file.
        name: of the file, as it is shown.
        rank: as the file's name states it; of several processes in a file each one's command
            (``--rank 3``) or the lines above it must state its own.
        node: as the file's name states it.
    """
    node = node or next(iter(_PROMPT.findall(text)), None)
    found: list[Stack] = []
    above: list[str] = []
    main, own = False, ""
    now: Stack | None = None
    for whole in text.splitlines():
        before = _BEFORE.match(whole)
        line = whole[before.end() :] if before else whole
        if before and before["host"]:
            node = before["host"]
        if process := _PROCESS.match(line):
            now = Stack(file=name, frames=(), node=node, pid=int(process["pid"]))
            main, own = True, process["command"]
            found.append(_stated(now, own, above))
        elif thread := _THREAD.match(line):
            of_main, number = thread["name"] == "MainThread", thread["id"]
            if now is None or (of_main and now.frames and number != str(now.pid)):
                # of a process whose own line was left out
                now = Stack(file=name, frames=(), node=node)
                now.pid = int(number) if number.isdigit() else None
                found.append(_stated(now, "", above))
            main = of_main or not now.frames
            if of_main:
                now.frames = ()
        elif now is not None and (frame := _FRAME.match(line)):
            if main:
                now.frames += ((frame["name"], frame["file"], frame["line"] or "?"),)
            above = []
        elif not _BESIDES.match(line):
            above.append(line)
    stacks = [
        one for one in found if one.frames and all(name != _WORKER for name, *_ in one.frames)
    ]
    if len(stacks) == 1 and stacks[0].rank is None:
        stacks[0].rank = rank
    return stacks


def _stated(stack: Stack, command: str, above: Sequence[str]) -> Stack:
    """The stack with the rank that its command, or the lines above it, state."""
    text = "\n".join(above)
    ranks = _RANK_OF_COMMAND.findall(command) or _RANK_ABOVE.findall(text)[-1:]
    local = _LOCAL_ABOVE.findall(text)
    stack.rank = int(ranks[0]) if ranks else None
    stack.local_rank = int(local[-1]) if local else None
    stack.above = "\n".join(above[-MAX_ABOVE:])
    return stack


def assign(
    job: Job, stacks: Sequence[Stack], on_node: Callable[[str, str], Sequence[str]]
) -> list[Stack]:
    """The stacks with the streams of the job that they are of.

    A process is known by its rank, by its number, or by its rank within its node. Where none of a
    file's is, processes of consecutive numbers are those of one launcher, in the order of their
    ranks. Else it is the node's, if that is known.

    Args:
        job: the job.
        stacks: of all files.
        on_node: the streams of a node's local rank.
    """
    ranks = job.ranks_of_numbers
    nodes = {node for stream in job.streams.values() if (node := job.node_of(stream))}
    nodes |= set(job.node_of_rank.values())
    whole = {short(node): node for node in sorted(nodes)}
    of_files, of_workers = _own_files(job), _ray_workers(job)
    for one in stacks:
        above = names_in(one.above, of_files)
        if len(above) == 1 and one.rank is None and one.local_rank is None:
            one.stream = of_files[above[0]]
        if one.node not in nodes:
            named = names_in(one.node or one.above, whole) or names_in(one.file, whole)
            one.node = whole[named[0]] if named else one.node
        rank: int | None = one.rank
        if rank is None and one.pid is not None:
            rank = job.rank_of_pid.get((one.node, one.pid))
            of_pid = ranks.get(one.pid, set())
            rank = min(of_pid) if rank is None and len(of_pid) == 1 else rank
        if rank is not None:
            one.stream = f"rank {rank}"
        elif one.pid in of_workers:
            one.stream = of_workers[one.pid]
    heard = [one.rank for one in job.streams.values() if one.rank is not None]
    size = job.world_size or (max(heard) + 1 if heard else None)
    by_file: dict[str, list[Stack]] = {}
    for one in stacks:
        by_file.setdefault(one.file, []).append(one)
    # A file for each process, or for all of a node.
    alone = all(len(some) == 1 for some in by_file.values())
    for some in [[*stacks]] if alone else by_file.values():
        _by_order(job, some, size, len(nodes))
    _by_host_above(stacks, size)
    local = [one.local_rank for one in stacks if not one.stream and one.local_rank is not None]
    of_all = len(nodes) <= 1 and len(stacks) >= MIN_RANKS and size in (None, len(stacks))
    of_all = of_all and len(set(local)) == len(local)
    for one in stacks:
        if one.stream:
            continue
        streams: Sequence[str] = ()
        if one.local_rank is not None and one.node is not None:
            streams = on_node(one.node, str(one.local_rank))
        elif one.local_rank is not None and one.local_rank < (job.world_size or 0) <= (
            job.ranks_per_node or 0
        ):
            streams = [f"rank {one.local_rank}"]
        if (
            of_all
            and one.local_rank is not None
            and not any(name.startswith("rank ") for name in streams)
        ):
            streams = [f"rank {one.local_rank}"]
        if len(streams) == 1:
            one.stream = streams[0]
        elif one.node is not None:
            one.stream = f"node {one.node}"
    return list(stacks)


def _own_files(job: Job) -> dict[str, str]:
    """The ranks' streams by the names of their files, where each has files of its own."""
    found: dict[str, str] = {}
    ranked = [one for one in job.streams.values() if one.rank is not None]
    for stream in ranked:
        for file in stream.files:
            name = file.rpartition("/")[2].partition(".")[0]
            if found.setdefault(name, stream.name) != stream.name:
                return {}
    return found if len(ranked) >= (job.world_size or 0) else {}


def _ray_workers(job: Job) -> dict[int, str]:
    """The ranks' streams by the number of their process, which the names of Ray's files state."""
    return {
        int(found[1]): stream.name
        for stream in job.streams.values()
        for file in stream.files
        if stream.rank is not None and (found := _OF_RAY_WORKER.search(file))
    }


def _by_host_above(stacks: Sequence[Stack], size: int | None) -> None:
    """Ranks by the host and the rank within it that stand above each process.

    Hosts are in the order of their ranks, as they are listed; all processes must be there.
    """
    hosts = [_HOST_ABOVE.search(one.above) for one in stacks]
    places = [
        (host[1], one.local_rank)
        for one, host in zip(stacks, hosts, strict=True)
        if host is not None and one.local_rank is not None and not one.stream
    ]
    named = list(dict.fromkeys(host for host, _ in places))
    if len(places) != len(stacks) or len(set(places)) != size or len(named) < 2:
        return
    each = len(places) // len(named)
    if any(local >= each for _, local in places):
        return
    for one, (host, local) in zip(stacks, places, strict=True):
        one.rank, one.node = named.index(host) * each + local, host
        one.stream = f"rank {one.rank}"


def _by_order(job: Job, stacks: Sequence[Stack], size: int | None, nodes: int) -> None:
    """Local ranks of the processes of one file by their numbers, where nothing else tells them."""
    if any(one.stream or one.local_rank is not None or one.pid is None for one in stacks):
        return
    numbers = sorted({one.pid for one in stacks if one.pid is not None})
    if len(numbers) < 2 or numbers[-1] - numbers[0] + 1 != len(numbers):
        return
    each = job.ranks_per_node or (size // max(1, nodes) if size else None)
    if each not in (None, len(numbers)):
        return  # some of them are missing, and nothing tells which
    for one in stacks:
        local = (one.pid or 0) - numbers[0]
        if one.node is None:
            one.rank, one.stream = local, f"rank {local}"
        else:
            one.local_rank = local


def states_stack(text: str) -> bool:
    r"""True for a log's entry that holds a stack of faulthandler.

    >>> states_stack("Timeout!\nThread 0x00007f25 (most recent call first):\n  File ...")
    True
    """
    return "(most recent call first)" in text and _FAULT_THREAD.search(text) is not None


def stacks_in_logs(job: Job, after: Callable[[Occurrence, Occurrence], bool]) -> list[Stack]:
    """The last stack of every stream that logged one, and no step behind it.

    Args:
        job: the job.
        after: True for an entry that is certainly later than another.
    """
    found = []
    furthest = job.furthest.last_step_at if job.furthest else None
    written = {
        (name, one.name, thread): dumps[-STACKS_OF_RANK:]
        for one in job.streams.values()
        for (name, thread), dumps in _by_process(one).items()
    }
    last = {
        key: [dump for dump in dumps if _is_last(job.streams[key[1]], dump, furthest, after)]
        for key, dumps in written.items()
    }
    rounds = {len(written[key]) for key, dumps in last.items() if dumps}
    for key, dumps in last.items():
        every, name, stream = written[key], key[0], job.streams[key[1]]
        if not dumps and stream.last_step is None and rounds == {len(every)}:
            dumps = every  # without a time, but all were asked as often
        if stream.last_step is None and dumps and dumps[-1] is every[-1]:
            dumps = every  # the one before it tells whether it moved
        places = [frames for dump in dumps for frames in _of_main_thread(dump.text)]
        if places and places[-1]:
            watched = len(every) == 1 and every[0].text.startswith(_WATCHED)
            stays = watched or places[-1] in places[:-1]
            found.append(Stack(file=dumps[-1].file, stream=name, frames=places[-1], stays=stays))
    return found


def _by_process(stream: JobStream) -> dict[tuple[str, str], list[Occurrence]]:
    """The stacks of a stream by their rank, which the line above may tell, and by main thread.

    Processes of a node may share its stream; a process of a rank may be started again.
    """
    found: dict[tuple[str, str], list[Occurrence]] = {}
    for dump in stream.stacks:
        heads = [*_FAULT_THREAD.finditer(dump.text)]
        above = dump.text[: heads[0].start()] if heads and stream.rank is None else ""
        ranks = _RANK_ABOVE.findall(above)
        shared = stream.rank is None and not ranks and stream.node is not None
        thread = heads[-1]["id"] if heads and shared else ""
        found.setdefault((f"rank {ranks[-1]}" if ranks else stream.name, thread), []).append(dump)
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


def frames_of_faulthandler(text: str) -> tuple[tuple[str, str, str], ...]:
    """(function, file, line) of the main thread, the innermost first; of several dumps the last."""
    return next(reversed(_of_main_thread(text)), ())


def _of_main_thread(text: str) -> list[tuple[tuple[str, str, str], ...]]:
    """The frames of the main thread in each dump of an entry: of the thread that comes last."""
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


def odd_stacks(stacks: Sequence[Stack]) -> dict[str, OddStack]:
    """The few streams that stand in another function than most, or that alone await no other.

    Of these, those that wait for data or a checkpoint keep the others waiting, which are left out.

    Args:
        stacks: of several of one rank the last counts; of a stream "" no more is known.
    """
    ranked = {one.stream: one for one in stacks if one.stream.startswith("rank ")}
    others = [one for one in stacks if not one.stream.startswith("rank ")]
    every = [*ranked.values(), *others]
    apart = _apart_from_most(every)
    if others:  # of a node there may be several: only what they wait for tells them apart
        known = all(one.stream for one in every)
        apart = [(one, odd) for one, odd in apart if known and (odd.awaits or odd.collective)]
    apart.sort(key=lambda pair: natural(pair[0].stream))
    found = {one.stream: odd for one, odd in apart}
    kept = {name: one for name, one in found.items() if one.awaits}
    if kept:
        return kept
    waiting = [one for one in every if one.stage]
    if not waiting or (len(every) > 2 and len(waiting) > MAX_ODD_SHARE * len(every)):
        return found
    return {one.stream: OddStack(f"{_AWAITS[one.stage]} {one.shown}", one.stage) for one in waiting}


def wait_together(stacks: Sequence[Stack]) -> bool:
    """True for stacks that all stand in one place, where a process waits for others."""
    places = {one.place for one in stacks}
    return (
        len(stacks) >= MIN_RANKS
        and len(places) == 1
        and any(_COLLECTIVE.search(name) for name, _ in places.pop())
    )


def _apart_from_most(stacks: Sequence[Stack]) -> list[tuple[Stack, OddStack]]:
    """The stacks of other places than that of most."""
    if len(stacks) < MIN_RANKS:
        return []
    ((usual, times),) = Counter(one.place for one in stacks).most_common(1)
    if times < MIN_AGREEING_SHARE * len(stacks):
        return []
    example = next(one for one in stacks if one.place == usual)
    found = []
    for one in stacks:
        if one.place != usual:
            awaits = "" if example.awaits(one) else one.awaits(example)
            words = f"{one.words(example)}, {times} others in {example.words(one)}"
            odd = OddStack(f"{_AWAITS[awaits]} {words}", awaits, one.differs(example))
            found.append((one, odd))
    return found
