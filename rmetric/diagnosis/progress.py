"""Find a hang: the training had stopped making progress long before something ended it.

A time limit, a cancellation or a watchdog then explains the end of the job, not its failure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from statistics import median
from typing import NamedTuple

from rmetric.diagnosis.beside.gpus import Spinning, spinning
from rmetric.diagnosis.beside.places import wait_together
from rmetric.diagnosis.causes import Cause
from rmetric.diagnosis.job import Job, JobStream, Occurrence
from rmetric.diagnosis.ordering import SAME_MOMENT, ZONE_TOLERANCE, Ordering, may_be_time_zone
from rmetric.diagnosis.patterns.peers import Peer, may_be_same, peers
from rmetric.diagnosis.rank_evidence import MAX_COMMON_SHARE
from rmetric.diagnosis.reading.timestamps import names_zone, parse, without_year
from rmetric.diagnosis.suspects import RankEvidence, divided

_NUMBERS = re.compile(r"\d+")
#: But those of the time that passes: "waited 60s".
_COUNTS = re.compile(r"(?<!\d)\d+(?!\d| ?(?:ms|s|secs?|seconds?|m|mins?|minutes?|h|hours?)\b)")
#: The value of such a key: `"no_progress_s": 600`.
_DURATION = re.compile(
    r"(?i)\b\w*(?:_s|_ms|_secs?|_seconds|_mins?|_minutes|elapsed|waited|idle|stalled)\"?\s?[:=]\s?[\d.]+"
)
_RANK = re.compile(r"(?i)\b(?:global_|world_)?rank[ =:#]{0,2}(\d{1,6})\b")
#: What is counted during an evaluation or another work without steps.
_WORK = re.compile(r"(?i)eval|valid|\btest|batch|sample|shard|export|upload|download|generat")
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
#: What watches a log and sees nothing new in it.
_NO_PROGRESS = re.compile(
    r"(?i)\bunchanged for \d"
    r"|\bno (?:new )?(?:progress|steps?|lines?|output)\b.{0,20}\b(?:for|since)\b"
)
_UNCHANGED = re.compile(r"(?i)\bunchanged for (\d{1,9}) ?s\b")
#: The time for which a job ran, as a batch system states it.
_RAN = re.compile(r"\bwalltime (\d{2,8}) exceeded limit\b")
#: A hang is at least so many seconds, and so many times the longest pause between two steps.
MIN_SECONDS = 120.0
MIN_RATIO = 5.0
#: Least seconds where no two steps were logged, so that their pauses are not known.
MIN_SECONDS_WITHOUT_STEPS = 1800.0
#: All zones are whole quarters of an hour apart, so what is left of a silence is real.
QUARTER_SECONDS = 900.0
#: Without years December is later than the January behind it, by so many seconds at least.
HALF_YEAR_SECONDS, YEAR_SECONDS = 183 * 86400.0, 366 * 86400.0
#: But no time limit is so much shorter than a difference of zones.
MIN_SHARE_BEFORE_LIMIT = 0.125
#: So many different entries may recur during a hang: heartbeats, monitors.
MAX_HEARTBEATS = 2
#: Least number of entries after the last step of logs that state no end.
MIN_HEARTBEATS = 3
#: Least number of step lines without times from which their rate is derived, and by how much
#: slower the last ones may be.
MIN_STEPS, RATE_MARGIN = 20, 2.0
#: A training whose steps took so small a share of the job's time, by their own account, is not
#: likely to be ended just then.
MAX_STATED_SHARE = 0.1
#: All the time of a step as its line states it, and that since the first as a bar does. Others
#: leave out what a step waited for.
_STATED = re.compile(
    r"(?i)\b(?:completed step: ?\d+, seconds|elapsed time per (?:step|iteration)) ?(?P<ms>\(ms\))?"
    r" ?[:=] ?(?P<each>\d+(?:\.\d+)?)"
)
_BAR = re.compile(r"\[(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d\d)<")
#: The step of a checkpoint as its path or name states it.
_SAVED_STEP = re.compile(r"(?i)(?:global_?step|checkpoint|iter|step)[-_=/ ]?0*(\d+)(?!\d)")
#: Stages in which nothing may be logged for long.
QUIET_STAGES = {"load data", "compile", "evaluate", "checkpoint", "tear-down"}
#: Confidence where nothing is logged any more, and where heartbeats are.
CONFIDENCE_SILENT = 0.9
CONFIDENCE_HEARTBEATS = 0.65
#: And where only the script that ended the training says so.
CONFIDENCE_WATCHED = 0.65
#: And where only the silence before the first step is known.
CONFIDENCE_WITHOUT_STEPS = 0.6
#: Least share of the ranks that made the last step, for the others to be behind.
MIN_SHARE_AT_TOP = 0.5
#: So many ranks must end at the same line, for the only other one to stand elsewhere.
MIN_RANKS_ALIKE = 3
#: A shorter time is not stated.
MIN_SHOWN_SECONDS = 60.0
#: Characters that are quoted of an entry.
MAX_QUOTED = 60
#: Strength of that evidence: a rank may also have more to log than its peers.
STRENGTH_ELSEWHERE = 0.6


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A training that had stopped before it was ended.

    Attributes:
        step: the last one; None if there was none.
        confidence: 0 to 1.
        seconds: from the last sign of progress to the end; 0.0 where nothing states a time.
        least: no more is known than that it was so long: clocks of two zones may be compared.
        ended: something ended it; else the logs stop.
        signs: evidence against ranks that are behind the others.
        last_words: the entry of that evidence, where it is one.
        spinning: GPUs that waited in a kernel meanwhile, by tables beside the logs.
        stated: seconds that the steps took by their own lines, where no line states a time.
    """

    step: int | None
    confidence: float
    seconds: float = 0.0
    least: bool = True
    ended: bool = True
    signs: tuple[RankEvidence, ...] = ()
    last_words: str = ""
    spinning: int = 0
    stated: float = 0.0

    @property
    def why(self) -> str:
        """What else tells that it hung; "" without anything."""
        many = f"{self.spinning} GPUs were" if self.spinning > 1 else "1 GPU was"
        spin = f"; {many} busy at little power meanwhile" if self.spinning else ""
        return spin + (f"; its steps took {_span(self.stated)} in all" if self.stated else "")

    @property
    def words(self) -> str:
        """When it stopped, and for how long."""
        after = "before the first step" if self.step is None else f"after step {self.step}"
        if self.seconds < MIN_SHOWN_SECONDS:
            return f"{after} and was ended later"
        later = f"at least {_span(self.seconds)}" if self.least else _span(self.seconds)
        return f"{after} and was ended {later} later" if self.ended else f"{after}, for {later}"


def find_hang(job: Job, causes: Sequence[Cause], ordering: Ordering) -> Hang | None:
    """The hang that an end from outside ended, or none, while monitors logged on; None without one.

    Args:
        job: the job.
        causes: its causes, the best first.
        ordering: of its entries.
    """
    lead = next((one for one in causes if one.signature.role in ("cause", "ending")), None)
    if lead is None:
        return _unended(job, ordering) if not causes and job.succeeded is None else None
    end = ordering.dated(lead.first) or _end_of(causes, ordering)
    end = _end_by_limit(job, lead.first) or end
    if lead.signature.role != "ending" or end is None:
        return None
    stepping = [one for one in job.streams.values() if one.last_step_at is not None]
    last_step = _last_step(job, stepping, ordering, end)
    events = {event for one in causes for match in one.matches for event in match.events}
    # No training goes on for long after its end: the clock of that file is another.
    same_file = last_step is not None and last_step > end + MIN_SECONDS

    ender = job.streams[lead.first.stream]

    def announces_end(entry: Occurrence) -> bool:
        """Of the moment in which a launcher that logs no steps ends the job."""
        time = None if ender.steps or entry.stream != ender.name else ordering.dated(entry)
        return time is not None and abs(end - time) <= SAME_MOMENT

    def is_before(entry: Occurrence) -> bool:
        comparable = entry.file == lead.first.file or not same_file
        if _NO_PROGRESS.search(entry.text) or announces_end(entry):
            return False
        return entry.event not in events and not (comparable and ordering.after(entry, lead.first))

    entries = _entries(job, ordering, is_before)
    # A note or a stack that states no time is no sign of progress beside lines that do.
    own_times = [one for one in entries if one[1].time is not None] or entries
    beats = _heartbeats([one for one in own_times if last_step is None or one[0] > last_step])
    behind = _behind(job, stepping)
    elsewhere = _elsewhere(job, lambda entry: is_before(entry) and entry.event not in beats)
    apart = behind or elsewhere
    rates = [rate for one in stepping if (rate := _rate(job, one, ordering)) is not None]
    stated = 0.0 if rates else _stated_of_little(job, stepping, lead.first)
    if stated:
        return Hang(
            step=_step(job),
            confidence=CONFIDENCE_WITHOUT_STEPS,
            signs=tuple(behind or [sign for sign, _ in elsewhere]),
            stated=stated,
        )
    last_entry = max((time for time, _ in entries), default=last_step if rates else None)
    if last_entry is None:
        return _by_stacks(job) if "by a person" in lead.signature.traits else None
    timed = [entry for _, entry in entries if entry.time is not None]
    one_clock = not timed or names_zone(timed[-1].text) == names_zone(lead.first.text)
    longest = max((one.longest_pause for one in stepping), default=0.0)
    least = max(MIN_SECONDS, MIN_RATIO * longest) if longest else MIN_SECONDS_WITHOUT_STEPS
    if not longest and rates:
        least = max(least, MIN_RATIO * max(rate.pause for rate in rates))
    elif apart and not longest:
        least = MIN_SECONDS
    confidence = CONFIDENCE_SILENT if longest else CONFIDENCE_WITHOUT_STEPS
    if last_step is not None and last_step > last_entry:
        # The steps state no times. That one rank alone is elsewhere tells of a hang all the same.
        last_step, confidence = (last_step, confidence) if not apart else (None, CONFIDENCE_WATCHED)
    gap = end - (last_entry if last_step is None else max(last_entry, last_step))
    if gap < -HALF_YEAR_SECONDS:
        gap += YEAR_SECONDS
    limit = "time limit" in lead.signature.traits
    # Only the last gap may be one between two clocks: an entry before the end keeps its own.
    other_clock = gap < 0 or (
        may_be_time_zone(gap)
        and not (
            limit
            and one_clock
            and last_entry - _begun(job, ordering, last_entry) < MIN_SHARE_BEFORE_LIMIT * gap
        )
    )
    before = 0.0
    later = [one for one in own_times if last_step is not None and one[0] > last_step]
    if last_step is not None and later:
        if _are_heartbeats(later, stepping):
            before = last_entry - last_step
            confidence = confidence if before < gap else CONFIDENCE_HEARTBEATS
        elif beats:  # after a checkpoint or an evaluation, say, which may take its time
            quiet = [one[0] for one in later if one[1].event not in beats]
            before = last_entry - max(quiet, default=last_step)
            confidence = CONFIDENCE_HEARTBEATS
            least = max(least, MIN_SECONDS_WITHOUT_STEPS)
        else:
            pauses = [after[0] - before[0] for before, after in pairwise(later)]
            least = max(least, MIN_RATIO * max(pauses, default=0.0))
    known = before + (_apart_from_zones(gap) if other_clock or not one_clock else gap)
    known = max(known, min(_stated_silence(job), gap))
    if known < least and not other_clock:
        known = before + gap
    at_least = other_clock or known < before + gap
    if "watched" in lead.signature.traits and last_step is not None:
        confidence = CONFIDENCE_WATCHED if known < least else confidence
    elif known < least:
        return None
    spin = None if last_step is None else _spinning(job, last_step)
    idle, signs = _idle_gpus(job, spin), _fell_silent(job, entries) or behind
    last = _unfinished(job, later) or ([] if signs else elsewhere)
    last = last if signs or last or idle else _last_words(later)
    return Hang(
        seconds=known,
        least=at_least,
        step=_step(job),
        confidence=confidence,
        signs=(*idle, *signs, *(sign for sign, _ in last)),
        last_words=last[0][1] if last else _left_open(job),
        spinning=0 if spin is None else spin.number,
    )


def _left_open(job: Job) -> str:
    """What was begun once or twice oftener than it was done, over the whole log; "" without."""
    counts = {_END_OF_SENTENCE.sub("", one.template): one.count for one in job.events}
    for template, count in counts.items():
        for begun, done in _BEGUN_AND_DONE:
            twin = counts.get(template.replace(begun, done)) if begun in template else None
            if twin is not None and 0 < count - twin <= MAX_LEFT_OPEN:
                return template
    return ""


def _stated_of_little(job: Job, stepping: Sequence[JobStream], end: Occurrence) -> float:
    """Seconds that the steps took by their own lines, if that is little of the time to the end.

    For logs whose steps state no times; 0.0 else. What starts for so long is seldom ended in its
    first steps.
    """
    at_work = all(one.stage == "train" for one in stepping)
    timed = any(one.last_step_at is not None and one.last_step_at.time for one in stepping)
    begun = job.streams[end.stream].first_time
    if not stepping or not at_work or timed or end.time is None or begun is None:
        return 0.0
    stated = [_stated_seconds(one) for one in stepping]
    least = max(MIN_SECONDS_WITHOUT_STEPS + max(stated), max(stated) / MAX_STATED_SHARE)
    lasted = without_year(end.time) - without_year(begun)
    return max(stated) if all(stated) and lasted > least else 0.0


def _stated_seconds(stream: JobStream) -> float:
    """Seconds that a stream's steps took, as the last one states; 0.0 where it does not."""
    text = stream.last_step_at.text if stream.last_step_at is not None else ""
    if stream.fell_back:
        return 0.0
    if bar := _BAR.search(text):
        return 3600.0 * int(bar["hours"] or 0) + 60.0 * int(bar["minutes"]) + int(bar["seconds"])
    found = _STATED.search(text)
    if found is None:
        return 0.0
    first = min((one.step for one in stream.head if one.step is not None), default=0)
    steps = max(stream.steps, (stream.last_step or 0) - first + 1)
    return steps * float(found["each"]) * (1e-3 if found["ms"] else 1.0)


def _begun(job: Job, ordering: Ordering, last: float) -> float:
    """When the job began, by any line that states it before the `last` sign of progress."""
    heads = (ordering.dated(one) for stream in job.streams.values() for one in stream.head)
    known = [time for time in heads if time is not None and time <= last]
    return min([*known, ordering.span[0] if ordering.span else last])


def _end_by_limit(job: Job, end: Occurrence) -> float | None:
    """When a job ended whose undated last line states for how many seconds it had run."""
    found = _RAN.search(end.text) if end.time is None else None
    if found is None:
        return None
    own = [one for one in job.streams.values() if end.file in one.files]
    begins = [one.first_time for one in own if one.first_time is not None]
    return min(begins) + float(found[1]) if begins else None


def _stated_silence(job: Job) -> float:
    """Seconds for which a watcher of the log saw nothing new, as its last words state."""
    said = (_UNCHANGED.search(one.text) for stream in job.streams.values() for one in stream.tail)
    return max((float(match[1]) for match in said if match), default=0.0)


def _by_stacks(job: Job) -> Hang | None:
    """A training without times that a person ended, and whose processes were asked where they are.

    Who takes the stacks of all and then ends the job has seen that it does not move.
    """
    if job.beside is None or not wait_together(job.beside.stacks) or _step(job) is None:
        return None
    return Hang(step=_step(job), confidence=CONFIDENCE_WATCHED)


def _end_of(causes: Sequence[Cause], ordering: Ordering) -> float | None:
    """The last time that a fault or an ending states; None where none does."""
    times = (ordering.dated(one) for cause in causes for one in (cause.first, cause.last))
    return max((time for time in times if time is not None), default=None)


def _unended(job: Job, ordering: Ordering) -> Hang | None:
    """A training without steps to the end of logs in which nothing but heartbeats goes on."""
    stepping = [one for one in job.streams.values() if one.last_step_at is not None]
    entries = _entries(job, ordering)
    end = max((time for time, _ in entries), default=None)
    longest = max((one.longest_pause for one in stepping), default=0.0)
    if end is None or not longest:
        return None
    last_step = _last_step(job, stepping, ordering, end)
    if last_step is None:
        return None
    least = max(MIN_SECONDS, MIN_RATIO * longest)
    spin = _spinning(job, last_step)
    end = max(end, spin.until) if spin is not None else end
    if end - last_step < least:
        return None
    later = [one for one in entries if one[0] > last_step]
    apart = max(
        after[0] - before[0] for before, after in pairwise([(last_step, None), *later, (end, None)])
    )
    enough = len(later) >= MIN_HEARTBEATS and apart > MIN_RATIO * longest
    beats = _heartbeats(later, of_all=False)
    if not (enough and _are_heartbeats(later, stepping)):
        quiet = [one for one in later if one[1].event not in beats]
        names = {one.name for one in stepping}
        if any(one.stage in QUIET_STAGES for _, one in quiet if one.stream in names):
            least = max(least, MIN_SECONDS_WITHOUT_STEPS)
        since = max((one[0] for one in quiet), default=last_step)
        if not (beats or spin) or end - since < least:
            return None
    idle, signs = _idle_gpus(job, spin), _fell_silent(job, entries) or _behind(job, stepping)
    last = [] if signs else _alone_waiting(job, later, beats)
    last = last if signs or last or idle else _last_words(later)
    return Hang(
        seconds=end - last_step,
        ended=False,
        step=_step(job),
        confidence=CONFIDENCE_HEARTBEATS,
        signs=(*idle, *signs, *(sign for sign, _ in last)),
        last_words=last[0][1] if last else "",
        spinning=0 if spin is None else spin.number,
    )


def _spinning(job: Job, last_step: float) -> Spinning | None:
    """GPUs that spin after the last step, by the tables beside the logs."""
    return spinning(job.beside.monitors, last_step) if job.beside is not None else None


def _idle_gpus(job: Job, spin: Spinning | None) -> list[RankEvidence]:
    """Evidence against the ranks whose GPUs are idle while those of the others spin."""
    if spin is None or len(spin.idle) > MAX_COMMON_SHARE * spin.number:
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
    return divided(names, "idle gpu", words)


def _step(job: Job) -> int | None:
    furthest = job.furthest
    return furthest.last_step if furthest and not furthest.counts_samples else None


def _last_step(
    job: Job, stepping: Sequence[JobStream], ordering: Ordering, end: float
) -> float | None:
    """When the last step was logged at the latest; None without steps.

    A line that states no time may be as late as the next one that does, or as the end.
    """
    found = None
    timed = {
        one.name: one for one in stepping if one.last_step_at and one.last_step_at.time is not None
    }
    saved = _saved_steps(job, ordering) if len(timed) < len(stepping) else []
    top = max((one.last_step or 0 for one in timed.values()), default=-1)
    for one in stepping:
        # Another entry of the same step is no progress.
        if one.last_step_at is not None and (one.name in timed or (one.last_step or 0) > top):
            at = ordering.at_latest(one.last_step_at)
            time = end if at is None else ordering.dated(at)
            known = [
                when
                for step, file, when in saved
                if one.name not in timed and step == one.last_step and file not in one.files
            ]
            if (rate := _rate(job, one, ordering)) is not None:
                known.append(rate.last)
            time = None if time is None else min([time, *known])
            if time is not None and (found is None or time > found):
                found = time
    return found


def _saved_steps(job: Job, ordering: Ordering) -> list[tuple[int, str, float]]:
    """Steps that checkpoints are named after, each with the file that states it, and when."""
    return [
        (int(step), entry.file, time)
        for one in job.streams.values()
        for entry in one.tail
        if entry.stage == "checkpoint" and (time := ordering.dated(entry)) is not None
        for step in _SAVED_STEP.findall(entry.text)
    ]


class _Rate(NamedTuple):
    """Steps without times, by the entries between them that state one.

    Attributes:
        last: when the last one was logged at the latest.
        pause: seconds between two lines of steps, on average.
    """

    last: float
    pause: float


def _rate(job: Job, stream: JobStream, ordering: Ordering) -> _Rate | None:
    """Derived from checkpoints, evaluations and warnings; None where the steps state times."""
    last, end = stream.last_step_at, stream.last_step
    if last is None or end is None or last.time is not None or stream.steps < MIN_STEPS:
        return None
    events = (entry for event in job.events for entry in (event.first, event.last))
    entries = [
        (one.step, one)
        for one in (*stream.head, *stream.tail, *events)
        if one.stream == stream.name and one.step is not None
    ]
    timed = {
        (step, time)
        for step, one in entries
        if step < end and one.time is not None and (time := ordering.dated(one)) is not None
    }
    (step, begin), (to_step, time) = min(timed, default=(0, 0.0)), max(timed, default=(0, 0.0))
    if to_step == step or time <= begin:
        return None
    each = (time - begin) / (to_step - step)
    steps_a_line = (end - min(step for step, _ in entries)) / (stream.steps - 1)
    return _Rate(time + RATE_MARGIN * (end - to_step) * each, steps_a_line * each)


def _entries(
    job: Job, ordering: Ordering, counts: Callable[[Occurrence], bool] = lambda _: True
) -> list[tuple[float, Occurrence]]:
    """The last entries of all streams with their times, in time; those that count."""
    found = [
        (time, entry)
        for one in job.streams.values()
        for entry in one.tail
        if counts(entry) and (time := ordering.dated(entry)) is not None
    ]
    return sorted(found, key=itemgetter(0))


def _are_heartbeats(
    later: Sequence[tuple[float, Occurrence]], stepping: Sequence[JobStream]
) -> bool:
    """True if what follows the last step is little that recurs, and no evaluation or checkpoint."""
    names = {one.name for one in stepping}
    stages = {entry.stage for _, entry in later if entry.stream in names}
    texts: dict[int, list[str]] = {}
    for _, entry in later:
        texts.setdefault(entry.event, []).append(entry.text)
    recurring = len(texts) <= MAX_HEARTBEATS and not any(map(_counts_work, texts.values()))
    return recurring and not stages & QUIET_STAGES


def _heartbeats(later: Sequence[tuple[float, Occurrence]], *, of_all: bool = True) -> set[int]:
    """Events that recur after the last step without counting anything; none if there are many.

    An evaluation counts its batches, which is progress.

    Args:
        later: entries behind the last step, with their times.
        of_all: nothing else may follow, but several of them.
    """
    texts: dict[tuple[str, int], list[str]] = {}
    for _, entry in later:
        texts.setdefault((entry.stream, entry.event), []).append(entry.text)
    beats = {event for (_, event), each in texts.items() if len(each) >= MIN_HEARTBEATS}
    counting = any(_counts_work(each) for (_, event), each in texts.items() if event in beats)
    quiet = max((time for time, entry in later if entry.event not in beats), default=0.0)
    since = sum(time > quiet for time, entry in later if entry.event in beats)
    at_the_end = since >= MIN_HEARTBEATS or not of_all
    return beats if at_the_end and not counting and len(beats) <= MAX_HEARTBEATS else set()


def _counts_work(texts: Sequence[str]) -> bool:
    """True if a number rises from entry to entry, and they are not of the time that passes."""
    if len(texts) < MIN_HEARTBEATS or not _WORK.search(texts[-1]):
        return False
    rests = (text[(parse(text) or (0.0, 0))[1] :] for text in texts)
    found = [_COUNTS.findall(_DURATION.sub("", rest)) for rest in rests]
    numbers = (list(map(int, each)) for each in zip(*found, strict=False))
    return any(all(one < other for one, other in pairwise(each)) for each in numbers)


def _apart_from_zones(seconds: float) -> float:
    """Seconds of a silence that no difference of time zones explains."""
    left = seconds % QUARTER_SECONDS
    return left if left < QUARTER_SECONDS - ZONE_TOLERANCE else 0.0


def _fell_silent(job: Job, entries: Sequence[tuple[float, Occurrence]]) -> list[RankEvidence]:
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
    most = max(MIN_SECONDS, MIN_RATIO * median(pauses))
    silent = [name for name, each in times.items() if end - each[-1] > most]
    if len(silent) > MAX_COMMON_SHARE * len(times):
        return []
    words = f"logs nothing for the last {{}}, while {len(times) - len(silent)} others do"
    return [
        RankEvidence(
            name, "behind", words.format(_span(end - times[name][-1])), len(silent) ** -0.5
        )
        for name in silent
    ]


def _behind(job: Job, stepping: Sequence[JobStream]) -> list[RankEvidence]:
    """Evidence against the few ranks whose last step is below that of the others."""
    ranks = [one for one in stepping if one.rank is not None and one.last_step is not None]
    top = max((one.last_step or 0 for one in ranks), default=0)
    behind = [one for one in ranks if (one.last_step or 0) < top]
    at_top = len(ranks) - len(behind)
    if (
        not behind
        or at_top < MIN_SHARE_AT_TOP * len(ranks)
        or len(behind) > MAX_COMMON_SHARE * len(ranks)
    ):
        return []
    steps = sorted({one.last_step or 0 for one in behind})
    words = f"its last step is {steps[0]}, that of {at_top} others {top}"
    return divided([one.name for one in behind], "behind", words)


def _last_words(later: Sequence[tuple[float, Occurrence]]) -> list[tuple[RankEvidence, str]]:
    """Evidence against the rank that the only entry which is no heartbeat states; and its text."""
    times = Counter(entry.event for _, entry in later)
    alone = [entry for _, entry in later if times[entry.event] == 1]
    ranks = {number for one in alone for number in _RANK.findall(one.text)}
    if len(alone) != 1 or len(ranks) != 1:
        return []
    text = alone[0].text
    words = f"the last entry before the silence is its own: {end_of(text)!r}"
    sign = RankEvidence(f"rank {int(ranks.pop())}", "behind", words, STRENGTH_ELSEWHERE)
    return [(sign, text)]


def _unfinished(
    job: Job, later: Sequence[tuple[float, Occurrence]]
) -> list[tuple[RankEvidence, str]]:
    """Evidence against the only one of several that began a file and is not done; its text."""
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
    words = f"did not finish, as {len(begun) - 1} others did: {end_of(entry.text)!r}"
    return [(RankEvidence(name, "behind", words), entry.text)]


def _name_of(file: str) -> str:
    return file.strip("'\"`.,:;()")


def _alone_waiting(
    job: Job, later: Sequence[tuple[float, Occurrence]], beats: Collection[int]
) -> list[tuple[RankEvidence, str]]:
    """Evidence against the only rank or node that goes on logging, and that it waits; its text."""
    waiting = {entry.stream: entry.text for _, entry in later if entry.event in beats}
    placed = {
        name
        for name, one in job.streams.items()
        if one.rank is not None or name.startswith("node ")
    }
    if len(waiting) != 1 or len(placed) < MIN_RANKS_ALIKE + 1:
        return []
    ((name, text),) = waiting.items()
    if name not in placed or not _OWN_WAIT.search(text) or _RANK.search(text):
        return []
    words = f"waits while {len(placed) - 1} others are silent: {end_of(text)!r}"
    return [(RankEvidence(name, "behind", words, STRENGTH_ELSEWHERE), text)]


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.0f} min"


def _elsewhere(job: Job, is_before: Callable[[Occurrence], bool]) -> list[tuple[RankEvidence, str]]:
    """Evidence against the one rank whose last entry before the end is not that of most; its text.

    Ranks that lead have lines of their own, which say nothing.
    """
    lasts = {}
    known = {one.number: len(one.counts) for one in job.events}
    present = [one for one in peers(job) if one.stream is not None]
    ranked = [one for one in present if one.rank is not None] or present
    for one in ranked:
        tail = one.stream.tail if one.stream is not None else ()
        before = list(filter(is_before, tail))
        own = one.leads and before and known[before[-1].event] < MIN_SHARE_AT_TOP * len(ranked)
        if before and not own:
            lasts[one.name] = before[-1]
    if len(lasts) < MIN_RANKS_ALIKE + 1:
        return []
    template = {one.number: one.template for one in job.events}
    at = {name: template.get(last.event, "") for name, last in lasts.items()}
    if len(set(at.values())) == 1:  # a template of wildcards may have taken in all lines
        at = {name: _NUMBERS.sub("<N>", last.text) for name, last in lasts.items()}
    ((usual, times),) = Counter(at.values()).most_common(1)
    others = [name for name, where in at.items() if where != usual]
    if times != len(lasts) - 1 or times < MIN_RANKS_ALIKE:
        return []
    alike = may_be_same(at[others[0]], usual) or _much_alike(at[others[0]], usual)
    if alike and not _passed(ranked, others[0], lasts[others[0]]):
        return []
    text = lasts[others[0]].text
    words = f"it stands at {end_of(text)!r}, {times} others at {end_of(usual)!r}"
    if not alike and _passed(ranked, others[0], lasts[others[0]]):
        text = f"{text}\n{usual}"  # what it has not done tells where it is, too
    return [(RankEvidence(others[0], "behind", words, STRENGTH_ELSEWHERE), text)]


def end_of(text: str) -> str:
    """The last words of a text."""
    if len(text) <= MAX_QUOTED:
        return text
    end = text[-MAX_QUOTED:]
    return "…" + (end.partition(" ")[2] or end)


def _passed(ranked: Sequence[Peer], name: str, last: Occurrence) -> bool:
    """True if most others logged the last line of one, but for numbers, and went on."""
    at = _NUMBERS.sub("<N>", last.text)
    others = [one for one in ranked if one.name != name and one.stream is not None]
    went_on = [
        any(_NUMBERS.sub("<N>", entry.text) == at for entry in list(one.stream.tail)[:-1])
        for one in others
        if one.stream is not None
    ]
    return sum(went_on) >= MIN_SHARE_AT_TOP * len(others)


def _much_alike(one: str, other: str) -> bool:
    """True for lines that differ in one word alone: a name, an address, yes or no."""
    ours, theirs = one.split(), other.split()
    differing = sum(mine != its for mine, its in zip(ours, theirs, strict=False))
    return len(ours) == len(theirs) and differing <= 1
