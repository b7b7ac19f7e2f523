"""Where things stand in a line, learnt from the first line of its form."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import floor

from rmetric.diagnosis.patterns.steps import Told
from rmetric.diagnosis.reading.prefixes import Prefixes

_NUMBER = re.compile(rb"[0-9]+")
#: Numbers of a line beyond which its step is looked for anew each time.
MOST_NUMBERS = 60
#: Minutes of a form's lines that are remembered.
MOST_MINUTES = 64
_SECONDS = re.compile(rb"[0-9]{1,10}(?:[.,][0-9]{1,9})?")


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


class TimePlace:
    """Reads the time of lines of one form.

    It is tried on the first line which numbers the time follows. Where the last of them are
    seconds and their fraction, what stands before them is looked up: most lines share it with
    one before.
    """

    def __init__(self, line: bytes, time: Callable[[bytes], float | None]) -> None:
        self._time, self._find = time, None
        self._minutes: dict[bytes, float] = {}
        now = time(line)
        numbers = list(_NUMBER.finditer(line))
        if now is None or len(numbers) > MOST_NUMBERS:
            return
        moved = [
            (number, None if later is None else later - now)
            for number in numbers
            if (later := time(_with_next(line, number))) != now
        ]
        seconds = [at for at, (_, by) in enumerate(moved) if by is not None and abs(by - 1) < 1e-6]
        if len(seconds) == 1 and len(moved) - seconds[0] <= 2:
            begin, end = moved[seconds[0]][0].start(), moved[-1][0].end()
            if _SECONDS.fullmatch(line, begin, end):
                self._find = same_places(line, [(0, begin), (begin, end)], end)
                self._find = self._find if self.time(line) == now else None

    _find: re.Pattern[bytes] | None

    def time(self, line: bytes) -> float | None:
        """Seconds that a line of the form states."""
        found = self._find.match(line) if self._find else None
        if found is None:
            return self._time(line)
        before, seconds = found[1], found[2]
        whole, _, fraction = seconds.replace(b",", b".").partition(b".")
        minute = self._minutes.get(before)
        if minute is None:
            now = self._time(line)
            if now is None:
                return None
            if len(self._minutes) >= MOST_MINUTES:
                self._minutes.clear()
            minute = self._minutes[before] = float(floor(now) - int(whole))
        return minute + int(whole) + float(b"0." + fraction if fraction else b"0")


def _with_next(line: bytes, number: re.Match[bytes]) -> bytes:
    """The line with a number that is higher by one."""
    following = str(int(number[0]) + 1).encode().rjust(len(number[0]), b"0")
    return line[: number.start()] + following + line[number.end() :]


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace")
