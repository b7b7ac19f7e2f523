"""What a tool puts before every line of a log: quote marks, numbers, a stream's name, an indent.

Logs come out of mails, issue reports, `cat -n`, `grep -n`, viewers and collectors. Ranks, nodes and
times before the lines tell something, and are left to prefixes.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
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

_MARKS = (
    re.compile(rb">(?: |(?=[^>\s])|$)"),
    re.compile(rb"(?i)(?:\[(?:stdout|stderr)\]|<(?:stdout|stderr)>|(?:stdout|stderr) ?[:|]) ?"),
)
_RIGHT_ALIGNED = re.compile(rb"(?=[ \d]{6,}\t) *(\d{1,9})\t")
_OF_GREP = re.compile(rb"(\d{1,9})[:-]")
_BRACKETED = re.compile(rb"\[(\d{1,9})\](?: |$)")


@dataclass(frozen=True)
class Wrapping:
    """Removes what stands before the lines of a file.

    Attributes:
        layers: patterns, the outermost first.
    """

    layers: tuple[re.Pattern[bytes], ...] = ()

    @classmethod
    def of(cls, lines: Iterable[bytes]) -> Wrapping:
        """The wrapping of a file that begins so."""
        sample = list(islice((line for line in lines if line.strip()), SAMPLE))
        layers: list[re.Pattern[bytes]] = []
        while len(sample) >= FEWEST and len(layers) < DEEPEST:
            layer = _numbers(sample) or _mark(sample) or _indent(sample)
            if layer is None:
                break
            layers.append(layer)
            sample = [line for line in (_without(layer, line) for line in sample) if line.strip()]
        return cls(tuple(layers))

    def removed(self, lines: list[bytes]) -> list[bytes]:
        """The lines without it."""
        for layer in self.layers:
            lines = [_without(layer, line) for line in lines]
        return lines


def _without(layer: re.Pattern[bytes], line: bytes) -> bytes:
    found = layer.match(line)
    return line[found.end() :] if found else line


def _mark(sample: Sequence[bytes]) -> re.Pattern[bytes] | None:
    for mark in _MARKS:
        if sum(mark.match(line) is not None for line in sample) >= MOST * len(sample):
            return mark
    return None


def _indent(sample: Sequence[bytes]) -> re.Pattern[bytes] | None:
    """An indent of more than one space; Megatron's lines have one of their own."""
    first, last = min(sample), max(sample)  # what these have in common all have
    blank = first[: len(first) - len(first.lstrip(b" \t"))]
    while not last.startswith(blank):
        blank = blank[:-1]
    return re.compile(re.escape(blank)) if len(blank.expandtabs()) > 1 else None


def _numbers(sample: Sequence[bytes]) -> re.Pattern[bytes] | None:
    """Numbers of lines: each is one more than the last, before text of every kind."""
    for form in (_RIGHT_ALIGNED, _OF_GREP, _BRACKETED):
        found = [match for match in map(form.match, sample) if match is not None]
        if len(found) < len(sample):
            continue
        numbers = [int(match[1]) for match in found]
        if any(after - before != 1 for before, after in pairwise(numbers)):
            continue
        rests = [match.string[match.end() :] for match in found]
        if form is _RIGHT_ALIGNED or (
            (numbers[0] >= PAST_RANKS or len(sample) >= MANY) and _is_any_text(form, rests)
        ):
            return form
    return None


def _is_any_text(form: re.Pattern[bytes], rests: Sequence[bytes]) -> bool:
    """False for what may be ranks or steps: `3: loss 2.1`, `[3] loss 2.1`."""
    if form is _OF_GREP and not any(rest[:1].strip() for rest in rests):
        return False
    kinds = {rest.translate(None, b"0123456789") for rest in rests}
    return len(kinds) >= min(MANY_KINDS, len(rests) // 2 + 1)
