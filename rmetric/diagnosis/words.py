"""A diagnosis in at most 15 lines of plain text, for whoever is woken by it.

The first line says it all; the others who should act, what to do, and why to believe it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, NamedTuple

from rmetric.diagnosis.result import LIKELY, SURE, Diagnosis, Evidence, Suspect
from rmetric.printed import counted, printable

MOST_LINES, WIDTH = 15, 110
_LABEL = 9
#: Seconds below which a time has no year: a date in the first year of the count, or, within a
#: month, rather a kernel's seconds since boot.
_NO_YEAR, _SINCE_BOOT = 366 * 86400.0, 31 * 86400.0
#: What loses a line where there are too many, in this order; each keeps one, but for Then.
_GIVES_WAY = (
    "Perhaps", "Where", "Where", "Note", "Then", "Sure", "Perhaps", "Perhaps", "Note", "To do",
)  # fmt: skip
_SURE_OF = {
    "healthy": " that it is healthy",
    "failed": " that it failed",
    "terminated": " that it was ended from outside",
}
_TRACEBACK = (
    "Traceback (most recent call last)",
    "During handling of the above exception",
    "The above exception was the direct cause",
)
#: Outcomes of which no cause is expected, and what a title without one may begin with.
_WITHOUT, _NOT_KNOWN = ("healthy", "unknown"), "I don't know"
#: Where several ranks stand out, so many are named in the first line.
_NAMED = 2
#: The first line leaves out those that are less suspect than the first by so much.
_ALIKE = 0.1
WHO_ACTS = {
    "hardware": "hardware: whoever looks after the machines",
    "user": "user: whoever wrote the job's code, settings or data",
    "framework": "framework: whoever chose the versions of its libraries",
    "platform": "platform: whoever runs the scheduler, network and storage",
}


class _Part(NamedTuple):
    """One label and what stands beside it.

    Attributes:
        texts: one is wrapped; of several each has a line.
        most: lines, where there is room.
    """

    label: str
    texts: Sequence[str]
    most: int = 1


def verdict(diagnosis: Diagnosis) -> str:
    """At most `MOST_LINES` lines of at most `WIDTH` characters, without a line end at the end.

    What stands in a log is shown on one line, its control characters escaped.
    """
    parts = [part for part in _parts(diagnosis) if part.texts]
    sizes = {part.label: len(_lines(part, part.most)) for part in parts}
    for label in _GIVES_WAY:
        if 1 + sum(sizes.values()) > MOST_LINES and sizes.get(label, 0) > (label != "Then"):
            sizes[label] -= 1
    lines = [headline(diagnosis)]
    for part in parts:
        label = part.label
        for line in _lines(part, sizes[label]):
            lines.append(f"{label:<{_LABEL}}{line}")
            label = ""
    return "\n".join(lines)


def headline(diagnosis: Diagnosis, width: int = WIDTH) -> str:
    """What, where and when, on one line.

    >>> print(headline(Diagnosis(
    ...     outcome="failed", cause="cuda_out_of_memory", title="A GPU ran out of memory.",
    ...     confidence=0.9, nodes=(Suspect(name="rank 12", rank=12, node="node-03", score=1.0,
    ...     why=""),), iteration=431, stage="train", time=1714702447.0)))
    FAILED: A GPU ran out of memory, rank 12 on node-03, at step 431 (train), 2024-05-03 02:14:07
    """
    head, said, struck = f"{_outcome(diagnosis)}: ", what(diagnosis), where(diagnosis)
    # A title that names the rank says it once.
    names = [] if struck in said else [struck]
    tails = [
        _listed([*names, when(diagnosis)]),
        # What gives way, in this order: the last line has the date and the time too.
        _listed([*names, when(diagnosis, date=False)]),
        _listed([*names, when(diagnosis, date=False, stage=False)]),
        _listed([*names, when(replace(diagnosis, time=None), stage=False)]),
    ]
    tail = next((one for one in tails if len(head + said + one) <= width), tails[-1])
    room = max(width - len(head) - len(tail), width // 3)
    return shortened(head + shortened(said, room) + tail, width)


def _listed(circumstances: Iterable[str]) -> str:
    return "".join(f", {text}" for text in circumstances if text)


def what(diagnosis: Diagnosis) -> str:
    """The cause in words; where it is not known, what is."""
    title = plain(diagnosis.title).rstrip(".")
    if diagnosis.cause is not None:
        return title or plain(diagnosis.cause).replace("_", " ")
    if diagnosis.outcome == "healthy":
        return title or "nothing speaks of a failure"
    if diagnosis.outcome == "unknown":
        # The outcome has said so already.
        title = re.sub(rf"^{_NOT_KNOWN}( why)?[.:] ", "", title)
        return title or "the logs do not say how the job ended"
    return title or "the cause is not known"


def _outcome(diagnosis: Diagnosis) -> str:
    name = diagnosis.outcome.upper()
    if diagnosis.cause is not None:
        return name if diagnosis.confidence >= SURE else f"{name}, probably"
    said = not diagnosis.title or diagnosis.title.startswith(_NOT_KNOWN)
    return name if said or diagnosis.outcome in _WITHOUT else f"{name}, cause unknown"


def where(diagnosis: Diagnosis) -> str:
    """Whom it struck, in few words; "" where the logs name nobody."""
    if diagnosis.nodes:
        first = diagnosis.nodes[0]
        alike = [one for one in diagnosis.nodes if one.score > first.score - _ALIKE]
        named = " and ".join(place(one) for one in alike[:_NAMED])
        more = len(alike) - _NAMED
        return f"{named} and {more} more" if more > 0 else named
    # Who said first what explains nothing, or came from outside, is of no use.
    if diagnosis.cause is None or not diagnosis.events or diagnosis.events[0].role != "cause":
        return ""
    who = diagnosis.events[0].who
    # A stream that is neither a rank nor a node is a file, which has a line of its own.
    if not who or not who[0].startswith(("rank ", "node ")):
        return ""
    return plain(who[0]) if len(who) == 1 else f"{plain(who[0])} first"


def place(suspect: Suspect) -> str:
    """A rank and its node.

    >>> place(Suspect(name="rank 3", rank=3, node="gpu-07", score=0.9, why="it fell silent"))
    'rank 3 on gpu-07'
    """
    if suspect.rank is not None and suspect.node:
        return plain(f"rank {suspect.rank} on {suspect.node}")
    return plain(suspect.name)


def when(diagnosis: Diagnosis, *, date: bool = True, stage: bool = True) -> str:
    """Step, stage and time, as far as the logs tell them."""
    texts = []
    if diagnosis.iteration is not None:
        within = f" ({plain(diagnosis.stage)})" if diagnosis.stage and stage else ""
        known = "at" if diagnosis.cause is not None else "last"
        texts.append(f"{known} step {diagnosis.iteration}{within}")
    elif diagnosis.stage:
        texts.append(f"stage: {plain(diagnosis.stage)}")
    if diagnosis.time is not None:
        texts.append(clock(diagnosis.time, date=date))
    return ", ".join(texts)


def clock(seconds: float, *, date: bool = True) -> str:
    """A log's time for people.

    >>> clock(1714702447.0), clock(10548847.0), clock(4821.55)
    ('2024-05-03 02:14:07', '05-03 02:14:07', '4821.6 s on its own clock')
    """
    if seconds < _SINCE_BOOT:
        return f"{seconds:.1f} s on its own clock"
    try:
        days = "" if not date else "%m-%d " if seconds < _NO_YEAR else "%Y-%m-%d "
        form = f"{days}%H:%M:%S"
        return datetime.fromtimestamp(seconds, timezone.utc).strftime(form)
    except (ValueError, OverflowError, OSError):  # a number that only looked like a time
        return f"time {seconds:g} s"


def sureness(diagnosis: Diagnosis) -> str:
    """How sure it is, in a number and a word.

    >>> sureness(Diagnosis(outcome="failed", cause="disk_full", confidence=0.92))
    '92 %, sure'
    >>> sureness(Diagnosis(outcome="failed", confidence=0.7))
    '70 %, likely that it failed'
    """
    value = diagnosis.confidence
    word = "sure" if value >= SURE else "likely" if value >= LIKELY else "a guess"
    # 99.6 % is not certain, and is not shown as if it were.
    number = 100 if value >= 1 else min(round(100 * value), 99)
    of = "" if diagnosis.cause else _SURE_OF.get(diagnosis.outcome, "")
    return f"{number} %, {word}{of}"


def _parts(diagnosis: Diagnosis) -> list[_Part]:
    acts = WHO_ACTS.get(diagnosis.actor or "", plain(diagnosis.actor or ""))
    to_do = plain(" ".join(diagnosis.to_do))
    return [
        _Part("Who acts", [acts] if acts else []),
        _Part("To do", [to_do] if to_do else [], 3),
        _Part("Sure", _why(diagnosis), 2),
        _Part("Log", _log_lines(diagnosis), 2),
        _Part("Where", _places(diagnosis), 3),
        _Part("Since", _since(diagnosis)),
        _Part("Then", _echoes(diagnosis)),
        _Part("Perhaps", _candidates(diagnosis), 2 if diagnosis.cause else 4),
        _Part("Note", [plain(note) for note in diagnosis.notes], 3),
        _Part("Read", _read(diagnosis.job)),
    ]


def _why(diagnosis: Diagnosis) -> list[str]:
    why = plain(diagnosis.why)
    if diagnosis.outcome == "unknown" and diagnosis.cause is None:
        return [f"no: {why}"] if why else []
    return [f"{sureness(diagnosis)}: {why}" if why else sureness(diagnosis)]


def _log_lines(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.events:
        return []
    first = diagnosis.events[0]
    return [f"{plain(first.file)}:{first.line}", said(first)]


def said(evidence: Evidence) -> str:
    """What was logged, on one line: of a traceback the exception, not the frames.

    >>> said(Evidence(role="cause", signature="", why="", template="", file="a.log", line=1,
    ...      time=None, who=(), count=1, text="Traceback (most recent call last):\\n"
    ...      '  File "train.py", line 7, in <module>\\nValueError: no such axis'))
    'ValueError: no such axis'
    """
    lines = [line for line in evidence.text.splitlines() if line.strip()]
    return plain(" ".join(_exception(lines) or lines)) or "(an empty line)"


def _exception(lines: Sequence[str]) -> list[str]:
    """Of a traceback the first exception, with its message; it is what others follow from."""
    raised: list[str] = []
    inside = False
    for line in lines:
        if line.lstrip().startswith(_TRACEBACK):
            if raised:
                break
            inside = True
        elif raised or (inside and not line.startswith((" ", "\t"))):
            raised.append(line)
    return raised


def _places(diagnosis: Diagnosis) -> list[str]:
    if diagnosis.nodes:
        return [f"{place(one)}: {plain(one.why)}" for one in diagnosis.nodes]
    alone = diagnosis.job.get("ranks_heard") in (0, 1)
    return [] if diagnosis.outcome == "healthy" or alone else ["no node stands out"]


def _since(diagnosis: Diagnosis) -> list[str]:
    if diagnosis.since is None:
        return []
    return [f"iteration {diagnosis.since}, the first that differs from those before it"]


def _echoes(diagnosis: Diagnosis) -> list[str]:
    echoes = [one for one in diagnosis.events[1:] if one.role == "echo"]
    if not echoes:
        return []
    first = echoes[0]
    late = "later"
    if first.time is not None and diagnosis.time is not None and first.time >= diagnosis.time:
        late = f"{first.time - diagnosis.time:.0f} s later"
    more = f" (and {len(echoes) - 1} more)" if len(echoes) > 1 else ""
    text = plain(first.why).rstrip(".") or said(first)
    return [f"{late}, as an echo, {_speakers(first.who)}: {text}{more}"]


def _speakers(who: Sequence[str]) -> str:
    if not who:
        return "others"
    first = plain(who[0])
    # Of more than eight, eight are known.
    more = "7 or more others" if len(who) >= 8 else counted(len(who) - 1, "other")
    return first if len(who) == 1 else f"{first} and {more}"


def _candidates(diagnosis: Diagnosis) -> list[str]:
    return [
        f"{plain(one.title).rstrip('.') or plain(one.cause)} ({100 * one.confidence:.0f} %)"
        + (f": {plain(one.why)}" if one.why else "")
        for one in diagnosis.candidates
    ]


def _read(job: dict[str, Any]) -> list[str]:
    """What was read, in numbers; what is not known is left out."""
    texts = [
        counted(job[name], name.removesuffix("s"))
        for name in ("files", "lines")
        if isinstance(job.get(name), int)
    ]
    ranks, world = job.get("ranks_heard"), job.get("world_size")
    if isinstance(ranks, int) and ranks:
        texts.append(f"{ranks} of {counted(world, 'rank')}" if world else counted(ranks, "rank"))
    first, last = job.get("first_time"), job.get("last_time")
    if first is not None and last is not None:
        texts.append(f"{clock(first)} to {clock(last)}")
    return [", ".join(texts)] if texts else []


def _lines(part: _Part, most: int) -> list[str]:
    width = WIDTH - _LABEL
    if len(part.texts) == 1:
        return wrapped(part.texts[0], width, most)
    shown, more = [shortened(text, width) for text in part.texts[:most]], len(part.texts) - most
    if more > 0 and shown:
        end = f" (and {more} more)"
        shown[-1] = shortened(part.texts[most - 1], width - len(end)) + end
    return shown


def wrapped(text: str, width: int, most: int) -> list[str]:
    """At most `most` lines of at most `width`; what is too long loses its middle."""
    room, lines = most * width, _wrap(text, width)
    if not most:
        return []
    while len(lines) > most:
        lines = _wrap(shortened(text, room), width)
        room -= 5
    return lines


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def shortened(text: str, most: int) -> str:
    """`text` at no more than `most` characters: head and tail, for both tell something.

    >>> shortened("/scratch/team/run-7/attempt_0/rank_12.log", 21)
    '/scratch/t…ank_12.log'
    """
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return f"{text[: most - 1 - tail]}…{text[len(text) - tail :]}"


def plain(text: str) -> str:
    r"""On one line, control characters escaped.

    >>> print(plain("a\n  b\x1b[2J"))
    a b\x1b[2J
    """
    return printable(" ".join(_words(text)))


def _words(text: str) -> Iterable[str]:
    # Not str.split alone: it also takes away control characters that are to be seen.
    return (word for word in text.replace("\t", " ").replace("\n", " ").split(" ") if word)
