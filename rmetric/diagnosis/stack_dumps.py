"""Read the stacks of a job's processes, and find the rank that stands elsewhere.

They are of py-spy dump, in files of their own, or of Python's faulthandler, in the logs: torch and
JAX register it for signals, and some trainings for every few minutes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rmetric.diagnosis.job import Job, JobStream, Occurrence
from rmetric.diagnosis.patterns.stages import awaited
from rmetric.diagnosis.reading.file_names import natural

#: Least number of ranks with stacks, and least share of them in one place, for one to be odd.
MIN_RANKS = 3
MIN_AGREEING_SHARE = 0.6
#: Frames that are shown of a stack.
MAX_SHOWN = 4
#: What py-spy begins with; a person's command and the time may stand above it.
_HEAD = re.compile(rb"(?:[^\n]*\n){0,5}?\s*Process \d+: .*\n(?:Python v\d|\s*\n)")
_PROCESS = re.compile(r"^Process (\d+): (.*)$", re.MULTILINE)
_THREAD = re.compile(r"^Thread (\S+)(?: \((\w[\w+]*)\))?(?:: \"(.*)\")?\s*$")
_FRAME = re.compile(r"^\s+(?P<name>\S.*?) \((?P<file>[^()\n]+?)(?::(?P<line>\d+))?\)\s*$")
#: Heads of the threads of faulthandler, the main thread's last, and their frames.
_FAULT_THREAD = re.compile(
    r"^(?:Current t|T)hread 0x[0-9a-f]+ .*\(most recent call first\):", re.MULTILINE
)
_FAULT_FRAME = re.compile(
    r"^\s*File \"(?P<file>[^\"\n]+)\", line (?P<line>\d+) in (?P<name>\S+)", re.MULTILINE
)
_AWAITS = {
    "": "stands in",
    "load data": "waits for its data in",
    "checkpoint": "is at a checkpoint in",
}
_RANK_OF_COMMAND = re.compile(r"(?:--?(?:global_?)?rank[= ]|\bRANK=)(\d+)")
_RANK_ABOVE = re.compile(r"(?i)(?<![a-z_])(?:global[ _])?rank[ =:#_]{0,2}(\d+)")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The main thread of one stream of the job, usually a rank.

    Attributes:
        frames: (function, file, line), the innermost first.
        stays: it did not move: taken after the process hung, or twice in one place.
    """

    file: str
    stream: str
    frames: tuple[tuple[str, str, str], ...]
    stays: bool = True

    @property
    def place(self) -> tuple[tuple[str, str], ...]:
        """Functions and files without the lines, which may differ within a loop."""
        return tuple((name, file) for name, file, _ in self.frames)

    def words(self, other: Stack) -> str:
        """The frames from where it leaves another stack, which is another rank's."""
        apart = self._apart(other)
        shown = apart[::-1] if len(apart) <= MAX_SHOWN else (*apart[:-MAX_SHOWN:-1], apart[0])
        return " > ".join(
            f"{name} ({file.rsplit('/', 1)[-1]}:{line})" for name, file, line in shown
        )

    def awaits(self, other: Stack) -> str:
        """What it waits for outside the job, data or a checkpoint, where it leaves another stack.

        torch.utils.checkpoint is no such wait: it computes activations once more.
        """
        return awaited(
            " ".join(
                f"{name} {file.rsplit('/', 1)[-1]}"
                for name, file, _ in self._apart(other)
                if not file.endswith("utils/checkpoint.py")
            )
        )

    def _apart(self, other: Stack) -> tuple[tuple[str, str, str], ...]:
        pairs = zip(reversed(self.place), reversed(other.place), strict=False)
        common = next((at for at, (one, two) in enumerate(pairs) if one != two), 0)
        return self.frames[: len(self.frames) - common] or self.frames[:1]


class OddStack(NamedTuple):
    """Where a stream stands other than most, in words, and what it waits for outside the job."""

    words: str
    awaits: str


def is_stack_dump(head: bytes) -> bool:
    r"""True for the first bytes of a file that py-spy dump wrote.

    >>> is_stack_dump(b"Process 4711: python train.py\nPython v3.10.12 (/bin/python3.10)\n")
    True
    """
    return _HEAD.match(head) is not None


def read_stacks(text: str, name: str, rank: int | None) -> list[Stack]:
    """The main threads of a file's processes.

    Args:
        text: content of the file.
        name: of the file, as it is shown.
        rank: as the file's name states it; of several processes in a file each one's command
            (``--rank 3``) or the lines above it must state its own. Where none does, processes of
            consecutive numbers are those of one launcher, in the order of their ranks.
    """
    starts = [*_PROCESS.finditer(text)]
    ranks = _ranks(text, starts) if len(starts) > 1 else [rank]
    found = []
    for at, (start, of) in enumerate(zip(starts, ranks, strict=False)):
        end = starts[at + 1].start() if at + 1 < len(starts) else len(text)
        stated = _RANK_OF_COMMAND.search(start[2])
        of = int(stated[1]) if stated else of
        frames = _main_thread(text[start.end() : end])
        if of is not None and frames:
            found.append(Stack(file=name, stream=f"rank {of}", frames=frames))
    return found


def _ranks(text: str, starts: Sequence[re.Match[str]]) -> list[int | None]:
    """The rank of each process of a file, by the lines above it or by its number."""
    ranks: list[int | None] = []
    end = 0
    for start in starts:
        # Below the stacks of the process before it, which are set in.
        above = re.split(r"\n[ \t]+\S[^\n]*", text[end : start.start()])[-1]
        stated = _RANK_ABOVE.findall(above)
        ranks.append(int(stated[-1]) if stated else None)
        end = start.end()
    numbers = [int(start[1]) for start in starts]
    if not any(one is not None for one in ranks) and max(numbers) - min(numbers) + 1 == len(
        set(numbers)
    ):
        return [number - min(numbers) for number in numbers]
    return ranks


def _main_thread(text: str) -> tuple[tuple[str, str, str], ...]:
    threads: list[tuple[str, list[tuple[str, str, str]]]] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            threads.append((thread[3] or "", []))
        elif threads and (frame := _FRAME.match(line)):
            threads[-1][1].append((frame["name"], frame["file"], frame["line"] or "?"))
    main = next((frames for name, frames in threads if name == "MainThread"), None)
    return tuple(main if main is not None else threads[0][1] if threads else ())


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
    last = {
        one.name: [dump for dump in one.stacks if _is_last(one, dump, furthest, after)]
        for one in job.streams.values()
    }
    rounds = {len(job.streams[name].stacks) for name, dumps in last.items() if dumps}
    for one in job.streams.values():
        dumps = last[one.name]
        if not dumps and one.last_step is None and rounds == {len(one.stacks)}:
            dumps = one.stacks[-1:]  # without a time, but all were asked as often
        places = [frames_of_faulthandler(dump.text) for dump in dumps]
        if places and places[-1]:
            stays = len(places) > 1 and places[0] == places[-1]
            found.append(
                Stack(file=dumps[-1].file, stream=one.name, frames=places[-1], stays=stays)
            )
    return found


def _is_last(
    stream: JobStream,
    dump: Occurrence,
    furthest: Occurrence | None,
    after: Callable[[Occurrence, Occurrence], bool],
) -> bool:
    if stream.last_step is not None:
        return dump.step == stream.last_step
    return furthest is None or after(dump, furthest)


def frames_of_faulthandler(text: str) -> tuple[tuple[str, str, str], ...]:
    """(function, file, line) of the main thread, the innermost first; of several dumps the last."""
    heads = [*_FAULT_THREAD.finditer(text)]
    main = text[heads[-1].end() :] if heads else ""
    return tuple((one["name"], one["file"], one["line"]) for one in _FAULT_FRAME.finditer(main))


def odd_stacks(stacks: Sequence[Stack]) -> dict[str, OddStack]:
    """The few streams that stand in another function than most.

    Of these, those that wait for data or a checkpoint keep the others waiting, which are left out.

    Args:
        stacks: of several of one stream the last counts.
    """
    by_stream = {one.stream: one for one in stacks}
    if len(by_stream) < MIN_RANKS:
        return {}
    ((usual, times),) = Counter(one.place for one in by_stream.values()).most_common(1)
    if times < MIN_AGREEING_SHARE * len(by_stream):
        return {}
    example = next(one for one in by_stream.values() if one.place == usual)
    found = {
        name: OddStack(
            f"{_AWAITS[awaits]} {one.words(example)}, {times} others in {example.words(one)}",
            awaits,
        )
        for name, one in sorted(by_stream.items(), key=lambda named: natural(named[0]))
        if one.place != usual
        for awaits in ["" if example.awaits(one) else one.awaits(example)]
    }
    return {name: one for name, one in found.items() if one.awaits} or found
