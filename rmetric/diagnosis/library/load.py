"""The library of signatures: which known faults does this entry of a log speak of?"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rmetric.diagnosis.library.files import check, compiled, form_of, read, wrong
from rmetric.diagnosis.signature import ROLES, Signature

#: Seconds that one pattern may take on one entry; a sound one takes some microseconds.
PATTERN_SECONDS = 0.05
_FOLDER = Path(__file__).parent / "signatures"
_ROLE_ORDER = {role: place for place, role in enumerate(ROLES)}


class Library:
    """Signatures by id, found by gate and pattern.

    Args:
        signatures: (signature, the file that it is from) in any order; ids are unique.

    Raises:
        SignatureError: an id given twice.
    """

    def __init__(self, signatures: Iterable[tuple[Signature, Path]]) -> None:
        self._by_id: dict[str, Signature] = {}
        self.files: dict[str, Path] = {}
        for one, path in signatures:
            if one.id in self._by_id:
                accepted = f"an id of its own: {self.files[one.id]} has it"
                raise wrong(path, one.id, "id", "one given twice", accepted)
            self._by_id[one.id] = one
            self.files[one.id] = path
        self._by_gate: dict[bytes, list[str]] = {}
        for one in self._by_id.values():
            for gate in one.gates:
                self._by_gate.setdefault(gate.encode(), []).append(one.id)
        self._gate = re.compile(_trie_pattern(self._by_gate))
        self._patterns: dict[str, tuple[Any, ...]] = {}

    @classmethod
    def shipped(cls) -> Library:
        """The signatures that come with rmetric; its tests have tried them on their examples."""
        return cls((one, path) for path in _shipped_files() for one in read(path))

    @classmethod
    def load(cls, paths: Iterable[Path | str]) -> Library:
        """The shipped signatures and those of files of the user's, tried on their examples.

        Raises:
            SignatureError: a file, signature or field that cannot be used, which it names.
        """
        own = []
        for path in map(Path, paths):
            for one in read(path):
                check(path, one)
                own.append((one, path))
        return cls([(one, path) for path in _shipped_files() for one in read(path)] + own)

    def __getitem__(self, id: str) -> Signature:
        return self._by_id[id]

    def __iter__(self) -> Iterator[Signature]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def gate(self, form: bytes) -> bool:
        """Whether an entry with a line of this form (`form_of`) may match any signature."""
        return self._gate.search(form) is not None

    def find(self, text: str, level: str = "") -> list[tuple[Signature, dict[str, str]]]:
        """The signatures that match an entry, with their fields; the best first.

        The higher rank is the better, and of equals the role that stands earlier in `ROLES`.
        Where a harmless one matches, only harmless ones are returned.

        Args:
            text: one entry of a log; lines are joined by newlines.
            level: "error", "warning", "info" or "" as the entry states it.
        """
        form = form_of(text)
        ids = {id for gate, those in self._by_gate.items() if gate in form for id in those}
        found = []
        for id in sorted(ids):
            one = self._by_id[id]
            if one.levels and level not in one.levels:
                continue
            fields = self._fields(one, text)
            if fields is not None:
                found.append((one, fields))
        harmless = [pair for pair in found if pair[0].role == "harmless"]
        return sorted(harmless or found, key=lambda pair: _order(pair[0]))

    def _fields(self, one: Signature, text: str) -> dict[str, str] | None:
        if one.id not in self._patterns:
            self._patterns[one.id] = tuple(compiled(pattern) for pattern in one.patterns)
        try:
            for pattern in self._patterns[one.id]:
                match = pattern.search(text, timeout=PATTERN_SECONDS)
                if match:
                    return {key: value for key, value in match.groupdict().items() if value}
        except TimeoutError:
            self._patterns[one.id] = ()
            warnings.warn(
                f"{self.files[one.id]}: {one.id}: switched off: a pattern took more than "
                f"{PATTERN_SECONDS} s on one entry",
                stacklevel=3,
            )
        return None


def _shipped_files() -> list[Path]:
    return sorted(_FOLDER.glob("*.yaml"))


def _order(one: Signature) -> tuple[int, int, str]:
    return -one.rank, _ROLE_ORDER[one.role], one.id


def _trie_pattern(words: Iterable[bytes]) -> bytes:
    """A pattern that finds any of the words, in time that hardly grows with their number.

    >>> _trie_pattern([b"bus", b"busy", b"bad"])
    b'b(?:ad|us)'
    """
    trie: dict[int, Any] = {}
    for word in words:
        node = trie
        for letter in word:
            node = node.setdefault(letter, {})
        node[-1] = {}
    return _branches(trie) if trie else rb"(?!)"


def _branches(node: dict[int, Any]) -> bytes:
    # A word that ends here is enough: longer ones that begin with it add nothing.
    if not node or -1 in node:
        return b""
    parts = [re.escape(bytes([letter])) + _branches(node[letter]) for letter in sorted(node)]
    return parts[0] if len(parts) == 1 else b"(?:" + b"|".join(parts) + b")"
