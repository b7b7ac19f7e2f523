"""What a tool did to every line of a log: marks before it, a break at the width of a terminal.

Logs come out of mails, issue reports, `cat -n`, `grep -n`, viewers and collectors. Ranks, nodes and
times before the lines tell something, and are left to prefixes.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

#: Lines with text that are looked at, and how many are needed.
SAMPLE, FEWEST = 200, 3
#: Share of them that a mark needs; lines without it stay as they are.
MOST = 0.9
#: Times that a log may have been wrapped.
DEEPEST = 3
#: Numbers that may be of ranks or steps count as those of lines from so many on, or in so many.
PAST_RANKS, MANY = 100, 5
#: Different texts, digits aside, that show that the numbers are not of ranks or steps.
MANY_KINDS = 6

#: Lines that are looked at for breaks, and widths of a terminal.
BROKEN_SAMPLE, NARROWEST, WIDEST = 5000, 60, 300
#: Least number of different lines as long as the longest; most that are up to so much shorter.
FULL, NEARLY_FULL, MOST_NEAR = 5, 8, 0.5
#: Bytes of a line's beginning by which it is known; most rests that begin as lines do, or as one.
KEY, MOST_ALIKE, MOST_OF_ONE = 8, 0.3, 0.6
#: Least share of the breaks that are within a word, and of whole lines beside rests.
WITHIN_WORD, FEWEST_WHOLE = 0.25, 0.25

_MARKS = (
    re.compile(rb">(?: |(?=[^>\s])|$)"),
    re.compile(rb"(?i)(?:\[(?:stdout|stderr)\]|<(?:stdout|stderr)>|(?:stdout|stderr) ?[:|]) ?"),
)
_RIGHT_ALIGNED = re.compile(rb"(?=[ \d]{6,}\t) *(\d{1,9})\t")
_OF_GREP = re.compile(rb"(\d{1,9})[:-]")
_BRACKETED = re.compile(rb"\[(\d{1,9})\](?: |$)")
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)


@dataclass(frozen=True)
class Wrapping:
    """Removes what stands before the lines of a file, and joins those that were broken.

    Attributes:
        layers: patterns, the outermost first.
        width: characters at which lines are broken; None where they are not.
        starts: how lines begin; one that is as long as that and whole is not continued by these.
    """

    layers: tuple[re.Pattern[bytes], ...] = ()
    width: int | None = None
    starts: frozenset[bytes] = frozenset()

    @classmethod
    def of(cls, lines: list[bytes]) -> Wrapping:
        """The wrapping of a file that begins so."""
        sample = list(islice((line for line in lines if line.strip()), SAMPLE))
        layers: list[re.Pattern[bytes]] = []
        while len(sample) >= FEWEST and len(layers) < DEEPEST:
            layer = _numbers(sample) or _mark(sample) or _indent(sample)
            if layer is None:
                break
            layers.append(layer)
            sample = [line for line in _without(layer, sample) if line.strip()]
        bare = cls(tuple(layers))
        starts, width = _broken(bare.removed(lines[:BROKEN_SAMPLE]))
        return cls(bare.layers, width, starts)

    def __bool__(self) -> bool:
        return bool(self.layers) or self.width is not None

    def notes(self) -> list[str]:
        """What was done."""
        notes = []
        if self.layers:
            notes.append("a mark, number or indent before every line was left out")
        if self.width is not None:
            notes.append(f"lines were broken at {self.width} columns: they were joined")
        return notes

    def removed(self, lines: list[bytes]) -> list[bytes]:
        """The lines without it; of a broken one the rests are empty, so that numbers stay."""
        for layer in self.layers:
            lines = _without(layer, lines)
        if self.width is None:
            return lines
        found: list[bytes] = []
        first = -1  # of a line under way
        for at, line in enumerate(lines):
            found.append(line)
            if first >= 0 and _key(line) in self.starts:
                first = -1
            if first >= 0:
                found[first] += line
                found[at] = b""
            if _columns(line) != self.width:
                first = -1
            elif first < 0:
                first = at
        return found


def _without(layer: re.Pattern[bytes], lines: Sequence[bytes]) -> list[bytes]:
    return [line[found.end() :] if (found := layer.match(line)) else line for line in lines]


def _mark(sample: Sequence[bytes]) -> re.Pattern[bytes] | None:
    enough = MOST * len(sample)
    return next(
        (mark for mark in _MARKS if sum(map(bool, map(mark.match, sample))) >= enough), None
    )


def _indent(sample: Sequence[bytes]) -> re.Pattern[bytes] | None:
    """An indent of more than one space; Megatron's lines have one of their own."""
    first, last = min(sample), max(sample)  # what these have in common all have
    blank = first[: len(first) - len(first.lstrip(b" \t"))]
    while not last.startswith(blank):
        blank = blank[:-1]
    return re.compile(re.escape(blank)) if len(blank.expandtabs()) > 1 else None


def _numbers(sample: Sequence[bytes]) -> re.Pattern[bytes] | None:
    """Numbers of lines: each is one more than the last, before text of every kind.

    `3: loss 2.1` and `[3] loss 2.1` may be of ranks or steps.
    """
    for form in (_RIGHT_ALIGNED, _OF_GREP, _BRACKETED):
        found = [match for match in map(form.match, sample) if match is not None]
        numbers = [int(match[1]) for match in found]
        steady = all(after - before == 1 for before, after in pairwise(numbers))
        if len(found) < len(sample) or not steady:
            continue
        rests = _without(form, sample)
        kinds = {rest.translate(None, b"0123456789") for rest in rests}
        of_lines = numbers[0] >= PAST_RANKS or len(sample) >= MANY
        set_in = form is _OF_GREP and not any(rest[:1].strip() for rest in rests)
        any_text = len(kinds) >= min(MANY_KINDS, len(rests) // 2 + 1) and not set_in
        if form is _RIGHT_ALIGNED or (of_lines and any_text):
            return form
    return None


def _broken(lines: Sequence[bytes]) -> tuple[frozenset[bytes], int | None]:
    """How lines begin, and the width at which a terminal broke them, None where not certain.

    Programs write lines of one length too. Their next lines begin as others do, and no word is cut.
    """
    lengths = [*map(_columns, lines)]
    width = max(lengths, default=0)
    full = [at for at, length in enumerate(lengths[:-1]) if length == width]
    near = sum(width - NEARLY_FULL <= length < width for length in lengths)
    different = len({lines[at] for at in full})
    if not (NARROWEST <= width <= WIDEST and different >= FULL and near <= MOST_NEAR * len(full)):
        return frozenset(), None
    after = {at + 1 for at in full}
    whole = (line for at, line in enumerate(lines) if at not in after)
    begun = Counter(map(_key, filter(None, whole)))
    kinds = Counter(_key(lines[at]) for at in after)
    starts = frozenset(key for key, number in begun.items() if number > 1)
    cut = sum(lines[at][-1:].isalnum() and lines[at + 1][:1].isalnum() for at in full)
    certain = (
        sum(map(kinds.__getitem__, starts)) <= MOST_ALIKE * len(after)
        and max(kinds.values()) <= MOST_OF_ONE * len(after)
        and sum(begun.values()) >= max(FULL, FEWEST_WHOLE * len(after))
        and cut >= WITHIN_WORD * len(full)
    )
    return (starts, width) if certain else (frozenset(), None)


def _columns(line: bytes) -> int:
    return len(line) if line.isascii() else len(line.decode("utf-8", "replace"))


def _key(line: bytes) -> bytes:
    return line[:KEY].translate(_DIGITS)
