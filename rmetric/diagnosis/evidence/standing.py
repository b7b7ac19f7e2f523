"""Signs of progress in logs, and ranks that stand apart while a training hangs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter

from rmetric.diagnosis.evidence.row import Row, Scene, divided
from rmetric.diagnosis.facts.job import Job, JobStream, Occurrence
from rmetric.diagnosis.library.stages import stage_of_wait
from rmetric.diagnosis.patterns.spatial import Peer, peers

#: An entry with its time in seconds.
Timed = tuple[float, Occurrence]
#: What an evaluation says of itself, which may take its time.
_WORK = re.compile(r"(?i)\b(?:eval|valid)")
#: What watches a log and sees nothing new in it.
_NO_PROGRESS = re.compile(
    r"(?i)\bunchanged for \d"
    r"|\bno (?:new )?(?:progress|steps?|lines?|output)\b.{0,20}\b(?:for|since)\b"
)
#: So many different entries may recur during a hang: heartbeats, monitors.
MAX_HEARTBEATS = 2
#: Least number of entries after the last step of logs that state no end.
MIN_HEARTBEATS = 3
#: Stages in which nothing may be logged for long.
QUIET_STAGES = {"load data", "compile", "evaluate", "checkpoint", "tear-down"}


def last_step_time(scene: Scene, stepping: Sequence[JobStream], end: float) -> float | None:
    """When the last step was logged at the latest; None without steps.

    A line that states no time may be as late as the next one that does, or as the end.
    """
    timed = {
        one.name: one for one in stepping if one.last_step_at and one.last_step_at.time is not None
    }
    top = max((one.last_step or 0 for one in timed.values()), default=-1)
    times = [
        _last_step_of(scene, one, end)
        for one in stepping
        if one.name in timed or (one.last_step or 0) > top  # another entry of it is no progress
    ]
    return max((time for time in times if time is not None), default=None)


def _last_step_of(scene: Scene, stream: JobStream, end: float) -> float | None:
    if stream.last_step_at is None:
        return None
    at = scene.ordering.at_latest(stream.last_step_at)
    return end if at is None else scene.ordering.dated(at)


def timed_entries(scene: Scene, counts: Callable[[Occurrence], bool]) -> list[Timed]:
    """The last entries of all streams with their times, in time; those that count."""
    found = [
        (time, entry)
        for one in scene.job.streams.values()
        for entry in one.tail
        if counts(entry) and (time := scene.ordering.dated(entry)) is not None
    ]
    return sorted(found, key=itemgetter(0))


def are_heartbeats(later: Sequence[Timed], stepping: Sequence[JobStream]) -> bool:
    """True if what follows the last step is little that recurs, and no evaluation or checkpoint."""
    names = {one.name for one in stepping}
    stages = {entry.stage for _, entry in later if entry.stream in names}
    few = len({entry.event for _, entry in later}) <= MAX_HEARTBEATS
    at_work = any(_WORK.search(entry.text) for _, entry in later)
    return few and not at_work and not stages & QUIET_STAGES


def heartbeats(later: Sequence[Timed]) -> set[int]:
    """Events that recur after the last step, to the end; none if they are many or tell of work."""
    times = Counter((entry.stream, entry.event) for _, entry in later)
    beats = {event for (_, event), count in times.items() if count >= MIN_HEARTBEATS}
    quiet = max((time for time, entry in later if entry.event not in beats), default=0.0)
    since = sum(time > quiet for time, entry in later if entry.event in beats)
    at_work = any(entry.event in beats and _WORK.search(entry.text) for _, entry in later)
    return (
        beats if since >= MIN_HEARTBEATS and len(beats) <= MAX_HEARTBEATS and not at_work else set()
    )


def says_no_progress(text: str) -> bool:
    """True for the words of what watches a log and sees nothing new in it."""
    return _NO_PROGRESS.search(text) is not None


_NUMBERS = re.compile(r"\d+")
#: Least share of the ranks that made the last step, for the others to be behind.
MIN_SHARE_AT_TOP = 0.5
#: Characters that are quoted of an entry.
MAX_QUOTED = 60
#: So many ranks must end at the same line, for the only other one to stand elsewhere.
MIN_RANKS_ALIKE = 3


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
    return [Row(other, "elsewhere", words, stage=stage_of_wait(f"{text}\n{usual}"))]


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


def end_of(text: str) -> str:
    """The last words of a text."""
    if len(text) <= MAX_QUOTED:
        return text
    end = text[-MAX_QUOTED:]
    return "…" + (end.partition(" ")[2] or end)
