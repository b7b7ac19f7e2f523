"""Ranks that stand apart while a training hangs: behind, silent, elsewhere, alone at a file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from operator import itemgetter
from statistics import median

from rmetric.diagnosis.auxiliary.gpus import Spinning
from rmetric.diagnosis.evidence.places import end_of
from rmetric.diagnosis.evidence.progress import Timed
from rmetric.diagnosis.evidence.ranks import MAX_COMMON_SHARE
from rmetric.diagnosis.evidence.row import Row, Scene, divided
from rmetric.diagnosis.facts.job import Job, JobStream, Occurrence
from rmetric.diagnosis.library.stages import stage_of_wait
from rmetric.diagnosis.patterns.peers import Peer, peers

_NUMBERS = re.compile(r"\d+")
_RANK = re.compile(r"(?i)\b(?:global_|world_)?rank[ =:#]{0,2}(\d{1,6})\b")
#: Words of a rank that waits for something else than another rank.
_OWN_WAIT = re.compile(r"(?i)\bwait(?:s|ed|ing)?\b|\bretr(?:y|ies|ying)\b|\bstarv|\bstall")
#: What a rank begins to do with a file, and what it says when it is done.
_BEGUN = re.compile(
    r"(?i)\b(?:sav|writ|load|read|upload|download)ing (?:\w+ ){0,3}(?P<file>\S*/\S+)"
)
_DONE = re.compile(
    r"(?i)\b(?:saved|written|wrote|loaded|read|uploaded|downloaded) (?:\w+ ){0,3}(?P<file>\S*/\S+)"
)
#: The same as templates have it, which are counted over the whole log.
_BEGUN_AND_DONE = (
    ("Saving ", "Saved "), ("saving ", "saved "), ("Writing ", "Wrote "), ("writing ", "wrote "),
    ("Uploading ", "Uploaded "), ("uploading ", "uploaded "),
)  # fmt: skip
_END_OF_SENTENCE = re.compile(r"[\W_]+$")
MAX_LEFT_OPEN = 2
_RANK_OF_FILE = re.compile(r"(?i)(?<![a-z])rank[_=-]?0*(\d{1,6})(?!\d)")
#: Least share of the ranks that made the last step, for the others to be behind.
MIN_SHARE_AT_TOP = 0.5
#: So many ranks must end at the same line, for the only other one to stand elsewhere.
MIN_RANKS_ALIKE = 3


def left_open(job: Job) -> str:
    """The stage of what was begun once or twice oftener than it was done, over the whole log."""
    counts = {_END_OF_SENTENCE.sub("", one.template): one.count for one in job.events}
    for template, count in counts.items():
        for begun, done in _BEGUN_AND_DONE:
            twin = counts.get(template.replace(begun, done)) if begun in template else None
            if twin is not None and 0 < count - twin <= MAX_LEFT_OPEN:
                return stage_of_wait(template)
    return ""


def idle_gpus(job: Job, spin: Spinning | None) -> list[Row]:
    """Evidence against the ranks whose GPUs are idle while those of the others spin."""
    if spin is None:
        return []
    names = list[str]()
    nodes = {one.rank: one.node for one in job.streams.values() if one.rank is not None}
    nodes |= job.node_of_rank
    for node, gpu in spin.idle:
        ranks = sorted(rank for rank, of in nodes.items() if of == node)
        rank = ranks[gpu] if gpu < len(ranks) else gpu if node is None else None
        names.append(f"node {node}" if rank is None else f"rank {rank}")
    gpus = ", ".join(f"GPU {gpu}{f' of {node}' if node else ''}" for node, gpu in spin.idle)
    verb = "is" if len(spin.idle) == 1 else "are"
    words = f"{gpus} {verb} idle while {spin.number} others spin in a kernel"
    return divided(Row(name, "idle gpu", words) for name in names)


def fell_silent(job: Job, entries: Sequence[Timed], least: float, ratio: float) -> list[Row]:
    """Evidence against the few ranks without the heartbeats that the others log to the end."""
    times: dict[str, list[float]] = {}
    for time, entry in sorted(entries, key=itemgetter(0)):
        if job.streams[entry.stream].rank is not None:
            times.setdefault(entry.stream, []).append(time)
    if not times:
        return []
    end = max(each[-1] for each in times.values())
    pauses = [
        max((after - before for before, after in pairwise(each)), default=0.0)
        for each in times.values()
    ]
    most = max(least, ratio * median(pauses))
    silent = [name for name, each in times.items() if end - each[-1] > most]
    if len(silent) > MAX_COMMON_SHARE * len(times):
        return []
    words = f"logs nothing for the last {{}}, while {len(times) - len(silent)} others do"
    return divided(
        Row(name, "behind", words.format(span(end - times[name][-1]))) for name in silent
    )


def behind(stepping: Sequence[JobStream]) -> list[Row]:
    """Evidence against the few ranks whose last step is below that of the others."""
    ranks = [one for one in stepping if one.rank is not None and one.last_step is not None]
    top = max((one.last_step or 0 for one in ranks), default=0)
    late = [one for one in ranks if (one.last_step or 0) < top]
    at_top = len(ranks) - len(late)
    if not late or at_top < MIN_SHARE_AT_TOP * len(ranks):
        return []
    steps = sorted({one.last_step or 0 for one in late})
    words = f"its last step is {steps[0]}, that of {at_top} others {top}"
    return divided(Row(one.name, "behind", words) for one in late)


def last_words(later: Sequence[Timed]) -> list[Row]:
    """Evidence against the rank that the only entry which is no heartbeat states."""
    times = Counter(entry.event for _, entry in later)
    alone = [entry for _, entry in later if times[entry.event] == 1]
    ranks = {number for one in alone for number in _RANK.findall(one.text)}
    if len(alone) != 1 or len(ranks) != 1:
        return []
    words = "the last entry before the silence is its own: {}"
    return [_stands(f"rank {int(ranks.pop())}", "last before silence", words, alone[0].text)]


def unfinished(job: Job, later: Sequence[Timed]) -> list[Row]:
    """Evidence against the only one of several that began a file and is not done."""
    begun: dict[str, Occurrence] = {}
    for _, entry in later:
        if found := _BEGUN.search(entry.text):
            begun[_name_of(found["file"])] = entry
    done = {_name_of(found["file"]) for _, one in later if (found := _DONE.search(one.text))}
    left = [name for name in begun if name not in done]
    if len(left) != 1 or len(begun) - 1 < MIN_RANKS_ALIKE:
        return []
    entry = begun[left[0]]
    # "zero_pp_rank_11_mp_rank_00": the number by which the files differ.
    numbers = {name: _RANK_OF_FILE.findall(name.rpartition("/")[2]) for name in begun}
    varying = [
        number
        for number, *others in zip(numbers[left[0]], *numbers.values(), strict=False)
        if len(set(others)) > 1
    ]
    unknown = job.streams[entry.stream].rank is None and len(varying) == 1
    name = f"rank {int(varying[0])}" if unknown else entry.stream
    words = f"did not finish, as {len(begun) - 1} others did: {{}}"
    return [_stands(name, "behind", words, entry.text)]


def _stands(name: str, kind: str, words: str, text: str) -> Row:
    """Evidence against a rank by the entry at which it stands."""
    return Row(name, kind, words.format(repr(end_of(text))), stage=stage_of_wait(text))


def _name_of(file: str) -> str:
    return file.strip("'\"`.,:;()")


def alone_waiting(job: Job, later: Sequence[Timed], beats: Collection[int]) -> list[Row]:
    """Evidence against the only rank or node that goes on logging, and that it waits."""
    waiting = {entry.stream: entry.text for _, entry in later if entry.event in beats}
    if len(waiting) != 1 or len(job.active_streams) <= MIN_RANKS_ALIKE:
        return []
    ((name, text),) = waiting.items()
    if not _OWN_WAIT.search(text) or _RANK.search(text):
        return []
    words = f"waits while {len(job.active_streams) - 1} others are silent: {{}}"
    return [_stands(name, "waits alone", words, text)]


def span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.0f} min"


def elsewhere(scene: Scene, is_before: Callable[[Occurrence], bool]) -> list[Row]:
    """The row against the one rank whose last entry before the end is not that of most.

    Ranks that lead have lines of their own, which say nothing.
    """
    present = [one for one in peers(scene.job) if one.stream is not None]
    ranked = [one for one in present if one.rank is not None] or present
    lasts = _last_entries(scene.job, ranked, is_before)
    if len(lasts) < MIN_RANKS_ALIKE + 1:
        return []
    template = {one.number: one.template for one in scene.job.events}
    at = {name: template.get(last.event, "") for name, last in lasts.items()}
    if len(set(at.values())) == 1:  # a template of wildcards may have taken in all lines
        at = {name: _NUMBERS.sub("<N>", last.text) for name, last in lasts.items()}
    ((usual, times),) = Counter(at.values()).most_common(1)
    if times != len(lasts) - 1:
        return []
    (other,) = (name for name, where in at.items() if where != usual)
    text = lasts[other].text
    words = f"it stands at {end_of(text)!r}, {times} others at {end_of(usual)!r}"
    # What it has not done tells where it is, too.
    more = f"\n{usual}" if _passed(ranked, other, text) else ""
    return [Row(other, "elsewhere", words, stage=stage_of_wait(text + more))]


def _last_entries(
    job: Job, ranked: Sequence[Peer], is_before: Callable[[Occurrence], bool]
) -> dict[str, Occurrence]:
    known = {one.number: len(one.counts) for one in job.events}
    found = {}
    for one in ranked:
        before = list(filter(is_before, one.stream.tail)) if one.stream is not None else []
        own = one.leads and before and known[before[-1].event] < MIN_SHARE_AT_TOP * len(ranked)
        if before and not own:
            found[one.name] = before[-1]
    return found


def _passed(ranked: Sequence[Peer], name: str, last: str) -> bool:
    """True if most others logged the last line of one, but for numbers, and went on."""
    at = _NUMBERS.sub("<N>", last)
    others = [one.stream for one in ranked if one.name != name and one.stream is not None]
    passed = ([_NUMBERS.sub("<N>", entry.text) for entry in [*one.tail][:-1]] for one in others)
    return sum(at in texts for texts in passed) >= MIN_SHARE_AT_TOP * len(others)
