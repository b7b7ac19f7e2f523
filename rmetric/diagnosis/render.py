"""Render a diagnosis in at most 15 lines of plain text.

The first line is the summary; the rest gives actor, actions, evidence and alternatives.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple

from rmetric._util.printed import counted
from rmetric.diagnosis.reading.timestamps import NO_YEAR
from rmetric.diagnosis.result import FOLLOWS, LEFT_OPEN, LIKELY, SURE, Diagnosis, Evidence, Suspect
from rmetric.diagnosis.text_layout import (
    around,
    brief,
    excerpt,
    file_name,
    partly,
    plain,
    point,
    shortened,
    without_folders,
    wrapped,
)

#: Largest number of lines of a verdict, and of characters of a line.
MOST_LINES = 15
WIDTH = 110
_LABEL = 11
#: Parts that lose lines where there are too many, in this order, down to so many.
_GIVES_WAY = (
    ("To do", 3), ("Attempts", 1), ("Candidates", 2), ("Where", 2), ("Log", 2), ("Note", 2),
    ("Where", 1), ("Echo", 0), ("Confidence", 1), ("Candidates", 1), ("Note", 1), ("When", 0),
    ("To do", 1),
)  # fmt: skip
_SURE_OF = {
    "healthy": " that the job is healthy",
    "failed": " that the job failed",
    "terminated": " that the job was ended from outside",
}
#: Outcomes of which no cause is expected, and what a title without one may begin with.
_OUTCOMES_WITHOUT_CAUSE = ("healthy", "unknown")
_UNKNOWN_PREFIXES = ("Cause unknown", "Outcome unknown")
#: Number of suspects in the first line.
_NAMED = 2
#: Suspects whose score is so much below the first one's are not in the first line.
_SCORE_GAP = 0.1
_AND_MORE = " (and {} more)"
#: Least number of characters of a candidate's title.
_FEWEST = 30
#: Characters of an attempt's title.
_ATTEMPT_TITLE = 60
WHO_ACTS = {
    "hardware": "hardware: operators of the machines",
    "user": "user: owner of the job's code, settings or data",
    "framework": "framework: owner of the library versions",
    "platform": "platform: operators of scheduler, network and storage",
}


class _Part(NamedTuple):
    """One label and the texts beside it.

    Attributes:
        texts: each has a line, the last all that are left.
        most: largest number of lines.
        cut: shortens a text to a number of characters.
    """

    label: str
    texts: Sequence[str]
    most: int = 1
    cut: Callable[[str, int], str] = partly


def verdict(diagnosis: Diagnosis) -> str:
    """At most `MOST_LINES` lines of at most `WIDTH` characters, without a line end at the end.

    Text of a log is shown on one line, its control characters escaped.
    """
    parts = [part for part in _parts(diagnosis) if part.texts]
    sizes = {part.label: len(_lines(part, part.most)) for part in parts}
    for label, least in _GIVES_WAY:
        while 1 + sum(sizes.values()) > MOST_LINES and sizes.get(label, 0) > least:
            sizes[label] -= 1
    lines = [headline(diagnosis)]
    for part in parts:
        label = part.label
        for line in _lines(part, sizes[label]):
            lines.append(f"{label:<{_LABEL}}{line}")
            label = ""
    return "\n".join(lines)


def headline(diagnosis: Diagnosis, width: int = WIDTH) -> str:
    """Cause, place and time on one line.

    >>> print(headline(Diagnosis(
    ...     outcome="failed", cause="cuda_out_of_memory", title="A GPU ran out of memory.",
    ...     confidence=0.9, nodes=(Suspect(name="rank 12", rank=12, node="node-03", score=1.0,
    ...     why=""),), iteration=431, stage="train", time=1714702447.0)))
    FAILED: A GPU ran out of memory, rank 12 on node-03, at step 431 (train), 2024-05-03 02:14:07
    """
    head, cause, place = f"{_outcome(diagnosis)}: ", what(diagnosis), where(diagnosis)
    # A rank that the title names is not named again.
    names = f", {place}" if place and place not in cause else ""
    # Omitted parts, in this order: each has a line of its own then, or the last line has it.
    times = [
        when(diagnosis),
        when(diagnosis, date=False),
        when(diagnosis, date=False, stage=False),
        when(diagnosis, clocks=False, stage=False),
        "",
    ]
    tails = [names + (f", {time}" if time else "") for time in times]
    # The title's explanation is omitted before the time of day is.
    for whole, some in ((True, tails[:3]), (False, tails[:3]), (True, tails[3:])):
        for tail in some:
            # "why., rank 0": what was left out followed a full stop.
            title = cause if whole else brief(cause, width - len(head + tail)).rstrip(".")
            if title and len(head + title + tail) <= width and not title.endswith("…"):
                return head + title + tail
    tail = names if len(head + names) <= width // 2 else ""
    return shortened(head + brief(cause, width - len(head + tail)).rstrip(".") + tail, width)


def what(diagnosis: Diagnosis) -> str:
    """The cause in words; where it is not known, the known facts."""
    title = plain(diagnosis.title).rstrip(".")
    if diagnosis.cause is not None:
        return title or plain(diagnosis.cause).replace("_", " ")
    if diagnosis.outcome == "healthy":
        return title or "no failure found"
    if diagnosis.outcome == "unknown":
        # The outcome is stated before.
        title = re.sub(rf"^(?:{'|'.join(_UNKNOWN_PREFIXES)})[.:] ", "", title)
        return title or "the logs do not say how the job ended"
    return title or "the cause is not known"


def _outcome(diagnosis: Diagnosis) -> str:
    name = diagnosis.outcome.upper()
    if diagnosis.cause is not None:
        return name if diagnosis.confidence >= SURE else f"{name}, probably"
    if diagnosis.outcome == "healthy" and diagnosis.confidence < LIKELY:
        return f"{name}, perhaps"
    stated = not diagnosis.title or diagnosis.title.startswith(_UNKNOWN_PREFIXES)
    stated = stated or diagnosis.outcome in _OUTCOMES_WITHOUT_CAUSE
    return name if stated else f"{name}, cause unknown"


def where(diagnosis: Diagnosis) -> str:
    """Affected ranks or nodes; "" where the logs name none."""
    if diagnosis.nodes:
        first = diagnosis.nodes[0]
        if not _is_known(first.name):
            return ""
        close = [one for one in diagnosis.nodes if one.score > first.score - _SCORE_GAP]
        named = " and ".join(place(one) for one in close[:_NAMED])
        more = len(close) - _NAMED
        return f"{named} and {more} more" if more > 0 else named
    event = shown(diagnosis)
    # The first stream of a symptom, an echo or an end from outside is no place of the failure.
    if diagnosis.cause is None or event is None or event.role != "cause":
        return ""
    if not event.who or not _is_known(event.who[0]):
        return ""
    return plain(event.who[0]) if len(event.who) == 1 else f"{plain(event.who[0])} first"


def _is_known(stream: str) -> bool:
    """Return False for a file, which has a line of its own."""
    return stream.startswith(("rank ", "node "))


def shown(diagnosis: Diagnosis) -> Evidence | None:
    """The event that is quoted: the cause's, of several the one at its time; else the first."""
    own = [one for one in diagnosis.events if one.signature and one.signature == diagnosis.cause]
    own = [one for one in own if one.time == diagnosis.time] or own or list(diagnosis.events)
    return own[0] if own else None


def place(suspect: Suspect) -> str:
    """A rank and its node.

    >>> place(Suspect(name="rank 3", rank=3, node="gpu-07", score=0.9, why="it fell silent"))
    'rank 3 on gpu-07'
    """
    if suspect.rank is not None and suspect.node:
        return plain(f"rank {suspect.rank} on {suspect.node}")
    return _speaker(suspect.name)


def when(
    diagnosis: Diagnosis, *, date: bool = True, stage: bool = True, clocks: bool = True
) -> str:
    """Step, stage and time, as far as the logs state them."""
    texts = []
    if diagnosis.iteration is not None:
        within = f" ({plain(diagnosis.stage)})" if diagnosis.stage and stage else ""
        known = "at" if diagnosis.cause is not None else "last"
        texts.append(f"{known} step {diagnosis.iteration}{within}")
    elif diagnosis.stage and stage:
        texts.append(f"stage: {plain(diagnosis.stage)}")
    if diagnosis.time is not None and clocks:
        texts.append(clock(diagnosis.time, date=date))
    return ", ".join(texts)


def clock(seconds: float, *, date: bool = True) -> str:
    """Format a log's time.

    >>> clock(1714702447.0), clock(73707247.0), clock(4821.55)
    ('2024-05-03 02:14:07', '05-03 02:14:07', '4821.6 s on its own clock')
    """
    if seconds < NO_YEAR[0]:
        return f"{seconds:.1f} s on its own clock"
    try:
        days = "" if not date else "%m-%d " if seconds < NO_YEAR[1] else "%Y-%m-%d "
        form = f"{days}%H:%M:%S"
        return datetime.fromtimestamp(seconds, timezone.utc).strftime(form)
    except (ValueError, OverflowError, OSError):  # a number that is no time
        return f"time {seconds:g} s"


def sureness(diagnosis: Diagnosis) -> str:
    """The confidence in a number and a word.

    >>> sureness(Diagnosis(outcome="failed", cause="disk_full", confidence=0.92))
    '92 % (sure)'
    >>> sureness(Diagnosis(outcome="failed", confidence=0.7))
    '70 % (likely) that the job failed'
    """
    value = diagnosis.confidence
    word = "sure" if value >= SURE else "likely" if value >= LIKELY else "guess"
    # 99.6 % is not certain, and is not shown as 100.
    number = 100 if value >= 1 else min(round(100 * value), 99)
    of = "" if diagnosis.cause else _SURE_OF.get(diagnosis.outcome, "")
    return f"{number} % ({word}){of}"


def _parts(diagnosis: Diagnosis) -> list[_Part]:
    acts = WHO_ACTS.get(diagnosis.actor or "", plain(diagnosis.actor or ""))
    to_do = plain(" ".join(diagnosis.to_do))
    quoted = shown(diagnosis)
    since = [f"iteration {diagnosis.since}, the first that differs from its predecessors"]
    log = []
    if quoted is not None:
        log = [file_name(f"{plain(quoted.file)}:{quoted.line}", WIDTH - _LABEL), excerpt(quoted)]
    return [
        _Part("When", _omitted_times(diagnosis)),
        _Part("Owner", [acts] if acts else []),
        _Part("To do", [to_do] if to_do else [], 4),
        _Part("Confidence", _why(diagnosis), 2, shortened),
        _Part("Log", log, 3, partial(around, point=point(quoted))),
        _Part("Where", _places(diagnosis), 3),
        _Part("Since", since if diagnosis.since is not None else []),
        _Part("Echo", _echoes(diagnosis)),
        _Part("Candidates", _candidates(diagnosis), 2 if diagnosis.cause else 4),
        _Part("Attempts", _attempts(diagnosis), 2),
        _Part("Note", [without_folders(plain(note)) for note in diagnosis.notes], 3),
        _Part("Input", _input_size(diagnosis.job)),
    ]


def _attempts(diagnosis: Diagnosis) -> list[str]:
    """The number of attempts and how the others ended, the commonest end first."""
    if not diagnosis.attempts:
        return []
    others = [one for one in diagnosis.attempts if one.number != diagnosis.attempt]
    ends = Counter(brief(plain(one.title).rstrip("."), _ATTEMPT_TITLE) for one in others)
    words = "; ".join(f"{times} x {title}" for title, times in ends.most_common())
    which = "the last" if diagnosis.attempt == len(diagnosis.attempts) else "only it"
    return [
        f"{diagnosis.attempt} of {len(diagnosis.attempts)}, {which} is diagnosed; others: {words}"
    ]


def _omitted_times(diagnosis: Diagnosis) -> list[str]:
    """Step, stage and time where the first line has no room for them."""
    first = headline(diagnosis)
    shown_there = any(when(diagnosis, date=date) in first for date in (True, False))
    return [] if shown_there else [when(diagnosis)]


def _why(diagnosis: Diagnosis) -> list[str]:
    why = plain(diagnosis.why)
    if diagnosis.outcome == "unknown" and diagnosis.cause is None:
        return [f"none: {why}"] if why else []
    return [f"{sureness(diagnosis)}: {why}" if why else sureness(diagnosis)]


def _places(diagnosis: Diagnosis) -> list[str]:
    if diagnosis.nodes:
        return [f"{place(one)}: {plain(one.why)}" for one in diagnosis.nodes]
    alone = diagnosis.job.get("ranks_heard") in (0, 1)
    return [] if diagnosis.outcome == "healthy" or alone else ["no node stands out"]


def _echoes(diagnosis: Diagnosis) -> list[str]:
    quoted = shown(diagnosis)
    echoes = [
        one
        for one in diagnosis.events[1:]
        if one.role == "echo" and (quoted is None or one.signature != quoted.signature)
    ]
    if not echoes:
        return []
    first = echoes[0]
    seconds = _apart(diagnosis.time, first.time)
    late = "later" if seconds is None else f"{seconds:.0f} s later"
    more = f" (and {len(echoes) - 1} more)" if len(echoes) > 1 else ""
    text = plain(first.why).rstrip(".") or excerpt(first)
    # The name of the only file is no information.
    alone = diagnosis.job.get("files") == 1 and first.who[:1] == (first.file,)
    who = "" if alone else f" on {_speakers(first.who)}"
    start = f"{late}{who}: "
    return [start + brief(text, max(WIDTH - _LABEL - len(start + more), 1)) + more]


def _apart(since: float | None, then: float | None) -> float | None:
    """Seconds to a later time; None on another scale: without a year, since a node's start."""
    if since is None or then is None or then < since:
        return None
    same = bisect_right(NO_YEAR, since) == bisect_right(NO_YEAR, then)
    return then - since if same else None


def _speakers(who: Sequence[str]) -> str:
    if not who:
        return "others"
    first = _speaker(who[0])
    # Of more than eight, eight are known.
    more = "7 or more others" if len(who) >= 8 else counted(len(who) - 1, "other")
    return first if len(who) == 1 else f"{first} and {more}"


def _speaker(stream: str) -> str:
    """Name of a rank or node, or of a file without its folders."""
    return plain(stream if _is_known(stream) else stream.rpartition("/")[2] or stream)


def _candidates(diagnosis: Diagnosis) -> list[str]:
    titles = {one.signature: one.why for one in diagnosis.events}
    titles |= {one.cause: one.title for one in diagnosis.candidates}
    room = WIDTH - _LABEL - len(_AND_MORE.format(9))
    texts = []
    left_open = [one for one in diagnosis.candidates if one.why == LEFT_OPEN]
    for one in (each for each in diagnosis.candidates if each.why != LEFT_OPEN):
        why = plain(one.why)
        if why.startswith(FOLLOWS):
            earlier, semicolon, more = why.removeprefix(FOLLOWS).partition(";")
            why = "later, likely a consequence"
            if earlier != diagnosis.cause:
                why = f"later than: {brief(plain(titles.get(earlier, earlier)), 40)}"
            why += semicolon + more
        end = f" ({100 * one.confidence:.0f} %)" + (f": {why}" if why else "")
        title = plain(one.title).rstrip(".") or plain(one.cause)
        alone = len(diagnosis.candidates) == 1
        texts.append((title if alone else brief(title, max(room - len(end), _FEWEST))) + end)
    if left_open:
        named = "; ".join(f"{one.title} ({100 * one.confidence:.0f} %)" for one in left_open)
        texts.insert(min(1, len(texts)), f"Left open: {named}")
    return texts


def _input_size(job: dict[str, Any]) -> list[str]:
    """Size of the input; unknown values are omitted."""
    texts = [
        counted(job[name], name.removesuffix("s"))
        for name in ("files", "lines")
        if isinstance(job.get(name), int)
    ]
    ranks, world = job.get("ranks_heard"), job.get("world_size")
    if isinstance(ranks, int) and ranks:
        of = world if world and world >= ranks else None
        texts.append(f"{ranks} of {counted(of, 'rank')}" if of else counted(ranks, "rank"))
    first, last = job.get("first_time"), job.get("last_time")
    if first is not None and last is not None:
        times = dict.fromkeys([clock(first), clock(last)])
        texts.append(" to ".join(times))
    return [", ".join(texts)] if texts else []


def _lines(part: _Part, most: int) -> list[str]:
    if not most:
        return []
    width = WIDTH - _LABEL
    *before, last = part.texts[:most]
    more = len(part.texts) - most
    end = _AND_MORE.format(more) if more > 0 else ""
    lines = [part.cut(text, width) for text in before]
    return lines + (
        [part.cut(last, width - len(end)) + end]
        if end
        else wrapped(last, width, most - len(before), part.cut)
    )
