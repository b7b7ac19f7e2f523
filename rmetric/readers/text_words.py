"""A line of any text taken apart: its numbers, each under the words before it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite

from rmetric.readers.columns import plain_name
from rmetric.readers.text_parts import without_date

_NUMBER = re.compile(
    r"(?<![\w.])([-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?(?:e[-+]?\d+)?|[-+]?\.\d+(?:e[-+]?\d+)?"
    r"|[-+]?nan|[-+]?inf(?:inity)?)"
    r"(?:\s*/\s*(\d[\d,]*))?([KMBG](?![\w/])|%|ms|it/s|s/it|[smhx])?(?![\w.]*\w)",
    re.IGNORECASE,
)
_TIMES = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9}
#: ``grad_norm={'default': 1.5}`` is a number with a name of its own.
_DICT_OF_ONE = re.compile(r"=\s*\{\s*'[^']*':")
_OF_A_SPLIT = re.compile(r"\b(epoch|iter)\((\w+)\)", re.IGNORECASE)
_BREAK = re.compile(r"[|,;\[\](){}<>]|\s-\s|--")
_FILLING = ("is", "of", "value", "mean", "avg", "at")
#: A word before a name that makes it another thing's, or a value that is not this step's.
_ANOTHERS = re.compile(
    r"(?:best|min|minimum|max|maximum|lowest|highest|previous|prev|last|initial|final|target|total"
    r"|aux|auxiliary|z|kl|moe|router|balance|balancing|load|test|mtp|reg|regularization|per|sec"
    r"|num|number|warmup|seconds|every)"
)


@dataclass(slots=True)
class Words:
    """The numbers of one line.

    Attributes:
        exact: values by name, where the words before them are the name and nothing else.
        loose: values by name, where there are more words before the name.
        totals: the ``b`` of a value that is ``a/b``.
        unnamed: a count ``a/b`` without a name, as progress bars have it, or else a whole
            number that the line begins with.
    """

    exact: dict[str, float] = field(default_factory=dict)
    loose: dict[str, float] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    unnamed: tuple[int, int | None] | None = None

    def get(self, name: str) -> float | None:
        return self.exact.get(name, self.loose.get(name))


def taken_apart(text: str, known: frozenset[str]) -> Words:
    """The numbers of `text` by name; `known` are the names looked for in longer phrases."""
    text = _DICT_OF_ONE.sub("=", without_date(text)).replace("'", "").replace('"', "")
    text = _OF_A_SPLIT.sub(r"\2 \1", text)
    line, end = Words(), 0
    for number in _NUMBER.finditer(text):
        name, exact = name_in(text[max(end, number.start() - 120) : number.start()], known)
        end = number.end()
        value = float(number[1].replace(",", "")) * _TIMES.get((number[3] or "").upper(), 1.0)
        total = int(number[2].replace(",", "")[:18]) if number[2] else None
        if name and number[3] != "%":
            (line.exact if exact else line.loose).setdefault(name, value)
            if total is not None:
                line.totals.setdefault(name, total)
        elif not name and line.unnamed is None and (total or _begins(text, number)):
            line.unnamed = (int(value), total) if isfinite(value) else None
    return line


def _begins(text: str, number: re.Match[str]) -> bool:
    """True if a line begins with this whole number, which is not a time of day."""
    if number.start() > 16:
        return False
    before, after = text[: number.start()].strip(" \t[(#"), text[number.end() : number.end() + 2]
    return not before and number[1].isdigit() and not number[3] and not after[1:].isdigit()


@lru_cache(maxsize=4096)
def name_in(before: str, known: frozenset[str]) -> tuple[str, bool]:
    """The name of a number in the words since the number before, and whether it is all of them.

    >>> known = frozenset(["train_loss", "loss", "step"])
    >>> name_in(", Train Loss: ", known), name_in(" INFO step=", known)
    (('train_loss', True), ('step', True))
    >>> name_in("| policy loss ", known), name_in("| best loss ", known), name_in(" - ", known)
    (('loss', False), ('best_loss', True), ('', True))
    """
    stripped = before.rstrip()
    words = stripped.rstrip(":=([{ ")
    if stripped.endswith("=") and words:
        words = words.split()[-1]
    words = _BREAK.split(words)[-1].replace(":", " ").replace("=", " ")
    plain = [w for w in (plain_name(word).lstrip("_") for word in words.split()[-8:]) if w]
    if len(plain) > 1 and plain[-1] in _FILLING:
        plain.pop()
    for first in range(len(plain)):
        name = "_".join(plain[first:])
        if name in known:
            if any(_ANOTHERS.fullmatch(word) for word in plain[:first]):
                break
            return name, first == 0
    return "_".join(plain)[-60:], True
