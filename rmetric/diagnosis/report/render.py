"""Render a diagnosis in at most 15 lines of plain text.

The first line is the summary; the rest gives actor, actions, evidence and alternatives. What is too
long keeps its essential part: of a path the file name, of prose the main clause, of a log entry the
matched text or the exception.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from itertools import product
from math import nan
from typing import TYPE_CHECKING, Any, NamedTuple

from rmetric._util.printed import counted, printable
from rmetric.diagnosis.reading.timestamps import NO_YEAR

if TYPE_CHECKING:
    from rmetric.diagnosis.report.result import Diagnosis, Evidence, Suspect

#: The reason of a candidate that came behind another fault: "follows ID".
FOLLOWS = "follows "
#: Largest number of lines of a verdict, and of characters of a line.
MOST_LINES = 15
WIDTH = 110
_LABEL_WIDTH = 11
#: Characters beside a label.
_ROOM = WIDTH - _LABEL_WIDTH
#: Parts that lose lines where there are too many, in this order, down to so many.
_GIVES_WAY = (
    ("To do", 3), ("Attempts", 1), ("Candidates", 2), ("Where", 2), ("Log", 2), ("Note", 2),
    ("Where", 1), ("Echo", 0), ("Restart", 0), ("Confidence", 1), ("Candidates", 1), ("Note", 1),
    ("When", 0), ("To do", 1),
)  # fmt: skip
_SURE_OF = {
    "healthy": " that the job is healthy",
    "failed": " that the job failed",
    "terminated": " that the job was ended from outside",
}
#: Suspects in the first line.
_MOST_NAMED = 2
#: Where a text may end early: an explanation or an addition follows.
_CLAUSE = re.compile(r"; |(?<=\.) (?=[A-Z])|, (?:(?:most )?often|which|so that) ")
#: Characters that are given up to end, or begin, with a whole word.
_WORD_WIDTH = 24
#: A file's name, with its folders.
_PATH = re.compile(r"""(?:[^\s/'"()\[\]=,]*/)+(?=[^\s/]*\w\.\w)""")
_TRACEBACK = (
    "Traceback (most recent call last)",
    "During handling of the above exception",
    "The above exception was the direct cause",
)
#: Lines of an entry that name a place in the code, and those that a line of code follows.
_PLACE = re.compile(
    r'\s*(?:File ".+", line \d+|#\d+:? |frame #\d+: |[~^][~^ ]*$)'
    r"|.*\(most recent call (?:first|last)\):\s*$"
)
_CODE_FOLLOWS = re.compile(r'\s*File ".+", line \d+, in ')


def brief(text: str, most: int, point: str = "") -> str:
    """A text in at most `most` characters: folders go first, then what is far from `point`.

    Without a point it ends with a clause, if that fills a quarter of the room, or else a word.
    """
    if len(text) <= most:
        return text
    text, point = _PATH.sub("…/", text), _PATH.sub("…/", point)
    point = point if point in text else ""
    at = text.find(point)
    if at and at + len(point) >= most:
        start = min(at, max(len(text) - most + 1, 0))
        space = text.find(" ", max(start - 1, 0), min(start + _WORD_WIDTH, at))
        text = f"…{text[start if space < 0 else space + 1 :]}"
    if len(text) <= most:
        return text
    end = text.find(point) + len(point)
    stops = [at for match in _CLAUSE.finditer(text, most // 4) if (at := match.start()) <= most - 2]
    if stops and not point:
        return text[: stops[-1]].rstrip("…") + " …"
    space = text.rfind(" ", max(end, most - 1 - _WORD_WIDTH), most - 1)
    return text[: most - 1 if space < 0 else space].rstrip(" ,;:") + "…"


def excerpt(evidence: Evidence) -> str:
    """Logged text on one line; of a traceback the exception, not the frames."""
    lines, point = [line for line in evidence.text.splitlines() if line.strip()], evidence.point
    raised, whole = _raised(lines), _without_frames(lines)
    pointed = [exception for exception in raised if point and point in "\n".join(exception)]
    if not pointed and point and plain(point) in whole:
        return whole
    return _without_frames((pointed or raised or [[]])[0]) or whole or "(an empty line)"


def _raised(lines: Sequence[str]) -> list[list[str]]:
    """The exceptions of a chain of tracebacks, each with its message."""
    raised: list[list[str]] = []
    in_frames = False
    for line in lines:
        if line.lstrip().startswith(_TRACEBACK):
            in_frames = True
        elif in_frames and not line.startswith((" ", "\t")):
            raised.append([line])
            in_frames = False
        elif raised and not in_frames:
            raised[-1].append(line)
    return raised


def _without_frames(lines: Sequence[str]) -> str:
    """On one line, without places in the code and the code there; with them if that is all."""
    kept = [
        line
        for before, line in zip(["", *lines], lines, strict=False)
        if not (_PLACE.match(line) or (_CODE_FOLLOWS.match(before) and line[:1] in " \t"))
    ]
    return plain(" ".join(kept or lines))


def plain(text: str) -> str:
    """On one line, control characters escaped."""
    # Not str.split alone: it also removes control characters that are to be shown.
    return printable(" ".join(filter(None, re.split("[ \t\n]", text))))


class _Part(NamedTuple):
    """A label, texts beside it in at most `most` lines, and what they keep when shortened.

    Each text that is not empty has a line, the last all that are left.
    """

    label: str
    texts: Sequence[str]
    most: int = 1
    point: str = ""

    def lines(self, most: int) -> list[str]:
        texts = [text for text in self.texts if text]
        if not texts or not most:
            return []
        *before, last = texts[:most]
        more = f" (and {len(texts) - most} more)" if len(texts) > most else ""
        lines = [brief(text, _ROOM, self.point) for text in before]
        left, rest = most - len(lines), list[str]()
        room = left * _ROOM - len(more)
        while not rest or len(rest) > left:
            text = brief(last, room, self.point) + more
            rest, room = textwrap.wrap(text, _ROOM, break_on_hyphens=False), room - 5
        return lines + rest


def verdict(diagnosis: Diagnosis) -> str:
    """At most `MOST_LINES` lines of at most `WIDTH` printable characters, joined."""
    parts = _parts(diagnosis)
    sizes = {part.label: len(part.lines(part.most)) for part in parts}
    for label, least in _GIVES_WAY:
        while 1 + sum(sizes.values()) > MOST_LINES and sizes[label] > least:
            sizes[label] -= 1
    lines = [headline(diagnosis)]
    for part in parts:
        for at, line in enumerate(part.lines(sizes[part.label])):
            lines.append(f"{'' if at else part.label:<{_LABEL_WIDTH}}{line}")
    return "\n".join(lines)


def headline(diagnosis: Diagnosis) -> str:
    """Cause, place and time on one line."""
    cause, place = what(diagnosis), where(diagnosis)
    doubt = ", probably" if diagnosis.cause and diagnosis.certainty != "sure" else ""
    if diagnosis.outcome == "healthy" and diagnosis.certainty == "guess":
        doubt = ", perhaps"
    head = f"{diagnosis.outcome.upper()}{doubt}: "
    # A rank that the title names is not named again.
    names = f", {place}" if place and place not in cause else ""
    whole, dateless = when(diagnosis), when(diagnosis, date=False)
    short = dateless.replace(f" ({plain(diagnosis.stage)})", "")
    times = (f", {at}" * bool(at) for at in (whole, dateless, short, short.split(", ")[0], ""))
    # What explains the title is omitted before its words are; the time has a line of its own then.
    for title, time in product((cause, _CLAUSE.split(cause)[0].rstrip(".")), times):
        if len(line := f"{head}{title}{names}{time}") <= WIDTH:
            return line
    names = names if len(head + names) <= WIDTH // 2 else ""
    return head + brief(cause, WIDTH - len(head + names)) + names


def what(diagnosis: Diagnosis) -> str:
    """The cause in words; where it is not known, the known facts."""
    title, cause = plain(diagnosis.title).rstrip("."), diagnosis.cause
    if diagnosis.outcome == "unknown" and cause is None:  # the outcome is stated before
        title = title.removeprefix("Outcome unknown: ").removeprefix("Cause unknown. ")
        cause = "the logs do not say how the job ended"
    unstated = "no failure found" if diagnosis.outcome == "healthy" else "the cause is not known"
    return title or plain(cause or unstated).replace("_", " ")


def where(diagnosis: Diagnosis) -> str:
    """Affected ranks or nodes; "" where the logs name none."""
    if diagnosis.nodes:
        if not _is_known(diagnosis.nodes[0].name):
            return ""
        close = diagnosis.leading
        named = " and ".join(place(suspect) for suspect in close[:_MOST_NAMED])
        more = len(close) - _MOST_NAMED
        return f"{named} and {more} more" if more > 0 else named
    event = shown(diagnosis)
    # The first stream of a symptom, an echo or an end from outside is not the place of the failure.
    if diagnosis.cause is None or event is None or event.role != "cause" or not event.who:
        return ""
    first = plain(event.who[0]) + " first" * (len(event.who) > 1)
    return first if _is_known(event.who[0]) else ""


def _is_known(stream: str) -> bool:
    """Return False for a file, which has a line of its own."""
    return stream.startswith(("rank ", "node "))


def shown(diagnosis: Diagnosis) -> Evidence | None:
    """The event that is quoted: the cause's, of several the one at its time; else the first."""
    own = [hit for hit in diagnosis.events if hit.signature and hit.signature == diagnosis.cause]
    at_time = [hit for hit in own if hit.time == diagnosis.time]
    return next(iter((*at_time, *own, *diagnosis.events)), None)


def place(suspect: Suspect) -> str:
    """A rank and its node."""
    if suspect.rank is not None and suspect.node:
        return plain(f"rank {suspect.rank} on {suspect.node}")
    return _writer(suspect.name)


def when(diagnosis: Diagnosis, *, date: bool = True) -> str:
    """Step, stage and time, as far as the logs state them."""
    texts, stage = [], plain(diagnosis.stage)
    if diagnosis.iteration is not None:
        known = "at" if diagnosis.cause is not None else "last"
        texts.append(f"{known} step {diagnosis.iteration}" + (f" ({stage})" if stage else ""))
    elif stage:
        texts.append(f"stage: {stage}")
    if diagnosis.time is not None:
        texts.append(clock(diagnosis.time, date=date))
    return ", ".join(texts)


def clock(seconds: float, *, date: bool = True) -> str:
    """Format a log's time."""
    if seconds < NO_YEAR[0]:
        return f"{seconds:.1f} s on its own clock"
    try:
        days = "" if not date else "%m-%d " if seconds < NO_YEAR[1] else "%Y-%m-%d "
        return datetime.fromtimestamp(seconds, timezone.utc).strftime(f"{days}%H:%M:%S")
    except (ValueError, OverflowError, OSError):  # the number is not a time
        return f"time {seconds:g} s"


def sureness(diagnosis: Diagnosis) -> str:
    """The confidence in a number and a word."""
    # 99.6 % is not certain, and is not shown as 100.
    number = 100 if diagnosis.confidence >= 1 else min(round(100 * diagnosis.confidence), 99)
    of = "" if diagnosis.cause else _SURE_OF.get(diagnosis.outcome, "")
    return f"{number} % ({diagnosis.certainty}){of}"


def owner(diagnosis: Diagnosis) -> str:
    """Who should act, and who that is; "" where nobody should."""
    from rmetric.diagnosis.signature import CHOICES  # needs the packages of diagnose

    actor = diagnosis.actor or ""
    # A diagnosis that somebody else makes may have an actor of its own.
    who = CHOICES["actor"].get(actor) if actor else None
    return f"{actor}: {who}" if who else plain(actor)


def _parts(diagnosis: Diagnosis) -> list[_Part]:
    quoted, since, job = shown(diagnosis), diagnosis.since, diagnosis.job
    log, point = [], ""
    if quoted:
        line = f"{plain(quoted.file)}:{quoted.line}"
        log = [line if len(line) <= _ROOM else f"…{line[1 - _ROOM :]}", excerpt(quoted)]
        # The matched part of the entry stays visible.
        point = plain(quoted.point.strip().split("\n")[0])
    differs = f"iteration {since}, the first that differs from its predecessors"
    first, times = headline(diagnosis), [when(diagnosis, date=date) for date in (True, False)]
    # Step, stage and time stand here where the first line has no room for them.
    omitted = "" if any(time in first for time in times) else times[0]
    places = [f"{place(suspect)}: {plain(suspect.why)}" for suspect in diagnosis.nodes]
    alone = diagnosis.outcome == "healthy" or job.get("ranks_heard") in (0, 1)
    return [
        _Part("When", [omitted]),
        _Part("Owner", [owner(diagnosis)]),
        _Part("To do", [plain(" ".join(diagnosis.to_do))], 4),
        _Part("Restart", [plain(advice.text) if (advice := diagnosis.restart) else ""]),
        _Part("Confidence", [_why(diagnosis)], 2),
        _Part("Log", log, 3, point),
        _Part("Where", places or ["" if alone else "no node stands out"], 3),
        _Part("Since", [differs if since is not None else ""]),
        _Part("Echo", [_echoes(diagnosis, quoted)]),
        _Part("Candidates", _candidates(diagnosis), 2 if diagnosis.cause else 4),
        _Part("Attempts", [_attempts(diagnosis)], 2),
        _Part("Note", [_PATH.sub("", plain(note)) for note in diagnosis.notes], 3),
        _Part("Input", [_input_size(job)]),
    ]


def _attempts(diagnosis: Diagnosis) -> str:
    """The number of attempts and how the others ended, the commonest end first."""
    if not diagnosis.attempts:
        return ""
    number, count = diagnosis.attempt, len(diagnosis.attempts)
    others = [attempt.title for attempt in diagnosis.attempts if attempt.number != number]
    ends = Counter(brief(plain(title).rstrip("."), 60) for title in others)
    words = "; ".join(f"{times} x {title}" for title, times in ends.most_common())
    which = "the last" if number == count else "only it"
    return f"{number} of {count}, {which} is diagnosed; others: {words}"


def _why(diagnosis: Diagnosis) -> str:
    why = plain(diagnosis.why)
    if diagnosis.outcome == "unknown" and diagnosis.cause is None:
        return f"none: {why}" if why else ""
    return f"{sureness(diagnosis)}: {why}" if why else sureness(diagnosis)


def _echoes(diagnosis: Diagnosis, quoted: Evidence | None) -> str:
    own = quoted.signature if quoted else None
    echoes = [hit for hit in diagnosis.events[1:] if hit.role == "echo" and hit.signature != own]
    if not echoes:
        return ""
    first, time = echoes[0], diagnosis.time
    apart = nan if time is None or first.time is None else first.time - time
    # Times without a year, or since a node's start, are on other scales.
    late = f"{apart:.0f} s later" if 0 <= apart < NO_YEAR[0] else "later"
    more = f" (and {len(echoes) - 1} more)" if len(echoes) > 1 else ""
    who = _writer(first.who[0]) if first.who else "others"
    others = len(first.who) - 1
    if others > 0:  # of more than eight, eight are known
        who += f" and {'7 or more others' if others >= 7 else counted(others, 'other')}"
    # The name of the only file adds nothing.
    alone = diagnosis.job.get("files") == 1 and first.who == (first.file,)
    start = f"{late}: " if alone else f"{late} on {who}: "
    text = plain(first.why).rstrip(".") or excerpt(first)
    return start + brief(text, max(_ROOM - len(start + more), 1)) + more


def _writer(stream: str) -> str:
    """Name of a rank or node, or of a file without its folders."""
    return plain(stream if _is_known(stream) else stream.rpartition("/")[2] or stream)


def _candidates(diagnosis: Diagnosis) -> list[str]:
    titles = {event.signature: event.why for event in diagnosis.events}
    titles |= {candidate.cause: candidate.title for candidate in diagnosis.candidates}
    texts = []
    for candidate in diagnosis.candidates:
        why = plain(candidate.why)
        if why.startswith(FOLLOWS):
            earlier = why.removeprefix(FOLLOWS)
            why = f"later than: {brief(plain(titles.get(earlier, earlier)), 60)}"
            why = "later, likely a consequence" if earlier == diagnosis.cause else why
        end = f" ({100 * candidate.confidence:.0f} %)" + (f": {why}" if why else "")
        title = plain(candidate.title).rstrip(".") or plain(candidate.cause)
        # " (and 9 more)" may follow.
        texts.append(brief(title, max(_ROOM - len(end) - 13, 30)) + end)
    return texts


def _input_size(job: dict[str, Any]) -> str:
    """Size of the input; unknown values are omitted."""
    sizes = [(job.get("files"), "file"), (job.get("lines"), "line")]
    texts = [counted(size, name) for size, name in sizes if isinstance(size, int)]
    ranks, world = job.get("ranks_heard"), job.get("world_size")
    if isinstance(ranks, int) and ranks:
        some = f"{ranks} of {counted(world, 'rank')}" if world and world >= ranks else ""
        texts.append(some or counted(ranks, "rank"))
    first, last = job.get("first_time"), job.get("last_time")
    if first is not None and last is not None:
        texts.append(" to ".join(dict.fromkeys([clock(first), clock(last)])))
    return ", ".join(texts)
