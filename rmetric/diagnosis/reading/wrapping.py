"""What a tool put before every line of a log: marks, numbers, an indent.

Logs come out of mails, issue reports, `cat -n`, `grep -n`, viewers and collectors. Ranks, nodes and
times before the lines tell something, and are left to prefixes.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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

#: Patterns of what is removed, the outermost first.
Layers = list[re.Pattern[bytes]]


def wrapping(lines: Sequence[bytes]) -> Layers:
    """What stands before the lines of a file that begins so."""
    sample = list(islice((line for line in lines if line.strip()), SAMPLE))
    layers = Layers()
    while len(sample) >= FEWEST and len(layers) < DEEPEST:
        layer = _numbers(sample) or _mark(sample) or _indent(sample)
        if layer is None:
            break
        layers.append(layer)
        sample = [line for line in without(layer, sample) if line.strip()]
    return layers


def without(layer: re.Pattern[bytes], lines: Sequence[bytes]) -> list[bytes]:
    """The lines, those that begin with the layer without it."""
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
        numbers = [int(match[1]) for match in map(form.match, sample) if match is not None]
        steady = all(after - before == 1 for before, after in pairwise(numbers))
        if len(numbers) < len(sample) or not steady:
            continue
        rests = without(form, sample)
        kinds = {rest.translate(None, b"0123456789") for rest in rests}
        of_lines = numbers[0] >= PAST_RANKS or len(sample) >= MANY
        set_in = form is _OF_GREP and not any(rest[:1].strip() for rest in rests)
        any_text = len(kinds) >= min(MANY_KINDS, len(rests) // 2 + 1) and not set_in
        if form is _RIGHT_ALIGNED or (of_lines and any_text):
            return form
    return None
