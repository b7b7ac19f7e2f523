"""Parse the timestamp of a line; line_heads.yaml has the forms in which programs write it."""

from __future__ import annotations

import re
from calendar import timegm
from functools import cache
from time import gmtime

from rmetric.diagnosis.reading import head_patterns

#: Characters of a line in which its time begins, and those that may hold the rest of it.
TIME_HEAD, WHOLE_HEAD = 200, 240
#: A time without a year is taken to be of this one, which has a 29th of February, between these
#: seconds; what is less counts from a machine's start.
_NO_YEAR = 1972
NO_YEAR = tuple(float(timegm((year, 1, 1, 0, 0, 0))) for year in (_NO_YEAR, _NO_YEAR + 1))
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
#: Part of a time that is a whole number -> how many of its units are a second.
UNITS = {"milliseconds": 1e3, "microseconds": 1e6}
#: Text before the time of a line. After any other words a time is not the line's own.
_BEFORE = re.compile(
    r"""[ \t|:*-]*
    (?:(?: \[[^\[\]]*\] | \([^()]*\) | <\d+> | (?:kern|daemon|user|auth|syslog)\ *:\w+\ *:
        | (?i:trace|debug|info|warn|warning|error|err|critical|fatal|[iwefd])\b
        | [\w.-]+\(\d+,[^()]*\): | [\w.-]+: | \d+,\d+, | \d{3}\ (?=\(\d+\.\d{3}\.\d{3}\))
       )[ \t|:,-]*){0,4}
    (?:\[[A-Za-z][\w|./: -]{0,40}[ |]|[\[(<"]|(?i:time|ts|timestamp|date)="?)?[ ]*""",
    re.VERBOSE,
)
_TIME_KEY = re.compile(
    r'^ +time +: $|"(?:time|time_ms|timestamp|@timestamp|ts|asctime|datetime|date)" ?: ?"?$| AT $'
)
#: Before a clock time stands a date's number.
_HINT = re.compile(r"\d[,T :_-]+[0-2]?\d:[0-5]\d:[0-6]\d|(?<!\d)1\d{9}|\d\.\d{6}\]|^\d,\d+,\d+,")
#: A date's end and a clock time, and a number with its point, where "0" replaces each number.
_PLAIN_CLOCK, _PLAIN_NUMBER = re.compile(r"0[,T :_-]+0:0:0"), re.compile(r"0(\.)?")


def unnamed(pattern: str) -> str:
    """A pattern without its named groups, but for one to which it refers."""
    return re.sub(r"[(][?]P<(?!dash)\w+>", "(?:", pattern)


@cache
def _forms() -> tuple[re.Pattern[str], dict[str, re.Pattern[str]]]:
    """All forms at once, whose one group is the form; and each form, with its parts as groups."""
    forms = head_patterns("times")
    some = "|".join(f"(?P<{form}>{unnamed(pattern)})" for form, pattern in forms.items())
    each = {form: re.compile(pattern, re.ASCII) for form, pattern in forms.items()}
    return re.compile(some, re.ASCII), each


def stated(text: str) -> re.Match[str] | None:
    """The time that a line states of itself, matched by its row of the table; None without one.

    It stands at the head of the line: at its beginning, behind a level, a tag or a bracket, as the
    value of a key such as "time_ms", or behind "AT".
    """
    some, forms = _forms()
    # Nearly all lines without a time fail this test, twenty times as quickly.
    found = some.search(text, 0, TIME_HEAD) if _HINT.search(text, 0, TIME_HEAD) else None
    if found is None:
        return None
    form, before = found.lastgroup or "", text[: found.start()]
    any_number = form in ("epoch", "long_epoch") and "." not in found[0] and not before.strip()
    if any_number or not _begins(before):
        return None
    return forms[form].match(text, found.start())


def parse(text: str) -> tuple[float, int] | None:
    """Seconds since 1970 (UTC where no zone is named) and where in `text` the time ends.

    Seconds since boot in a kernel's log; a time without a year is in `NO_YEAR`.
    """
    match = stated(text)
    seconds = None if match is None else _seconds(match.groupdict(default=""))
    return None if match is None or seconds is None else (seconds, match.end())


def names_zone(text: str) -> bool:
    """Return True if a line's time is the same everywhere: seconds since 1970, or with a zone.

    >>> names_zone("1756820873.923 step 3"), names_zone("2025-09-02 13:47:55 step 3")
    (True, False)
    """
    match = stated(text)
    parts = {} if match is None else match.groupdict()
    return any(map(parts.get, ("epoch", "milliseconds", "zone")))


def may_state(plain: str) -> bool:
    """Return False only if `stated` is None whatever the numbers; "0" stands for each of them."""
    text = plain[:TIME_HEAD]
    return _PLAIN_CLOCK.search(text) is not None or any(
        (number[1] or text[: number.start()].strip()) and _begins(text[: number.start()])
        for number in _PLAIN_NUMBER.finditer(text)
    )


def _begins(before: str) -> bool:
    """Return True if a time behind this text is the line's own."""
    return bool(_BEFORE.fullmatch(before) or _TIME_KEY.search(before))


def _seconds(parts: dict[str, str]) -> float | None:
    for name in UNITS.keys() & parts:
        return int(parts[name]) / UNITS[name]
    fraction = float("0." + parts.get("fraction", "").replace(".", ""))
    if since := parts.get("epoch") or parts.get("boot"):
        return int(since) + fraction
    (year, month, day), hour, half = _date(parts), int(parts["hour"]), parts.get("half")
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour <= 23):
        return None
    if half:
        hour = hour % 12 + (12 if half == "P" else 0)
    seconds = timegm((year, month, day, hour, int(parts["minute"]), int(parts["second"])))
    zone = parts.get("zone", "")
    if zone[:1] in ("+", "-"):
        east = 3600 * int(zone[1:3]) + 60 * int(zone[-2:])
        seconds -= -east if zone[0] == "-" else east
    return seconds + fraction


def _date(parts: dict[str, str]) -> tuple[int, int, int]:
    """Year, month, day; `_NO_YEAR` where no year is given."""
    if "first" in parts:
        first, middle, last = (int(parts[name]) for name in ("first", "middle", "last"))
        if first > 12 and last > 99:
            return last, middle, first
        # A first number above 12 is a year of two digits.
        return (2000 + first, middle, last) if first > 12 else (last % 100 + 2000, first, middle)
    month = parts["month"]
    number = int(month) if month.isdecimal() else _MONTHS.index(month.lower()) + 1
    year = parts.get("year") or parts.get("later_year") or _NO_YEAR
    return int(year), number, int(parts["day"])


def without_year(time: float) -> float:
    """The same time as one whose year is not stated, so that the two can be compared.

    >>> without_year(timegm((2025, 3, 1, 0, 0, 0))) == timegm((_NO_YEAR, 3, 1, 0, 0, 0))
    True
    """
    if time < NO_YEAR[1]:
        return time
    return float(timegm((_NO_YEAR, *gmtime(time)[1:6]))) + time % 1.0
