"""Where things stand in a line, learnt from the first line of its form."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rmetric.diagnosis.patterns.steps import Told
from rmetric.diagnosis.reading.prefixes import Prefixes

_NUMBER = re.compile(rb"[0-9]+")
#: Numbers of a line beyond which its step is looked for anew each time.
MOST_NUMBERS = 60


def same_places(line: bytes, spans: Sequence[tuple[int, int]], text: int) -> re.Pattern[bytes]:
    """Finds the spans in lines that differ from this one in their digits, each as a group.

    Args:
        spans: in order, not overlapping.
        text: a place between or behind them, which becomes the empty group "text".

    >>> same_places(b"[rank3]: step 10 of 20", [(0, 9)], 9).match(b"[rank12]: step 11 of 20")[1]
    b'[rank12]: '
    """
    groups = sorted([*((begin, end, b"(") for begin, end in spans), (text, text, b"(?P<text>")])
    parts, at = [], 0
    for begin, end, opening in groups:
        parts += [_loose(line[at:begin]), opening, _loose(line[begin:end]), b")"]
        at = end
    return re.compile(b"".join(parts))


def prefix_place(
    prefixes: Prefixes, line: bytes
) -> Callable[[bytes], re.Match[bytes] | None] | None:
    """Matches lines of the form up to where their prefix ends; its groups tell who says them."""
    found = prefixes.pattern.match(line)
    if found is None:
        return None
    spans = [found.span(at) for at in range(1, found.re.groups + 1) if found[at]]
    return same_places(line, spans, found.end()).match


def _loose(text: bytes) -> bytes:
    return rb"[0-9]+".join(map(re.escape, _NUMBER.split(text)))


class StepPlace:
    """Reads the step of lines of one form.

    It is tried on the first line, number by number, which of them the step follows. Where it is
    one alone, that is all that is read of further lines.
    """

    def __init__(self, line: bytes, told: Callable[[str], Told | None]) -> None:
        self._told = told
        self._find: re.Pattern[bytes] | None = None
        self._form = ""
        first = told(_text(line))
        numbers = list(_NUMBER.finditer(line))
        if first is None or len(numbers) > MOST_NUMBERS:
            return
        moved = [
            (number.span(), there)
            for number in numbers
            if (there := told(_text(_with_next(line, number)))) != first
        ]
        if len(moved) == 1:
            (span, there), self._form = moved[0], first.form
            if there == (first.form, int(line[slice(*span)]) + 1) and there[1] == first.step + 1:
                self._find = same_places(line, [span], span[1])

    def told(self, line: bytes) -> Told | None:
        """Of a line of the form, without its prefix."""
        found = self._find.match(line) if self._find else None
        if found is None or len(found[1]) > 12:
            return self._told(_text(line))
        return Told(self._form, int(found[1]))


def _with_next(line: bytes, number: re.Match[bytes]) -> bytes:
    """The line with a number that is higher by one."""
    following = str(int(number[0]) + 1).encode().rjust(len(number[0]), b"0")
    return line[: number.start()] + following + line[number.end() :]


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace")
