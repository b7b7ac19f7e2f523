"""Find which of many literal texts occur in a line, by the words of the line.

Lines of logs share their words: which texts may stand around a word is looked up, not sought.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item")

_WORD = re.compile(rb"[a-z]+")
#: Fewest letters of a literal's word by which it is sought.
MIN_LETTERS = 3
#: Words that are remembered.
MAX_WORDS = 1 << 16


class WordIndex(Generic[Item]):
    """Items by literals in lower case.

    Args:
        literals: (literal, its item); a literal may be given several times.
    """

    def __init__(self, literals: Iterable[tuple[bytes, Item]]) -> None:
        self._by_part: dict[bytes, list[tuple[bytes, Item]]] = defaultdict(list)
        #: byte -> those of too few letters that have it, which are sought in every line with it
        self._others: dict[bytes, dict[bytes, list[Item]]] = defaultdict(dict)
        for literal, item in literals:
            part = max(_WORD.findall(literal), key=len, default=b"")
            if len(part) < MIN_LETTERS:
                byte = _WORD.sub(b"", literal)[:1]
                self._others[byte].setdefault(literal, []).append(item)
            else:
                self._by_part[part].append((literal, item))
        self._around = _Around(self._by_part)

    def items(self, line: bytes, words: Collection[bytes] | None = None) -> list[Item]:
        """Items of the literals that occur in a line in lower case; an item may recur.

        Args:
            line: the line.
            words: those of it (`words_of`), where they are known.
        """
        found: list[Item] = []
        for byte, others in self._others.items():
            if byte in line:
                found += [item for each in others if each in line for item in others[each]]
        words = words_of(line) if words is None else words
        # Nearly all words are in no literal; `filter` passes over them without a step of Python.
        for around in filter(None, map(self._around.__getitem__, words)):
            for literal, item in around:
                if literal in line:
                    found.append(item)
        return found


def words_of(line: bytes) -> Collection[bytes]:
    """The words of a line in lower case, each once."""
    return set(_WORD.findall(line))


class _Around(dict[bytes, tuple[tuple[bytes, Item], ...]]):
    """Word -> the literals whose part is in it, with their items; filled by what is asked for."""

    def __init__(self, by_part: dict[bytes, list[tuple[bytes, Item]]]) -> None:
        super().__init__()
        self._by_part = by_part
        self._by_begin: dict[bytes, list[bytes]] = defaultdict(list)
        for part in by_part:
            self._by_begin[part[:MIN_LETTERS]].append(part)
        self._begins = frozenset(self._by_begin)

    def __missing__(self, word: bytes) -> tuple[tuple[bytes, Item], ...]:
        begins = {word[at : at + MIN_LETTERS] for at in range(len(word) - MIN_LETTERS + 1)}
        parts = {
            part
            for begin in begins & self._begins
            for part in self._by_begin[begin]
            if part in word
        }
        around = tuple(pair for part in parts for pair in self._by_part[part])
        if len(self) >= MAX_WORDS:
            self.clear()
        self[word] = around
        return around
